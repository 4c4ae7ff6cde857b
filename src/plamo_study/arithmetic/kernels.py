"""The matrix kernels of llama.cpp by tensor type and number of columns, to name a rate.

From the sources of llama.cpp 0c1e570: ggml-cpu/repack.cpp (`ggml_repack_get_optimal_repack_type`), llamafile/sgemm.cpp
(`llamafile_sgemm`, from two columns on; `tinyBLAS_Q0_AVX`). Types are covered on x86 only, columns for Q8_0.
"""

from typing import Any

PACKED = {"Q4_0": "AVX2 = 1", "Q4_K": "AVX2 = 1", "Q2_K": "AVX512 = 1"}  # type -> instruction set that the build needs


def column_tile(engine: dict[str, Any], dtype: str) -> int | None:
    """Columns of one tile of the x86 kernel for Q8_0: 4 with 32 vector registers, else 2; None elsewhere."""
    build = engine["build"]
    if dtype != "Q8_0" or engine["gpu_offload"] or "LLAMAFILE = 1" not in build or "AVX2 = 1" not in build:
        return None
    return 4 if "AVX512 = 1" in build else 2


def weight_passes(n_seq: int, tile: int) -> int:
    """Number of passes over a weight matrix in a step of `n_seq` columns on x86.

    Whole tiles of columns share one pass over the weights; any remaining columns need another.
    """
    return 2 if n_seq > tile and n_seq % tile else 1
