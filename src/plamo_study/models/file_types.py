"""llama.cpp's file types, by the names that cells and recipes give them.

A module of its own: every worker needs the names, and with `tensors` it would load the package `gguf`, a quarter of its
start.
"""

FILE_TYPES = {  # llama.cpp's file types (llama.h, enum llama_ftype), and the type of a matrix without a special rule
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
