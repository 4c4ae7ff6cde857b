"""A cell of kind "replicas": processes load the same file, begin together, and answer sequences of their own."""

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from llama_meter.cells import Replicas
from llama_meter.measure import peers, watch
from llama_meter.measure.peers import Go, Peer, clock
from llama_meter.measure.tolerance import tolerance
from llama_meter.rows import Measured, Request, passed
from plamo_study.studies.batch_scaling import replica
from plamo_study.studies.batch_scaling.replica import Answered, Proved, Task

LOOK_S = 5e-4  # between polls of the progress of the replica to be killed
KILLED = "its process was killed"


class Crew:
    """The live replicas of a cell, by name. All must report before any is told to go on."""

    def __init__(self, alive: dict[str, Peer]):
        self.alive = alive

    def go(self) -> None:
        """Tell every replica to go on."""
        for peer in self.alive.values():
            peer.line.send(Go())

    def hear(self) -> list[Any]:
        """The next message of each replica."""
        return [peer.line.recv() for peer in self.alive.values()]


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
        stamps = replica.board(file.fileno(), cell)
        stage("start")
        begin = clock()
        tasks = {
            _named(number): Task(cell=cell, path=str(path), number=number, board=file.fileno())
            for number in range(cell.n_processes)
        }
        with peers.started(replica.__name__, tasks, [file.fileno()]) as alive:
            crew = Crew(alive)
            started = [(said.at_ns - begin) / 1e9 for said in crew.hear()]
            stage("load")
            crew.go()
            loaded = crew.hear()
            crew.go()
            weighed = crew.hear()
            mapped = [float(said.mapped) for said in weighed if said.mapped is not None]
            stage("answer")
            begin = clock()
            crew.go()
            if cell.killed >= 0:
                _kill_halfway(cell, crew, stamps)
            answered = crew.hear()
            stage("prove")
            crew.go()
            proved = crew.hear()
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


def _kill_halfway(cell: Replicas, crew: Crew, stamps: np.ndarray) -> None:
    """Kill a replica once it has half of its tokens, and before its last; the others may be anywhere."""
    victim = crew.alive.pop(_named(cell.killed))
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
