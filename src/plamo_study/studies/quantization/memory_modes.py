"""Study 04: one cell at two speeds, and whether file, pages, process or the memory itself is what differs.

A memory-bound step takes as long as its bytes at memory's rate. So every row becomes the bytes of weights that it read
per second, and rows are compared by what they have in common: the file they map, memory of their own, or one process
over time.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd

from plamo_study.analysis import stats
from plamo_study.analysis.timing import NS, median_sample
from plamo_study.analysis.usable import main_rows

PARTS = 5  # of a process's samples, in order, two or more in each: a speed that changes inside shows between them
APART = 1.15  # two neighbouring speeds further apart than this, with at least two processes on either side, are modes
DECODE, PRODUCT, READING = "decode", "product of one column", "reading"
LEAST = 2  # processes
COLUMNS = ["what", "model", "dtype", "mapped", "cold", "block", "started", "rate", "inside", "prefill"]


def rates(rows: pd.DataFrame, files: Mapping[tuple[str, str], Mapping[str, Any]]) -> pd.DataFrame:
    """One line per memory-bound process: `rate`, the bytes of weights read per second (B/s).

    `what`: decode of one sequence, a product of one column or plain reading, both in memory of the process; `mapped`
    and `cold` as in the cell; `inside`: the fastest over the slowest fifth of the process's samples; `prefill`: seconds
    of the prompt that the same process computed before, which is not memory-bound.
    """
    entries = []
    for row in main_rows(rows).to_dict("records"):
        n_bytes = _bytes(row, files)
        if n_bytes is None:
            continue
        samples = [n_bytes * NS / time for time in chain(*row["samples_ns"])]
        parts = [float(np.median(part)) for part in np.array_split(samples, max(min(PARTS, len(samples) // 2), 1))]
        what = {"decode": DECODE, "matmul": PRODUCT, "read": READING}[row["workload"]]
        entry = {name: row.get(name) for name in ("model", "dtype", "cold", "block", "started")}
        entry |= {"what": what, "mapped": what == DECODE and row.get("use_mmap", True)}
        entry |= {"rate": float(np.median(samples)), "inside": max(parts) / min(parts)}
        fills = row["prefill_ns"] if what == DECODE else []
        entries.append(entry | {"prefill": float(np.median(fills)) / NS if len(fills) else float("nan")})
    return pd.DataFrame(entries, columns=COLUMNS)


def _bytes(row: Mapping[str, Any], files: Mapping[tuple[str, str], Mapping[str, Any]]) -> float | None:
    if row["workload"] == "decode" and row["n_seq"] == 1:
        return float(files[row["model"], row["dtype"]]["file_bytes"])
    as_loaded = row["workload"] == "read" or (row["workload"] == "matmul" and row["label"] != "plain")
    return float(row["n_bytes"]) if as_loaded and row["n_bytes"] else None


def spreads(found: pd.DataFrame) -> pd.DataFrame:
    """Per cell of `rates`: n, slowest and fastest process, `spread` (their quotient), `gap`, `modes`, `inside`.

    `gap`: the widest quotient of neighbouring speeds that leaves `LEAST` processes on either side. `modes`: whether
    that is more than `APART`. `inside`: the largest change within one process.
    """
    entries = []
    for (what, model, dtype, mapped, cold), group in found.groupby(COLUMNS[:5], sort=False, dropna=False):
        ordered = np.sort(group["rate"].to_numpy())
        gap = _gap(ordered)
        entries.append(
            {"what": what, "model": model, "dtype": dtype, "mapped": mapped, "cold": cold, "n": len(ordered)}
            | {"slowest": ordered[0], "fastest": ordered[-1], "median": stats.median(ordered.tolist())}
            | {"spread": ordered[-1] / ordered[0], "gap": gap, "modes": gap > APART, "inside": group["inside"].max()}
        )
    return pd.DataFrame(entries)


def _gap(ordered: np.ndarray) -> float:
    """The widest quotient of neighbours with `LEAST` values on either side; 1 where there are too few."""
    inner = ordered[LEAST - 1 : len(ordered) - LEAST + 1]
    return float((inner[1:] / inner[:-1]).max()) if len(inner) > 1 else 1.0


def readings(rows: pd.DataFrame) -> pd.Series:
    """Bytes per second that memory gave beside each row's steps (median pass); NaN where that was not measured."""
    return rows["series"].map(lambda series: float(np.median(series["read"])) if "read" in series else float("nan"))


def explained(rows: pd.DataFrame) -> tuple[float, float, float, float]:
    """Whether plain reading right after the steps says how fast they were.

    (rank correlation of a process's step time with its reading, both over the median of their type; its p; fastest
    reading over slowest; longest step over shortest). Readings tried as a control: a step that waited for the memory
    would be long where the reading was slow, a correlation near -1.
    """
    found = main_rows(rows)
    found = found[(found["workload"] == "decode") & (found["n_seq"] == 1)]
    steps = found["samples_ns"].map(median_sample)
    known = pd.DataFrame({"dtype": found["dtype"], "read": readings(found), "step": steps}).dropna()
    usual = known[["read", "step"]] / known.groupby("dtype")[["read", "step"]].transform("median")
    if len(usual) < 3:
        return (float("nan"),) * 4
    from scipy import stats as distributions  # slow to import and rarely needed

    rank = distributions.spearmanr(usual["read"], usual["step"])
    read, step = known["read"], usual["step"]
    return float(rank.statistic), float(rank.pvalue), float(read.max() / read.min()), float(step.max() / step.min())
