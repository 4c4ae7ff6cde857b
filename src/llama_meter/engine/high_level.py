"""llama-cpp-python's high-level interface, as a program of users has it, with the tokens counted that it evaluates."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from llama_meter.engine.session import SessionConfig


class HighLevel:
    """A loaded `llama_cpp.Llama`, which keeps what it evaluated last and finds the beginning that a prompt shares.

    `evaluated`: tokens since the last answer began.
    """

    def __init__(self, path: Path, config: SessionConfig):
        from llama_cpp import Llama  # 0.6 s of a CPU, which the bindings alone do not take

        self._model = Llama(
            str(path),
            n_ctx=config.n_ctx_seq,
            n_batch=config.n_batch,
            n_ubatch=config.n_ubatch,
            n_threads=config.n_threads,
            n_threads_batch=config.n_threads,
            n_gpu_layers=config.n_gpu_layers,
            verbose=False,
        )
        self._evaluate = self._model.eval
        self._model.eval = self._counted  # type: ignore[method-assign] # nothing else tells how many it evaluates
        self.evaluated = 0

    def _counted(self, tokens: Any) -> None:
        self.evaluated += len(tokens)
        self._evaluate(tokens)

    def forget(self) -> None:
        """Keep nothing of what was evaluated."""
        self._model.reset()

    def answer(self, tokens: np.ndarray) -> Iterator[np.ndarray]:
        """Logits (n_vocab,) float32 of one token after the other of a greedy answer to a prompt (n,)."""
        self.evaluated = 0
        for _ in self._model.generate(tokens.tolist(), temp=0.0):
            yield np.ctypeslib.as_array(self._model._ctx.get_logits(), (self._model.n_vocab(),))
