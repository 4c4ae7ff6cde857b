"""Random weights by kind, and numbers narrowed to what GGML stores.

The `gguf` package rounds, bit for bit as llama.cpp does. It does not know which tensor they belong to.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, quantize
from numpy.typing import NDArray

from llama_meter.models.tensors import TensorInfo

BLOCK = 32  # weights that share one scale in Q8_0
STORED: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),  # the upper half of an F32
    "Q8_0": np.dtype([("scale", "<f2"), ("q", "i1", BLOCK)]),
}


def narrow(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Float32 numbers, one dimension, as the items of a GGML type (see `STORED`), rounded as llama.cpp does.

    Numbers beyond F16's range become infinite.
    """
    with np.errstate(all="ignore"):
        return quantize(values, GGMLQuantizationType[dtype]).view(STORED[dtype])


LIFELIKE, DENORMAL, AGAIN, SCALES = "lifelike", "denormal", "again", "scales"
TAIL = 5  # degrees of freedom of Student's t
ROW_SPREAD = 0.4  # of the logarithm of a row's scale
BLOCK_SPREAD = 0.4  # of the logarithm of a block's scale
OUTLIER_EVERY, OUTLIER = 64, 4.0  # inputs, and how many times as heavy one of them is
NORM_SPREAD = 0.1
TINY = 1e-39  # below the least normal float32
SHARP = 5.0  # of query and key norms: scores spread by 25, and most lie 87 below the largest
QUIET = 0.03  # of attention's output: attention this sharp would magnify every rounding
TINY_EVERY = 4
CHUNK = 1 << 22  # weights drawn at a time


def lifelike(tensor: TensorInfo, spread: float, seed: int) -> Iterator[NDArray[Any]]:
    """A matrix in chunks of rows, as items of its GGML type; `spread`: the weights' standard deviation."""
    rng = _rng(tensor, seed)
    n_in = tensor.shape[-1]
    n_rows = tensor.n_elements // n_in
    inputs = np.where(np.arange(n_in) % OUTLIER_EVERY == rng.integers(OUTLIER_EVERY), OUTLIER, 1.0)
    inputs *= spread / np.sqrt((inputs**2).mean() * np.exp(2 * ROW_SPREAD**2) * TAIL / (TAIL - 2))
    per_chunk = max(CHUNK // n_in, 1)
    for start in range(0, n_rows, per_chunk):
        n = min(per_chunk, n_rows - start)
        rows = np.exp(ROW_SPREAD * rng.standard_normal((n, 1), dtype=np.float32))
        tails = np.sqrt(TAIL / (2 * rng.standard_gamma(TAIL / 2, (n, n_in), dtype=np.float32)))
        drawn = rng.standard_normal((n, n_in), dtype=np.float32) * tails * rows * inputs.astype(np.float32)
        yield narrow(drawn.ravel(), tensor.dtype)


def small(kind: str, tensor: TensorInfo, usual: NDArray[np.float32], seed: int) -> NDArray[np.float32]:
    """Norms and Mamba vectors with values of this kind, derived from the `usual` ones."""
    if kind == LIFELIKE and "norm" in tensor.kind:
        spread = _rng(tensor, seed).standard_normal(usual.size, dtype=np.float32)
        return (usual * np.exp(NORM_SPREAD * spread)).astype("<f4")
    if kind != DENORMAL:
        return usual
    if tensor.kind == "ssm_b_norm":
        return np.full_like(usual, TINY)
    if tensor.kind in ("attn_q_norm", "attn_k_norm"):
        return np.full_like(usual, SHARP)
    if tensor.kind == "post_attention_norm":
        return usual * np.float32(QUIET)
    if tensor.kind in ("attn_norm", "ffn_norm"):
        return np.where(np.arange(usual.size) % TINY_EVERY == 0, np.float32(TINY), usual).astype("<f4")
    return usual


def _rng(tensor: TensorInfo, seed: int) -> np.random.Generator:
    """A random stream of one tensor."""
    digest = hashlib.sha256(f"{seed}/{tensor.name}/lifelike".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest, "little"))
