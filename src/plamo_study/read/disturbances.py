"""Forty short sweeps, half of them with a planted busy process: which rows the watch marked, and whether correctly.

Each row keeps what was planted and what the system counted, so it can be judged again under other limits. A block
counts as disturbed when a busy process ran during a tenth of one of its rows or more. Blocks without a planted process
from which the hypervisor still took CPU time for other guests are counted apart: they are not clean. The slowdown of
their marked rows shows whether the marks were right.
"""

from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import pandas as pd

from llama_meter import stats
from llama_meter.cells import Cell
from llama_meter.limits import OTHERS_LIMIT
from llama_meter.measure import result_file, watch
from llama_meter.rows import Row
from llama_meter.stats import Estimate
from plamo_study.stats import clustered

NAME = "A-disturb.json.gz"
BLOCKS = 3
LOADS = {"one spinning process": 1, "two spinning processes": 2}
OVERLAP = 0.1  # of a row's time beside a busy process: from here on it is a disturbed one
TAKEN = OTHERS_LIMIT / 2  # of the machine's CPUs, given to other guests: from here on a row is not clean
NAN = float("nan")
MADE_BY = "commit 53f8ee5 made it"


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


def blocks_of(sweeps: list[Planted], marked: bool) -> set[tuple[str, int]]:
    """Blocks, as (seed of the sweep, number), with a row that the watch marked, or else with a truly disturbed row."""
    blocks = set()
    for sweep in sweeps:
        keys = watch.disturbed(sweep.rows)
        for row, overlap in zip(sweep.rows, sweep.overlaps, strict=True):
            if not row.anchor and (row.key in keys if marked else overlap >= OVERLAP):
                blocks.add((sweep.seed, row.block))
    return blocks


def rates(trial: Trial, load: str | None = None) -> tuple[Estimate, Estimate]:
    """(hit rate in disturbed blocks, alarm rate in clean ones), with exact intervals; for one load or all."""
    sweeps = [sweep for sweep in trial.sweeps if load is None or sweep.load == load]
    true, marked = blocks_of(sweeps, marked=False), blocks_of(sweeps, marked=True)
    every = {(sweep.seed, block) for sweep in sweeps for block in range(BLOCKS)}
    clean = every - true - taken(sweeps)
    return clustered.rate(len(true & marked), len(true)), clustered.rate(len(marked & clean), len(clean))


def by_load(trial: Trial) -> pd.DataFrame:
    """`hits` and `alarms` (Estimates) of all sweeps ("any") and by what was planted ("nothing": no hits)."""
    entries = []
    for planted, load in (("any", None), *((load, load) for load in LOADS), ("nothing", "")):
        hits, alarms = rates(trial, load)
        entries.append({"planted": planted, "hits": hits, "alarms": alarms})
    return pd.DataFrame(entries)


def taken(sweeps: list[Planted]) -> set[tuple[str, int]]:
    """Blocks with nothing planted beside them, in which the hypervisor took CPUs of a row for other guests."""
    rows = [(sweep.seed, row) for sweep in sweeps for row in sweep.rows if not row.anchor]
    blocks = {(seed, row.block) for seed, row in rows if _stolen(row) >= TAKEN}
    return blocks - blocks_of(sweeps, marked=False)


def slowdown(trial: Trial) -> Estimate:
    """Time of the marked rows of `taken` blocks over that of clean rows of their cell; the unit is a block."""
    blocks, clean, marked = taken(trial.sweeps), dict[Cell, list[float]](), dict[tuple[str, int], list[Row]]()
    for sweep in trial.sweeps:
        keys = watch.disturbed(sweep.rows)
        for row, overlap in zip(sweep.rows, sweep.overlaps, strict=True):
            if (sweep.seed, row.block) in blocks and row.key in keys and not row.anchor:
                marked.setdefault((sweep.seed, row.block), []).append(row)
            elif not overlap and row.key not in keys and _stolen(row) < TAKEN:
                clean.setdefault(row.cell, []).append(_seconds(row))
    usual = {cell: median(seconds) for cell, seconds in clean.items()}
    longer = [[_seconds(row) / usual[row.cell] for row in rows if row.cell in usual] for rows in marked.values()]
    return stats.median([median(block) for block in longer if block])


def _stolen(row: Row) -> float:
    whole = row.conditions.whole
    return 0.0 if whole is None else (whole.stolen_ns or 0) / (whole.wall_ns * whole.cpus)


def _seconds(row: Row) -> float:
    timed = row.conditions.timed
    return NAN if timed is None else timed.wall_ns / 1e9


def write(trial: Trial, place: str) -> Path:
    """Keep a trial; a new one replaces the one before it."""
    return result_file.write(msgspec.json.encode(trial), place, NAME)


def load(place: str) -> Trial | None:
    """The trial of a place; None where there was none. StudyError for a damaged file."""
    return result_file.load(place, NAME, Trial, MADE_BY)
