"""The micro-batches that the engine forms from a call, read from the graphs it computes."""

from pathlib import Path
from typing import Any

from plamo_study.engine.bindings import llama
from plamo_study.engine.nodes import Tensor
from plamo_study.engine.session import Session, SessionConfig, context_params

# Outputs of the first layer in plamo2.cpp and plamo3.cpp, one column per token. The last layer keeps only output rows.
FIRST_LAYER = (b"ffn_residual-0", b"l_out-0")


class MicroBatches(Session):
    """A session that records the token count of every graph in `sizes`. The callback costs time: do not time it.

    Raises EngineError as its base class does.
    """

    def __init__(self, path: Path | str, config: SessionConfig):
        self.sizes: list[int] = []
        self._callback = llama.ggml_backend_sched_eval_callback(self._on_node)
        super().__init__(path, config)

    def _context_params(self, config: SessionConfig) -> Any:
        params = context_params(config)
        params.cb_eval = self._callback
        return params

    def _on_node(self, address: int, ask: bool, _: int) -> bool:
        node = Tensor.from_address(address)
        if not ask:
            columns, steps, sequences = node.ne[1], node.ne[2], node.ne[3]
            self.sizes.append(columns * steps * sequences)
        return not ask or node.name in FIRST_LAYER
