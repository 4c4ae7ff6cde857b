"""Every timed cell of every study on one roofline: predicted band, measured time, miss, and what explains it.

No cell is left out: wrong results, anchors and other builds are here with their verdict, and cells that crashed are
counted. The band is given three times: with each ceiling's best sample, with what the ceilings usually are, and then
with what the engine is known to read more than once. It knows nothing of caches: small models lie above their roof.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd

from plamo_study.analysis import columns, roofline, stats
from plamo_study.analysis.kernels import column_tile, weight_passes
from plamo_study.analysis.prediction import miss
from plamo_study.analysis.roofline import PRODUCTS, Band, Ceilings, Model, Part
from plamo_study.analysis.usable import undisturbed
from plamo_study.errors import StudyError

Facts = Mapping[str, Mapping[str, Any]]
TIMED = ("prefill", "decode", "depth", "naive")
KEY = ["machine", "build", "engine", "model", "dtype", "workload", "n_prompt", "n_gen", "n_seq", "policy", "n_threads",
       "n_ubatch", "type_k", "type_v", "flash_attn", "n_gpu_layers", "label", "anchor"]  # fmt: skip
NS = 1e9
NAN = float("nan")
MISSES = ("miss", "miss_usual", "miss_known", "miss_kernel")  # each explains more than the one before it
Rates = dict[tuple[str, str, int, int, str], list[tuple[float, ...]]]


@dataclass(frozen=True)
class Timed:
    """One kind of pass that a cell timed: new tokens per sequence at a depth, and its seconds, one per process."""

    phase: str
    tokens: int
    depth: float
    seconds: tuple[float, ...]
    n_seq: int = 1
    together: bool = True


def cells(studies: Iterable[tuple[str, pd.DataFrame, Facts]]) -> pd.DataFrame:
    """One line per study, cell and kind of pass; `studies` are (name, rows, facts).

    Columns: the cell's, `chip`, `phase`, `tokens`, `depth`, `verdict`, `n` processes, `flops`, `bytes`, `intensity`,
    `compute` and `read` (ceilings), `low`, `high`, `measured` (estimate, s), `miss`, `share` (of the roof), and
    `miss_usual`, `miss_known`, and `miss_kernel` where the kernel was measured by columns.
    """
    studies = list(studies)
    rates = [_rates(rows) for _, rows, _ in studies]
    pooled = {key: [rate for found in rates for rate in found.get(key, [])] for key in set(chain(*rates))}
    by_columns = columns.rates(rows for _, rows, _ in studies)
    entries = []
    for (name, rows, facts), own in zip(studies, rates, strict=True):
        files, found = _files(facts), _steady(rows[rows["workload"].isin(TIMED)])
        for key, group in found.groupby(KEY, sort=False):
            cell = dict(zip(KEY, key, strict=True))
            model = files[cell["model"].rstrip("*"), cell["dtype"]]
            limits = _limits(own, pooled, cell)
            kernel = by_columns.get((cell["machine"], cell["n_threads"], cell["n_gpu_layers"], cell["dtype"]))
            verdict = "valid" if (group["verdict"] == "valid").all() else "/".join(sorted(group["verdict"].unique()))
            cell |= {"verdict": verdict, "n": len(group), "chip": facts[cell["machine"]]["chip"]}
            for timed in _timed(cell, group):
                entry = {"study": name, **cell, "phase": timed.phase, "tokens": timed.tokens, "depth": timed.depth}
                entry["n_seq"] = timed.n_seq
                entries.append(entry | _compared(timed, cell, model, facts[cell["engine"]], limits, kernel))
    return pd.DataFrame(entries)


ENDED = ("ok", "starved")  # a starved worker did not crash: it was measured again


def crashed(studies: Iterable[tuple[str, pd.DataFrame, Facts]]) -> int:
    """Processes of timed cells that ended without a time."""
    return sum(int((rows["workload"].isin(TIMED) & ~rows["status"].isin(ENDED)).sum()) for _, rows, _ in studies)


def summary(table: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Per group: `cells`, share `inside` the band, `median` and `worst` miss, and the median with each explanation.

    A miss is how many times the band's nearer edge the time lies from it, above 1 either way.
    """
    entries = []
    for key, group in table.groupby(by, sort=False):
        off = group["miss"].map(_off)
        entry: dict[str, Any] = dict(zip(by, key, strict=True)) | {"cells": len(group)}
        entry |= {"inside": float((off == 1).mean()), "median": float(off.median()), "worst": float(off.max())}
        entry |= {name: float(group[name].map(_off).median()) for name in MISSES[1:]}
        entries.append(entry | {"share": float(group["share"].median())})
    return pd.DataFrame(entries)


