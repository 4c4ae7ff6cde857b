"""Study 05's arithmetic: what each depth should cost beside what was measured, and what is kept and reserved.

From the tensor table and this machine's ceilings alone; the frames are those of 05-context: its rows, and the samples
`timed` in them.
"""

from typing import Any

import numpy as np
import pandas as pd

from plamo_study.analysis import roofline, stats
from plamo_study.analysis.ceilings import limits
from plamo_study.analysis.roofline import Ceilings, Model, miss
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
