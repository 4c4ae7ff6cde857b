"""What a prompt's arrival costs those who are being answered, and the prompt itself: frames in, estimates out."""

from collections.abc import Iterator
from statistics import median
from typing import Any

import pandas as pd

from plamo_study.analysis import stats, timing
from plamo_study.analysis.memo import once_a_frame
from plamo_study.analysis.timing import NS
from plamo_study.analysis.usable import of_cell, usable, verdict_of
from plamo_study.measure.cells import Arrival
from plamo_study.studies.chunked.workload import before, calls

TIMES = ["before", "during", "largest", "ttft", "call"]
CELL = ["model", "n_seq", "n_prompt", "n_arriving", "way", "n_chunk", "kv_unified", "flash_attn"]
BUDGET = ["model", "n_seq", "n_arriving", "budget", "n_chunk", "promised", "largest", "kept", "ttft"]
NEIGHBOURS = ["model", "kv_unified", "n_chunk", "short", "long", "call_short", "call_long", "ratio"]
STOCK = "stock"
TILE = 64  # queries from which the engine's flash attention on CPUs works in tiles (GGML_FA_TILE_Q)
PART = ["model", "n_arriving", "n_chunk", "flash_attn"]  # what tells prompts apart that nobody decodes beside


def cell_of(row: Any) -> Arrival:
    """The cell of a line of a frame, as far as its calls depend on it."""
    return Arrival(
        depth=int(row.n_prompt), n_gen=int(row.n_gen), n_seq=int(row.n_seq), n_arriving=int(row.n_arriving),
        n_chunk=int(row.n_chunk), way=row.way,
    )  # fmt: skip


@once_a_frame
def processes(rows: pd.DataFrame) -> pd.DataFrame:
    """A line a process in which somebody decodes, under its row's index, in seconds: CELL, `block`, `verdict`, `before`
    (median step), `during` and `largest` (median and largest gap between two tokens of those decoding while the prompt
    is evaluated), `steps` (tokens that each of them got meanwhile), `ttft` and `call` (median call with a full chunk in
    it); `rate`, prompt tokens per second from its arrival to its first token."""
    entries: dict[Any, dict[str, Any]] = {}
    for row, cell, times in _arrivals(rows):
        if cell.n_seq:
            gaps, ttft = _during(cell, times)
            entry = {name: getattr(row, name) for name in (*CELL, "block", "verdict")}
            entry |= {"before": median(times[: cell.n_gen]), "during": median(gaps), "largest": max(gaps)}
            entry |= {"steps": len(gaps) - (cell.way != "together"), "ttft": ttft, "rate": cell.n_arriving / ttft}
            entries[row.Index] = entry | {"call": median(full_calls(cell, times))}
    names = [*CELL, "block", "verdict", "steps", *TIMES, "rate"]
    return pd.DataFrame(list(entries.values()), list(entries), columns=names)


def usable_processes(rows: pd.DataFrame) -> pd.DataFrame:
    """The `processes` that a speed may be taken from."""
    found = processes(rows)
    return found[found.index.isin(usable(rows).index)]


def alone(rows: pd.DataFrame) -> pd.DataFrame:
    """A line a process of prompts that nobody decodes beside: PART, `block`, `calls`, seconds of each full chunk."""
    entries = [
        {name: getattr(row, name) for name in (*PART, "block")} | {"calls": full_calls(cell, times)}
        for row, cell, times in _arrivals(usable(rows))
        if not cell.n_seq
    ]
    return pd.DataFrame(entries, columns=[*PART, "block", "calls"])


def _arrivals(rows: pd.DataFrame) -> Iterator[tuple[Any, Arrival, list[float]]]:
    """The rows of arrivals that ended well, their cells, and the seconds of each call."""
    for row in rows[(rows["workload"] == "arrival") & (rows["status"] == "ok")].itertuples():
        yield row, cell_of(row), [ns / NS for ns in row.samples_ns[0]]


def full_calls(cell: Arrival, times: list[float]) -> list[float]:
    """Seconds of the calls with as much of the prompt in them as any has."""
    pieces = [dict(call).get(cell.n_seq, 0) for call in calls(cell)]
    pieces[len(pieces) - cell.n_gen :] = [0] * cell.n_gen  # the tokens after the prompt
    return [seconds for seconds, piece in zip(times, pieces, strict=True) if piece == max(pieces)]


def _during(cell: Arrival, times: list[float]) -> tuple[list[float], float]:
    """Gaps between tokens of those decoding, from the prompt's arrival on, and its time to the first token."""
    gaps, waited, ttft, left = [], 0.0, 0.0, cell.n_arriving
    for call, seconds in list(zip(calls(cell), times, strict=True))[before(cell) :]:
        waited += seconds
        if left > 0:
            ttft += seconds
            left -= dict(call).get(cell.n_seq, 0)
        if 0 in dict(call):
            gaps.append(waited)
            waited = 0.0
            if left <= 0:
                break
    return gaps, ttft


