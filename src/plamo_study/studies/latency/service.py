"""A cell of kind "service": requests arrive over time and are answered by one engine, or by two that split the work.

Shared: an engine with all threads prefills each prompt as it comes, while running answers wait, and then decodes all
sequences together. Split: a process with half of the threads prefills prompts and ships states here, where the other
half decodes. Tokens are given beforehand, so that every answer can be checked against the same tokens alone.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from llama_meter.cells import Service, Shipment
from llama_meter.engine.session import Session
from llama_meter.errors import StudyError
from llama_meter.measure import proof, watch
from llama_meter.measure.peers import Go, clock
from llama_meter.measure.tolerance import tolerance
from llama_meter.oracle.compare import relative_error
from llama_meter.rows import Measured, Request, passed
from plamo_study.studies.latency import shipment
from plamo_study.studies.latency.shipment import Receiver, receiving
from plamo_study.studies.two_files import sender
from plamo_study.studies.two_files.sender import Asking, State

HEAD_START_NS = 50_000_000  # from now to the agreed start, so that both processes are ready


@dataclass(frozen=True)
class Asked:
    """Tokens of each request's prompt and answer."""

    prompt: list[int]
    output: list[int]


@dataclass
class Answer:
    """A request being answered: tokens held, time of each answer token (ns), and the last logits."""

    number: int
    n_past: int
    token_ns: list[int] = field(default_factory=list)
    logits: np.ndarray | None = None
    moved_ns: tuple[int, int] = (0, 0)  # time to save, check and send its state, and to load it


Admit = Callable[[int, bool], Answer | None]  # (sequence, whether to wait for a request)


def run(cell: Service, path: Path, stage: Callable[[str], None]) -> Measured:
    """Measure a cell of kind "service" with `answered`; all requests have the same length."""
    n = cell.n_requests
    return answered(cell, Asked([cell.n_prompt] * n, [cell.n_gen] * n), path, stage)


def answered(cell: Asking, asked: Asked, path: Path, stage: Callable[[str], None]) -> Measured:
    """Answer requests of these lengths, which arrive as the cell says. `requests`: arrivals and tokens; `samples_ns`:
    time of the last token; `series`: "error" of every answer and, if the work is split, "shipped" and "loaded"
    (s): the first occupies the sender, and the second delays all running answers.

    A request's first token counts when the process that answers has it: after the prompt, or after the shipment.
    """
    with receiving(cell, path) as receiver:
        session, tokens = receiver.session, receiver.tokens
        stage("serve")
        with _source(cell, asked, path, receiver) as (admit, began, pids), watch.timed(*pids):
            answers = _serve(cell, asked, session, tokens, admit)
        stage("alone")
        errors = [_error(session, tokens[answer.number], answer) for answer in answers]
    checks: dict[str, float | bool] = {"second_path_error": max(errors), "second_path": max(errors) <= tolerance(cell)}
    checks["answered"] = [len(answer.token_ns) for answer in answers] == asked.output
    series = {"error": errors}
    if sender.is_split(cell):
        moved = zip(*(answer.moved_ns for answer in answers), strict=True)
        series |= {
            name: [ns / 1e9 for ns in durations] for name, durations in zip(("shipped", "loaded"), moved, strict=True)
        }
    return Measured(
        samples_ns=[[max(answer.token_ns[-1] for answer in answers) - began]],
        warmup_ns=[receiver.warmup_ns],
        load_ns=receiver.load_ns,
        n_evaluated=sum(asked.prompt) + sum(asked.output) - cell.n_requests,
        checks=checks,
        series=series,
        requests=_requests(cell, asked, answers, began),
        valid=passed(checks),
    )


def _serve(cell: Asking, asked: Asked, session: Session, tokens: np.ndarray, admit: Admit) -> list[Answer]:
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
            if len(answer.token_ns) == asked.output[answer.number]:
                answer.logits = session.logits(seq)
        for seq in reversed(range(len(active))):
            if active[seq].logits is not None:
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
def _source(cell: Asking, asked: Asked, path: Path, receiver: Receiver) -> Iterator[tuple[Admit, int, tuple[int, ...]]]:
    """Source of requests: a function to admit one, the start time (ns), and the pids of other processes at work."""
    if sender.is_split(cell):
        with sender.started(cell, path, asked.prompt) as line:
            pid = line.recv().pid
            began = clock() + HEAD_START_NS
            line.send(Go(at_ns=began))
            inbox = _Inbox(receiver, line)
            yield inbox.admit, began, (pid,)
            line.send(Go())
    else:
        began = clock() + HEAD_START_NS
        yield _prompts(cell, asked, receiver, began), began, ()


def _prompts(cell: Asking, asked: Asked, receiver: Receiver, began: int) -> Admit:
    """Source of requests that are prefilled here, in order of arrival."""
    due = [(number, began + arrives) for number, arrives in enumerate(sender.arrivals(cell))]

    def admit(seq: int, wait: bool) -> Answer | None:
        number, arrives = due[0]
        if arrives > clock() and not wait:
            return None
        sender.wait_until(arrives)
        due.pop(0)
        n_prompt = asked.prompt[number]
        receiver.session.prefill({seq: receiver.tokens[number, :n_prompt]})
        return Answer(number, n_prompt, [clock()])

    return admit


class _Inbox(threading.Thread):
    """Thread that receives shipments during decoding; `admit` loads the next one into a sequence."""

    def __init__(self, receiver: Receiver, line: Connection):
        super().__init__(daemon=True)
        self.receiver, self.line = receiver, line
        self.came: queue.Queue[tuple[State, np.ndarray, int] | Exception] = queue.Queue()
        self.start()

    def run(self) -> None:
        """Receive and acknowledge shipments one by one; an error is passed on and ends the thread."""
        try:
            for _ in self.receiver.tokens:
                header, data, taken = self.receiver.arrived(self.line)
                self.came.put((header, data, header.spent.save + header.spent.check + sum(taken.values())))
                self.line.send(Go())
        except (StudyError, EOFError, OSError) as error:
            self.came.put(error)

    def admit(self, seq: int, wait: bool) -> Answer | None:
        """Load the next shipment into a sequence; None if there is none yet. Its first token came with it."""
        try:
            arrival = self.came.get(block=wait)
        except queue.Empty:
            return None
        if isinstance(arrival, Exception):
            raise arrival
        header, data, shipped_ns = arrival
        start = clock()
        self.receiver.load(seq, header, data)
        now = clock()
        return Answer(header.request, header.n_tokens, [now], moved_ns=(shipped_ns, now - start))


def _error(session: Session, stream: np.ndarray, answer: Answer) -> float:
    """Relative error of an answer's last logits to those of the same tokens alone."""
    assert answer.logits is not None
    return relative_error(answer.logits, proof.alone(session, 0, stream[: answer.n_past]))


def _requests(cell: Asking, asked: Asked, answers: list[Answer], began: int) -> list[Request]:
    arrivals = sender.arrivals(cell)
    return [
        Request(
            id=str(answer.number),
            n_prompt=asked.prompt[answer.number],
            arrived_ns=arrivals[answer.number],
            token_ns=[stamp - began for stamp in answer.token_ns],
        )
        for answer in answers
    ]


RUNS = {Service: run, Shipment: shipment.run}
