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
    "Q5_K_S": (16, "Q5_K"),
    "Q5_1": (9, "Q5_1"),
    "Q5_0": (8, "Q5_0"),
    "Q4_K_M": (15, "Q4_K"),
    "Q4_K_S": (14, "Q4_K"),
    "Q4_1": (3, "Q4_1"),
    "Q4_0": (2, "Q4_0"),
    "IQ4_NL": (25, "IQ4_NL"),
    "IQ4_XS": (30, "IQ4_XS"),
    "Q3_K_L": (13, "Q3_K"),
    "Q3_K_M": (12, "Q3_K"),
    "Q3_K_S": (11, "Q3_K"),
    "IQ3_M": (27, "IQ3_S"),
    "IQ3_S": (26, "IQ3_S"),
    "IQ3_XS": (22, "IQ3_S"),
    "IQ3_XXS": (23, "IQ3_XXS"),
    "Q2_K": (10, "Q2_K"),
    "Q2_K_S": (21, "Q2_K"),
    "IQ2_M": (29, "IQ2_S"),
    "IQ2_S": (28, "IQ2_XS"),
    "IQ2_XS": (20, "IQ2_XS"),
    "IQ2_XXS": (19, "IQ2_XXS"),
    "IQ1_M": (31, "IQ1_M"),
    "IQ1_S": (24, "IQ1_S"),
    "TQ2_0": (37, "TQ2_0"),
    "TQ1_0": (36, "TQ1_0"),
}
FLOATS = ("F32", "F16", "BF16")
