"""Bytes of a sequence's state by formula, exactly as many as llama.cpp 0c1e57098 writes.

Keys and values grow with every token, those of sliding layers up to their window, and the recurrent part of Mamba
layers does not grow at all. The formula depends on shapes only, not on time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BITS = {"f32": 32.0, "f16": 16.0, "bf16": 16.0, "q8_0": 8.5, "q4_0": 4.5}  # per element, including scales
FLOAT = 4  # bytes: recurrent states are F32
HEAD = 8  # at the start: the kind of state
CACHE, LAYER, CELL = 16, 24, 12  # of each cache, of each of its layers, of each token in it: position and sequence
RECURRENT = 20  # of a recurrent state, before its layers


@dataclass(frozen=True)
class Size:
    """Bytes of a state: `full` and `sliding` keys and values, the `recurrent` part, and their descriptions."""

    full: float = 0.0
    sliding: float = 0.0
    recurrent: float = 0.0
    described: float = 0.0

    @property
    def total(self) -> float:
        """Bytes of the whole state."""
        return self.full + self.sliding + self.recurrent + self.described


def size(shape: Mapping[str, Any], n_tokens: int, type_k: str = "f16", type_v: str = "f16") -> Size:
    """Size of the state of `n_tokens` tokens. `shape`: the model's, as in its facts."""
    layers = range(int(shape["layers"]))
    mamba = [n for n in layers if shape["mamba_heads"] and n % 2 == 0]
    sliding = [n for n in layers if shape["window"] and (n + 1) % shape["window_pattern"]]
    n_full = len(layers) - len(mamba) - len(sliding)
    row = shape["kv_heads"] * shape["head_dim"] * (BITS[type_k] + BITS[type_v]) / 8  # of one token in one layer
    held = min(n_tokens, int(shape["window"])) if sliding else 0
    described = HEAD + CACHE + LAYER * n_full + CELL * n_tokens
    described += CACHE + LAYER * len(sliding) + CELL * held if sliding else 0
    described += RECURRENT + LAYER * len(mamba) if mamba else 0
    return Size(n_full * n_tokens * row, len(sliding) * held * row, _recurrent(shape, len(mamba)), float(described))


def _recurrent(shape: Mapping[str, Any], n_layers: int) -> float:
    """Bytes of the Mamba layers: of each its state, and the last inputs of its convolution."""
    inner = shape["mamba_heads"] * shape["mamba_head_dim"]
    return float(FLOAT * n_layers * inner * (shape["d_state"] + shape["d_conv"] - 1)) if n_layers else 0.0
