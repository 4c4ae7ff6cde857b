"""llama.cpp's file types, as far as the studies use them."""

FILE_TYPES = {  # name: llama.h's enum llama_ftype, and the type of a matrix without a special rule
    "F32": (0, "F32"),
    "F16": (1, "F16"),
    "BF16": (32, "BF16"),
    "Q8_0": (7, "Q8_0"),
    "Q6_K": (18, "Q6_K"),
    "Q5_K_M": (17, "Q5_K"),
    "Q5_0": (8, "Q5_0"),
    "Q4_K_M": (15, "Q4_K"),
    "Q4_0": (2, "Q4_0"),
    "Q3_K_M": (12, "Q3_K"),
    "Q2_K": (10, "Q2_K"),
}
