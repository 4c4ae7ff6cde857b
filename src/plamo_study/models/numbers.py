"""Numbers of model files: widened to floats and narrowed to what GGML stores, a chunk at a time.

The `gguf` package rounds, bit for bit as llama.cpp does. It does not know which tensor they belong to.
"""

from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
from gguf import GGMLQuantizationType, dequantize, quantize
from numpy.typing import NDArray

BLOCK = 32  # weights that share one scale in Q8_0
AT_A_TIME = 1 << 15  # weights in memory at a time: what rounding them takes stays in the processor's cache
STORED: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),  # the upper half of an F32
    "Q8_0": np.dtype([("scale", "<f2"), ("q", "i1", BLOCK)]),
}


def chunks(file: BinaryIO, start: int, n_elements: int, dtype: str) -> Iterator[NDArray[Any]]:
    """`n_elements` numbers of `file` from byte `start`, in one-dimensional chunks of at most `AT_A_TIME`.

    The chunks are float32; F64 stays float64. Q8_0 needs whole blocks of 32. EOFError when the file ends early.
    """
    file.seek(start)
    per_item = BLOCK if dtype == "Q8_0" else 1
    for first in range(0, n_elements, AT_A_TIME):
        n = min(AT_A_TIME, n_elements - first) // per_item
        raw = np.fromfile(file, STORED[dtype], n)
        if raw.size < n:
            raise EOFError("the file ends within the tensor")
        yield widen(raw, dtype)


def widen(raw: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Stored numbers (see `STORED`) as float32, one dimension; F64 stays float64."""
    return raw if dtype == "F64" else dequantize(raw.view(np.uint8), GGMLQuantizationType[dtype])


def narrow(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Float32 numbers, one dimension, as the items of a GGML type (see `STORED`), rounded as llama.cpp does.

    Numbers beyond F16's range become infinite: check with `is_finite`.
    """
    with np.errstate(all="ignore"):
        return quantize(values, GGMLQuantizationType[dtype]).view(STORED[dtype])


def is_finite(items: NDArray[Any], dtype: str) -> bool:
    """Whether no item of `narrow` is infinite or not a number."""
    return bool(np.isfinite(items["scale"] if dtype == "Q8_0" else widen(items, dtype)).all())
