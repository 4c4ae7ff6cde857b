"""The watch held against planted disturbances: short sweeps, in half of which a busy process runs beside one block.

What was planted and what the system counted is kept for every row, so the verdicts can be taken again under other
limits. A block counts as disturbed when a busy process ran during a tenth of one of its rows or more.
"""

import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from plamo_study import paths
from plamo_study.analysis import clustered
from plamo_study.analysis.stats import Estimate
from plamo_study.errors import StudyError
from plamo_study.measure import files, machine, plan, runner, watch
from plamo_study.measure.rows import Row

NAME = "00-disturb.json"
SWEEPS, BLOCKS = 40, 3
CALM_S = 120.0  # a sweep waits so long for a calm machine
LOADS = {"one spinning process": 1, "two spinning processes": 2}
OVERLAP = 0.1  # of a row's time beside a busy process: from here on it is a disturbed one
SPIN = "import time\nend = time.time() + 120\nwhile time.time() < end: pass"  # ends by itself if all else fails
MADE_BY = "plamo-study selfcheck --disturb"


class Planted(msgspec.Struct, frozen=True, kw_only=True):
    """One short sweep: its seed, the load planted beside block `block` (none: ""), and its rows.

    `overlaps`: for each row the share of its time during which the load ran.
    """

    seed: str
    load: str = ""
    block: int = -1
    rows: list[Row]
    overlaps: list[float]


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """All sweeps of one check, and the machine they ran on."""

    machine: dict[str, Any]
    seed: int
    sweeps: list[Planted]


