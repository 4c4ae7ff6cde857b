"""Every timed cell of every study against two ceilings: the predicted band, the measured time, and the miss.

Only usable rows: computed right, in undisturbed blocks; what is left out is counted. The band is given four times, each
refinement on top of the one before: with each ceiling's best sample; with what the ceilings usually are; with what the
engine is known to read more than once; with the matrix kernels' own times at a pass's number of columns, where they
were measured. A refinement may make the miss worse. Caches are not modelled: small models lie above their roof.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd

from plamo_study.analysis import ceilings, roofline, stats
from plamo_study.analysis.ceilings import Place
from plamo_study.analysis.kernels import column_tile, weight_passes
from plamo_study.analysis.roofline import PRODUCTS, Band, Ceilings, Model, Part, miss
from plamo_study.analysis.usable import usable
from plamo_study.errors import StudyError
from plamo_study.present.processors import processor
from plamo_study.studies.roofline import columns

Facts = Mapping[str, Mapping[str, Any]]
TIMED = ("prefill", "decode", "depth", "naive")
KEY = ["machine", "build", "engine", "model", "dtype", "workload", "n_prompt", "n_gen", "n_seq", "policy", "n_threads",
       "n_ubatch", "type_k", "type_v", "flash_attn", "n_gpu_layers", "label"]  # fmt: skip
NS = 1e9
STEPS = {
    "miss": "the best sample of each ceiling",
    "miss_usual": "the median of each ceiling",
    "miss_known": "the weights counted as often as the engine is known to read them",
    "miss_kernel": "each kernel timed at the pass's own number of columns",
}  # each on top of the one before it; where one does not apply, the previous miss is kept


@dataclass(frozen=True)
class Timed:
    """One kind of pass that a cell timed: new tokens per sequence at a depth, and its seconds, one per process."""

    phase: str
    tokens: int
    depth: float
    seconds: tuple[float, ...]
    n_seq: int = 1
    together: bool = True


@dataclass(frozen=True)
class Limits:
    """Limits of a cell: its file's ceilings (best and median samples), the fastest kernel, kernel times by columns."""

    best: Ceilings
    usual: Ceilings
    fastest: Ceilings
    by_columns: Mapping[str, Mapping[int, float]]


Held = tuple[str, Facts, dict[str, Any], Model, Timed, Limits | StudyError]


def cells(studies: Iterable[tuple[str, pd.DataFrame, Facts]]) -> pd.DataFrame:
    """One line per study, cell and kind of pass; `studies` are (name, rows, facts). Usable rows only.

    Columns: the cell's, `chip`, `phase`, `tokens`, `depth`, `n` processes, `flops`, `bytes`, `intensity`, `compute` and
    `read` (its file's ceilings, best), `low`, `high`, `measured` (estimate, s), the misses of STEPS, `by_kernel`
    (whether the last refinement applies), `share` (of the roof of its own kernels) and `share_fastest` (of the roof of
    the fastest matrix kernel measured there). Ceilings are its own study's, else those of all studies on that machine.
    A cell whose ceilings no study measured on its machine is left out, and counted by `unpredicted`; raises StudyError
    where that leaves none.
    """
    entries, lacking = [], []
    for name, facts, cell, model, timed, limits in _held(studies):
        if isinstance(limits, StudyError):
            lacking.append(limits)
            continue
        entry = {"study": name, **cell, "phase": timed.phase, "tokens": timed.tokens, "depth": timed.depth}
        entry["n_seq"] = timed.n_seq
        entries.append(entry | _compared(timed, cell, model, facts[cell["engine"]], limits))
    if lacking and not entries:
        raise lacking[0]
    return pd.DataFrame(entries)


def unpredicted(studies: Iterable[tuple[str, pd.DataFrame, Facts]]) -> int:
    """Number of usable passes on machines where their ceilings were not measured."""
    return sum(isinstance(limits, StudyError) for *_, limits in _held(studies))


def _held(studies: Iterable[tuple[str, pd.DataFrame, Facts]]) -> Iterator[Held]:
    """Every usable pass with the limits it is held against, or the error that says which ceiling is missing."""
    studies = list(studies)
    own = [ceilings.measured([rows]) for _, rows, _ in studies]
    pooled = pd.concat(own, ignore_index=True)
    for (name, rows, facts), table in zip(studies, own, strict=True):
        files, found = _files(facts), usable(rows)
        found = found[found["workload"].isin(TIMED) & found["samples_ns"].map(len).astype(bool)]
        for key, group in found.groupby(KEY, sort=False):
            cell = dict(zip(KEY, key, strict=True))
            model = files[cell["model"].rstrip("*"), cell["dtype"]]
            cell |= {"n": len(group), "chip": processor(facts[cell["machine"]])}
            for timed in _timed(cell, group):
                yield name, facts, cell, model, timed, _limits([table, pooled], ceilings.place_of(cell), model, timed)


