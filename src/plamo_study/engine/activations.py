"""What goes into the matrix products of a model: sums of squares per input column, through llama.cpp's callback.

The graph is stopped at every product of a block's weights, as llama-imatrix does. It does not know files, texts'
encodings or the quantizer, and it leaves out products with experts, which PLaMo has not.

Every call evaluates ONE sequence. llama-imatrix packs n_batch / n_ctx pieces of text as parallel sequences, which
PLaMo 2 mixes up in llama.cpp 0c1e57098 (mixed prompts, D2): its sums are those of another computation.
"""

from pathlib import Path
from typing import Any

import numpy as np

from plamo_study.engine.bindings import llama
from plamo_study.engine.nodes import F32, Tensor, WatchedModel, name_of
from plamo_study.engine.session import EngineError, SessionConfig

LARGEST = float(np.finfo(np.float32).max)  # files hold the sums as float32


class InputSquares(WatchedModel):
    """A model that sums the squares of what it multiplies its blocks' matrices with, while it evaluates texts.

    `sums`: by tensor name, (n_columns,) float64; `counts`: the tokens summed over. `config` sets room and threads.

    Raises
    ------
    EngineError
        The file does not load, a text is refused, an input is not finite, or the build lays tensors out otherwise.

    """

    def __init__(self, path: Path | str, config: SessionConfig):
        self.sums: dict[str, np.ndarray] = {}
        self.counts: dict[str, int] = {}
        super().__init__(path, config)

    def add(self, tokens: np.ndarray) -> None:
        """Evaluate one piece of text by itself, every position an output, and add what its products saw.

        As in llama-imatrix the first token gives way to the beginning-of-text token where the model wants one.
        """
        self.clear()
        tokens = np.array(tokens)
        if len(tokens) and llama.llama_vocab_get_add_bos(self._vocab):
            tokens[0] = llama.llama_vocab_bos(self._vocab)
        self.evaluate(tokens)

    def wanted(self, node: Tensor) -> bool:
        """Products of a block's weights with F32 inputs."""
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
        if not (total <= LARGEST).all():  # NaN is not smaller either
            raise EngineError(f"what is multiplied with {name} is not finite, or its squares exceed float32")
        self.sums[name] = total
        self.counts[name] = self.counts.get(name, 0) + len(rows)