def off(table: pd.DataFrame) -> pd.Series:
    """How far each time lies from its band, above 1 either way."""
    return table["miss"].map(_off)


def kind(row: Mapping[str, Any]) -> str:
    """What a pass is, for a reader: several sequences are another matter than one, and packed ones another again."""
    if row["phase"] != "decode":
        return "prefill, many prompts" if row["n_seq"] > 1 else "prefill, one prompt"
    return "decode, many sequences" if row["n_seq"] > 1 else "decode, one sequence"


def _off(value: float) -> float:
    return max(value, 1 / value) if value == value else value


def _files(facts: Facts) -> dict[tuple[str, str], Model]:
    return {(fact["name"], fact["dtype"]): dict(fact) for fact in facts.values() if "tensors" in fact}


def _steady(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with times that nothing disturbed, where there are enough of them; verdicts play no part."""
    return undisturbed(rows[(rows["status"] == "ok") & rows["samples_ns"].map(len).astype(bool)])


def _timed(cell: Mapping[str, Any], group: pd.DataFrame) -> Iterator[Timed]:
    n_seq, together = int(cell["n_seq"]), cell["policy"] != "per_sequence"
    samples = list(group["samples_ns"])
    if cell["workload"] == "prefill":
        yield Timed("prefill", cell["n_prompt"], 0, _medians(samples), n_seq, together)
    elif cell["workload"] == "decode":
        depth = cell["n_prompt"] + cell["n_gen"] / 2
        yield Timed("decode", 1, depth, _medians(samples), n_seq)
        fills = [[found] for found in group["prefill_ns"] if found]
        if fills:
            yield Timed("prefill", cell["n_prompt"], 0, _medians(fills), n_seq, together)
    elif cell["workload"] == "naive":
        naive, cached = ([row[i] for row in samples] for i in (0, 1))
        length = cell["n_prompt"] + (cell["n_gen"] - 1) / 2
        yield Timed("prefill, without a cache", round(length), 0, _medians([[row] for row in naive]))
        yield Timed("decode", 1, length, _medians([[row[1:] or row] for row in cached]))
    elif "part_depth" in group["series"].iloc[0]:
        yield from _by_depth(cell, group)


def _by_depth(cell: Mapping[str, Any], group: pd.DataFrame) -> Iterator[Timed]:
    """The rungs of a ladder: at each depth one part of a prompt and a few decode steps."""
    rungs = sorted({float(depth) for series in group["series"] for depth in series["part_depth"]})
    for phase, index, name in (("prefill", 0, "part_depth"), ("decode", 1, "step_depth")):
        for rung, above in zip(rungs, [*rungs[1:], float("inf")], strict=True):
            seconds = []
            for samples, series in zip(group["samples_ns"], group["series"], strict=True):
                at = [ns for ns, depth in zip(samples[index], series[name], strict=True) if rung <= depth < above]
                seconds += [float(np.median(at)) / NS] if at else []
            if seconds:
                yield Timed(phase, cell["n_ubatch"] if phase == "prefill" else 1, rung, tuple(seconds))


def _medians(samples: list[list[list[int]]]) -> tuple[float, ...]:
    """Per process the median over all its samples, in seconds."""
    return tuple(float(np.median(list(chain(*row)))) / NS for row in samples)


def _rates(rows: pd.DataFrame) -> Rates:
    """(best sample, median) of every ceiling process, by machine, ceiling, threads, GPU layers, type or "" for any."""
    found = rows[rows["workload"].isin(["read", "matmul"]) & (rows["status"] == "ok") & (rows["n_prompt"] == 0)]
    names = ["machine", "workload", "n_threads", "n_gpu_layers", "dtype", "n_bytes", "n_flops", "samples_ns"]
    rates: Rates = {}
    for *where, dtype, n_bytes, n_flops, samples in found[names].itertuples(index=False):
        times = list(chain(*samples))
        pair = tuple((n_bytes + n_flops) * NS / time for time in (min(times), float(np.median(times))))
        for kind in (dtype, ""):
            rates.setdefault((*where, kind), []).append(pair)
    return rates


def _limits(own: Rates, pooled: Rates, cell: Mapping[str, Any]) -> list[Ceilings]:
    """Best and usual ceilings for a cell's machine, threads, device and type: of its own study, else of all.

    Where the type was not measured, any type's. Raises StudyError where no study has them.
    """
    found = {}
    for ceiling, kinds in (("read", ("",)), ("matmul", (cell["dtype"], ""))):
        keys = [(cell["machine"], ceiling, cell["n_threads"], cell["n_gpu_layers"], kind) for kind in kinds]
        pairs = next((rates[key] for key in keys for rates in (own, pooled) if key in rates), None)
        if pairs is None:
            why = f"no study measured it on that machine with {cell['n_threads']} threads"
            raise StudyError(f"{ceiling} ceiling", why, "plamo-study measure 02-roofline")
        found[ceiling] = max(best for best, _ in pairs), float(np.median([usual for _, usual in pairs]))
    return [Ceilings(read, matmul) for read, matmul in zip(found["read"], found["matmul"], strict=True)]


def _compared(
    timed: Timed,
    cell: Mapping[str, Any],
    model: Model,
    engine: Mapping[str, Any],
    limits: list[Ceilings],
    kernel: Mapping[int, float] | None,
) -> dict[str, Any]:
    how = {"n_ubatch": int(cell["n_ubatch"]), "type_k": cell["type_k"], "type_v": cell["type_v"]}
    account = roofline.parts(model, timed.tokens, timed.depth, timed.n_seq, **how, together=timed.together)
    flops, moved = roofline.work(account)
    best, usual = limits
    bands = [roofline.band(flops, moved, limit) for limit in limits]
    again = replace(bands[1], memory=(moved + _again(timed, cell, model, engine)) / usual.read)
    measured = stats.median(timed.seconds)
    by_kernel = _by_kernel(timed, cell, model, engine, account, usual, kernel) if kernel else None
    misses = [miss(measured.value, band.low, band.high) if band else NAN for band in (*bands, again, by_kernel)]
    return {
        "flops": flops,
        "bytes": moved,
        "intensity": flops / moved,
        "compute": best.matmul,
        "read": best.read,
        "bound": bands[0].bound,
        "low": bands[0].low,
        "high": bands[0].high,
        "measured": measured,
        "share": bands[0].low / measured.value,
        **dict(zip(MISSES, misses, strict=True)),
    }


def _by_kernel(
    timed: Timed,
    cell: Mapping[str, Any],
    model: Model,
    engine: Mapping[str, Any],
    account: list[Part],
    usual: Ceilings,
    kernel: Mapping[int, float],
) -> Band:
    """All matrix products at the rate the kernel has for so many columns, beside everything else at the ceilings."""
    shape = {
        "tokens": timed.tokens,
        "n_seq": timed.n_seq,
        "together": timed.together,
        "n_ubatch": int(cell["n_ubatch"]),
    }
    products = columns.seconds(model, shape, kernel, "D4" not in engine.get("corrects", ()))
    rest = roofline.band(*roofline.work([part for part in account if part.name not in PRODUCTS]), usual)
    return Band(products, rest.high)


def _again(timed: Timed, cell: Mapping[str, Any], model: Model, engine: Mapping[str, Any]) -> float:
    """Bytes the engine is known to read a second time: leftover columns of a tile, Mamba projections per sequence."""
    width = min(timed.tokens * (timed.n_seq if timed.together else 1), int(cell["n_ubatch"]))
    tile = column_tile(dict(engine), str(cell["dtype"]))
    passes = weight_passes(width, tile) if tile else 1
    mamba = sum(model["tensors"].get(kind, {"n_bytes": 0})["n_bytes"] for kind in columns.MAMBA)
    apart = timed.n_seq - 1 if timed.together and "D4" not in engine.get("corrects", ()) else 0
    return float((passes - 1) * roofline.weight_bytes(model) + apart * mamba)
