"""The effect of a tensor type on numbers: ggml's own encoding and decoding of rows, in memory.

It knows types by ggml's number and nothing about models. Encoding is ggml's reference implementation, which llama.cpp's
quantizer uses for tensors without an importance matrix.
"""

from functools import lru_cache

import numpy as np

from plamo_study.engine.ggml import F32, Traits, ggml

BLOCK = 32  # weights that share a scale in every type here; a multiple of it is a super-block
MEDIAN_OF_NORMAL = 0.67449  # median of |x| of a standard normal x
PIECE = 1 << 22  # weights processed at a time


def decode(raw: np.ndarray, dtype: int) -> np.ndarray:
    """Float32 numbers (n,) decoded from the bytes of a ggml type. `raw`: contiguous uint8 of whole blocks."""
    if dtype == F32:
        return raw.view(np.float32)
    traits = _traits(dtype)
    values = np.empty(raw.size // traits.type_size * traits.blck_size, dtype=np.float32)
    traits.to_float(raw.ctypes.data, values.ctypes.data, values.size)
    return values


def encode(values: np.ndarray, dtype: int) -> np.ndarray:
    """Bytes (uint8) of a ggml type that encode float32 numbers; whole blocks of the type only."""
    values = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
    if dtype == F32:
        return values.view(np.uint8)
    traits = _traits(dtype)
    raw = np.empty(values.size // traits.blck_size * traits.type_size, dtype=np.uint8)
    traits.from_float_ref(values.ctypes.data, raw.ctypes.data, values.size)
    return raw


def with_structureless_error(raw: np.ndarray, kept: int, dtype: int, rng: np.random.Generator) -> np.ndarray:
    """A tensor's bytes in type `kept`, plus the rounding error that type `dtype` makes on numbers without structure.

    Those numbers are normal draws. Each block of 32 is scaled to the typical size of its weights, from their median
    magnitude, which outliers do not affect. So the error is independent of the weights and as large as the type's error
    on well-behaved weights.
    """
    blocks = raw.size // _traits(kept).type_size if kept != F32 else raw.size // 4
    step = PIECE * (raw.size // blocks)
    return np.concatenate([_disturbed(raw[i : i + step], kept, dtype, rng) for i in range(0, raw.size, step)])


def _disturbed(raw: np.ndarray, kept: int, dtype: int, rng: np.random.Generator) -> np.ndarray:
    values = decode(raw, kept).reshape(-1, BLOCK)
    size = np.median(np.abs(values), axis=1, keepdims=True) / MEDIAN_OF_NORMAL
    drawn = rng.standard_normal(values.shape, dtype=np.float32) * size
    error = decode(encode(drawn, dtype), dtype).reshape(values.shape) - drawn
    return encode(values + error, kept)


@lru_cache  # asked for every piece of every tensor
def _traits(dtype: int) -> Traits:
    found: Traits = ggml("ggml-base").ggml_get_type_traits(dtype).contents
    return found
