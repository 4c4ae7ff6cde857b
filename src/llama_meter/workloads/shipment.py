"""A cell of kind "shipment", receiver's side: the sender prefills a prompt, and decoding continues here from its state.

Proof: the sender also continues from its own copy of the state and sends its logits. They must agree within the
tolerance; whether they are bit-identical is recorded, too.
"""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np

from llama_meter.cells import PHASES, Shipment
from llama_meter.engine import filling, library
from llama_meter.engine.session import EngineError, Session
from llama_meter.errors import StudyError
from llama_meter.measure import peers, watch
from llama_meter.measure.peers import Go, clock
from llama_meter.measure.tolerance import tolerance
from llama_meter.oracle.compare import relative_error
from llama_meter.rows import Measured, passed
from llama_meter.workloads import sender
from llama_meter.workloads.sender import Asking, Hello, Origin, Proof, Reply, State

A_CELL = 16  # bytes at most of a token's position and sequence
FRAME = 1 << 17  # bytes at most of the descriptions of caches and layers, and of rounding in the engine's log


@dataclass(frozen=True)
class Receiver:
    """A warm context that loads states of its own kind.

    `log`: the engine's log from its creation; `tokens`: as `sender.tokens` draws them; nanoseconds to load the model
    and to warm up.
    """

    session: Session
    own: Origin
    log: list[str]
    n_requests: int
    tokens: np.ndarray
    load_ns: int
    warmup_ns: int

    @cached_property
    def most_bytes(self) -> int:
        """Upper limit of one sequence's state in bytes: the memory that the engine reserved for all sequences."""
        memory = filling.memory(self.log)
        return int(memory.kv + memory.state) + A_CELL * sum(memory.cells) + FRAME

    def check(self, header: State) -> None:
        """StudyError for an announced state that this context must not load. None of it has been read yet.

        It is of another origin, too long, of an impossible size, of a token outside of the vocabulary, or of an
        unknown request.
        """
        for name in Origin.__struct_fields__:
            theirs, ours = getattr(header.origin, name), getattr(self.own, name)
            if theirs != ours:
                why = f"has another {name}: {theirs}, and here {ours}"
                raise StudyError("the state", why, f"use one {name} on both sides")
        room = self.session.config.n_ctx_seq
        if not 0 < header.n_tokens <= room:
            why = f"stands for {header.n_tokens} tokens, and here is room for {room}"
            raise StudyError("the state", why, "make room")
        if not (0 <= header.token < self.session.n_vocab and 0 <= header.request < self.n_requests):
            why = f"is of request {header.request}, token {header.token}"
            raise StudyError("the state", why, "send what was asked for")
        if not 0 < header.n_bytes <= self.most_bytes:
            raise StudyError(
                "the state", f"announces {header.n_bytes:,} bytes, {self.most_bytes:,} at most", peers.AGAIN
            )

    def arrived(self, line: socket.socket) -> tuple[State, np.ndarray, dict[str, int]]:
        """Receive the next state that this context may load, complete and verified; the context is not changed yet.

        Its header, its bytes, and nanoseconds of "send" and "check" on this side.

        Raises
        ------
        StudyError
            The state is refused. The sender gets the reason.

        """
        with _telling(line):
            header = peers.receive(line, State)
            self.check(header)
            start = clock()
            peers.send(line, Reply())
            data = peers.take(line, header.n_bytes)
            came = clock()
            if sender.digest(data) != header.sha256:
                raise StudyError("the state", "is not what was sent: its SHA-256 differs", peers.AGAIN)
            return header, data, {"send": came - start, "check": clock() - came}

    def load(self, seq: int, header: State, data: np.ndarray) -> None:
        """Load a checked and verified state into a sequence.

        Raises
        ------
        StudyError
            The engine refuses it, or it does not hold the announced number of tokens. The sequence is then empty.

        """
        try:
            self.session.set_state(seq, data, header.n_tokens)
            why = "" if self.session.held(seq) == header.n_tokens else f"holds {self.session.held(seq)} tokens"
        except EngineError as error:
            why = str(error)
        if why:
            self.session.remove_tail(seq, 0)
            raise StudyError("the state", f"of {header.n_tokens} tokens cannot be taken: {why}", peers.AGAIN)

    def received(self, line: socket.socket) -> tuple[State, dict[str, int]]:
        """Load the next state into sequence 0: its header, and nanoseconds of "send", "check" and "load" on this side.

        Raises
        ------
        StudyError
            The state is refused or cannot be loaded. The sender gets the reason, and the sequence is empty.

        """
        header, data, taken = self.arrived(line)
        start = clock()
        with _telling(line):
            self.load(0, header, data)
        return header, taken | {"load": clock() - start}