@once_a_frame
def table(rows: pd.DataFrame) -> pd.DataFrame:
    """A line a cell: TIMES and `rate` as estimates over processes; `verdict` is valid, or how many were not."""
    entries = []
    right = usable_processes(rows)
    for key, group in processes(rows).groupby(CELL, sort=False):
        entry: dict[str, Any] = dict(zip(CELL, key, strict=True))
        entry["verdict"] = verdict_of(group["verdict"])
        used = of_cell(right, entry, CELL)
        if len(used):
            entry |= {name: stats.median(used[name].tolist()) for name in TIMES}
            entry["rate"] = stats.rate(float(entry["n_arriving"]), used["ttft"].tolist())
        entries.append(entry)
    return pd.DataFrame(entries)


def formed(rows: pd.DataFrame) -> pd.DataFrame:
    """The micro-batches the engine formed of the first mixed call: CELL, `sizes` (tokens of each) and `count`."""
    entries = []
    for row, cell, _ in _arrivals(rows):
        if cell.way == "together":
            of_call, sizes = row.series["of call"], row.series["micro-batch"]
            first = [int(size) for size, call in zip(sizes, of_call, strict=True) if call == row.n_gen]
            told = {"sizes": " + ".join(map(str, first)), "count": len(first)}
            entries.append({name: getattr(row, name) for name in CELL} | told)
    return pd.DataFrame(entries, columns=[*CELL, "sizes", "count"]).drop_duplicates()


@once_a_frame
def predicted(rows: pd.DataFrame) -> pd.DataFrame:
    """Calls with a full chunk in them against what their micro-batches take alone.

    A chunk in a call of its own is one micro-batch. A mixed call is one of all its tokens, or a step of all sequences
    and one of the chunk without its first token; how many it is was counted (`formed`). Steps and prompts were measured
    alone in the same blocks, the prompts in chunks of those sizes. `call`: measured, the median over the prompt;
    `ratio`: measured over promised, paired by block.
    """
    used, made = usable(rows), formed(rows).set_index(CELL)["count"]
    steps = used[used["workload"] == "decode"].groupby(["model", "n_seq", "flash_attn"])
    step = {key: timing.median_by_block(group) for key, group in steps}
    chunk = {key: _median_call(group) for key, group in alone(rows).groupby(PART)}
    entries = []
    for key, group in usable_processes(rows).groupby(CELL, sort=False):
        entry: dict[str, Any] = dict(zip(CELL, key, strict=True))
        count = made[key] if entry["way"] == "together" else 1
        size = entry["n_chunk"]
        if entry["way"] == "together":
            size += entry["n_seq"] if count == 1 else -1
        promised = chunk.get((entry["model"], entry["n_arriving"], size, entry["flash_attn"]))
        beside = step.get((entry["model"], entry["n_seq"] + 1, entry["flash_attn"]))
        if promised is None or (count == 2 and beside is None):
            continue
        promised = (promised + beside if count == 2 else promised).dropna()
        call = group.groupby("block")["call"].median()
        entry |= {"formed": count, "promised": stats.median(promised.tolist()), "call": stats.median(call.tolist())}
        entries.append(entry | {"ratio": timing.paired_ratio(call, promised)})
    return pd.DataFrame(entries, columns=[*CELL, "formed", "promised", "call", "ratio"])


def _median_call(group: pd.DataFrame) -> pd.Series:
    """Median full chunk by block."""
    return group.set_index("block")["calls"].map(median).groupby(level=0).median()


def across_the_tile(rows: pd.DataFrame) -> pd.DataFrame:
    """Chunks of one token less than the size that flash attention's tiles need, against chunks of just that size.

    A line a model and kind of attention: `model`, `flash_attn`, `short` and `full` (seconds of a call, the median over
    the prompt), `ratio`, paired by block.
    """
    found = alone(rows)
    sizes = {TILE - 1: "short", TILE: "full"}
    entries = []
    for (model, flash_attn), group in found[found["n_chunk"].isin(sizes)].groupby(["model", "flash_attn"], sort=False):
        by_size = {sizes[int(size)]: _median_call(part) for size, part in group.groupby("n_chunk")}
        if len(by_size) == len(sizes):
            entry = {"model": model, "flash_attn": flash_attn}
            entry |= {name: stats.median(seconds.tolist()) for name, seconds in by_size.items()}
            entries.append(entry | {"ratio": timing.paired_ratio(by_size["short"], by_size["full"])})
    return pd.DataFrame(entries, columns=["model", "flash_attn", *sizes.values(), "ratio"])


def by_size(rows: pd.DataFrame) -> pd.DataFrame:
    """Chunks of every size with nobody decoding: `model`, `how` ("stock", "stock, no flash attention", or a build),
    `n_chunk`, `call` (seconds, the median over the prompt) and `ratio`, stock with flash attention over it."""
    found = _chunks(rows)
    usual = {(model, n): calls for (model, how, n), calls in found.items() if how == STOCK}
    return pd.DataFrame(
        [
            {"model": model, "how": how, "n_chunk": n, "call": stats.median(calls.tolist())}
            | {"ratio": None if how == STOCK else timing.paired_ratio(usual[model, n], calls)}
            for (model, how, n), calls in found.items()
        ]
    )


