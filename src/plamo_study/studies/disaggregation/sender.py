"""The process that prefills prompts and ships their states, and how the receiver starts it and waits for its end.

Whichever dies first takes the other along: the sender ends with the worker that started it, and its end closes the
connection.
"""

import os
import select
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from plamo_study.engine.session import Session
from plamo_study.errors import StudyError
from plamo_study.measure import process
from plamo_study.measure.cells import Shipment
from plamo_study.measure.rows import Measured
from plamo_study.studies.disaggregation import requests, wire
from plamo_study.studies.disaggregation.requests import Asking
from plamo_study.studies.disaggregation.wire import Hello, Origin, Proof, Reply, Start, State, clock

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
    with Session(path, requests.sending(cell)) as session:
        own = requests.origin(path, requests.receiving(cell))
        prompts = requests.tokens(cell, session.n_vocab)
        requests.warm(session, prompts[0])
        with wire.ready(socket.socket(fileno=order.connection), wire.OWN_S) as peer:
            wire.send(peer, Hello(pid=os.getpid()))
            if isinstance(cell, Shipment):
                for prompt in prompts:
                    wire.receive(peer, Start)
                    _ship_and_prove(peer, session, cell, own, prompt)
            else:
                due = zip(requests.arrivals(cell), prompts, order.lengths, strict=True)
                _ship_all(peer, session, own, [(arrives, prompt[:n]) for arrives, prompt, n in due])
            wire.receive(peer, Reply)  # the receiver reads this process's CPU time while it lives
    return Measured()


def _ship_and_prove(peer: socket.socket, session: Session, cell: Shipment, own: Origin, prompt: np.ndarray) -> None:
    """Ship a state, then continue decoding from it here and send the logits as proof."""
    token = _ship(peer, session, own, prompt, 0, cell.link_bps)
    rows = requests.greedy(session, token, cell.n_gen)
    wire.send(peer, Proof(n_steps=len(rows), n_vocab=session.n_vocab))
    wire.push(peer, rows)


def _ship_all(peer: socket.socket, session: Session, own: Origin, due: list[tuple[int, np.ndarray]]) -> None:
    """Prefill prompts one by one as they arrive, and ship each state immediately."""
    began = wire.receive(peer, Start).at_ns
    for number, (arrives, prompt) in enumerate(due):
        requests.wait_until(began + arrives)
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
