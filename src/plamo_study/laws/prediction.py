"""Study 05's arithmetic: what each depth should cost beside what was measured, and what is kept and reserved.

From the tensor table and this machine's ceilings alone; the frames are those of 05-context: its rows, and the samples
`timed` in them.
"""

from typing import Any

from plamo_study.arithmetic import roofline
from plamo_study.arithmetic.roofline import Ceilings, Model


def band(model: Model, phase: str, depth: float, limit: Ceilings, part: int) -> dict[str, Any]:
    """Predicted seconds of one token at a depth: a step, or its share of a part of `part` tokens."""
    n = part if phase == "prefill" else 1
    flops, moved = roofline.work(roofline.parts(model, n, depth, n_ubatch=part))
    found = roofline.band(flops / n, moved / n, limit)
    return {"flops": flops / n, "bytes": moved / n, "bound": found.bound, "low": found.low, "high": found.high}


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
