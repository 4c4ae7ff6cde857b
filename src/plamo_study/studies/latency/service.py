"""Cells of kind "shipment", and requests whose work is split: prompts are read in a process of its own, and answered
here, from the states that it hands over.

Split: the process prefills prompts with half of the threads and ships states here, where the other half decodes all
sequences together. Tokens are drawn beforehand, so that every answer can be checked against the same tokens alone. A
shipment's sender also continues from its own copy of the state: both must agree within the tolerance, and whether they
are bit-identical is recorded, too.
"""

import hashlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np

from llama_meter.cells import PHASES, Service, Shipment, Traffic
from llama_meter.engine import library
from llama_meter.engine.session import Session, SessionConfig, random_tokens
from llama_meter.errors import StudyError
from llama_meter.measure import peers, phases, proof, watch
from llama_meter.measure.peers import Go, clock
from llama_meter.measure.tolerance import tolerance
from llama_meter.oracle.compare import relative_error
from llama_meter.rows import Measured, Request, passed
from plamo_study.studies.latency.loop import drawn

WARM_STEPS = 2
HEAD_START_NS = 50_000_000  # from now to the agreed start, so that both processes are ready
Split = Service | Traffic  # cells in which requests arrive in one process and are answered in another


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What announces a sequence's state."""

    request: int
    n_tokens: int  # evaluated, and in the state
    token: int  # first of the answer: not in the state, and a recurrent state cannot go back to compute it
    n_bytes: int
    sha256: str  # of these bytes
    spent: dict[str, int]  # nanoseconds of prefill, save and check on the sender's side


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Task of the sender: the cell, and its model file."""

    cell: Shipment | Split
    path: str


Arrived = tuple[State, np.ndarray, dict[str, int]]  # a state's header, its bytes, and ns of "send" and "check"

# ------------------------------------------------------------------ what both sides derive


def receiving(cell: Shipment | Split) -> SessionConfig:
    """Configuration of the context that decodes answers."""
    return _config(cell, cell.n_threads - _reading_threads(cell))


def sending(cell: Shipment | Split) -> SessionConfig:
    """Configuration of the context that prefills prompts one by one; with the same `n_seq_max`, so that states fit."""
    return _config(cell, _reading_threads(cell) or cell.n_threads)


def _reading_threads(cell: Shipment | Split) -> int:
    """Threads that prefill while others decode: half of them, or of a shipment, where nobody does, 0."""
    return 0 if isinstance(cell, Shipment) else max(cell.n_threads // 2, 1)


def _config(cell: Shipment | Split, n_threads: int) -> SessionConfig:
    room, n_seq = cell.n_prompt + cell.n_gen, getattr(cell, "n_seq", 1)
    return SessionConfig.of(cell, room, n_seq_max=n_seq, n_threads=max(n_threads, 1), swa_full=False)


def tokens(cell: Shipment | Split, n_vocab: int) -> np.ndarray:
    """Random tokens, (n, n_tokens) int32: a prompt per repetition, or per request the longest prompt with its
    answer."""
    shape = cell.repetitions, cell.n_prompt
    if not isinstance(cell, Shipment):
        shape = cell.n_requests, cell.n_prompt + cell.n_gen
    return random_tokens(cell.seed, n_vocab, *shape)


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


# ------------------------------------------------------------------ in the process that reads


@contextmanager
def started(cell: Shipment | Split, path: Path) -> Iterator[Connection]:
    """Start a cell's sender and yield the connection to it."""
    with peers.started(__name__, {"the sender": Order(cell=cell, path=str(path))}) as by_name:
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
            began, load = line.recv().at_ns, drawn(cell)
            for number, (arrives, n_prompt) in enumerate(zip(load.arrives, load.prompt, strict=True)):
                time.sleep(max(began + arrives * 1e9 - clock(), 0) / 1e9)
                _ship(line, session, prompts[number, :n_prompt], number)
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


# ------------------------------------------------------------------ in the process that writes


@contextmanager
def opened(cell: Shipment | Split, path: Path, times: dict[str, int]) -> Iterator[tuple[Session, np.ndarray]]:
    """A warm context that decodes a cell's answers, and `tokens`; notes nanoseconds of "load" and "warm-up"."""
    library.capture_log([])
    start = clock()
    with Session(path, receiving(cell)) as session:
        times["load"] = clock() - start
        prompts = tokens(cell, session.n_vocab)
        start = clock()
        warm(session, prompts[0])
        times["warm-up"] = clock() - start
        yield session, prompts


def arrived(line: Connection) -> Arrived:
    """Receive the next state. StudyError where the bytes are not those that were sent."""
    header = line.recv()
    start = clock()
    line.send(Go())
    data = peers.take(line, header.n_bytes)
    came = clock()
    if digest(data) != header.sha256:
        raise StudyError("the state", "is not what was sent: its SHA-256 differs", "measure it again")
    return header, data, {"send": came - start, "check": header.spent["check"] + clock() - came}


