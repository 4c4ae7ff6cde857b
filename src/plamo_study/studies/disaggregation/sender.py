"""The process that prefills prompts and ships their states; it ends with the worker that started it."""

import os
import socket
from pathlib import Path

import msgspec
import numpy as np

from plamo_study.engine.session import Session
from plamo_study.measure import worker
from plamo_study.measure.cells import Service, Shipment, Traffic
from plamo_study.measure.rows import Measured
from plamo_study.studies.disaggregation import contexts, requests, wire
from plamo_study.studies.disaggregation.wire import Origin, Reply, State, clock


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Input of the sender: the cell, its model file, and the file descriptor of the connection to the receiver.

    `lengths`: tokens of each request's prompt.
    """

    cell: Shipment | Service | Traffic
    path: str
    connection: int
    lengths: list[int] = []


class Hello(wire.Strict, frozen=True, kw_only=True):
    """Message that the sender is ready, with its process id."""

    pid: int


class Start(wire.Strict, frozen=True, kw_only=True):
    """Message that the receiver is ready, with the `clock` time of the start (ns)."""

    at_ns: int = 0


class Proof(wire.Strict, frozen=True, kw_only=True):
    """Header of the logits that the sender computed from the state it shipped."""

    n_steps: int
    n_vocab: int


def serve(order: Order) -> Measured:
    """Ship all states of the cell; the receiver records the times."""
    cell, path = order.cell, Path(order.path)
    config = requests.sending(cell)
    with Session(path, config) as session:
        own = contexts.origin(path, requests.receiving(cell))
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


if __name__ == "__main__":
    worker.serve(Order, serve)