def without(flash_attn: str) -> str:
    """What is said behind the name of what ran without flash attention."""
    return ", no flash attention" if flash_attn == "off" else ""


def _chunks(rows: pd.DataFrame) -> dict[tuple[str, str, int], pd.Series]:
    """Seconds of a full chunk by block, by model, how it was computed, and its tokens."""
    found = {}
    for build, of_build in rows[rows["workload"] == "arrival"].groupby("build", sort=False):
        for (model, flash, n), group in alone(of_build).groupby(["model", "flash_attn", "n_chunk"], sort=False):
            found[str(model), f"{build}{without(flash)}", int(n)] = _median_call(group)
    return found


def neighbours(rows: pd.DataFrame) -> pd.DataFrame:
    """Mixed calls beside sequences of two lengths: `model`, `kv_unified`, `n_chunk`, `short` and `long` (tokens they
    start from), `call_short`, `call_long` (seconds) and `ratio`, long over short, paired by block."""
    found = usable_processes(rows)
    found = found[(found["way"] == "together") & (found["flash_attn"] == "auto")]
    entries = []
    for (model, unified, n_chunk, _), group in found.groupby(["model", "kv_unified", "n_chunk", "n_seq"], sort=False):
        if group["n_prompt"].nunique() == 2:
            (short, first), (long, second) = (
                (int(depth), of.set_index("block")["call"]) for depth, of in group.groupby("n_prompt")
            )
            entry = {"model": model, "kv_unified": unified, "n_chunk": n_chunk, "short": short, "long": long}
            entry |= {"call_short": stats.median(first.tolist()), "call_long": stats.median(second.tolist())}
            entries.append(entry | {"ratio": timing.paired_ratio(second, first)})
    return pd.DataFrame(entries, columns=NEIGHBOURS)


def within_budget(rows: pd.DataFrame, shares: tuple[float, ...]) -> pd.DataFrame:
    """The largest chunk between steps whose predicted wait stays under a budget, and the longest wait it gave.

    The budget is a share of the wait with the prompt at once; the prediction is a chunk alone plus a step. A line a
    model and share: `budget`, `n_chunk` (0: none is small enough), `promised`, `largest` and `kept`, and `ttft`.
    """
    every = usable_processes(rows)
    every = every[(every["way"] != "together") & (every["flash_attn"] == "auto")]
    chunk = {key: _median_call(group).median() for key, group in alone(rows).groupby(PART)}
    entries = []
    for (model, n_seq, n_arriving), group in every.groupby(["model", "n_seq", "n_arriving"], sort=False):
        whole, cut = group[group["way"] == "whole"], group[group["way"] == "apart"]
        if whole.empty or cut["n_chunk"].nunique() < 2:
            continue
        promised = {
            int(n): chunk.get((model, n_arriving, n, "auto"), float("inf")) + of["before"].median()
            for n, of in cut.groupby("n_chunk")
        }
        for share in shares:
            budget = share * whole["largest"].median()
            fits = [n for n, seconds in promised.items() if seconds <= budget]
            n_chunk = max(fits, default=0)
            entry = {"model": model, "n_seq": n_seq, "n_arriving": n_arriving, "budget": budget, "n_chunk": n_chunk}
            if n_chunk:
                of = cut[cut["n_chunk"] == n_chunk]
                largest, ttft = (stats.median(of[name].tolist()) for name in ("largest", "ttft"))
                entry |= {"promised": promised[n_chunk], "largest": largest, "ttft": ttft}
                entry["kept"] = "yes" if largest.high <= budget else "no" if largest.low > budget else "inconclusive"
            entries.append(entry)
    return pd.DataFrame(entries, columns=BUDGET)


def equal_work(rows: pd.DataFrame) -> pd.DataFrame:
    """What cutting the prompt gains or costs in all: time of the prompt at once plus the steps that others got
    meanwhile, over the time the cut prompt took with those steps; a line a cell, `gain`, paired by block."""
    every = usable_processes(rows)
    entries = []
    for key, group in every[every["way"] != "whole"].groupby(CELL, sort=False):
        entry: dict[str, Any] = dict(zip(CELL, key, strict=True))
        at_once = {"way": "whole", "n_chunk": 0, "kv_unified": False, "flash_attn": "auto"}
        whole = of_cell(every, entry | at_once, CELL)
        if len(whole):
            both, first = group.groupby("block"), whole.groupby("block")
            apart = first["ttft"].median() + both["steps"].median() * first["before"].median()
            entries.append(entry | {"gain": timing.paired_ratio(apart, both["ttft"].median())})
    return pd.DataFrame(entries, columns=[*CELL, "gain"])
