"""Study 04, speed: ratios of two weight types, what the kernels timed alone promise, and one cell at two speeds.

Ratios are paired by block. Promises: each type's matrix product is measured alone, for one column as a rate of bytes
and for many as a rate of FLOPs, and a file's time is the sum over its types; what kernels explain and bytes do not is
the price of dequantization. Two speeds: a memory-bound step takes as long as its bytes at memory's rate, so every row
becomes the bytes of weights that it read per second, and rows are compared by what they have in common: the file they
map, memory of their own, or one process over time. Loss of quality is another study's.
"""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd

from plamo_study.analysis import stats
from plamo_study.analysis.ceilings import MATMUL, at, by_type, loaded, main_place, measured, weighty
from plamo_study.analysis.files import Files
from plamo_study.analysis.timing import NS, median_sample, paired_ratio
from plamo_study.analysis.usable import main_rows

Series = dict[tuple[str, str, str], pd.Series]
Rates = dict[tuple[str, str], pd.Series]
PARTS = 5  # of a process's samples, in order, two or more in each: a speed that changes inside shows between them
APART = 1.15  # two neighbouring speeds further apart than this, with at least two processes on either side, are modes
DECODE, PRODUCT, READING = "decode", "product of one column", "reading"
LEAST = 2  # processes
COLUMNS = ["what", "model", "dtype", "mapped", "cold", "block", "started", "rate", "inside", "prefill"]


def seconds(rows: pd.DataFrame) -> Series:
    """Seconds by block, by (phase, model, dtype): of a whole prompt, or of a decode step (median of its steps)."""
    found = main_rows(rows)
    found = found[found["workload"] == "decode"]
    alone, together = found[found["n_seq"] == 1], found[found["n_seq"] > 1]
    series: Series = {}
    for (model, dtype), group in alone.groupby(["model", "dtype"]):
        by_block = group.set_index("block")
        series["prefill", model, dtype] = by_block["prefill_ns"].map(lambda times: pd.Series(times).median()) / NS
        series["decode", model, dtype] = by_block["samples_ns"].map(median_sample) / NS
    for (model, dtype), group in together.groupby(["model", "dtype"]):
        series["batch", model, dtype] = group.set_index("block")["samples_ns"].map(median_sample) / NS
    return series


def ratio(known: Series, phase: str, model: str, dtype: str, over: str) -> stats.Estimate | None:
    """Speed of `dtype` over that of `over` in a phase, paired by block; None if either was not measured.

    `known`: the `seconds` of the rows.
    """
    top, bottom = known.get((phase, model, over)), known.get((phase, model, dtype))
    return None if top is None or bottom is None else paired_ratio(top, bottom)


def asymmetry(rows: pd.DataFrame, model: str) -> pd.DataFrame:
    """Prefill speed over decode speed by `dtype`, smallest first: columns dtype, n_prompt and `ratio`.

    Per token of a prompt of `n_prompt` tokens and per step of one answer, paired by block.
    """
    known, entries = seconds(rows), []
    n_prompt = int(rows[(rows["workload"] == "decode") & ~rows["anchor"] & (rows["n_seq"] == 1)]["n_prompt"].iloc[0])
    for phase, name, dtype in known:
        if (phase, name) == ("decode", model) and ("prefill", model, dtype) in known:
            ratio = paired_ratio(known[phase, model, dtype], known["prefill", model, dtype] / n_prompt)
            entries.append({"dtype": dtype, "n_prompt": n_prompt, "ratio": ratio})
    return pd.DataFrame(entries).sort_values("ratio", key=lambda found: found.map(lambda each: each.value))


def kernel_seconds(rows: pd.DataFrame, known: Files) -> pd.DataFrame:
    """Seconds of a file by its kernels' rates: model, dtype, phase ("reads" a prompt, "writes" a token), block.

    `kernels` holds the seconds. Files that hold a tensor type whose kernel was not measured are left out.
    """
    entries = list(_entries(rows, known))
    return pd.concat(entries) if entries else pd.DataFrame(columns=["block", "kernels", "model", "dtype", "phase"])


def _entries(rows: pd.DataFrame, known: Files) -> Iterator[pd.DataFrame]:
    rates = _rates(rows)
    n_prompt = int(rows[rows["workload"] == "decode"]["n_prompt"].max())
    for (model, dtype), fact in known.items():
        amounts = weighty(by_type(fact))
        if any((kind, columns) not in rates for kind in amounts for columns in ("one", "many")):
            continue
        spent: dict[str, list[Any]] = {
            "writes": [amount["bytes"] / rates[kind, "one"] for kind, amount in amounts.items()],
            "reads": [2 * n_prompt * a["multiplied"] / rates[kind, "many"] for kind, a in amounts.items()],
        }
        for phase, parts in spent.items():
            whole = pd.concat(parts, axis=1).sum(axis=1, skipna=False).dropna()
            yield whole.rename("kernels").reset_index().assign(model=model, dtype=dtype, phase=phase)


def _rates(rows: pd.DataFrame) -> Rates:
    """Rates by block, in B/s or FLOP/s, by (tensor type, one or many columns), of weights as the engine loads them."""
    table, place = measured([rows]), main_place(rows)
    found: Rates = {}
    for dtype in at(table, place, MATMUL)["dtype"].unique():
        lines = loaded(table, place, str(dtype))
        one, many = lines[lines["columns"] == 1].set_index("block"), lines[lines["many"]].set_index("block")
        found[str(dtype), "one"] = one["n_bytes"] / one["usual"]
        found[str(dtype), "many"] = many["n_flops"] / many["usual"]
    return {key: rates for key, rates in found.items() if len(rates)}


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


def _readings(rows: pd.DataFrame) -> pd.Series:
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
    known = pd.DataFrame({"dtype": found["dtype"], "read": _readings(found), "step": steps}).dropna()
    usual = known[["read", "step"]] / known.groupby("dtype")[["read", "step"]].transform("median")
    if len(usual) < 3:
        return (float("nan"),) * 4
    from scipy import stats as distributions  # slow to import and rarely needed

    rank = distributions.spearmanr(usual["read"], usual["step"])
    read, step = known["read"], usual["step"]
    return float(rank.statistic), float(rank.pvalue), float(read.max() / read.min()), float(step.max() / step.min())
