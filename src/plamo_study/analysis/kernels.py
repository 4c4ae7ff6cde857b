"""The matrix kernels of llama.cpp by tensor type and number of columns, to name a rate or a jump in a curve.

From the sources of llama.cpp 0c1e570: ggml-cpu/repack.cpp (`ggml_repack_get_optimal_repack_type`), tiled/tiled.cpp
(`ggml_tiled_supported`, which gives way to packed weights), llamafile/sgemm.cpp (`llamafile_sgemm`, from two columns
on; `tinyBLAS_Q0_AVX`), for the rest the dot products of ggml-cpu.c, and ggml-metal-ops.cpp. Types are covered on x86
only, columns for Q8_0 on x86 and on Metal.
"""

from dataclasses import dataclass
from typing import Any

from plamo_study.models.casts import ON_GPUS

PACKED = {"Q4_0": "AVX2 = 1", "Q4_K": "AVX2 = 1", "Q2_K": "AVX512 = 1"}  # type -> instruction set that the build needs
TINY_BLAS = ("F32", "F16", "BF16", "Q8_0", "Q5_0", "Q4_0")
TILED = ("Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K")


@dataclass(frozen=True)
class Switch:
    """From `n_seq` to `n_seq + 1` columns the engine computes a matrix product differently."""

    n_seq: int
    what: str


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


def switches(engine: dict[str, Any], dtype: str, most: int, on_gpu: bool = False) -> list[Switch]:
    """The known switches up to `most` columns, in order; none for an unknown backend.

    `on_gpu`: for weights on a GPU.
    """
    if on_gpu:
        if f"{ON_GPUS['Metal']} : " not in engine["build"]:
            return []
        return [Switch(1, "matrix-vector to small-batch kernel"), Switch(8, "small-batch to matrix kernel")]
    tile = column_tile(engine, dtype)
    if tile is None:
        return []
    found = [Switch(1, "dot products to tiles")]
    for n in range(tile, most):
        before, after = weight_passes(n, tile), weight_passes(n + 1, tile)
        if before != after:
            what = "second pass for the columns left over" if after > before else "no columns left over: one pass"
            found.append(Switch(n, what))
    return found
