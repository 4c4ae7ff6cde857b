"""A cell of kind "shipment", receiver's side: the sender prefills a prompt, and decoding continues here from its state.

Proof: the sender also continues from its own copy of the state and sends its logits. They must agree within the
tolerance; whether they are bit-identical is recorded, too.
"""

import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from plamo_study.engine import library
from plamo_study.engine.session import Session
from plamo_study.errors import StudyError
from plamo_study.measure import watch
from plamo_study.measure.cells import Shipment
from plamo_study.measure.rows import Measured, passed
from plamo_study.measure.tolerance import tolerance
from plamo_study.oracle.compare import relative_error
from plamo_study.studies.disaggregation import contexts, peers, requests, wire
from plamo_study.studies.disaggregation.contexts import Receiver
from plamo_study.studies.disaggregation.measures import PHASES
from plamo_study.studies.disaggregation.sender import Proof, Start
from plamo_study.studies.disaggregation.wire import Reply, State, clock


def run(cell: Shipment, path: Path, stage: Callable[[str], None]) -> Measured:
    """Measure one cell. `samples_ns`: per repetition the times of PHASES.

    prefill and save: on the sender's side. check: on both (SHA-256). send: from the receiver's request until the last
    byte has arrived. load and step, the first decode step: here. `n_bytes`: of the state.
    """
    log: list[str] = []
    library.capture_log(log)
    with peers.started(cell, path) as (thread, peer):
        start = clock()
        with Session(path, requests.receiving(cell)) as session:
            receiver = Receiver(session, contexts.origin(path, session.config), log)
            load_ns, start = clock() - start, clock()
            requests.warm(session, requests.tokens(cell, session.n_vocab)[0])
            warmup = clock() - start
            stage("sender")
            pid = peers.called(thread, peer)
            stage("ship")
            found = [_shipped(receiver, peer, pid, cell) for _ in range(cell.repetitions)]
            wire.send(peer, Reply())
    samples, sizes, mine, theirs = zip(*found, strict=True)
    checks: dict[str, float | bool] = {
        "second_path_error": (error := max(map(relative_error, np.concatenate(mine), np.concatenate(theirs)))),
        "second_path": error <= tolerance(cell),
        "identical": float(np.array(mine).tobytes() == np.array(theirs).tobytes()),
        "finite": bool(np.isfinite(mine).all() and np.isfinite(theirs).all()),
        "evaluated": session.n_evaluated == cell.n_gen,  # of the last repetition: every prompt was evaluated elsewhere
        "one_size": len(set(sizes)) == 1,
    }
    return Measured(
        samples_ns=list(samples), warmup_ns=[warmup], load_ns=load_ns, n_evaluated=cell.repetitions * cell.n_gen,
        n_bytes=sizes[0], checks=checks, valid=passed(checks),
    )  # fmt: skip


def _shipped(
    receiver: Receiver, peer: socket.socket, pid: int, cell: Shipment
) -> tuple[list[int], int, np.ndarray, np.ndarray]:
    """One shipment: times of PHASES (ns), bytes, and logits (n_gen, n_vocab) of the same steps here and there."""
    session = receiver.session
    session.clear()
    with watch.timed(pid):
        wire.send(peer, Start())
        told, taken = received(receiver, peer, 0)
        start = clock()
        first = requests.greedy(session, told.token, 1)
        step = clock() - start
    rest = requests.greedy(session, int(first[-1].argmax()), cell.n_gen - 1)
    wire.send(peer, Reply())
    proof = wire.receive(peer, Proof)
    if (proof.n_steps, proof.n_vocab) != (cell.n_gen, session.n_vocab):
        raise StudyError("the sender", f"proves {proof.n_steps} steps of {proof.n_vocab} logits", "update both sides")
    theirs = wire.take(peer, 4 * proof.n_steps * proof.n_vocab).view(np.float32)
    mine = np.concatenate([first, rest]) if cell.n_gen > 1 else first
    spent = msgspec.structs.asdict(told.spent) | taken | {"check": told.spent.check + taken["check"]}
    return [(spent | {"step": step})[name] for name in PHASES], told.n_bytes, mine, theirs.reshape(mine.shape)


def received(receiver: Receiver, peer: socket.socket, seq: int) -> tuple[State, dict[str, int]]:
    """Load the next state into a sequence: its header, and nanoseconds of "send", "check" and "load" on this side.

    Raises
    ------
    StudyError
        The state is refused or cannot be loaded. The sender gets the reason, and the sequence is empty.

    """
    told, data, taken = arrived(receiver, peer)
    start = clock()
    try:
        receiver.load(seq, told, data)
    except StudyError as error:
        refuse(peer, error)
        raise
    return told, taken | {"load": clock() - start}


def arrived(receiver: Receiver, peer: socket.socket) -> tuple[State, np.ndarray, dict[str, int]]:
    """Receive the next state that this context may load, complete and verified; the context is not changed yet.

    Raises
    ------
    StudyError
        The state is refused. The sender gets the reason.

    """
    try:
        told = wire.receive(peer, State)
        receiver.check(told)
        start = clock()
        wire.send(peer, Reply())
        data = wire.take(peer, told.n_bytes)
        came = clock()
        wire.verify(told, data)
    except StudyError as error:
        refuse(peer, error)
        raise
    return told, data, {"send": came - start, "check": clock() - came}


def refuse(peer: socket.socket, error: StudyError) -> None:
    """Send the sender the reason for a refusal, if it still listens."""
    try:
        wire.send(peer, Reply(refused=f"{error.what} {error.why}"))
    except StudyError:
        return
