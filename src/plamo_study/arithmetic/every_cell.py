"""Every timed cell of every study against two ceilings: the predicted band, the measured time, and the miss.

Only usable rows: computed right, in undisturbed blocks; what is left out is counted. The band is given four times, each
refinement on top of the one before: with each ceiling's best sample; with what the ceilings usually are; with what the
engine is known to read more than once; with the matrix kernels' own times at a pass's number of columns, where they
were measured. A refinement may make the miss worse. Caches are not modelled: small models lie above their roof.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd

from llama_meter import stats
from llama_meter.errors import StudyError
from llama_meter.limits import RIGHT
from plamo_study.arithmetic import ceilings, roofline
from plamo_study.arithmetic.ceilings import Place
from plamo_study.arithmetic.kernels import column_tile, weight_passes
from plamo_study.arithmetic.roofline import NO_MATMUL, PRODUCTS, Band, Ceilings, Model, Part, miss
from plamo_study.read.processors import device
from plamo_study.read.usable import usable

Facts = Mapping[str, Mapping[str, Any]]
Known = Mapping[str, Mapping[int, float]]  # tensor type -> number of columns -> seconds per weight
TIMED = ("prefill", "decode", "depth", "naive")
KEY = ["machine", "build", "engine", "model", "dtype", "workload", "n_prompt", "depth", "n_ctx", "n_gen", "n_seq",
       "policy", "n_threads", "n_ubatch", "type_k", "type_v", "flash_attn", "n_gpu_layers", "ladder"]  # fmt: skip
NUMBERS = ["tokens", "depth", "n_seq", "n_threads", "flops", "bytes", "intensity", "compute", "read", "low", "high",
           "miss", "miss_usual", "miss_known", "miss_kernel", "share", "share_fastest"]  # fmt: skip
CELL_COLUMNS = [
    *KEY,
    "n",
    "chip",
    "phase",
    "bound",
    "measured",
    "by_kernel",
    *(name for name in NUMBERS if name not in KEY),
]
MAMBA = ("ssm_in", "ssm_x", "ssm_dt", "ssm_out")
SPAN = 4  # between measured numbers of columns at most this many times apart, times are interpolated
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
    by_columns: Known


Held = tuple[str, Facts, dict[str, Any], Model, Timed, Limits | StudyError]


def cells(studies: Iterable[tuple[str, pd.DataFrame, Facts]]) -> tuple[pd.DataFrame, int]:
    """One line per study, cell and kind of pass; `studies` are (name, rows, facts). Usable rows only.

    Columns: the cell's, `chip` (a GPU's where layers were offloaded), `phase`, `tokens`, `depth`, `n` processes,
    `flops`, `bytes`, `intensity`, `compute` and `read` (its file's ceilings, best), `low`, `high`, `measured`
    (estimate, s), the misses of STEPS, `by_kernel` (whether the last refinement applies), `share` (of the roof of its
    own kernels) and `share_fastest` (of the roof of the fastest matrix kernel measured there). Ceilings are its own
    study's, else those of all studies on that machine. A pass whose ceilings no study measured on its machine is left
    out; their number comes second.
    """
    entries, lacking = [], 0
    for name, facts, cell, model, timed, limits in _held(studies):
        if isinstance(limits, StudyError):
            lacking += 1
            continue
        entry = {"study": name, **cell, "phase": timed.phase, "tokens": timed.tokens, "depth": timed.depth}
        entry["n_seq"] = timed.n_seq
        entries.append(entry | _compared(timed, cell, model, facts[cell["engine"]], limits))
    if not entries:
        return pd.DataFrame(columns=["study", *CELL_COLUMNS]).astype(dict.fromkeys(NUMBERS, float)), lacking
    return pd.DataFrame(entries), lacking


def _held(studies: Iterable[tuple[str, pd.DataFrame, Facts]]) -> Iterator[Held]:
    """Every usable pass with the limits it is held against, or the error that says which ceiling is missing."""
    studies = list(studies)
    own = [ceilings.measured([rows]) for _, rows, _ in studies]
    pooled = pd.concat(own, ignore_index=True)
    matmul = pooled[pooled["ceiling"] == ceilings.MATMUL].to_dict("records")
    by_columns = {kernel: ceilings.by_columns(pooled, *kernel) for kernel in {_kernel(line) for line in matmul}}
    fastest = {place: ceilings.fastest([pooled], place)[1].best for place in {place for place, _ in by_columns}}
    for (name, rows, facts), table in zip(studies, own, strict=True):
        files = {(fact["name"], fact["dtype"]): dict(fact) for fact in facts.values() if "tensors" in fact}
        limits: dict[tuple[Place, tuple[str, str], int], Limits | StudyError] = {}
        runs = usable(rows[rows["workload"].isin(TIMED)])
        runs = runs[runs["samples_ns"].map(len).astype(bool)][[*KEY, "samples_ns", "prefill_ns", "series"]]
        near: dict[Place, ceilings.Here] = {}  # the ceilings of a place, its study's first
        for key, group in runs.groupby(KEY, sort=False):
            cell = dict(zip(KEY, key, strict=True))
            place, file = ceilings.place_of(cell), (cell["model"].rstrip("*"), cell["dtype"])
            cell |= {"n": len(group), "chip": device(facts[cell["machine"]], cell["n_gpu_layers"] != 0)}
            for timed in _timed(cell, group):
                held = (place, file, timed.tokens)
                if place not in near:
                    near[place] = ceilings.Here((table, pooled), place)
                if held not in limits:
                    limits[held] = _limits(near[place], place, files[file], timed.tokens, fastest, by_columns)
                yield name, facts, cell, files[file], timed, limits[held]


def _kernel(line: Mapping[str, Any]) -> tuple[Place, str]:
    """Where a matrix product was measured, and of which type of weights."""
    return ceilings.place_of(line), str(line["dtype"])


def left_out(rows: pd.DataFrame) -> dict[str, int]:
    """Processes of a study's timed cells that are left out: `crashed`, `wrong` (computed wrong), and `other`.

    `other` counts anchors, disturbed processes, and starved ones, which were measured again.
    """
    timed = rows[rows["workload"].isin(TIMED)]
    crashed, used = ~timed["status"].isin(["ok", "starved"]), timed.index.isin(usable(timed).index)
    wrong = ~crashed & ~timed["verdict"].isin([*RIGHT, "n/a", "starved"])
    other = ~crashed & ~wrong & ~used
    return {"crashed": int(crashed.sum()), "wrong": int(wrong.sum()), "other": int(other.sum())}


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


def _limits(
    here: ceilings.Here,
    place: Place,
    model: Model,
    n_tokens: int,
    fastest: Mapping[Place, float],
    by_columns: Mapping[tuple[Place, str], Mapping[int, float]],
) -> Limits | StudyError:
    """The ceilings of a place for a file in a pass of so many tokens; a decode step computes the head with each."""
    try:
        best, usual = here.limits(model, heads=1 / n_tokens)
    except StudyError as error:
        return error
    by_dtype = {dtype: by_columns.get((place, dtype), {}) for dtype in ceilings.by_type(model)}
    return Limits(best, usual, Ceilings(best.read, fastest[place]), by_dtype)


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
    spent = products(model, shape, limits.by_columns, "D4" not in engine.get("corrects", ()))
    rest = roofline.band(*roofline.work([part for part in account if part.name not in PRODUCTS]), limits.usual)
    return None if spent is None else Band(spent, rest.high)


def products(model: Model, shape: Mapping[str, Any], by_dtype: Known, projections_apart: bool) -> float | None:
    """Seconds of all matrix products of a pass, each type with its own kernel at the pass's number of columns.

    None where a kernel was not measured near that number: one built for many columns does not reach its rate at few.

    `shape` has tokens, n_seq, together and n_ubatch. `projections_apart`: the Mamba projections of several sequences
    are one product each, as in stock builds (split projections, D4).
    """
    tokens, n_seq, together = int(shape["tokens"]), int(shape["n_seq"]), bool(shape["together"])
    streams, length = (1, n_seq * tokens) if together else (n_seq, tokens)
    passes = [min(length - start, shape["n_ubatch"]) for start in range(0, length, shape["n_ubatch"])]
    apart = projections_apart and together
    mamba, blocks, head = (_amounts(model, kinds) for kinds in _kinds(model))
    work = [(blocks, columns, streams) for columns in passes] + [(head, n_seq if together else 1, streams)]
    work += [(mamba, tokens, n_seq)] if apart else [(mamba, columns, streams) for columns in passes]
    spent = [
        times * elements * _per_weight(by_dtype.get(dtype, {}), columns)
        for amounts, columns, times in work
        for dtype, elements in amounts.items()
    ]
    return None if np.isnan(spent).any() else float(sum(spent))


def _kinds(model: Model) -> tuple[list[str], list[str], list[str]]:
    """Kinds of tensors that are (Mamba projections, other matrices of the blocks, the output head)."""
    matrices = [kind for kind in model["tensors"] if kind not in NO_MATMUL and not kind.endswith("_norm")]
    head = "output" if "output" in model["tensors"] else "token_embd"
    return [k for k in matrices if k in MAMBA], [k for k in matrices if k not in MAMBA], [head]


def _amounts(model: Model, kinds: Iterable[str]) -> dict[str, float]:
    """Number of weights by tensor type, without types that hold almost none of the file."""
    types, amounts = ceilings.weighty(ceilings.by_type(model)), dict[str, float]()
    for kind in kinds:
        tensors = model["tensors"][kind]
        for dtype, part in tensors.get("by_type", {tensors["type"]: tensors}).items():
            if dtype in types:
                amounts[dtype] = amounts.get(dtype, 0.0) + part["n_elements"]
    return amounts


def _per_weight(spent: Mapping[int, float], columns: int) -> float:
    """Seconds per weight at `columns` columns; proportional beyond the last measured number, NaN far from any."""
    at = sorted(spent)
    below, above = max((n for n in at if n <= columns), default=0), min((n for n in at if n >= columns), default=0)
    if below and not above:
        return spent[below] * columns / below if columns <= SPAN * below else float("nan")
    if not below or above > SPAN * below:
        return float("nan")
    return float(np.interp(columns, (below, above), (spent[below], spent[above]))) if above > below else spent[below]


def _again(timed: Timed, cell: Mapping[str, Any], model: Model, engine: Mapping[str, Any]) -> float:
    """Bytes the engine is known to read a second time: leftover columns of a tile, Mamba projections per sequence."""
    width = min(timed.tokens * (timed.n_seq if timed.together else 1), int(cell["n_ubatch"]))
    tile = column_tile(dict(engine), str(cell["dtype"]))
    passes = weight_passes(width, tile) if tile else 1
    mamba = sum(model["tensors"].get(kind, {"n_bytes": 0})["n_bytes"] for kind in MAMBA)
    apart = timed.n_seq - 1 if timed.together and "D4" not in engine.get("corrects", ()) else 0
    return float((passes - 1) * roofline.weight_bytes(model) + apart * mamba)
