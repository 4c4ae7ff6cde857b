"""Every timed cell of every study against two ceilings: the predicted band, the measured time, and the miss.

Only usable rows: computed right, in undisturbed blocks. The miss is given twice: with each ceiling's best sample, and
with what the ceilings usually are. Caches are not modelled: small models lie above their roof.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd

from llama_meter import stats
from llama_meter.errors import StudyError
from plamo_study.arithmetic import ceilings, roofline
from plamo_study.arithmetic.ceilings import Place
from plamo_study.arithmetic.roofline import Ceilings, Model, miss
from plamo_study.read.frame import device_name, usable

Facts = Mapping[str, Mapping[str, Any]]
TIMED = ("prefill", "decode", "depth", "naive")
KEY = [
    "machine",
    "build",
    "engine",
    "model",
    "dtype",
    "workload",
    "n_prompt",
    "depth",
    "n_ctx",
    "n_gen",
    "n_seq",
    "policy",
    "n_threads",
    "n_ubatch",
    "type_k",
    "type_v",
    "flash_attn",
    "n_gpu_layers",
    "ladder",
]
NUMBERS = [
    "tokens",
    "depth",
    "n_seq",
    "n_threads",
    "flops",
    "bytes",
    "intensity",
    "compute",
    "read",
    "low",
    "high",
    "miss",
    "miss_usual",
    "share",
]
CELL_COLUMNS = [
    *KEY,
    "n",
    "chip",
    "phase",
    "bound",
    "measured",
    *(name for name in NUMBERS if name not in KEY),
]
NS = 1e9


@dataclass(frozen=True)
class Timed:
    """One kind of pass that a cell timed: new tokens per sequence at a depth, and its seconds, one per process."""

    phase: str
    tokens: int
    depth: float
    seconds: tuple[float, ...]
    n_seq: int = 1
    together: bool = True


Limits = tuple[Ceilings, Ceilings]  # of a file: best and median samples
Held = tuple[str, dict[str, Any], Model, Timed, Limits | StudyError]


def cells(studies: Iterable[tuple[str, pd.DataFrame, Facts]]) -> tuple[pd.DataFrame, int]:
    """One line per study, cell and kind of pass; `studies` are (name, rows, facts). Usable rows only.

    Columns: the cell's, `chip` (a GPU's where layers were offloaded), `phase`, `tokens`, `depth`, `n` processes,
    `flops`, `bytes`, `intensity`, `compute` and `read` (its file's ceilings, best), `low`, `high`, `measured`
    (estimate, s), `miss` and `miss_usual` (how far off the band of the best and of the usual ceilings), and `share` (of
    the roof of its own kernels). Ceilings are its own study's, else those of all studies on that machine. A pass whose
    ceilings no study measured on its machine is left out; their number comes second.
    """
    entries, lacking = [], 0
    for name, cell, model, timed, limits in _held(studies):
        if isinstance(limits, StudyError):
            lacking += 1
            continue
        entry = {"study": name, **cell, "phase": timed.phase, "tokens": timed.tokens, "depth": timed.depth}
        entry["n_seq"] = timed.n_seq
        entries.append(entry | _compared(timed, cell, model, limits))
    if not entries:
        return pd.DataFrame(columns=["study", *CELL_COLUMNS]).astype(dict.fromkeys(NUMBERS, float)), lacking
    return pd.DataFrame(entries), lacking


def _held(studies: Iterable[tuple[str, pd.DataFrame, Facts]]) -> Iterator[Held]:
    """Every usable pass with the limits it is held against, or the error that says which ceiling is missing."""
    studies = list(studies)
    own = [ceilings.measured([rows]) for _, rows, _ in studies]
    pooled = pd.concat(own, ignore_index=True)
    for (name, rows, facts), table in zip(studies, own, strict=True):
        files = {(fact["name"], fact["dtype"]): dict(fact) for fact in facts.values() if "tensors" in fact}
        limits: dict[tuple[Place, tuple[str, str], int], Limits | StudyError] = {}
        runs = usable(rows[rows["workload"].isin(TIMED)])
        runs = runs[runs["samples_ns"].map(len).astype(bool)][[*KEY, "samples_ns", "prefill_ns", "series"]]
        near: dict[Place, ceilings.Here] = {}  # the ceilings of a place, its study's first
        for key, group in runs.groupby(KEY, sort=False):
            cell = dict(zip(KEY, key, strict=True))
            place, file = ceilings.place_of(cell), (cell["model"].rstrip("*"), cell["dtype"])
            cell |= {"n": len(group), "chip": device_name(facts[cell["machine"]], cell["n_gpu_layers"] != 0)}
            for timed in _timed(cell, group):
                held = (place, file, timed.tokens)
                if place not in near:
                    near[place] = ceilings.Here((table, pooled), place)
                if held not in limits:
                    limits[held] = _limits(near[place], files[file], timed.tokens)
                yield name, cell, files[file], timed, limits[held]


def _timed(cell: Mapping[str, Any], group: pd.DataFrame) -> Iterator[Timed]:
    n_seq, together = int(cell["n_seq"]), cell["policy"] != "per_sequence"
    samples = list(group["samples_ns"])
    if cell["workload"] == "prefill":
        yield Timed("prefill", cell["n_prompt"], 0, _medians(samples), n_seq, together)
    elif cell["workload"] == "decode":
        depth = cell["depth"] + cell["n_gen"] / 2
        yield Timed("decode", 1, depth, _medians(samples), n_seq)
        fills = [[fill] for fill in group["prefill_ns"] if fill]
        if fills:
            yield Timed("prefill", cell["depth"], 0, _medians(fills), n_seq, together)
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


def _limits(here: ceilings.Here, model: Model, n_tokens: int) -> Limits | StudyError:
    """The ceilings of a place for a file in a pass of so many tokens; a decode step computes the head with each."""
    try:
        return here.limits(model, heads=1 / n_tokens)
    except StudyError as error:
        return error


def _compared(timed: Timed, cell: Mapping[str, Any], model: Model, limits: Limits) -> dict[str, Any]:
    how = {"n_ubatch": int(cell["n_ubatch"]), "type_k": cell["type_k"], "type_v": cell["type_v"]}
    account = roofline.parts(model, timed.tokens, timed.depth, timed.n_seq, **how, together=timed.together)
    flops, moved = roofline.work(account)
    best, usual = (roofline.band(flops, moved, limit) for limit in limits)
    measured = stats.median(timed.seconds)
    return {
        "flops": flops,
        "bytes": moved,
        "intensity": flops / moved,
        "compute": limits[0].matmul,
        "read": limits[0].read,
        "bound": best.bound,
        "low": best.low,
        "high": best.high,
        "measured": measured,
        "share": best.low / measured.value,
        "miss": miss(measured.value, best.low, best.high),
        "miss_usual": miss(measured.value, usual.low, usual.high),
    }
