"""Study 05's arithmetic: what each depth should cost, where the curves should cross, and what was measured.

From the tensor table and this machine's ceilings alone; the frames are those of 05-context: its rows, and the samples
`timed` in them.
"""

from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from plamo_study.analysis import growth, roofline, stats
from plamo_study.analysis.ceilings import limits
from plamo_study.analysis.roofline import Ceilings, Model, miss
from plamo_study.measure.frame import WITH_WINDOW
from plamo_study.studies.context import analysis

PREDICTED = ["model", "phase", "depth", "flops", "bytes", "bound", "low", "high", "measured", "miss"]
DEPTHS = (0, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


def band(model: Model, phase: str, depth: float, limit: Ceilings, part: int) -> dict[str, Any]:
    """Predicted seconds of one token at a depth: a step, or its share of a part of `part` tokens."""
    n = part if phase == "prefill" else 1
    flops, moved = roofline.work(roofline.parts(model, n, depth, n_ubatch=part))
    found = roofline.band(flops / n, moved / n, limit)
    return {"flops": flops / n, "bytes": moved / n, "bound": found.bound, "low": found.low, "high": found.high}


def against_prediction(rows: pd.DataFrame, timed: pd.DataFrame, models: dict[str, Model]) -> pd.DataFrame:
    """Per model, phase and depth measured: FLOPs, bytes and the band `low` to `high`, per token, before any timing.

    Beside it `measured` (s per token); `miss`: 1 inside the band, else times its edge. A model whose ceilings were not
    measured is left out.
    """
    entries, part = [], analysis.part(timed)
    by_phase = {phase: analysis.curves(timed, phase) for phase in analysis.PHASES}
    ceilings = limits(rows, {name: models[name] for curves in by_phase.values() for name in curves})
    for phase, curves in by_phase.items():
        for name, curve in curves.items():
            for depth in curve.index if name in ceilings else ():
                found = band(models[name], phase, depth, ceilings[name], part)
                measured = stats.median(curve.loc[depth].dropna().tolist())
                off = miss(measured.value, found["low"], found["high"])
                entry = {"model": name, "phase": phase, "depth": int(depth), "measured": measured, "miss": off}
                entries.append(entry | found)
    return pd.DataFrame(entries, columns=PREDICTED)


def attention_rates(rows: pd.DataFrame, timed: pd.DataFrame, models: dict[str, Model]) -> pd.DataFrame:
    """Time that each token of depth adds to a token, and the rate of attention that follows.

    Per model and phase whose law grows and fits: `added` and `allowed` by the nearer ceiling (s per token and token of
    depth, below a window's end), `rate` (FLOP/s) and its `share` of the matrix ceiling.
    """
    entries, part, laws = [], analysis.part(timed), analysis.laws(timed, analysis.knots(models))
    ceilings = limits(rows, {name: models[name] for name in laws["model"]})
    for law in laws[laws["model"].isin(ceilings)].to_dict("records"):
        limit = ceilings[law["model"]]
        near, far = (band(models[law["model"]], law["phase"], depth, limit, part) for depth in (0, part))
        flops, moved = ((far[name] - near[name]) / part for name in ("flops", "bytes"))
        if law["fits"] and len(law["coefficients"]) > 1 and law["coefficients"][1].low > 0:
            added: stats.Estimate = law["coefficients"][1]
            rate = added.per(flops)
            entry = {"model": law["model"], "phase": law["phase"], "added": added, "rate": rate}
            entry |= {"allowed": max(flops / limit.matmul, moved / limit.read)}
            entries.append(entry | {"share": rate.scaled(1 / limit.matmul)})
    return pd.DataFrame(entries, columns=["model", "phase", "added", "allowed", "rate", "share"])


def growth_of_bytes(models: dict[str, Model], names: list[str]) -> pd.DataFrame:
    """Per model and depth: bytes kept for one sequence, `state` and `kv` in F16, and with every token kept `kv_whole`.

    `kv` keeps the window of sliding layers only, without the part of a prompt that llama.cpp adds to it.
    """
    entries = []
    for name in names:
        model = models[name]
        per_token, (_, sliding, full) = roofline.kv_bytes_per_token(model), roofline.layers(model)
        for depth in DEPTHS:
            kept = float(cells_kept(model, depth))
            sizes = {"kv": per_token * kept, "kv_whole": per_token * (full + sliding) * depth}
            entries.append({"model": name, "depth": depth, "state": roofline.state_bytes(model)} | sizes)
    return pd.DataFrame(entries, columns=["model", "depth", "state", "kv", "kv_whole"])


def pairs(timed: pd.DataFrame, models: dict[str, Model]) -> list[tuple[str, str]]:
    """(hybrid, attention) models to compare, by their layers: that of equal bytes first, if any; windowed ones last."""
    ladders = analysis.curves(timed, "decode")
    names = sorted(ladders, key=lambda name: ("matched" not in name, WITH_WINDOW in name, name))
    hybrids = [name for name in names if roofline.layers(models[name])[0]]
    return [(hybrid, other) for hybrid in hybrids for other in names if other not in hybrids]


def meeting_points(timed: pd.DataFrame, models: dict[str, Model]) -> pd.DataFrame:
    """Depths up to which, or from which, the hybrid needs less by arithmetic, per pair of models and phase.

    `keys`: fewer keys that a token looks at, all layers together; `sliding`: fewer bytes of a step, or FLOPs of a part
    of a prompt; `whole`: the same if all layers of the attention model saw everything. `..._first`: whether the hybrid
    needs less right after the first token; the depths are those where this changes, empty if it never does.
    """
    entries = []
    for hybrid, other in pairs(timed, models):
        for phase in analysis.PHASES:
            entry: dict[str, Any] = {"hybrid": hybrid, "other": other, "phase": phase}
            own, theirs = models[hybrid], models[other]
            part = analysis.part(timed)
            more = {"keys": partial(_more_keys, theirs, own), "sliding": partial(_more_work, theirs, own, phase, part)}
            more["whole"] = partial(_more_work, without_window(theirs), own, phase, part)
            for name, difference in more.items():
                entry |= {f"{name}_first": difference(1.0) > 0, name: growth.turns(difference, 1.0)}
            entries.append(entry)
    names = [name for what in ("keys", "sliding", "whole") for name in (f"{what}_first", what)]
    return pd.DataFrame(entries, columns=["hybrid", "other", "phase", *names])


def _more_keys(model: Model, than: Model, depth: float) -> float:
    return float(cells_kept(model, depth) - cells_kept(than, depth))


def _more_work(model: Model, than: Model, phase: str, part: int, depth: float) -> float:
    return _work(model, phase, part, depth) - _work(than, phase, part, depth)


def _work(model: Model, phase: str, part: int, depth: float) -> float:
    """FLOPs of a part of a prompt, or bytes of a step."""
    if phase == "prefill":
        return roofline.work(roofline.parts(model, part, depth, n_ubatch=part))[0]
    return roofline.decode_bytes(model, depth)


def without_window(model: Model) -> Model:
    """The same tensors with every attention layer seeing everything."""
    return model | {"shape": model["shape"] | {"window": 0}}


def paged(models: dict[str, Model], names: list[str], memory: float, n_ctx: int, block: int = 16) -> pd.DataFrame:
    """What paged attention would change for sequences that end anywhere up to `n_ctx` tokens: memory, never speed.

    `reserved`: bytes of a sequence whose whole context is set aside; `used`: at the mean length, half of it; `paged`:
    with blocks of `block` tokens, half a block of them empty (vLLM's block size, Kwon et al. 2023). `fit`, `fit_paged`:
    sequences that `memory` bytes hold beside the weights.
    """
    entries = []
    for name in names:
        state, per_token = roofline.state_bytes(models[name]), roofline.kv_bytes_per_token(models[name])
        lengths = np.arange(1, n_ctx + 1)
        reserved = state + per_token * float(cells_kept(models[name], n_ctx))
        used = state + per_token * float(np.mean(cells_kept(models[name], lengths)))
        _, sliding, full = roofline.layers(models[name])
        with_blocks = used + per_token * (full + sliding) * block / 2
        room = memory - roofline.weight_bytes(models[name])
        sizes = {"reserved": reserved, "used": used, "paged": with_blocks, "gain": reserved / with_blocks}
        fits = {"fit": int(room // reserved), "fit_paged": int(room // with_blocks)}
        entries.append({"model": name, "n_ctx": n_ctx} | sizes | fits)
    return pd.DataFrame(entries, columns=["model", "n_ctx", "reserved", "used", "paged", "gain", "fit", "fit_paged"])


def cells_kept(model: Model, tokens: Any) -> Any:
    """KV cells of all layers together after `tokens` tokens; sliding layers keep only their window."""
    _, sliding, full = roofline.layers(model)
    window = model["shape"]["window"]
    return full * tokens + sliding * (np.minimum(tokens, window) if window else tokens)


def reserved(model: Model, kind: str, room: int, n_ubatch: int, whole: bool) -> dict[str, float]:
    """Bytes a context of `room` tokens should take: `kv`, `state`, and `scores`, written out without flash attention.

    As llama.cpp reserves them: room in steps of 256 cells; sliding layers window + micro-batch, or all if `whole`;
    scores of every head for a micro-batch of queries and all cells, in F32.
    """
    flash, type_k, type_v = kind.split("/")
    (_, sliding, full), window = roofline.layers(model), model["shape"]["window"]
    cells = _padded(room)
    in_window = cells if whole or not window else min(cells, _padded(window + n_ubatch))
    kv = roofline.kv_bytes_per_token(model, type_k, type_v) * (full * cells + sliding * in_window)
    scores = 0.0 if flash == "on" else 4.0 * model["shape"]["heads"] * n_ubatch * cells
    return {"kv": kv, "state": float(roofline.state_bytes(model)), "scores": scores}


def _padded(cells: int, step: int = 256) -> int:
    return -(-cells // step) * step