@contextmanager
def _telling(line: socket.socket) -> Iterator[None]:
    """Context in which the sender gets the reason for a refusal, too, if it still listens."""
    try:
        yield
    except StudyError as error:
        with suppress(StudyError):
            peers.send(line, Reply(refused=f"{error.what} {error.why}"))
        raise


@contextmanager
def receiving(cell: Shipment | Asking, path: Path) -> Iterator[Receiver]:
    """Open the context that decodes a cell's answers."""
    log: list[str] = []
    library.capture_log(log)
    start = clock()
    with Session(path, sender.receiving(cell)) as session:
        own = sender.origin(path, session.config)
        loaded = clock()
        tokens = sender.tokens(cell, session.n_vocab)
        sender.warm(session, tokens[0])
        n_requests = 1 if isinstance(cell, Shipment) else cell.n_requests
        yield Receiver(session, own, log, n_requests, tokens, loaded - start, clock() - loaded)


def run(cell: Shipment, path: Path, stage: Callable[[str], None]) -> Measured:
    """Measure one cell. `samples_ns`: per repetition the times of PHASES.

    prefill and save: on the sender's side. check: on both (SHA-256). send: from the receiver's request until the last
    byte has arrived. load and step, the first decode step: here. `n_bytes`: of the state.
    """
    with sender.started(cell, path) as line, receiving(cell, path) as receiver:
        stage("sender")
        pid = peers.receive(line, Hello).pid
        stage("ship")
        shipments = [_shipped(receiver, line, pid, cell) for _ in range(cell.repetitions)]
        peers.send(line, Go())
    samples, sizes, mine, theirs = zip(*shipments, strict=True)
    checks: dict[str, float | bool] = {
        "second_path_error": (error := max(map(relative_error, np.concatenate(mine), np.concatenate(theirs)))),
        "second_path": error <= tolerance(cell),
        "identical": float(np.array(mine).tobytes() == np.array(theirs).tobytes()),
        "finite": bool(np.isfinite(mine).all() and np.isfinite(theirs).all()),
        # of the last repetition: every prompt was evaluated elsewhere
        "evaluated": receiver.session.n_evaluated == cell.n_gen,
        "one_size": len(set(sizes)) == 1,
    }
    return Measured(
        samples_ns=list(samples), warmup_ns=[receiver.warmup_ns], load_ns=receiver.load_ns,
        n_evaluated=cell.repetitions * cell.n_gen, n_bytes=sizes[0], checks=checks, valid=passed(checks),
    )  # fmt: skip


def _shipped(
    receiver: Receiver, line: socket.socket, pid: int, cell: Shipment
) -> tuple[list[int], int, np.ndarray, np.ndarray]:
    """One shipment: times of PHASES (ns), bytes, and logits (n_gen, n_vocab) of the same steps here and there."""
    session = receiver.session
    session.clear()
    with watch.timed(pid):
        peers.send(line, Go())
        header, taken = receiver.received(line)
        start = clock()
        first = sender.greedy(session, header.token, 1)
        step = clock() - start
    rest = sender.greedy(session, int(first[-1].argmax()), cell.n_gen - 1)
    peers.send(line, Reply())
    proof = peers.receive(line, Proof)
    if (proof.n_steps, proof.n_vocab) != (cell.n_gen, session.n_vocab):
        raise StudyError("the sender", f"proves {proof.n_steps} steps of {proof.n_vocab} logits", "update both sides")
    theirs = peers.take(line, 4 * proof.n_steps * proof.n_vocab).view(np.float32)
    mine = np.concatenate([first, rest]) if cell.n_gen > 1 else first
    spent = msgspec.structs.asdict(header.spent) | taken | {"check": header.spent.check + taken["check"]}
    return [(spent | {"step": step})[name] for name in PHASES], header.n_bytes, mine, theirs.reshape(mine.shape)
