"""The matrix kernels of llama.cpp by tensor type, to name a rate.

From the sources of llama.cpp 0c1e570: ggml-cpu/repack.cpp (`ggml_repack_get_optimal_repack_type`), tiled/tiled.cpp
(`ggml_tiled_supported`, which gives way to packed weights), llamafile/sgemm.cpp (`llamafile_sgemm`, from two columns
on), for the rest the dot products of ggml-cpu.c. Types are covered on x86 only.
"""

from typing import Any

PACKED = {"Q4_0": "AVX2 = 1", "Q4_K": "AVX2 = 1", "Q2_K": "AVX512 = 1"}  # type -> instruction set that the build needs
TINY_BLAS = ("F32", "F16", "BF16", "Q8_0", "Q5_0", "Q4_0")
TILED = ("Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K")


def by_type(engine: dict[str, Any], dtype: str, packed: bool = True) -> str:
    """The kernels of a type for many columns and for one, e.g. "tiled; dot products"; "" where unknown.

    `packed` False: for weights laid out as in the file.
    """
    build = engine["build"]
    if engine["gpu_offload"] or "AVX2 = 1" not in build or "LLAMAFILE = 1" not in build:
        return ""
    if packed and dtype in PACKED and PACKED[dtype] in build and "REPACK = 1" in build:
        return "packed rows for both"
    many = "tiled" if dtype in TILED else "tinyBLAS" if dtype in TINY_BLAS else "dot products"
    return f"{many}; dot products"
