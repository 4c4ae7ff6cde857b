"""Cells of kind "shipment", and the process that reads prompts so that another one can answer them.

That process prefills a prompt, saves the sequence's state and ships it. Tokens are drawn beforehand, so that every
answer can be checked against the same tokens alone. A shipment's sender also continues from its own copy of the state:
both must agree within the tolerance, and whether they are bit-identical is recorded, too.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from llama_meter.cells import PHASES, Service, Shipment, Traffic
from llama_meter.engine import library
from llama_meter.engine.session import Session, SessionConfig, random_tokens
from llama_meter.errors import StudyError
from llama_meter.measure import peers, phases, watch
from llama_meter.measure.peers import Go, clock
from llama_meter.measure.tolerance import tolerance
from llama_meter.measure.worker import Job
from llama_meter.oracle.compare import relative_error
from llama_meter.rows import Measured, passed
from plamo_study.studies.latency.loop import drawn

WARM_STEPS = 2


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What announces a sequence's state."""

    n_tokens: int  # evaluated, and in the state
    token: int  # first of the answer: not in the state, and a recurrent state cannot go back to compute it
    n_bytes: int
    sha256: str  # of these bytes
    spent: dict[str, int]  # nanoseconds of prefill, save and check on the sender's side


Arrived = tuple[State, np.ndarray, dict[str, int]]  # a state's header, its bytes, and ns of "send" and "check"


def reading_threads(cell: Service | Traffic) -> int:
    """Threads that read prompts in a process of their own, half of all: the others decode meanwhile."""
    return max(cell.n_threads // 2, 1)


def config(cell: Shipment | Service | Traffic, n_threads: int) -> SessionConfig:
    """Configuration of a context with so many threads; states fit between contexts of one cell."""
    room, n_seq = cell.n_prompt + cell.n_gen, getattr(cell, "n_seq", 1)
    return SessionConfig.of(cell, room, n_seq_max=n_seq, n_threads=n_threads, swa_full=False)


def tokens(cell: Shipment | Service | Traffic, n_vocab: int) -> np.ndarray:
    """Random tokens, (n, n_prompt + n_gen) int32: a row for each repetition, for each request, or at least for each
    sequence."""
    n = cell.repetitions if isinstance(cell, Shipment) else max(cell.n_requests, cell.n_seq)
    return random_tokens(cell.seed, n_vocab, n, cell.n_prompt + cell.n_gen)


def warm(session: Session, prompt: np.ndarray) -> None:
    """Evaluate a micro-batch and some steps, save and load the state: everything that is timed later, once untimed."""
    session.prefill({0: prompt[: session.config.n_ubatch]})
    session.set_state(0, session.read_state(0), session.n_past[0])
    phases.greedy(session, int(prompt[0]), WARM_STEPS)
    session.clear()


# ------------------------------------------------------------------ in the process that reads


@contextmanager
def started(cell: Shipment | Service | Traffic, path: Path) -> Iterator[Connection]:
    """Start a cell's sender and yield the connection to it."""
    with peers.started(__name__, {"the sender": Job(cell=cell, path=str(path))}) as by_name:
        yield by_name["the sender"].line


def serve(job: Job, line: Connection) -> None:
    """Ship all states of the cell; the receiver records the times. A shipment is proved: decoding continues here, too,
    and the logits follow it."""
    cell: Any = job.cell
    n_threads = cell.n_threads if isinstance(cell, Shipment) else reading_threads(cell)
    with Session(Path(job.path), config(cell, n_threads)) as session:
        prompts = tokens(cell, session.n_vocab)[:, : cell.n_prompt]
        warm(session, prompts[0])
        line.send(os.getpid())
        if isinstance(cell, Shipment):
            for prompt in prompts:
                line.recv()
                token = _ship(line, session, prompt)
                line.send(phases.greedy(session, token, cell.n_gen))
        else:
            began, load = line.recv().at_ns, drawn(cell)
            for prompt, arrives, n_prompt in zip(prompts, load.arrives, load.prompt, strict=False):
                time.sleep(max(began + arrives * 1e9 - clock(), 0) / 1e9)
                _ship(line, session, prompt[:n_prompt])
        line.recv()  # the receiver reads this process's CPU time while it lives


def _ship(line: Connection, session: Session, prompt: np.ndarray) -> int:
    """Prefill a prompt, announce its state, send it once the peer is ready, and wait until it has arrived; the answer's
    first token."""
    session.clear()
    began = clock()
    token = int(session.prefill({0: prompt})[0][-1].argmax())
    read = clock()
    state = session.read_state(0)
    saved = clock()
    sha256 = hashlib.sha256(state.data).hexdigest()
    spent = {"prefill": read - began, "save": saved - read, "check": clock() - saved}
    line.send(State(n_tokens=len(prompt), token=token, n_bytes=state.size, sha256=sha256, spent=spent))
    line.recv()
    peers.push(line, state)
    line.recv()
    return token


# ------------------------------------------------------------------ in the process that writes


def arrived(line: Connection) -> Arrived:
    """Receive the next state. StudyError where the bytes are not those that were sent."""
    header = line.recv()
    start = clock()
    line.send(Go())
    data = peers.take(line, header.n_bytes)
    came = clock()
    if hashlib.sha256(data.data).hexdigest() != header.sha256:
        raise StudyError("the state", "is not what was sent: its SHA-256 differs", "measure it again")
    return header, data, {"send": came - start, "check": header.spent["check"] + clock() - came}


def shipped(cell: Shipment, path: Path, stage: Callable[[str], None]) -> Measured:
    """Measure a cell of kind "shipment". `samples_ns`: per repetition the times of PHASES.

    prefill and save: on the sender's side. check: on both (SHA-256). send: from the receiver's request until the last
    byte has arrived. load and step, the first decode step: here. `n_bytes`: of the state.
    """
    library.capture_log([])
    samples, mine, theirs, n_bytes = [], [], [], 0
    start = clock()
    with started(cell, path) as line, Session(path, config(cell, cell.n_threads)) as session:
        load_ns, start = clock() - start, clock()
        warm(session, tokens(cell, session.n_vocab)[0, : cell.n_prompt])
        warmup = clock() - start
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
        warmup_ns=[warmup],
        load_ns=load_ns,
        n_evaluated=cell.repetitions * cell.n_gen,
        n_bytes=n_bytes,
        checks=checks,
        valid=passed(checks),
    )
