"""Our two ceilings beside other programs: recorded runs, rates with their spread, and ratios paired by round."""

from typing import Any

import msgspec
import numpy as np
import pandas as pd

from llama_meter import stats
from llama_meter.measure import result_file
from llama_meter.stats import Estimate

NAME = "02-ceilings.json"
INSTALL = "commit 53f8ee5 made it, with likwid-bench"
MARGIN = 0.10  # the read ceiling agrees with a STREAM-class tool's within this
READ, MATMUL = "our read kernel", "our matrix product"
AGAINST = {
    "likwid-bench, read only": READ,
    "likwid-bench, copy": READ,
    "likwid-bench, STREAM triad": READ,
    "likwid-bench, read only, small pages": READ,
    "NumPy": MATMUL,
    "NumPy, told of AVX-512": MATMUL,
}
LIKE_WITH_LIKE = "likwid-bench, read only"


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one program: `rates` in B/s or FLOP/s, one per pass, or only their mean if nothing else is printed."""

    what: str
    round: int
    rates: list[float]


class SideBySide(msgspec.Struct, frozen=True, kw_only=True):
    """All runs of one comparison, with the machine, sizes and tools."""

    machine: dict[str, Any]
    scale: str
    n_bytes: int
    n_flops: int
    n_threads: int
    tools: dict[str, str]
    runs: list[Run]


def load(place: str) -> SideBySide | None:
    """The runs of a place; None where nothing was compared there. StudyError for a damaged file."""
    return result_file.load(place, NAME, SideBySide, INSTALL)


def frame(comparison: SideBySide) -> pd.DataFrame:
    """The runs in the form that `rates` and `ratios` expect: columns what, round and rates."""
    return pd.DataFrame([{"what": run.what, "round": run.round, "rates": run.rates} for run in comparison.runs])


def rates(runs: pd.DataFrame) -> pd.DataFrame:
    """Per program: `rate` (median over rounds of a run's work over its time), `best` run, `variation`, `n` rounds.

    `runs` has columns what, round and rates (per pass, or the mean of a run), in B/s or FLOP/s.
    """
    table, entries = _by_round(runs), []
    for what in table.columns:
        values = table[what].dropna()
        entry = {"what": what, "rate": stats.median(values.tolist()), "best": float(values.max())}
        entries.append(entry | {"variation": stats.variation(values.tolist()), "n": len(values)})
    return pd.DataFrame(entries)


def ratios(runs: pd.DataFrame) -> pd.DataFrame:
    """Per other program: `ratio`, our rate over its rate, and `verdict` (within MARGIN?) of like kernels only."""
    table, entries = _by_round(runs), []
    for other, ours in AGAINST.items():
        if other not in table or ours not in table:
            continue
        both = table[[ours, other]].dropna()
        ratio: Estimate = stats.ratio(both[ours].tolist(), both[other].tolist())
        entry: dict[str, Any] = {"ours": ours, "other": other, "ratio": ratio, "verdict": ""}
        if other == LIKE_WITH_LIKE:
            entry["verdict"] = ratio.within(1 - MARGIN, 1 + MARGIN)
        entries.append(entry)
    return pd.DataFrame(entries, columns=["ours", "other", "ratio", "verdict"])


def _by_round(runs: pd.DataFrame) -> pd.DataFrame:
    """One row a round, one column a program: its work over its time."""
    means = [len(rates) / float(np.sum(1 / np.asarray(rates, float))) for rates in runs["rates"]]
    table = runs.assign(mean=means).pivot_table(index="round", columns="what", values="mean", sort=False)
    order = [READ, *(name for name, ours in AGAINST.items() if ours == READ), MATMUL]
    order += [name for name, ours in AGAINST.items() if ours == MATMUL]
    return table[[name for name in order if name in table]]
