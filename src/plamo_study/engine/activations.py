"""Sums of squares per input column of a model's matrix products, through llama.cpp's callback.

The graph stops at every product with a block's weights, as in llama-imatrix. Products with experts are left out: PLaMo
has none. It does not know files, text encodings or the quantizer.

Every call evaluates ONE sequence. llama-imatrix packs n_batch / n_ctx pieces of text as parallel sequences, which
PLaMo 2 mixes up in llama.cpp 0c1e57098 (mixed prompts, D2): its sums belong to another computation.
"""

from pathlib import Path
from typing import Any

import numpy as np

from plamo_study.engine.bindings import llama
from plamo_study.engine.nodes import F32, Tensor, WatchedModel, name_of
from plamo_study.engine.session import EngineError, SessionConfig

LARGEST = float(np.finfo(np.float32).max)  # files hold the sums as float32


class InputSquares(WatchedModel):
    """A model that sums the squared inputs of its blocks' matrices while it evaluates texts.

    `sums`: by tensor name, (n_columns,) float64; `counts`: the tokens summed over. `config` sets context and threads.

    Raises
    ------
    EngineError
        The file does not load, a text is refused, an input is not finite, or the build's tensor layout differs.

    """

    def __init__(self, path: Path | str, config: SessionConfig):
        self.sums: dict[str, np.ndarray] = {}
        self.counts: dict[str, int] = {}
        super().__init__(path, config)

    def add(self, tokens: np.ndarray) -> None:
        """Evaluate one piece of text alone, with outputs at every position, and add its products' squared inputs.

        As in llama-imatrix, the beginning-of-text token replaces the first token if the model uses one.
        """
        self.clear()
        tokens = np.array(tokens)
        if len(tokens) and llama.llama_vocab_get_add_bos(self._vocab):
            tokens[0] = llama.llama_vocab_bos(self._vocab)
        self.evaluate(tokens)

    def wanted(self, node: Tensor) -> bool:
        """Whether a node is a product of a block's weights with F32 inputs."""
        if self.op(node) != "MUL_MAT":
            return False
        return name_of(node.src[0]).startswith("blk.") and node.src[1].contents.type == F32

    def see(self, node: Tensor) -> None:
        """Add the squares of the product's inputs."""
        self._add_inputs(name_of(node.src[0]), node.src[0].contents, node.src[1])

    def _add_inputs(self, name: str, weights: Tensor, inputs: Any) -> None:
        if weights.ne[2] * weights.ne[3] != 1:
            raise EngineError(f"{name} is more than one matrix")
        rows = self.values(inputs).reshape(-1, inputs.contents.ne[0])
        total = self.sums.get(name, 0.0) + np.einsum("ij,ij->j", rows, rows, dtype=np.float64)
        if not (total <= LARGEST).all():  # also catches NaN
            raise EngineError(f"the input of {name} is not finite, or its squares exceed float32")
        self.sums[name] = total
        self.counts[name] = self.counts.get(name, 0) + len(rows)
