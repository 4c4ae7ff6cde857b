"""One replica: a process that loads the model and answers its sequences on command of the worker that started it.

It reports (started, loaded, answered, proved) and then waits until it may go on. It reports its own memory as well,
which macOS shows to no other process. Token times are written to the board, a file that all replicas
and the worker map, so the progress of a killed replica is known.
"""

import mmap
import re
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np
import psutil

from llama_meter.cells import Replicas
from llama_meter.engine import library
from llama_meter.engine.session import Session, SessionConfig
from llama_meter.limits import FIRST_TOKEN
from llama_meter.measure import machine, proof, sessions, watch
from llama_meter.measure.peers import clock
from llama_meter.measure.proof import Prompts
from llama_meter.oracle.compare import relative_error
from llama_meter.rows import Evidence

WARM_STEPS = 2
WEIGHTS = re.compile(r"(\S+) model buffer size = +([\d.]+) MiB")
MAPPED = "_Mapped"  # ends llama.cpp's names for weights that stay in the file's pages: CPU_Mapped, MTL0_Mapped


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """Task of a replica; `board`: the file descriptor of the board."""

    cell: Replicas
    path: str
    number: int
    board: int


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """The replica is ready to load."""

    at_ns: int


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """The model is loaded and warm. Bytes of weights as the engine says: in the file's pages, and in its own memory."""

    load_ns: int
    mapped_bytes: float
    own_bytes: float
    splits: tuple[int, int] | None  # of its graphs, as `library.splits`


class Weighed(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the replica's memory, and of its share of the model file's pages where the system reports it."""

    rss: int
    mapped: int | None


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """All tokens are evaluated."""

    n_evaluated: int
    evidence: Evidence


class Proved(msgspec.Struct, frozen=True, kw_only=True):
    """How far each sequence's last logits are from those of the sequence alone, and whether all are finite."""

    errors: list[float]
    finite: bool


def board(file: int, cell: Replicas) -> np.ndarray:
    """When the prompts and then the steps of each replica ended, (n_processes, n_seq + n_gen) int64 ns; 0: not yet."""
    shape = (cell.n_processes, cell.n_seq + cell.n_gen)
    return np.frombuffer(mmap.mmap(file, 8 * shape[0] * shape[1]), dtype=np.int64).reshape(shape)


def config(cell: Replicas) -> SessionConfig:
    """The context of one replica, with its share of the threads."""
    threads = {"n_threads": cell.threads_each, "n_threads_batch": cell.threads_each}
    return sessions.config(cell, cell.n_prompt + cell.n_gen, n_seq_max=cell.n_seq, **threads)


def run(task: Task, say: Callable[[msgspec.Struct], None], stamps: np.ndarray) -> None:
    """Load, answer and prove, each on command; `stamps`: this replica's line of the board."""
    cell, log = task.cell, list[str]()
    library.capture_log(log)
    say(Started(at_ns=clock()))
    start = clock()
    with Session(task.path, config(cell)) as session:
        load_ns = clock() - start
        tokens = _draw(cell, task.number, session.n_vocab)
        _prompts(session, cell, tokens, np.zeros(cell.n_seq, dtype=np.int64))
        _steps(session, cell, tokens, np.zeros(WARM_STEPS, dtype=np.int64))
        session.clear()
        mapped, own = weights("".join(log))
        say(Loaded(load_ns=load_ns, mapped_bytes=mapped, own_bytes=own, splits=library.splits()))
        say(Weighed(rss=psutil.Process().memory_info().rss, mapped=machine.mapped(Path(task.path))))
        with watch.timed():
            _prompts(session, cell, tokens, stamps[: cell.n_seq])
            _steps(session, cell, tokens, stamps[cell.n_seq :], waits=task.number == cell.killed)
        last = {seq: session.logits(row) for row, seq in enumerate(tokens)}
        say(Answered(n_evaluated=session.n_evaluated, evidence=watch.collected() or Evidence()))
        errors = [relative_error(last[seq], proof.alone(session, seq, stream)) for seq, stream in tokens.items()]
        say(Proved(errors=errors, finite=all(bool(np.isfinite(row).all()) for row in last.values())))


def weights(log: str) -> tuple[float, float]:
    """Bytes of weights by the engine's log: (in the file's pages, in memory of its own)."""
    sizes = [(name.endswith(MAPPED), float(size) * 2**20) for name, size in WEIGHTS.findall(log)]
    return sum(size for mapped, size in sizes if mapped), sum(size for mapped, size in sizes if not mapped)


def _draw(cell: Replicas, number: int, n_vocab: int) -> Prompts:
    rng = np.random.default_rng([cell.seed, number])
    tokens = rng.integers(FIRST_TOKEN, n_vocab, (cell.n_seq, cell.n_prompt + cell.n_gen), dtype=np.int32)
    return dict(enumerate(tokens))


def _prompts(session: Session, cell: Replicas, tokens: Prompts, ends: np.ndarray) -> None:
    """Evaluate the prompts, one after the other or, packed, all at once."""
    prompts = {seq: stream[: cell.n_prompt] for seq, stream in tokens.items()}
    if cell.policy == "packed":
        session.prefill(prompts, "packed")
        ends[:] = clock()
        return
    for seq, prompt in prompts.items():
        session.prefill({seq: prompt})
        ends[seq] = clock()


def _steps(session: Session, cell: Replicas, tokens: Prompts, ends: np.ndarray, waits: bool = False) -> None:
    """Evaluate the steps; a replica that `waits` does not begin the last one, and is killed there at the latest."""
    steps = [{seq: int(t[cell.n_prompt + i]) for seq, t in tokens.items()} for i in range(len(ends))]
    for i, step in enumerate(steps):
        if waits and 0 < i == len(steps) - 1:
            signal.pause()
        session.decode(step)
        ends[i] = clock()


def serve(task: Task, line: Connection) -> None:
    """Be one replica, which waits after each report until all have reported."""

    def say(what: msgspec.Struct) -> None:
        line.send(what)
        line.recv()

    run(task, say, board(task.board, task.cell)[task.number])
