"""Facts that both processes of a cell derive independently: contexts, tokens, arrivals; and how each decodes."""

import time
from pathlib import Path

import numpy as np

from plamo_study.engine import library
from plamo_study.engine.session import Session, SessionConfig
from plamo_study.limits import FIRST_TOKEN
from plamo_study.measure import sessions
from plamo_study.measure.cells import Service, Shipment, Traffic
from plamo_study.models import tensors
from plamo_study.studies.disaggregation.wire import Origin, clock

WARM_STEPS = 2
SPLIT = "split"
Asking = Service | Traffic  # cells in which requests arrive


def receiving(cell: Shipment | Asking) -> SessionConfig:
    """Configuration of the context that decodes answers."""
    return _config(cell, cell.n_threads - reading_threads(cell))


def sending(cell: Shipment | Asking) -> SessionConfig:
    """Configuration of the context that prefills prompts one by one; with the same `n_seq_max`, so that states fit."""
    return _config(cell, reading_threads(cell) or cell.n_threads)


def is_split(cell: Asking) -> bool:
    """Whether one process prefills and another decodes."""
    return (cell.rule if isinstance(cell, Traffic) else cell.mode) == SPLIT


def reading_threads(cell: Shipment | Asking) -> int:
    """Threads that prefill while others decode: half of them if the work is split, else 0."""
    return max(cell.n_threads // 2, 1) if not isinstance(cell, Shipment) and is_split(cell) else 0


def _config(cell: Shipment | Asking, n_threads: int) -> SessionConfig:
    n_seq = 1 if isinstance(cell, Shipment) else cell.n_seq
    changes = {"n_seq_max": n_seq, "n_threads": max(n_threads, 1), "n_threads_batch": max(n_threads, 1)}
    return sessions.config(cell, cell.n_prompt + cell.n_gen, swa_full=False, **changes)


def origin(path: Path, config: SessionConfig) -> Origin:
    """Properties that a context of this file and configuration shares with those that can load its states."""
    same = {name: getattr(config, name) for name in Origin.__struct_fields__ if hasattr(config, name)}
    return Origin(model=tensors.sha256(path), engine=library.describe()["sha256"], **same)


def tokens(cell: Shipment | Asking, n_vocab: int) -> np.ndarray:
    """Random tokens, (n, n_tokens) int32: a prompt per repetition, or per request the longest prompt with its
    answer."""
    rng = np.random.default_rng(cell.seed)
    n, length = (cell.repetitions, cell.n_prompt) if isinstance(cell, Shipment) else (
        cell.n_requests, cell.n_prompt + cell.n_gen)  # fmt: skip
    return rng.integers(FIRST_TOKEN, n_vocab, (n, length), dtype=np.int32)


def arrivals(cell: Asking) -> list[int]:
    """Arrival time of each request in ns since the first, with independent exponential gaps."""
    gaps = np.random.default_rng([cell.seed, 1]).exponential(1e9 / cell.per_second, cell.n_requests)
    return (np.cumsum(gaps) - gaps[0]).astype(np.int64).tolist()


def wait_until(at_ns: int) -> None:
    """Sleep until `clock` reaches `at_ns`."""
    if (left := at_ns - clock()) > 0:
        time.sleep(left / 1e9)


def warm(session: Session, prompt: np.ndarray) -> None:
    """Evaluate a micro-batch and some steps, save and load the state: everything that is timed later, once untimed."""
    session.prefill({0: prompt[: session.config.n_ubatch]})
    session.set_state(0, session.read_state(0), session.n_past[0])
    if session.n_past[0] + WARM_STEPS <= session.config.n_ctx_seq:
        greedy(session, int(prompt[0]), WARM_STEPS)
    session.clear()


def greedy(session: Session, token: int, n_steps: int) -> np.ndarray:
    """Logits (n_steps, n_vocab) of greedy decode steps of sequence 0, beginning with `token`."""
    rows = []
    for _ in range(n_steps):
        session.decode({0: token})
        rows.append(session.logits())
        token = int(rows[-1].argmax())
    return np.array(rows)
