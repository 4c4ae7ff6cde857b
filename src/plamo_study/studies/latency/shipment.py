"""A cell of kind "shipment", receiver's side: the sender prefills a prompt, and decoding continues here from its state.

Proof: the sender also continues from its own copy of the state and sends its logits. They must agree within the
tolerance; whether they are bit-identical is recorded, too.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np

from llama_meter.cells import PHASES, Shipment
from llama_meter.engine import library
from llama_meter.engine.session import EngineError, Session
from llama_meter.errors import StudyError
from llama_meter.measure import peers, watch
from llama_meter.measure.peers import Go, clock
from llama_meter.measure.tolerance import tolerance
from llama_meter.oracle.compare import relative_error
from llama_meter.rows import Measured, passed
from plamo_study.studies.two_files import sender
from plamo_study.studies.two_files.sender import Asking, State


@dataclass(frozen=True)
class Receiver:
    """A warm context that loads states of its own kind.

    `tokens`: as `sender.tokens` draws them; nanoseconds to load the model and to warm up.
    """

    session: Session
    tokens: np.ndarray
    load_ns: int
    warmup_ns: int

    def arrived(self, line: Connection) -> tuple[State, np.ndarray, dict[str, int]]:
        """Receive the next state; the context is not changed yet.

        Its header, its bytes, and nanoseconds of "send" and "check" on this side. StudyError where the bytes are not
        those that were sent.
        """
        header = line.recv()
        start = clock()
        line.send(Go())
        data = peers.take(line, header.n_bytes)
        came = clock()
        if sender.digest(data) != header.sha256:
            raise StudyError("the state", "is not what was sent: its SHA-256 differs", "measure it again")
        return header, data, {"send": came - start, "check": clock() - came}

    def load(self, seq: int, header: State, data: np.ndarray) -> None:
        """Load a state into a sequence.

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
            raise StudyError("the state", f"of {header.n_tokens} tokens cannot be taken: {why}", "measure it again")

    def received(self, line: Connection) -> tuple[State, dict[str, int]]:
        """Load the next state into sequence 0: its header, and nanoseconds of "send", "check" and "load" here."""
        header, data, taken = self.arrived(line)
        start = clock()
        self.load(0, header, data)
        return header, taken | {"load": clock() - start}


@contextmanager
def receiving(cell: Shipment | Asking, path: Path) -> Iterator[Receiver]:
    """Open the context that decodes a cell's answers."""
    library.capture_log([])
    start = clock()
    with Session(path, sender.receiving(cell)) as session:
        loaded = clock()
        tokens = sender.tokens(cell, session.n_vocab)
        sender.warm(session, tokens[0])
        yield Receiver(session, tokens, loaded - start, clock() - loaded)


def run(cell: Shipment, path: Path, stage: Callable[[str], None]) -> Measured:
    """Measure one cell. `samples_ns`: per repetition the times of PHASES.

    prefill and save: on the sender's side. check: on both (SHA-256). send: from the receiver's request until the last
    byte has arrived. load and step, the first decode step: here. `n_bytes`: of the state.
    """
    with sender.started(cell, path) as line, receiving(cell, path) as receiver:
        stage("sender")
        pid = line.recv().pid
        stage("ship")
        shipments = [_shipped(receiver, line, pid, cell) for _ in range(cell.repetitions)]
        line.send(Go())
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
        samples_ns=list(samples),
        warmup_ns=[receiver.warmup_ns],
        load_ns=receiver.load_ns,
        n_evaluated=cell.repetitions * cell.n_gen,
        n_bytes=sizes[0],
        checks=checks,
        valid=passed(checks),
    )


def _shipped(
    receiver: Receiver, line: Connection, pid: int, cell: Shipment
) -> tuple[list[int], int, np.ndarray, np.ndarray]:
    """One shipment: times of PHASES (ns), bytes, and logits (n_gen, n_vocab) of the same steps here and there."""
    session = receiver.session
    session.clear()
    with watch.timed(pid):
        line.send(Go())
        header, taken = receiver.received(line)
        start = clock()
        first = sender.greedy(session, header.token, 1)
        step = clock() - start
    rest = sender.greedy(session, int(first[-1].argmax()), cell.n_gen - 1)
    line.send(Go())
    theirs = line.recv()
    mine = np.concatenate([first, rest]) if cell.n_gen > 1 else first
    spent = msgspec.structs.asdict(header.spent) | taken | {"check": header.spent.check + taken["check"]}
    return [(spent | {"step": step})[name] for name in PHASES], header.n_bytes, mine, theirs