def shipped(cell: Shipment, path: Path, stage: Callable[[str], None]) -> Measured:
    """Measure a cell of kind "shipment". `samples_ns`: per repetition the times of PHASES.

    prefill and save: on the sender's side. check: on both (SHA-256). send: from the receiver's request until the last
    byte has arrived. load and step, the first decode step: here. `n_bytes`: of the state.
    """
    samples, mine, theirs, n_bytes = [], [], [], 0
    times: dict[str, int] = {}
    with started(cell, path) as line, opened(cell, path, times) as (session, _):
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
    here, there = np.concatenate(mine), np.concatenate(theirs)
    error = max(map(relative_error, here, there))
    checks: dict[str, float | bool] = {
        "second_path_error": error,
        "second_path": error <= tolerance(cell),
        "identical": float(here.tobytes() == there.tobytes()),
        "finite": bool(np.isfinite(here).all() and np.isfinite(there).all()),
    }
    return Measured(
        samples_ns=samples,
        warmup_ns=[times["warm-up"]],
        load_ns=times["load"],
        n_evaluated=cell.repetitions * cell.n_gen,
        n_bytes=n_bytes,
        checks=checks,
        valid=passed(checks),
    )


@dataclass
class Answer:
    """A request being answered: tokens held, time of each answer token (ns), and the last logits."""

    number: int
    n_past: int
    token_ns: list[int] = field(default_factory=list)
    logits: np.ndarray = field(default_factory=lambda: np.empty(0))


def answered(cell: Split, path: Path, stage: Callable[[str], None]) -> Measured:
    """Answer requests that another process reads. `requests`: arrivals and tokens, a request's first one when its state
    is loaded here; `samples_ns`: time of the last token."""
    times: dict[str, int] = {}
    load = drawn(cell)
    with opened(cell, path, times) as (session, prompts):
        stage("serve")
        with started(cell, path) as line:
            pid = line.recv()
            began = clock() + HEAD_START_NS
            line.send(Go(at_ns=began))
            with watch.timed(pid):
                answers = _serve(cell, load.output, session, prompts, _Inbox(session, line, cell.n_requests))
            line.send(Go())
        stage("alone")
        errors = [
            relative_error(answer.logits, proof.alone(session, 0, prompts[answer.number, : answer.n_past]))
            for answer in answers
        ]
    checks: dict[str, float | bool] = {"second_path_error": max(errors), "second_path": max(errors) <= tolerance(cell)}
    checks["answered"] = [len(answer.token_ns) for answer in answers] == load.output
    columns = zip(answers, load.prompt, load.arrives, strict=True)
    requests = [
        Request(
            id=str(answer.number),
            n_prompt=n_prompt,
            arrived_ns=int(arrives * 1e9),
            token_ns=[at - began for at in answer.token_ns],
        )
        for answer, n_prompt, arrives in columns
    ]
    return Measured(
        samples_ns=[[max(request.token_ns[-1] for request in requests)]],
        warmup_ns=[times["warm-up"]],
        load_ns=times["load"],
        n_evaluated=sum(load.prompt) + sum(load.output) - cell.n_requests,
        checks=checks,
        requests=requests,
        valid=passed(checks),
    )


def _serve(cell: Split, n_gen: list[int], session: Session, prompts: np.ndarray, inbox: "_Inbox") -> list[Answer]:
    """Admit waiting requests while there is room, then decode a token for all; the answers in order of arrival."""
    active: list[Answer] = []  # an index is a sequence; those in use are always the first ones
    done: list[Answer] = []
    while len(done) < cell.n_requests:
        while len(active) < cell.n_seq and len(active) + len(done) < cell.n_requests:
            if not (answer := inbox.admit(len(active), not active)):
                break
            active.append(answer)
        session.decode({seq: int(prompts[answer.number, answer.n_past]) for seq, answer in enumerate(active)})
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


class _Inbox(threading.Thread):
    """Thread that receives shipments during decoding; `admit` loads the next one into a sequence."""

    def __init__(self, session: Session, line: Connection, n_requests: int):
        super().__init__(daemon=True)
        self.session, self.line, self.n_requests = session, line, n_requests
        self.came: queue.Queue[Arrived | Exception] = queue.Queue()
        self.start()

    def run(self) -> None:
        """Receive and acknowledge shipments one by one; an error is passed on and ends the thread."""
        try:
            for _ in range(self.n_requests):
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
        self.session.set_state(seq, data, header.n_tokens)
        return Answer(header.request, header.n_tokens, [clock()])