def trial(seed: int, sweeps: int = SWEEPS, told: Callable[[str], None] = print) -> Trial:
    """Run the sweeps, half of them with a load in a random block; `told` hears of each as it ends."""
    rng = random.Random(seed)
    loads = [""] * (sweeps - sweeps // 2) + [list(LOADS)[n % len(LOADS)] for n in range(sweeps // 2)]
    rng.shuffle(loads)
    found = []
    for number, load in enumerate(loads):
        watch.wait_until_calm(CALM_S)  # what was not planted is not counted
        found.append(_sweep(f"{seed}/{number}", load))
        told(said(found[-1]))
    return Trial(machine=machine.facts(), seed=seed, sweeps=found)


def said(sweep: Planted) -> str:
    """One line on a sweep: what was planted where, and which blocks the watch marked."""
    planted = f"{sweep.load} in block {sweep.block}" if sweep.load else "nothing"
    marked = ", ".join(str(block) for _, block in sorted(blocks_of([sweep], marked=True)))
    return f"seed {sweep.seed}: planted {planted}; marked {marked or 'none'}"


def blocks_of(sweeps: list[Planted], marked: bool) -> set[tuple[str, int]]:
    """Blocks, as (seed of the sweep, number), with a row that the watch marked, or that was disturbed in truth."""
    found = set()
    for sweep in sweeps:
        keys = watch.disturbed(sweep.rows)
        for row, overlap in zip(sweep.rows, sweep.overlaps, strict=True):
            if not row.anchor and (row.key in keys if marked else overlap >= OVERLAP):
                found.add((sweep.seed, row.block))
    return found


def rates(found: Trial, load: str | None = None) -> tuple[Estimate, Estimate]:
    """(disturbed blocks that were marked, undisturbed ones that were), with exact intervals; of one load or all."""
    sweeps = [sweep for sweep in found.sweeps if load is None or sweep.load == load]
    every = {(sweep.seed, block) for sweep in sweeps for block in range(BLOCKS)}
    true, marked = blocks_of(sweeps, marked=False), blocks_of(sweeps, marked=True)
    return (
        clustered.rate(len(true & marked), len(true)),
        clustered.rate(len(marked - true), len(every - true)),
    )


def path(place: str) -> Path:
    """Where the trial of a place lies: data/measured/<place>/00-disturb.json."""
    return paths.MEASURED / place / NAME


def write(found: Trial, place: str) -> Path:
    """Keep a trial; a new one replaces the one before it."""
    target = path(place)
    target.parent.mkdir(parents=True, exist_ok=True)
    growing = target.with_suffix(".partial")
    growing.write_bytes(msgspec.json.encode(found) + b"\n")
    os.replace(growing, target)
    return target


def load(place: str) -> Trial | None:
    """The trial of a place; None where there was none. StudyError for a damaged file."""
    try:
        return msgspec.json.decode(path(place).read_bytes(), type=Trial)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise StudyError(str(path(place)), f"is damaged ({error})", MADE_BY) from error


def small_plan() -> plan.Plan:
    """A few seconds of work: decode and prefill on all cores, decode on half of them, three blocks."""
    cores = machine.performance_cores()
    base = plan.Cell(workload="decode", model=plan.MODELS[0], scale="mini", dtype=plan.DTYPE["mini"], n_prompt=16)
    decode = plan.change(base, n_gen=24, n_threads=cores)
    prefill = plan.change(base, workload="prefill", n_prompt=64, n_threads=cores)
    fewer = plan.change(decode, n_threads=max(cores // 2, 1))
    cells = tuple(dict.fromkeys((decode, prefill, fewer)))
    return plan.Plan("00-disturb", "mini", cells, (), plan.change(decode, n_gen=16), BLOCKS, 0, 60.0, anchors=1)


def _sweep(seed: str, load: str) -> Planted:
    """One sweep; a load begins at a random moment of a random row of a random block and ends in the row after it."""
    rng, planned = random.Random(seed), small_plan()
    block, first = rng.randrange(BLOCKS), rng.randrange(len(planned.cells))
    planting = _Planting(LOADS[load] if load else 0, block, first + 1, rng.uniform(0.0, 0.5), rng.uniform(0.0, 1.0))
    files.make_models(planned)
    planned = plan.replace(planned, seed=rng.randrange(2**31))
    with tempfile.TemporaryDirectory() as folder:
        try:
            rows = runner.sweep(planned, Path(folder) / "sweep.jsonl", planting.hear).rows
        finally:
            planting.end()
    overlaps = [planting.overlap(row) for row in rows]
    return Planted(seed=seed, load=load, block=block if load else -1, rows=rows, overlaps=overlaps)


class _Planting:
    """Starts busy processes in one row and ends them in the next, and remembers when rows and processes ran."""

    def __init__(self, processes: int, block: int, order: int, delay_s: float, last_s: float):
        self.processes, self.at, self.delay_s, self.last_s = processes, (block, order), delay_s, last_s
        self.running: list[subprocess.Popen[bytes]] = []
        self.timers: list[threading.Timer] = []
        self.spans: dict[str, tuple[float, float]] = {}
        self.began = self.ended = self.row_began = 0.0

    def hear(self, event: runner.Progress) -> None:
        """The runner's news: a row is about to begin, or has ended."""
        if event.row is not None:
            self.spans[event.row.key] = self.row_began, time.monotonic()
            return
        self.row_began = time.monotonic()
        if self.processes and not self.began and not self.timers and (event.task.block, event.task.order) == self.at:
            self._later(self.delay_s, self.begin)
        elif self.began and len(self.timers) == 1:
            self._later(self.last_s, self.end)

    def begin(self) -> None:
        """Start the load."""
        self.began = time.monotonic()
        self.running = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(self.processes)]

    def end(self) -> None:
        """End the load, if it runs, and forget what was to come."""
        for timer in self.timers:
            timer.cancel()
        for process in self.running:
            process.kill()
            process.wait()
        if self.running:
            self.ended, self.running = time.monotonic(), []

    def overlap(self, row: Row) -> float:
        """Share of a row's time during which the load ran."""
        start, stop = self.spans[row.key]
        return max(0.0, min(stop, self.ended) - max(start, self.began)) / (stop - start) if self.began else 0.0

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        self.timers.append(threading.Timer(seconds, what))
        self.timers[-1].start()
