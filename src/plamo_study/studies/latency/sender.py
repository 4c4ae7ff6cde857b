"""The process that reads prompts and hands states over, and what both ends derive: contexts, tokens, arrivals."""

import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np

from llama_meter.cells import SPLIT, Service, Shipment, Traffic
from llama_meter.engine.session import Session, SessionConfig
from llama_meter.measure import peers, phases, sessions
from llama_meter.measure.peers import clock

WARM_STEPS = 2
Asking = Service | Traffic  # cells in which requests arrive


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What announces a sequence's state."""

    request: int
    n_tokens: int  # evaluated, and in the state
    token: int  # first of the answer: not in the state, and a recurrent state cannot go back to compute it
    n_bytes: int
    sha256: str  # of these bytes
    spent: dict[str, int]  # nanoseconds of prefill, save and check on the sender's side


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Task of the sender: the cell, its model file, and the tokens of each request's prompt."""

    cell: Shipment | Asking
    path: str
    lengths: list[int]


# ------------------------------------------------------------------ what both sides derive


def receiving(cell: Shipment | Asking) -> SessionConfig:
    """Configuration of the context that decodes answers."""
    return _config(cell, cell.n_threads - reading_threads(cell))


def sending(cell: Shipment | Asking) -> SessionConfig:
    """Configuration of the context that prefills prompts one by one; with the same `n_seq_max`, so that states fit."""
    return _config(cell, reading_threads(cell) or cell.n_threads)


def is_split(cell: Shipment | Asking) -> bool:
    """Whether requests arrive in one process, which prefills, and are decoded in another."""
    return SPLIT in (getattr(cell, "rule", ""), getattr(cell, "mode", ""))


def reading_threads(cell: Shipment | Asking) -> int:
    """Threads that prefill while others decode: half of them if the work is split, else 0."""
    return max(cell.n_threads // 2, 1) if is_split(cell) else 0


def _config(cell: Shipment | Asking, n_threads: int) -> SessionConfig:
    changes = {"n_seq_max": getattr(cell, "n_seq", 1), "n_threads": max(n_threads, 1)}
    changes |= {"n_threads_batch": changes["n_threads"]}
    return sessions.config(cell, cell.n_prompt + cell.n_gen, swa_full=False, **changes)


def tokens(cell: Shipment | Asking, n_vocab: int) -> np.ndarray:
    """Random tokens, (n, n_tokens) int32: a prompt per repetition, or per request the longest prompt with its
    answer."""
    shape = cell.repetitions, cell.n_prompt
    if not isinstance(cell, Shipment):
        shape = cell.n_requests, cell.n_prompt + cell.n_gen
    return sessions.random_tokens(cell.seed, n_vocab, *shape)


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
        phases.greedy(session, int(prompt[0]), WARM_STEPS)
    session.clear()


def digest(data: np.ndarray) -> str:
    """SHA-256 of an array's bytes, 64 hex digits."""
    return hashlib.sha256(data.data).hexdigest()


# ------------------------------------------------------------------ its start, and what it does


@contextmanager
def started(cell: Shipment | Asking, path: Path, lengths: Sequence[int] = ()) -> Iterator[Connection]:
    """Start a cell's sender and yield the connection to it. `lengths`: tokens of each request's prompt."""
    order = Order(cell=cell, path=str(path), lengths=list(lengths))
    with peers.started(__name__, {"the sender": order}) as by_name:
        yield by_name["the sender"].line


def serve(order: Order, line: Connection) -> None:
    """Ship all states of the cell; the receiver records the times. A shipment is proved: decoding continues here, too,
    and the logits follow it."""
    cell = order.cell
    with Session(Path(order.path), sending(cell)) as session:
        prompts = tokens(cell, session.n_vocab)
        warm(session, prompts[0])
        line.send(os.getpid())
        if isinstance(cell, Shipment):
            for prompt in prompts:
                line.recv()
                token = _ship(line, session, prompt, 0)
                line.send(phases.greedy(session, token, cell.n_gen))
        else:
            began = line.recv().at_ns
            due = zip(arrivals(cell), prompts, order.lengths, strict=True)
            for number, (arrives, prompt, n_prompt) in enumerate(due):
                wait_until(began + arrives)
                _ship(line, session, prompt[:n_prompt], number)
        line.recv()  # the receiver reads this process's CPU time while it lives


def _ship(line: Connection, session: Session, prompt: np.ndarray, number: int) -> int:
    """Prefill a prompt, announce its state, send it once the peer is ready, and wait until it has arrived; the answer's
    first token."""
    session.clear()
    began = clock()
    token = int(session.prefill({0: prompt})[0][-1].argmax())
    read = clock()
    state = session.read_state(0)
    saved = clock()
    sha256 = digest(state)
    spent = {"prefill": read - began, "save": saved - read, "check": clock() - saved}
    line.send(State(request=number, n_tokens=len(prompt), token=token, n_bytes=state.size, sha256=sha256, spent=spent))
    line.recv()
    peers.push(line, state)
    line.recv()
    return token
