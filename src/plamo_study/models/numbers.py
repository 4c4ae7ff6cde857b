"""Numbers of model files: widened to floats and narrowed to what GGML stores, a chunk at a time.

It does not know which tensor they belong to.
"""

from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

BLOCK = 32  # weights that share one scale in Q8_0
CHUNK = 1 << 20  # weights in memory at a time: 4 MiB as F32
ALMOST_HALF = np.nextafter(np.float32(0.5), np.float32(0))
STORED: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),  # the upper half of an F32
    "Q8_0": np.dtype([("scale", "<f2"), ("q", "i1", BLOCK)]),
}


def chunks(file: BinaryIO, start: int, n_elements: int, dtype: str) -> Iterator[NDArray[Any]]:
    """`n_elements` numbers of `file` from byte `start`, in one-dimensional chunks of at most `CHUNK`.

    The chunks are float32; F64 stays float64. Q8_0 needs whole blocks of 32. EOFError when the file ends early.
    """
    file.seek(start)
    per_item = BLOCK if dtype == "Q8_0" else 1
    for first in range(0, n_elements, CHUNK):
        n = min(CHUNK, n_elements - first) // per_item
        raw = np.fromfile(file, STORED[dtype], n)
        if raw.size < n:
            raise EOFError("the file ends within the tensor")
        yield widen(raw, dtype)


def widen(raw: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Stored numbers (see `STORED`) as float32, one dimension; F64 stays float64."""
    if dtype == "BF16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    if dtype == "Q8_0":
        return (raw["q"] * raw["scale"].astype(np.float32)[:, None]).ravel()
    return raw.astype(np.float32, copy=False) if dtype == "F16" else raw


def narrow(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Float32 numbers as the items of a GGML type (see `STORED`), rounded to nearest even; Q8_0 as `_q8_0`.

    Numbers beyond F16's range become infinite: check with `is_finite`.
    """
    if dtype == "BF16":
        bits = values.view(np.uint32)
        return ((bits + ((bits >> 16 & 1) + 0x7FFF)) >> 16).astype("<u2")
    if dtype == "Q8_0":
        return _q8_0(values)
    with np.errstate(over="ignore"):
        return values.astype(STORED[dtype], copy=False)


def is_finite(items: NDArray[Any], dtype: str) -> bool:
    """Whether no item of `narrow` is infinite or not a number."""
    if dtype == "BF16":
        return bool(((items & 0x7F80) != 0x7F80).all())
    return bool(np.isfinite(items["scale"] if dtype == "Q8_0" else items).all())


def _q8_0(values: NDArray[np.float32]) -> NDArray[Any]:
    """One scale, max |x| / 127, per 32 numbers, and x / scale rounded to whole numbers, halves away from zero.

    Same operations in the same order as llama.cpp's `quantize_row_q8_0_ref`, so the bytes are equal.
    """
    blocks = values.reshape(-1, BLOCK)
    with np.errstate(all="ignore"):  # blocks of zeros divide by zero, non-finite numbers give garbage: see is_finite
        scale = np.abs(np.maximum(blocks.max(axis=1), -blocks.min(axis=1))) / np.float32(127)  # abs: zeros have signs
        inverse = np.where(scale == 0, np.float32(0), np.float32(1) / scale)
        x = blocks * inverse[:, None]
        x += np.copysign(ALMOST_HALF, x)  # truncation then rounds halves away from zero
        items = np.empty(len(blocks), STORED["Q8_0"])
        items["scale"], items["q"] = scale, x
    return items
