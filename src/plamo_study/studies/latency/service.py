"""Cells of kinds "shipment" and "service": a prompt is read in one process and answered in another, which gets its
state; and requests that arrive over time are answered by one engine, or by two that split the work.

Shared: an engine with all threads prefills each prompt as it comes, while running answers wait, and then decodes all
sequences together. Split: a process with half of the threads prefills prompts and ships states here, where the other
half decodes. Tokens are drawn beforehand, so that every answer can be checked against the same tokens alone. A
shipment's sender also continues from its own copy of the state: both must agree within the tolerance, and whether they
are bit-identical is recorded, too.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from llama_meter.cells import PHASES, Service, Shipment
from llama_meter.engine import library
from llama_meter.engine.session import Session
from llama_meter.errors import StudyError
from llama_meter.measure import peers, phases, proof, watch
from llama_meter.measure.peers import Go, clock
from llama_meter.measure.tolerance import tolerance
from llama_meter.oracle.compare import relative_error
from llama_meter.rows import Measured, Request, passed
from plamo_study.studies.latency import sender
from plamo_study.studies.latency.sender import Asking, State

HEAD_START_NS = 50_000_000  # from now to the agreed start, so that both processes are ready
Arrived = tuple[State, np.ndarray, dict[str, int]]  # a state's header, its bytes, and ns of "send" and "check"


@dataclass(frozen=True)
class Receiver:
    """A warm context that loads states of its own kind; `tokens`: as `sender.tokens` draws them."""

    session: Session
    tokens: np.ndarray
    load_ns: int
    warmup_ns: int


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


def arrived(line: Connection) -> Arrived:
    """Receive the next state. StudyError where the bytes are not those that were sent."""
    header = line.recv()
    start = clock()
    line.send(Go())
    data = peers.take(line, header.n_bytes)
    came = clock()
    if sender.digest(data) != header.sha256:
        raise StudyError("the state", "is not what was sent: its SHA-256 differs", "measure it again")
    return header, data, {"send": came - start, "check": header.spent["check"] + clock() - came}


# ------------------------------------------------------------------ shipments


def shipped(cell: Shipment, path: Path, stage: Callable[[str], None]) -> Measured:
    """Measure a cell of kind "shipment". `samples_ns`: per repetition the times of PHASES.

    prefill and save: on the sender's side. check: on both (SHA-256). send: from the receiver's request until the last
    byte has arrived. load and step, the first decode step: here. `n_bytes`: of the state.
    """
    samples, mine, theirs, n_bytes = [], [], [], 0
    with sender.started(cell, path) as line, receiving(cell, path) as receiver:
        session = receiver.session
        stage("sender")
        pid = line.recv()
        stage("ship")
        for _ in range(cell.repetitions):
            session.clear()
            with watch.timed(pid):
                line.send(Go())
                header, data, spent = arrived(line)
                start = clock()
                session.set_state(0, data, header.n_tokens)
                loaded = clock()
                mine.append(phases.greedy(session, header.token, 1))
                spent = header.spent | spent | {"load": loaded - start, "step": clock() - loaded}
            mine.append(phases.greedy(session, int(mine[-1][-1].argmax()), cell.n_gen - 1))
            line.send(Go())
            theirs.append(line.recv())
            samples.append([spent[name] for name in PHASES])
            n_bytes = header.n_bytes
        line.send(Go())
    here, there = np.concatenate([rows for rows in mine if len(rows)]), np.concatenate(theirs)
    error = max(map(relative_error, here, there))
    checks: dict[str, float | bool] = {
        "second_path_error": error,
        "second_path": error <= tolerance(cell),
        "identical": float(here.tobytes() == there.tobytes()),
        "finite": bool(np.isfinite(here).all() and np.isfinite(there).all()),
    }
    return Measured(
        samples_ns=samples,
        warmup_ns=[receiver.warmup_ns],
        load_ns=receiver.load_ns,
        n_evaluated=cell.repetitions * cell.n_gen,
        n_bytes=n_bytes,
        checks=checks,
        valid=passed(checks),
    )


# ------------------------------------------------------------------ requests


@dataclass
class Answer:
    """A request being answered: tokens held, time of each answer token (ns), and the last logits."""

    number: int
    n_past: int
    token_ns: list[int] = field(default_factory=list)
    logits: np.ndarray = field(default_factory=lambda: np.empty(0))


Admit = Callable[[int, bool], Answer | None]  # (sequence, whether to wait for a request)


def run(cell: Service, path: Path, stage: Callable[[str], None]) -> Measured:
    """Measure a cell of kind "service"; all requests have the same length."""
    n = cell.n_requests
    return answered(cell, [cell.n_prompt] * n, [cell.n_gen] * n, path, stage)


def answered(cell: Asking, n_prompt: list[int], n_gen: list[int], path: Path, stage: Callable[[str], None]) -> Measured:
    """Answer requests of these lengths, which arrive as the cell says. `requests`: arrivals and tokens; `samples_ns`:
    time of the last token.

    A request's first token counts when the process that answers has it: after the prompt, or after the shipment.
    """
    with receiving(cell, path) as receiver:
        session, tokens = receiver.session, receiver.tokens
        stage("serve")
        with _source(cell, n_prompt, path, receiver) as (admit, began, pids), watch.timed(*pids):
            answers = _serve(cell, n_gen, session, tokens, admit)
        stage("alone")
        errors = [
            relative_error(answer.logits, proof.alone(session, 0, tokens[answer.number, : answer.n_past]))
            for answer in answers
        ]
    checks: dict[str, float | bool] = {"second_path_error": max(errors), "second_path": max(errors) <= tolerance(cell)}
    checks["answered"] = [len(answer.token_ns) for answer in answers] == n_gen
    requests = [
        Request(id=str(n), n_prompt=length, arrived_ns=arrives, token_ns=[at - began for at in answer.token_ns])
        for n, (answer, length, arrives) in enumerate(zip(answers, n_prompt, sender.arrivals(cell), strict=True))
    ]
    return Measured(
        samples_ns=[[max(request.token_ns[-1] for request in requests)]],
        warmup_ns=[receiver.warmup_ns],
        load_ns=receiver.load_ns,
        n_evaluated=sum(n_prompt) + sum(n_gen) - cell.n_requests,
        checks=checks,
        requests=requests,
        valid=passed(checks),
    )


def _serve(cell: Asking, n_gen: list[int], session: Session, tokens: np.ndarray, admit: Admit) -> list[Answer]:
    """Admit waiting requests while there is room, then decode a token for all; the answers in order of arrival."""
    active: list[Answer] = []  # an index is a sequence; those in use are always the first ones
    done: list[Answer] = []
    while len(done) < cell.n_requests:
        while len(active) < cell.n_seq and len(active) + len(done) < cell.n_requests:
            if not (answer := admit(len(active), not active)):
                break
            active.append(answer)
        session.decode({seq: int(tokens[answer.number, answer.n_past]) for seq, answer in enumerate(active)})
        now = clock()
        for seq, answer in enumerate(active):
            answer.n_past += 1
            answer.token_ns.append(now)
            if len(answer.token_ns) == n_gen[answer.number]:
                answer.logits = session.logits(seq)
        for seq in reversed(range(len(active))):
            if len(active[seq].logits):
                done.append(_leave(session, active, seq))
    return sorted(done, key=lambda answer: answer.number)


def _leave(session: Session, active: list[Answer], seq: int) -> Answer:
    """Remove an answer; the last sequence moves to its place, so that no hybrid call starts past the first one."""
    gone, last = active[seq], len(active) - 1
    session.remove_tail(seq, 0)
    if seq != last:
        session.move(last, seq)
        active[seq] = active[last]
    active.pop()
    return gone


@contextmanager
def _source(
    cell: Asking, n_prompt: list[int], path: Path, receiver: Receiver
) -> Iterator[tuple[Admit, int, tuple[int, ...]]]:
    """Source of requests: a function to admit one, the start time (ns), and the pids of other processes at work."""
    if sender.is_split(cell):
        with sender.started(cell, path, n_prompt) as line:
            pid = line.recv()
            began = clock() + HEAD_START_NS
            line.send(Go(at_ns=began))
            yield _Inbox(receiver, line).admit, began, (pid,)
            line.send(Go())
    else:
        began = clock() + HEAD_START_NS
        yield _prompts(cell, n_prompt, receiver, began), began, ()


def _prompts(cell: Asking, n_prompt: list[int], receiver: Receiver, began: int) -> Admit:
    """Source of requests that are prefilled here, in order of arrival."""
    due = [(number, began + arrives) for number, arrives in enumerate(sender.arrivals(cell))]

    def admit(seq: int, wait: bool) -> Answer | None:
        number, arrives = due[0]
        if arrives > clock() and not wait:
            return None
        sender.wait_until(arrives)
        due.pop(0)
        receiver.session.prefill({seq: receiver.tokens[number, : n_prompt[number]]})
        return Answer(number, n_prompt[number], [clock()])

    return admit


class _Inbox(threading.Thread):
    """Thread that receives shipments during decoding; `admit` loads the next one into a sequence."""

    def __init__(self, receiver: Receiver, line: Connection):
        super().__init__(daemon=True)
        self.receiver, self.line = receiver, line
        self.came: queue.Queue[Arrived | Exception] = queue.Queue()
        self.start()

    def run(self) -> None:
        """Receive and acknowledge shipments one by one; an error is passed on and ends the thread."""
        try:
            for _ in self.receiver.tokens:
                self.came.put(arrived(self.line))
                self.line.send(Go())
        except (StudyError, EOFError, OSError) as error:
            self.came.put(error)

    def admit(self, seq: int, wait: bool) -> Answer | None:
        """Load the next shipment into a sequence; None if there is none yet. Its first token came with it."""
        try:
            came = self.came.get(block=wait)
        except queue.Empty:
            return None
        if isinstance(came, Exception):
            raise came
        header, data, _ = came
        self.receiver.session.set_state(seq, data, header.n_tokens)
        return Answer(header.request, header.n_tokens, [clock()])


RUNS = {Service: run, Shipment: shipped}
