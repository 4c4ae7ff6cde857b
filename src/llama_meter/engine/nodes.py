"""A model whose graph nodes are looked at while it evaluates, through llama.cpp's evaluation callback.

Stopping at nodes costs time, so nothing is timed in such a session.
"""

import ctypes
import re
from dataclasses import replace
from typing import Any

import numpy as np

from llama_meter.engine.bindings import OBJECT_SIZE, Tensor, ggml, llama
from llama_meter.engine.session import EngineError, Session

SUM = re.compile(r"(attn_residual|ffn_residual|l_out)-(\d+)")  # plamo2.cpp and plamo3.cpp; l_out renames the second
MIXER, FEED_FORWARD = "mixer", "feed-forward"


def name_of(node: Tensor) -> str:
    """A node's name; a backend's copy of a tensor is named like `CUDA0#blk.0.ffn_up.weight#0`."""
    parts = node.name.decode(errors="replace").split("#")
    return str(parts[1] if len(parts) > 1 else parts[0])


class PartSums(Session):
    """A second context on a session's model that keeps the residual sum after every part of every token.

    Its calls are as long as its context. The correct values are not known here: see oracle/judge.py. Raises EngineError
    as its base class does, and where the build's tensor layout differs.
    """

    def __init__(self, session: Session):
        self._rows: dict[tuple[int, str], list[np.ndarray]] = {}
        self._base = ggml("ggml-base")
        if self._base.ggml_tensor_overhead() != ctypes.sizeof(Tensor) + OBJECT_SIZE:
            raise EngineError("this build's tensor layout is not that of ggml 0c1e57098")
        self._callback = llama.ggml_backend_sched_eval_callback(self._on_node)
        super().__init__(session, replace(session.config, n_batch=session.config.n_ctx_seq))

    def _context_params(self) -> "llama.llama_context_params":
        params = super()._context_params()
        params.cb_eval = self._callback
        return params

    def sums(self) -> dict[tuple[int, str], np.ndarray]:
        """Residual sums by (layer, part), (n_tokens, hidden) float32, tokens in evaluation order."""
        return {place: np.concatenate(rows) for place, rows in self._rows.items()}

    def _on_node(self, address: int, ask: bool, _: int) -> bool:
        """Keep the rows of the two sums of a layer, which are F32 and contiguous.

        With `ask`: whether the node is wanted. Without: it is computed; returning False ends the evaluation.
        """
        node = Tensor.from_address(address)
        name: Any = SUM.fullmatch(name_of(node))
        if not ask:
            hidden, *columns = node.ne
            rows = np.empty((int(np.prod(columns)), hidden), np.float32)
            self._base.ggml_backend_tensor_get(address, rows.ctypes.data, 0, rows.nbytes)
            part = MIXER if name[1] == "attn_residual" else FEED_FORWARD
            self._rows.setdefault((int(name[2]), part), []).append(rows)
        return not ask or name is not None
