"""The process that reads prompts and hands states over, and what both ends derive: contexts, tokens, arrivals."""

import os
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from llama_meter.cells import Service, Shipment, Traffic
from llama_meter.engine import library
from llama_meter.engine.session import Session, SessionConfig
from llama_meter.errors import StudyError
from llama_meter.limits import FIRST_TOKEN
from llama_meter.measure import process, sessions
from llama_meter.models import tensors
from llama_meter.rows import Measured
from llama_meter.workloads import wire
from llama_meter.workloads.wire import Hello, Origin, Proof, Reply, Start, State, clock

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


LOOK_S = 0.1  # between two checks that the sender is alive


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Input of the sender: the cell, its model file, and the file descriptor of the connection to the receiver.

    `lengths`: tokens of each request's prompt.
    """

    cell: Shipment | Asking
    path: str
    connection: int
    lengths: list[int] = []


# ---------------------------------------------------------------- in the receiver's process


class Sender(threading.Thread):
    """Thread that runs the sending process until it ends; `outcome` then holds the result."""

    def __init__(self, order: Order, end: socket.socket):
        super().__init__(daemon=True)
        self.order, self.end = order, end
        self.outcome: process.Outcome | None = None

    def run(self) -> None:
        """Wait for the process."""
        with self.end:
            self.outcome = process.work(self.order, wire.OWN_S, workload=__name__, files=[self.end.fileno()])

    def called(self, peer: socket.socket) -> int:
        """Wait until the sender is ready; its pid. StudyError if it ended before that."""
        while not select.select([peer], [], [], LOOK_S)[0]:
            if not self.is_alive():
                raise StudyError("the sender", "ended before it called", "start it again")
        pid = wire.receive(peer, Hello).pid
        self.end.close()  # the sender owns it now, and its end must close the connection
        return pid


@contextmanager
def started(cell: Shipment | Asking, path: Path, lengths: Sequence[int] = ()) -> Iterator[tuple[Sender, socket.socket]]:
    """Start a cell's sender and yield it with the connection to it; wait for its end on exit.

    `lengths`: tokens of each request's prompt. An error tells the reason of the sender's end, if it is known.
    """
    peer, end = wire.pair(wire.OWN_S)
    sender = Sender(Order(cell=cell, path=str(path), connection=end.fileno(), lengths=list(lengths)), end)
    sender.start()
    try:
        with peer:
            yield sender, peer
    except StudyError as error:
        sender.join(LOOK_S * 10)
        if not (sender.outcome and (failure := sender.outcome.failure)):
            raise
        why = f"{error.why}; the sender ended in {failure.stage}: {failure.why}"
        raise StudyError(error.what, why, error.mend) from error
    sender.join()


# ---------------------------------------------------------------- in the sender's process


def serve(order: Order) -> Measured:
    """Ship all states of the cell; the receiver records the times."""
    cell, path = order.cell, Path(order.path)
    with Session(path, sending(cell)) as session:
        own = origin(path, receiving(cell))
        prompts = tokens(cell, session.n_vocab)
        warm(session, prompts[0])
        with wire.ready(socket.socket(fileno=order.connection), wire.OWN_S) as peer:
            wire.send(peer, Hello(pid=os.getpid()))
            if isinstance(cell, Shipment):
                for prompt in prompts:
                    wire.receive(peer, Start)
                    _ship_and_prove(peer, session, cell, own, prompt)
            else:
                due = zip(arrivals(cell), prompts, order.lengths, strict=True)
                _ship_all(peer, session, own, [(arrives, prompt[:n]) for arrives, prompt, n in due])
            wire.receive(peer, Reply)  # the receiver reads this process's CPU time while it lives
    return Measured()


def _ship_and_prove(peer: socket.socket, session: Session, cell: Shipment, own: Origin, prompt: np.ndarray) -> None:
    """Ship a state, then continue decoding from it here and send the logits as proof."""
    token = _ship(peer, session, own, prompt, 0, cell.link_bps)
    rows = greedy(session, token, cell.n_gen)
    wire.send(peer, Proof(n_steps=len(rows), n_vocab=session.n_vocab))
    wire.push(peer, rows)


def _ship_all(peer: socket.socket, session: Session, own: Origin, due: list[tuple[int, np.ndarray]]) -> None:
    """Prefill prompts one by one as they arrive, and ship each state immediately."""
    began = wire.receive(peer, Start).at_ns
    for number, (arrives, prompt) in enumerate(due):
        wait_until(began + arrives)
        _ship(peer, session, own, prompt, number, 0)


def _ship(peer: socket.socket, session: Session, own: Origin, prompt: np.ndarray, number: int, bps: int) -> int:
    """Prefill a prompt and ship its state; the answer's first token. StudyError if the receiver refuses."""
    session.clear()
    began = clock()
    token = int(session.prefill({0: prompt})[0][-1].argmax())
    read = clock()
    state = session.read_state(0)
    saved = clock()
    sha256 = wire.digest(state)
    hashed = clock()
    spent = wire.Spent(prefill=read - began, save=saved - read, check=hashed - saved)
    told = State(
        origin=own, request=number, n_tokens=len(prompt), token=token, n_bytes=state.size, sha256=sha256, spent=spent
    )
    wire.offer(peer, told, state, bps)
    return token


RUNS = {Order: serve}
