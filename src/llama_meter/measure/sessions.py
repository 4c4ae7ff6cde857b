"""The engine's context configuration for a cell, and tokens to evaluate. Nothing is opened here."""

from typing import Any

import numpy as np

from llama_meter.cells import OnModel
from llama_meter.engine.session import SessionConfig
from llama_meter.limits import FIRST_TOKEN

SAME = ("n_batch", "n_ubatch", "n_threads", "type_k", "type_v", "flash_attn", "n_gpu_layers", "use_mmap")


def config(cell: OnModel, n_ctx_seq: int, **changes: Any) -> SessionConfig:
    """A context with room for `n_ctx_seq` tokens per sequence; `changes` are fields that a workload overrides."""
    given = {name: getattr(cell, name) for name in SAME} | {"n_threads_batch": cell.n_threads} | changes
    return SessionConfig(n_ctx_seq=n_ctx_seq, **given)


def random_tokens(seed: int | list[int], n_vocab: int, *shape: int) -> np.ndarray:
    """Random tokens of a shape, int32: speed does not depend on them."""
    return np.random.default_rng(seed).integers(FIRST_TOKEN, n_vocab, shape, dtype=np.int32)
