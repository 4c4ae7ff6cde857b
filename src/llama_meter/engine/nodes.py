"""A model whose graph nodes are looked at while it evaluates, through llama.cpp's evaluation callback.

`Watched` stops the graph at the nodes a subclass wants and hands them over; what they are wanted for, the subclasses
say: residual sums for the gate, sizes of micro-batches.
Stopping costs time, so nothing is timed in such a session.
"""

import ctypes
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from llama_meter.engine.bindings import llama
from llama_meter.engine.ggml import F32, OBJECT_SIZE, TYPES, Library, Tensor, ggml
from llama_meter.engine.session import EngineError, Session, SessionConfig

NUMBERS = {F32: "<f4", TYPES["F16"]: "<f2"}  # by ggml type, what `values` can read
SUM = re.compile(r"(attn_residual|ffn_residual|l_out)-(\d+)")  # plamo2.cpp and plamo3.cpp; l_out renames the second
MIXER, FEED_FORWARD = "mixer", "feed-forward"
# Outputs of the first layer in plamo2.cpp and plamo3.cpp, one column per token. The last layer keeps only output rows.
FIRST_LAYER = ("ffn_residual-0", "l_out-0")


class Operators(Session):
    """A session with a callback at every node, `_on_node`, which a subclass defines. It knows operations by name.

    Raises EngineError as its base class does, and where the build's tensor layout differs.
    """

    def __init__(self, source: Path | str | Session, config: SessionConfig):
        self._base = base()
        self._ops: dict[int, str] = {}
        self._callback = llama.ggml_backend_sched_eval_callback(self._on_node)
        super().__init__(source, config)

    def _context_params(self) -> "llama.llama_context_params":
        params = super()._context_params()
        params.cb_eval = self._callback
        return params

    def _on_node(self, address: int, ask: bool, _: int) -> bool:
        """With `ask`: whether the node is wanted. Without: it is computed; returning False ends the evaluation."""
        raise NotImplementedError

    def op(self, number: int) -> str:
        """Name of an operation by its number, e.g. "MUL_MAT"."""
        if number not in self._ops:
            self._ops[number] = str(self._base.ggml_op_name(number).decode())
        return self._ops[number]


class Watched(Operators):
    """A session whose calls are as long as its context, and whose nodes a subclass looks at.

    Raises EngineError also for any exception of `see`, with its text.
    """

    def __init__(self, source: Path | str | Session, config: SessionConfig):
        self._error = ""
        super().__init__(source, replace(config, n_batch=config.n_ctx_seq))

    def wanted(self, node: Tensor) -> bool:
        """Whether to call `see` for this node."""
        raise NotImplementedError

    def see(self, node: Tensor) -> None:
        """Look at a wanted node that has just been computed."""
        raise NotImplementedError

    def values(self, tensor: Any) -> np.ndarray:
        """A copy of an F32 or F16 tensor from its backend's memory, in NumPy order and with the tensor's strides.

        `tensor`: pointer to a `Tensor`.
        """
        described, n_bytes = tensor.contents, self._base.ggml_nbytes(tensor)
        data = np.empty(n_bytes, dtype=np.uint8)
        self._base.ggml_backend_tensor_get(tensor, data.ctypes.data, 0, n_bytes)
        shape, strides = tuple(described.ne)[::-1], tuple(described.nb)[::-1]
        return np.lib.stride_tricks.as_strided(data.view(np.dtype(NUMBERS[described.type])), shape, strides)

    def _run(self, n_tokens: int) -> None:
        self._error = ""
        try:
            super()._run(n_tokens)
        finally:
            if self._error:
                raise EngineError(self._error)

    def _on_node(self, address: int, ask: bool, _: int) -> bool:
        try:
            node = Tensor.from_address(address)
            if ask:
                return self.wanted(node)
            self.see(node)
        except Exception as error:  # ctypes would only print it
            self._error = str(error)
        return not self._error


def base() -> Library:
    """libggml-base. EngineError when its tensor layout differs."""
    library = ggml("ggml-base")
    if library.ggml_tensor_overhead() != ctypes.sizeof(Tensor) + OBJECT_SIZE:
        raise EngineError("this build's tensor layout is not that of ggml 0c1e57098")
    return library


def name_of(node: Tensor) -> str:
    """A node's name; a backend's copy of a tensor is named like `CUDA0#blk.0.ffn_up.weight#0`."""
    parts = node.name.decode(errors="replace").split("#")
    return str(parts[1] if len(parts) > 1 else parts[0])


# ---------------------------------------------------------------- parts and micro-batches


class PartSums(Watched):
    """A second context on a session's model that keeps the residual sum after every part of every token.

    Their correct values are not known here: see oracle/judge.py.
    """

    def __init__(self, session: Session):
        self._rows: dict[tuple[int, str], list[np.ndarray]] = {}
        super().__init__(session, session.config)

    def wanted(self, node: Tensor) -> bool:
        """Whether a node is one of the two sums of a layer."""
        return SUM.fullmatch(name_of(node)) is not None

    def see(self, node: Tensor) -> None:
        """Keep the node's rows."""
        name: Any = SUM.fullmatch(name_of(node))
        part = MIXER if name[1] == "attn_residual" else FEED_FORWARD
        rows = self.values(ctypes.pointer(node)).reshape(-1, node.ne[0])
        self._rows.setdefault((int(name[2]), part), []).append(rows)

    def sums(self) -> dict[tuple[int, str], np.ndarray]:
        """Residual sums by (layer, part), (n_tokens, hidden) float32, tokens in evaluation order."""
        return {place: np.concatenate(rows) for place, rows in self._rows.items()}


class MicroBatches(Operators):
    """A session that records the token count of every micro-batch that the engine forms of its calls, in `sizes`."""

    def __init__(self, path: Path | str, config: SessionConfig):
        self.sizes: list[int] = []
        super().__init__(path, config)

    def _on_node(self, address: int, ask: bool, _: int) -> bool:
        node = Tensor.from_address(address)
        if not ask:
            columns, steps, sequences = node.ne[1], node.ne[2], node.ne[3]
            self.sizes.append(columns * steps * sequences)
        return not ask or name_of(node) in FIRST_LAYER
