"""Short sweeps, half of them with a busy process beside one block, to test the watch on planted disturbances."""

import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from llama_meter import children, progress
from llama_meter.cells import Decode
from llama_meter.measure import files, machine, plan, runner, watch
from llama_meter.rows import Row
from plamo_study.read.disturbances import BLOCKS, LOADS, Planted, Trial, blocks_of

SWEEPS = 40
CALM_S = 120.0  # longest wait of a sweep for a calm machine
SPIN = "import time\nend = time.time() + 120\nwhile time.time() < end: pass"  # ends by itself if all else fails


def trial(seed: int, sweeps: int = SWEEPS) -> Trial:
    """Run the sweeps, half of them with a load in a random block."""
    rng = random.Random(seed)
    loads = [""] * (sweeps - sweeps // 2) + [list(LOADS)[n % len(LOADS)] for n in range(sweeps // 2)]
    rng.shuffle(loads)
    found = []
    for number, load in enumerate(loads):
        watch.wait_until_calm(CALM_S)  # what was not planted is not counted
        found.append(_sweep(f"{seed}/{number}", load))
        progress.tell(len(found), sweeps, said(found[-1]))
    return Trial(machine=machine.facts(), seed=seed, sweeps=found)


def said(sweep: Planted) -> str:
    """One line on a sweep: what was planted where, and which blocks the watch marked."""
    planted = f"{sweep.load} in block {sweep.block}" if sweep.load else "nothing"
    marked = ", ".join(str(block) for _, block in sorted(blocks_of([sweep], marked=True)))
    return f"seed {sweep.seed}: planted {planted}; marked {marked or 'none'}"


def small_plan() -> plan.Plan:
    """A few seconds of work: decode and prefill on all cores, decode on half of them, three blocks.

    A tenth of a second is timed in each row, so that one preemption of 3 ms is not yet a disturbance.
    """
    cores = machine.performance_cores()
    base = Decode(model=plan.MODELS[0], scale="mini", dtype=plan.DTYPE["mini"], depth=16)
    decode = plan.change(base, n_gen=192, n_threads=cores)
    prefill = plan.change(base, workload="prefill", n_prompt=512, n_threads=cores)
    fewer = plan.change(decode, n_threads=max(cores // 2, 1))
    cells = tuple(dict.fromkeys((decode, prefill, fewer)))
    return plan.Plan("00-disturb", "mini", cells, (), plan.change(decode, n_gen=16), BLOCKS, 0, 60.0, anchors=1)


def _sweep(seed: str, load: str) -> Planted:
    """One sweep; a load begins at a random moment of a random row of a random block and ends in the row after it."""
    rng, planned = random.Random(seed), small_plan()
    block, first = rng.randrange(BLOCKS), rng.randrange(len(planned.cells))
    planting = _Planting(LOADS[load] if load else 0, block, first + 1, rng.uniform(0.0, 0.5), rng.uniform(0.0, 1.0))
    files.make_models(planned)
    planned = replace(planned, seed=rng.randrange(2**31))
    with tempfile.TemporaryDirectory() as folder:
        try:
            rows = runner.sweep(planned, Path(folder) / "sweep.jsonl", planting.hear).rows
        finally:
            planting.over()
    overlaps = [planting.overlap(row) for row in rows]
    return Planted(seed=seed, load=load, block=block if load else -1, rows=rows, overlaps=overlaps)


class _Planting:
    """Starts busy processes in one row and ends them in the next, and remembers when rows and processes ran."""

    def __init__(self, processes: int, block: int, order: int, delay: float, lasts: float):
        """`delay`, `lasts`: when the load begins and ends in its rows, as shares of the previous row's time."""
        self.processes, self.at, self.delay, self.lasts = processes, (block, order), delay, lasts
        self.row_s = 0.0
        self.running: list[subprocess.Popen[bytes]] = []
        self.timers: list[threading.Timer] = []
        self.spans: dict[str, tuple[float, float]] = {}
        self.began = self.ended = self.row_began = 0.0

    def hear(self, event: runner.Progress) -> None:
        """Handle the runner's progress: a row is about to begin, or has ended."""
        if event.row is not None:
            self.spans[event.row.key] = self.row_began, time.monotonic()
            self.row_s = time.monotonic() - self.row_began
            return
        self.row_began = time.monotonic()
        if self.processes and not self.began and not self.timers and (event.task.block, event.task.order) == self.at:
            self._later(self.delay * self.row_s, self.begin)
        elif self.began and len(self.timers) == 1:
            self._later(self.lasts * self.row_s, self.end)

    def begin(self) -> None:
        """Start the load."""
        self.began = time.monotonic()
        self.running = [subprocess.Popen(children.python("-c", SPIN)) for _ in range(self.processes)]

    def end(self) -> None:
        """End the load without reaping it: its CPU time would be booked on the runner's ended worker."""
        for process in self.running:
            process.kill()
        if self.running and not self.ended:
            self.ended = time.monotonic()

    def over(self) -> None:
        """Clean up after the sweep: cancel pending timers, end the load and wait for its processes."""
        for timer in self.timers:
            timer.cancel()
        self.end()
        for process in self.running:
            process.wait()

    def overlap(self, row: Row) -> float:
        """Share of a row's time during which the load ran."""
        start, stop = self.spans[row.key]
        return max(0.0, min(stop, self.ended) - max(start, self.began)) / (stop - start) if self.began else 0.0

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        self.timers.append(threading.Timer(seconds, what))
        self.timers[-1].start()
