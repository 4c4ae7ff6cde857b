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

from llama_meter.cells import Service, Shipment, Traffic
from llama_meter.engine.session import Session, SessionConfig
from llama_meter.limits import FIRST_TOKEN
from llama_meter.measure import peers, sessions
from llama_meter.measure.peers import clock

WARM_STEPS = 2
SPLIT = "split"
Asking = Service | Traffic  # cells in which requests arrive


# ---------------------------------------------------------------- what is said


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """Nanoseconds spent on a state before it was announced."""

    prefill: int
    save: int
    check: int


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What announces a sequence's state."""

    request: int = 0
    n_tokens: int  # evaluated, and in the state
    token: int  # first of the answer: not in the state, and a recurrent state cannot go back to compute it
    n_bytes: int
    sha256: str  # of these bytes
    spent: Spent  # on the sender's side


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The sender is ready."""

    pid: int


# ---------------------------------------------------------------- what both sides derive


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


def tokens(cell: Shipment | Asking, n_vocab: int) -> np.ndarray:
    """Random tokens, (n, n_tokens) int32: a prompt per repetition, or per request the longest prompt with its
    answer."""
    rng = np.random.default_rng(cell.seed)
    n, length = (
        (cell.repetitions, cell.n_prompt)
        if isinstance(cell, Shipment)
        else (cell.n_requests, cell.n_prompt + cell.n_gen)
    )
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


# ---------------------------------------------------------------- in the receiver's process


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Task of the sender: the cell, its model file, and the tokens of each request's prompt."""

    cell: Shipment | Asking
    path: str
    lengths: list[int] = []


@contextmanager
def started(cell: Shipment | Asking, path: Path, lengths: Sequence[int] = ()) -> Iterator[Connection]:
    """Start a cell's sender and yield the connection to it. `lengths`: tokens of each request's prompt."""
    order = Order(cell=cell, path=str(path), lengths=list(lengths))
    with peers.started(__name__, {"the sender": order}) as by_name:
        yield by_name["the sender"].line


# ---------------------------------------------------------------- in the sender's process


def serve(order: Order, line: Connection) -> None:
    """Ship all states of the cell; the receiver records the times."""
    cell, path = order.cell, Path(order.path)
    with Session(path, sending(cell)) as session:
        prompts = tokens(cell, session.n_vocab)
        warm(session, prompts[0])
        line.send(Hello(pid=os.getpid()))
        if isinstance(cell, Shipment):
            for prompt in prompts:
                line.recv()
                _ship_and_prove(line, session, cell, prompt)
        else:
            due = zip(arrivals(cell), prompts, order.lengths, strict=True)
            _ship_all(line, session, [(arrives, prompt[:n]) for arrives, prompt, n in due])
        line.recv()  # the receiver reads this process's CPU time while it lives


def _ship_and_prove(line: Connection, session: Session, cell: Shipment, prompt: np.ndarray) -> None:
    """Ship a state, then continue decoding from it here and send the logits as proof."""
    token = _ship(line, session, prompt, 0, cell.link_bps)
    rows = greedy(session, token, cell.n_gen)
    line.send(rows)


def _ship_all(line: Connection, session: Session, due: list[tuple[int, np.ndarray]]) -> None:
    """Prefill prompts one by one as they arrive, and ship each state immediately."""
    began = line.recv().at_ns
    for number, (arrives, prompt) in enumerate(due):
        wait_until(began + arrives)
        _ship(line, session, prompt, number, 0)


def _ship(line: Connection, session: Session, prompt: np.ndarray, number: int, bps: int) -> int:
    """Prefill a prompt and ship its state; the answer's first token."""
    session.clear()
    began = clock()
    token = int(session.prefill({0: prompt})[0][-1].argmax())
    read = clock()
    state = session.read_state(0)
    saved = clock()
    sha256 = digest(state)
    hashed = clock()
    spent = Spent(prefill=read - began, save=saved - read, check=hashed - saved)
    header = State(request=number, n_tokens=len(prompt), token=token, n_bytes=state.size, sha256=sha256, spent=spent)
    offer(line, header, state, bps)
    return token


def offer(line: Connection, header: State, data: np.ndarray, bps: int = 0) -> None:
    """Announce a state, send it once the peer is ready, and wait until it has arrived."""
    line.send(header)
    line.recv()
    peers.push(line, data, bps)
    line.recv()


def digest(data: np.ndarray) -> str:
    """SHA-256 of an array's bytes, 64 hex digits."""
    return hashlib.sha256(data.data).hexdigest()
