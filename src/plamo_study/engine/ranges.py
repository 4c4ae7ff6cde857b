"""The largest numbers that enter and leave every matrix product of a model, through llama.cpp's callback.

Covered: products with weights, the two products inside attention (or the query of a flash attention, which computes
both), and values stored in the key/value cache, which take its type. It does not know how a backend casts a number.
"""

import ctypes
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from plamo_study.engine.nodes import F32, Tensor, WatchedModel, name_of
from plamo_study.engine.session import SessionConfig

NO_LAYER = -1  # layer of the output matrix
BLOCKS = (16, 32)  # numbers whose sum some backends keep beside quantized activations
CACHE = re.compile(r"cache_([kv])_l(\d+)")
LAYER = re.compile(r"-(\d+)$")  # llama.cpp's names of nodes end in the layer


@dataclass
class Range:
    """Largest absolute values met in one product, over finite numbers.

    `weight_type`: ggml's number of the type the inputs are multiplied with. `largest`: of the inputs; `sums`: of the
    sums of 16 and 32 consecutive inputs; `output`: of the results. `not_finite`: inputs that were infinite or NaN.
    """

    weight_type: int
    largest: float = 0.0
    sums: dict[int, float] = field(default_factory=lambda: dict.fromkeys(BLOCKS, 0.0))
    output: float = 0.0
    not_finite: int = 0

    def take_in(self, values: np.ndarray) -> None:
        """Widen the range by an array of inputs with rows along its last axis."""
        rows = values.reshape(-1, values.shape[-1])
        if not rows.size:  # a micro-batch without outputs
            return
        self.largest = max(self.largest, _largest(rows))
        self.not_finite += int(rows.size - np.isfinite(rows).sum())
        for n in BLOCKS:
            if rows.shape[1] % n == 0:
                self.sums[n] = max(self.sums[n], _largest(rows.reshape(len(rows), -1, n).sum(axis=-1)))


class InputRanges(WatchedModel):
    """A model that records the ranges of its products' inputs during evaluation, under the current `phase`.

    `found`: by (phase, kind, layer). A kind is a weight's name without block and `.weight`, or "kq", "kqv", "cache_k",
    "cache_v".
    """

    def __init__(self, path: Path | str, config: SessionConfig, watch: bool = True):
        self.phase = "prompt"
        self.found: dict[tuple[str, str, int], Range] = {}
        super().__init__(path, config, watch)

    def wanted(self, node: Tensor) -> bool:
        """Whether a node is a product, a flash attention or a store into a key/value cache, with F32 inputs."""
        op = self.op(node)
        if op == "SET_ROWS":
            return bool(CACHE.search(node.name.decode(errors="replace"))) and node.src[0].contents.type == F32
        if op == "FLASH_ATTN_EXT":
            return bool(node.src[0].contents.type == F32)
        return op == "MUL_MAT" and node.src[1].contents.type == F32

    def see(self, node: Tensor) -> None:
        """Widen the range of the product's inputs and results."""
        op = self.op(node)
        kind, layer = _stored(node) if op == "SET_ROWS" else _asked(node) if op == "FLASH_ATTN_EXT" else _product(node)
        inputs, meets = {"SET_ROWS": (0, node), "FLASH_ATTN_EXT": (0, node.src[1].contents)}.get(
            op, (1, node.src[0].contents)
        )
        seen = self.found.setdefault((self.phase, kind, layer), Range(meets.type))
        seen.take_in(self.values(node.src[inputs]))
        if op == "MUL_MAT":
            seen.output = max(seen.output, _largest(self.values(ctypes.pointer(node))))


def _stored(node: Tensor) -> tuple[str, int]:
    """Kind and layer of rows stored in a cache."""
    cache = CACHE.search(node.name.decode(errors="replace"))
    assert cache is not None
    return f"cache_{cache[1]}", int(cache[2])


def _asked(node: Tensor) -> tuple[str, int]:
    """Kind and layer of a flash attention's query, from its keys: the node itself has no name."""
    cache = CACHE.search(name_of(node.src[1]))
    return "kq", int(cache[2]) if cache else NO_LAYER


def _product(node: Tensor) -> tuple[str, int]:
    """Kind and layer of a product, by the weight's name or, inside attention, by its own."""
    weight = name_of(node.src[0])
    if weight.endswith(".weight"):
        block = re.match(r"blk\.(\d+)\.", weight)
        kind = weight.removeprefix(block[0] if block else "").removesuffix(".weight")
        return kind, int(block[1]) if block else NO_LAYER
    name = node.name.decode(errors="replace")
    at = LAYER.search(name)
    return LAYER.sub("", name), int(at[1]) if at else NO_LAYER


def _largest(values: np.ndarray) -> float:
    """The largest finite absolute value; 0 where none is finite."""
    most = float(max(values.max(), -values.min())) if values.size else 0.0
    if np.isfinite(most):
        return most
    finite = values[np.isfinite(values)]
    return float(np.abs(finite).max()) if finite.size else 0.0
