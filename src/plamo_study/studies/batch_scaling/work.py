"""A cell of kind "replicas": processes load the same file, begin together, and answer sequences of their own.

A replica reports (started, loaded, answered, proved) and then waits until it may go on. It reports its own memory as
well, which macOS shows to no other process. Token times are written to the board, a file that all replicas and the
worker map, so the progress of a killed replica is known.
"""

import mmap
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from llama_meter.cells import Replicas
from llama_meter.engine import library
from llama_meter.engine.session import Session, SessionConfig
from llama_meter.limits import FIRST_TOKEN
from llama_meter.measure import machine, peers, proof, sessions, watch
from llama_meter.measure.peers import Go, Peer, clock
from llama_meter.measure.proof import Prompts
from llama_meter.measure.tolerance import tolerance
from llama_meter.oracle.compare import relative_error
from llama_meter.rows import Evidence, Measured, Request, passed

LOOK_S = 5e-4  # between polls of the progress of the replica to be killed
KILLED = "its process was killed"
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


def _replica(task: Task, say: Callable[[msgspec.Struct], None], stamps: np.ndarray) -> None:
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

    _replica(task, say, board(task.board, task.cell)[task.number])


def _go(alive: dict[str, Peer]) -> None:
    """Let every replica go on."""
    for peer in alive.values():
        peer.line.send(Go())


def _reports(alive: dict[str, Peer]) -> list[Any]:
    """The next message of each live replica. All report before any goes on."""
    return [peer.line.recv() for peer in alive.values()]


def _named(number: int) -> str:
    return f"replica {number}"


def run(cell: Replicas, path: Path, stage: Callable[[str], None]) -> Measured:
    """Do one cell.

    `requests`: one per sequence, "PROCESS/SEQUENCE"; times since the common start. `samples_ns`: one list per process,
    one number per step; `prefill_ns`: its prompts before. `series`, one number per process: "start" (s until it could
    load), "load" (s); "mapped", bytes of its share of the file's pages when all had loaded. One number per sequence:
    "error", its last logits against itself alone.
    """
    with tempfile.TemporaryFile() as file:
        file.truncate(8 * cell.n_processes * (cell.n_seq + cell.n_gen))
        stamps = board(file.fileno(), cell)
        stage("start")
        begin = clock()
        tasks = {
            _named(number): Task(cell=cell, path=str(path), number=number, board=file.fileno())
            for number in range(cell.n_processes)
        }
        with peers.started(__name__, tasks, [file.fileno()]) as alive:
            started = [(said.at_ns - begin) / 1e9 for said in _reports(alive)]
            stage("load")
            _go(alive)
            loaded = _reports(alive)
            _go(alive)
            weighed = _reports(alive)
            mapped = [float(said.mapped) for said in weighed if said.mapped is not None]
            stage("answer")
            begin = clock()
            _go(alive)
            if cell.killed >= 0:
                _kill_halfway(cell, alive, stamps)
            answered = _reports(alive)
            stage("prove")
            _go(alive)
            proved = _reports(alive)
    watch.take_over([said.evidence for said in answered])
    requests = list(_requests(cell, stamps, begin))
    checks = _checks(cell, requests, answered, proved)
    checks |= {"mapped_bytes": loaded[0].mapped_bytes, "own_bytes": loaded[0].own_bytes}
    ends = [line[line > 0] - begin for line in stamps]
    return Measured(
        samples_ns=[np.diff(line[cell.n_seq - 1 :]).tolist() for line in ends],
        prefill_ns=[int(line[cell.n_seq - 1]) for line in ends],
        load_ns=max(said.load_ns for said in loaded),
        splits=loaded[0].splits,
        n_evaluated=sum(said.n_evaluated for said in answered),
        checks=checks,
        series={
            "start": started,
            "load": [said.load_ns / 1e9 for said in loaded],
            "error": _errors(proved),
            "mapped": mapped,
        },
        requests=requests,
        valid=passed(checks),
        peak_rss_bytes=sum(said.rss for said in weighed),
    )


def _kill_halfway(cell: Replicas, alive: dict[str, Peer], stamps: np.ndarray) -> None:
    """Kill a replica once it has half of its tokens, and before its last; the others may be anywhere."""
    victim = alive.pop(_named(cell.killed))
    while not stamps[cell.killed, cell.n_seq + (cell.n_gen - 1) // 2] and victim.process.poll() is None:
        time.sleep(LOOK_S)
    victim.kill()


def _requests(cell: Replicas, stamps: np.ndarray, begin: int) -> Iterator[Request]:
    """Every sequence's tokens: the first at the end of its prompt, one more at the end of every step."""
    for number, line in enumerate(stamps):
        steps = line[cell.n_seq :]
        for seq in range(cell.n_seq):
            came = [int(at) - begin for at in (line[seq], *steps) if at]
            failure = KILLED if number == cell.killed else ""
            yield Request(id=f"{number}/{seq}", n_prompt=cell.n_prompt, arrived_ns=0, token_ns=came, failure=failure)


def _errors(proved: list[Proved]) -> list[float]:
    return [error for said in proved for error in said.errors]


def _checks(
    cell: Replicas, requests: list[Request], answered: list[Answered], proved: list[Proved]
) -> dict[str, float | bool]:
    """Whether every sequence of a living replica got all of its tokens, and the right ones."""
    whole = [request.id for request in requests if len(request.token_ns) == cell.n_gen + 1]
    due = [request.id for request in requests if not request.failure]
    n_tokens = len(due) * (cell.n_prompt + cell.n_gen)
    return {
        "second_path_error": max(_errors(proved)),
        "second_path": max(_errors(proved)) <= tolerance(cell),
        "finite": all(said.finite for said in proved),
        "evaluated": sum(said.n_evaluated for said in answered) == n_tokens,
        "finished": len(whole),
        "all_finished": whole == due,
    }


RUNS = {Replicas: run}