def left_out(studies: Iterable[tuple[str, pd.DataFrame, Facts]]) -> dict[str, int]:
    """Processes of timed cells that are left out: `crashed`, `wrong` (computed wrong), and `other`.

    `other` counts anchors, disturbed processes, and starved ones, which were measured again.
    """
    counted = {"crashed": 0, "wrong": 0, "other": 0}
    for _, rows, _ in studies:
        timed = rows[rows["workload"].isin(TIMED)]
        crashed, used = ~timed["status"].isin(["ok", "starved"]), timed.index.isin(usable(rows).index)
        wrong = ~crashed & ~timed["verdict"].isin(["valid", "n/a", "starved"])
        counted["crashed"] += int(crashed.sum())
        counted["wrong"] += int(wrong.sum())
        counted["other"] += int((~crashed & ~wrong & ~used).sum())
    return counted


def _files(facts: Facts) -> dict[tuple[str, str], Model]:
    return {(fact["name"], fact["dtype"]): dict(fact) for fact in facts.values() if "tensors" in fact}


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


def _limits(tables: Sequence[pd.DataFrame], place: Place, model: Model, timed: Timed) -> Limits | StudyError:
    """The ceilings of a cell's place for its file; a decode step computes the head with every token."""
    try:
        best, usual = ceilings.limits(tables, place, model, heads=1 / timed.tokens)
    except StudyError as error:
        return error
    rate = ceilings.fastest(tables, place)[1]
    known = {dtype: ceilings.by_columns(tables[-1], place, dtype) for dtype in ceilings.by_type(model)}
    return Limits(best, usual, Ceilings(best.read, rate.best), known)


def _compared(
    timed: Timed, cell: Mapping[str, Any], model: Model, engine: Mapping[str, Any], limits: Limits
) -> dict[str, Any]:
    how = {"n_ubatch": int(cell["n_ubatch"]), "type_k": cell["type_k"], "type_v": cell["type_v"]}
    account = roofline.parts(model, timed.tokens, timed.depth, timed.n_seq, **how, together=timed.together)
    flops, moved = roofline.work(account)
    best, usual = roofline.band(flops, moved, limits.best), roofline.band(flops, moved, limits.usual)
    again = replace(usual, memory=(moved + _again(timed, cell, model, engine)) / limits.usual.read)
    by_kernel = _by_kernel(timed, cell, model, engine, account, limits)
    bands = (best, usual, again, by_kernel or again)
    measured = stats.median(timed.seconds)
    return {
        "flops": flops,
        "bytes": moved,
        "intensity": flops / moved,
        "compute": limits.best.matmul,
        "read": limits.best.read,
        "bound": best.bound,
        "low": best.low,
        "high": best.high,
        "measured": measured,
        "share": best.low / measured.value,
        "share_fastest": roofline.band(flops, moved, limits.fastest).low / measured.value,
        "by_kernel": by_kernel is not None,
        **{name: miss(measured.value, band.low, band.high) for name, band in zip(STEPS, bands, strict=True)},
    }


def _by_kernel(
    timed: Timed, cell: Mapping[str, Any], model: Model, engine: Mapping[str, Any], account: list[Part], limits: Limits
) -> Band | None:
    """The band with all matrix products at their kernels' times by columns, everything else at the ceilings.

    None where a kernel was not measured near that number of columns.
    """
    shape = {
        "tokens": timed.tokens,
        "n_seq": timed.n_seq,
        "together": timed.together,
        "n_ubatch": int(cell["n_ubatch"]),
    }
    products = columns.seconds(model, shape, limits.by_columns, "D4" not in engine.get("corrects", ()))
    rest = roofline.band(*roofline.work([part for part in account if part.name not in PRODUCTS]), limits.usual)
    return None if products is None else Band(products, rest.high)


def _again(timed: Timed, cell: Mapping[str, Any], model: Model, engine: Mapping[str, Any]) -> float:
    """Bytes the engine is known to read a second time: leftover columns of a tile, Mamba projections per sequence."""
    width = min(timed.tokens * (timed.n_seq if timed.together else 1), int(cell["n_ubatch"]))
    tile = column_tile(dict(engine), str(cell["dtype"]))
    passes = weight_passes(width, tile) if tile else 1
    mamba = sum(model["tensors"].get(kind, {"n_bytes": 0})["n_bytes"] for kind in columns.MAMBA)
    apart = timed.n_seq - 1 if timed.together and "D4" not in engine.get("corrects", ()) else 0
    return float((passes - 1) * roofline.weight_bytes(model) + apart * mamba)
