"""A cell of kind "replicas": processes load the same file, begin together, and answer sequences of their own.

A replica loads, answers and proves, each on command, and reports. It reports its own memory as well, which macOS shows
to no other process.
"""

from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from llama_meter.cells import Replicas
from llama_meter.engine import library
from llama_meter.engine.session import Session, SessionConfig, random_tokens
from llama_meter.measure import machine, peers, phases, proof, watch
from llama_meter.measure.peers import Go, Peer, clock
from llama_meter.measure.proof import Prompts
from llama_meter.rows import Evidence, Measured, Request, passed

WARM_STEPS = 2
MAPPED = "_Mapped"  # ends llama.cpp's names for weights that stay in the file's pages: CPU_Mapped, MTL0_Mapped


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """Task of a replica."""

    cell: Replicas
    path: str
    number: int


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """The model is loaded and warm. Bytes of weights as the engine says: in the file's pages, and in its own memory."""

    load_ns: int
    mapped_bytes: float
    private_bytes: float
    splits: tuple[int, int] | None  # of its graphs, as `library.splits`


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """All tokens are evaluated: when each prompt ended (`clock`), and nanoseconds of every step after them.

    `rss`: bytes of the replica's memory; `mapped`: of its share of the model file's pages where the system reports it.
    """

    prompts: list[int]
    steps: list[int]
    n_evaluated: int
    evidence: Evidence
    rss: int
    mapped: int | None


def config(cell: Replicas) -> SessionConfig:
    """The context of one replica, with its share of the threads."""
    room = cell.n_prompt + cell.n_gen
    return SessionConfig.of(cell, room, n_seq_max=cell.n_seq, n_threads=cell.threads_each)


def _prompts(session: Session, cell: Replicas, tokens: Prompts) -> list[int]:
    """Evaluate the prompts, one after the other or, packed, all at once. Returns when each ended."""
    prompts = {seq: stream[: cell.n_prompt] for seq, stream in tokens.items()}
    if cell.policy == "packed":
        session.prefill(prompts, "packed")
        return [clock()] * cell.n_seq
    ends = []
    for seq, prompt in prompts.items():
        session.prefill({seq: prompt})
        ends.append(clock())
    return ends


def serve(task: Task, line: Connection) -> None:
    """Be one replica: load, answer and prove, each on command."""
    cell = task.cell
    library.capture_log([])
    line.recv()
    start = clock()
    with Session(task.path, config(cell)) as session:
        load_ns = clock() - start
        shape = cell.n_seq, cell.n_prompt + cell.n_gen
        tokens = dict(enumerate(random_tokens([cell.seed, task.number], session.n_vocab, *shape)))
        steps = [{seq: int(t[at]) for seq, t in tokens.items()} for at in range(cell.n_prompt, shape[1])]
        _prompts(session, cell, tokens)
        phases.time_steps(session, steps[:WARM_STEPS])
        session.clear()
        weights = library.buffers("model")
        mapped = sum(size for device, size in weights.items() if device.endswith(MAPPED))
        private = sum(weights.values()) - mapped
        line.send(Loaded(load_ns=load_ns, mapped_bytes=mapped, private_bytes=private, splits=library.splits()))
        line.recv()
        with watch.timed():
            prompts, taken = _prompts(session, cell, tokens), phases.time_steps(session, steps)
        last = {seq: session.logits(row) for row, seq in enumerate(tokens)}
        n_evaluated, evidence = session.n_evaluated, watch.collected() or Evidence()
        of_memory = {"rss": psutil.Process().memory_info().rss, "mapped": machine.mapped(Path(task.path))}
        line.send(Answered(prompts=prompts, steps=taken, n_evaluated=n_evaluated, evidence=evidence, **of_memory))
        line.recv()
        alone = {seq: proof.alone(session, seq, stream) for seq, stream in tokens.items()}
        line.send(proof.checks(cell, last, alone, n_evaluated, shape[0] * shape[1]))


def _all(replicas: dict[str, Peer]) -> list[Any]:
    """Let every replica go on. Returns the next report of each, so none goes on before all have reported."""
    for peer in replicas.values():
        peer.line.send(Go())
    return [peer.line.recv() for peer in replicas.values()]


def run(cell: Replicas, path: Path, stage: Callable[[str], None]) -> Measured:
    """Do one cell.

    `requests`: one per sequence, "PROCESS/SEQUENCE"; times since the common start. `samples_ns`: one list per process,
    one number per step; `prefill_ns`: its prompts before. `series`, one number per process: "mapped", bytes of its
    share of the file's pages when all had loaded.
    """
    numbers = range(cell.n_processes)
    tasks = {f"replica {number}": Task(cell=cell, path=str(path), number=number) for number in numbers}
    with peers.started(__name__, tasks) as replicas:
        stage("load")
        loaded = _all(replicas)
        stage("answer")
        begin = clock()
        answered = _all(replicas)
        stage("prove")
        proved = _all(replicas)
    watch.take_over([each.evidence for each in answered])
    checks: dict[str, float | bool] = {name: all(each[name] for each in proved) for name in proved[0]}
    checks["second_path_error"] = max(each["second_path_error"] for each in proved)
    return Measured(
        samples_ns=[each.steps for each in answered],
        prefill_ns=[each.prompts[-1] - begin for each in answered],
        load_ns=max(each.load_ns for each in loaded),
        splits=loaded[0].splits,
        n_evaluated=sum(each.n_evaluated for each in answered),
        checks=checks | {"mapped_bytes": loaded[0].mapped_bytes, "own_bytes": loaded[0].private_bytes},
        series={"mapped": [float(each.mapped) for each in answered if each.mapped is not None]},
        requests=list(_requests(cell, answered, begin)),
        valid=passed(checks),
        peak_rss_bytes=sum(each.rss for each in answered),
    )


def _requests(cell: Replicas, answered: list[Answered], begin: int) -> Iterator[Request]:
    """Every sequence's tokens: the first at the end of its prompt, one more at the end of every step."""
    for number, replica in enumerate(answered):
        steps = (np.cumsum(replica.steps) + replica.prompts[-1] - begin).tolist()
        for seq, end in enumerate(replica.prompts):
            times = [end - begin, *steps]
            yield Request(id=f"{number}/{seq}", n_prompt=cell.n_prompt, arrived_ns=0, token_ns=times)


RUNS = {Replicas: run}
