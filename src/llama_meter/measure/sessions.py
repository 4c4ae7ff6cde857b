"""The engine's context configuration for a cell. Nothing is opened here."""

from typing import Any

from llama_meter.cells import OnModel
from llama_meter.engine.session import SessionConfig

SAME = ("n_batch", "n_ubatch", "n_threads", "type_k", "type_v", "flash_attn", "n_gpu_layers", "use_mmap")


def config(cell: OnModel, n_ctx_seq: int, **changes: Any) -> SessionConfig:
    """A context with room for `n_ctx_seq` tokens per sequence; `changes` are fields that a workload overrides."""
    given = {name: getattr(cell, name) for name in SAME} | {"n_threads_batch": cell.n_threads} | changes
    return SessionConfig(n_ctx_seq=n_ctx_seq, **given)
