"""The bindings' own text loop, `Llama.generate`, with or without drafted tokens."""

from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

Draft = Callable[[np.ndarray], np.ndarray]  # tokens so far (n,) to the drafted next ones


def generate(path: Path, prompt: Sequence[int], n: int, n_ctx: int, draft: Draft | None = None) -> list[int]:
    """The `n` greedy tokens after a prompt, from `Llama.generate` on the CPU; `draft` proposes tokens for it.

    Raises RuntimeError where llama.cpp refuses a batch.
    """
    from llama_cpp import Llama  # half of what a worker imports
    from llama_cpp.llama_speculative import LlamaDraftModel

    class Drafts(LlamaDraftModel):  # type: ignore[misc] # the package is not typed
        def __call__(self, input_ids: np.ndarray, /, **others: Any) -> np.ndarray:
            assert draft is not None
            return draft(input_ids).astype(np.intc)

    draft_model = Drafts() if draft else None  # op_offload=False keeps a build with a GPU off it
    model = Llama(str(path), n_ctx=n_ctx, logits_all=True, verbose=False, op_offload=False, draft_model=draft_model)
    try:
        tokens = model.generate(list(prompt), temp=0.0, top_k=1, repeat_penalty=1.0)
        return [int(token) for token in islice(tokens, n)]
    finally:
        model.close()
