"""Study 05's other half: memory and effects of kinds of attention and cache, and the time of a loop without a cache.

Memory from the frame of 06-memory, predictions from 06-drift, the loop from 06-naive. `reserved` is what the tensor
table says a context takes.
"""

from typing import Any

import numpy as np
import pandas as pd

from llama_meter import stats
from llama_meter.cells import WHOLE_WINDOW
from plamo_study.arithmetic import roofline
from plamo_study.arithmetic.roofline import Model
from plamo_study.laws import context
from plamo_study.read.usable import usable
from plamo_study.stats import clustered
from plamo_study.stats.estimates import paired_ratio

PLAIN = "off/f16/f16"
DRIFT = ["model", "kind", "kld", "same_top", "ppl_ratio", "p", "detectable", "chunks", "n_ctx"]
KINDS = ["model", "whole", "kind", "depth", "prefill_gain", "decode_gain", "kv", "state", "compute", "rss", "room",
         "n_ubatch", "n"]  # fmt: skip


def kind_of(rows: pd.DataFrame) -> pd.Series:
    """The kind of each row, "flash/K/V": flash attention, type of keys, type of values."""
    return rows["flash_attn"] + "/" + rows["type_k"] + "/" + rows["type_v"]


def kinds(rows: pd.DataFrame) -> pd.DataFrame:
    """Per model and kind "flash/K/V": its bytes, and its effect on speed at the deepest.

    `prefill_gain`, `decode_gain`: speed over the plain kind with the same setting of `whole`; `whole`: sliding
    layers keep everything. `kv`, `state`, `compute`: bytes reserved, by the engine's log; `rss`: largest resident size
    before any memory was filled; `room`: tokens the context has room for, `n_ubatch`.
    """
    depths = usable(rows)
    depths = depths[(depths["workload"] == "depth") & (depths["text"] == "")]
    every, depths, entries = context.samples(depths), depths.assign(kind=kind_of(depths)), []
    for (model, ladder), group in depths.groupby(["model", "ladder"]):
        timed = every[(every["model"] == model) & (every["ladder"] == ladder)]
        timed = timed[timed["depth"] == timed["depth"].max()]
        for kind, cells in group.groupby("kind"):
            entry = {"model": model, "whole": ladder == WHOLE_WINDOW, "kind": kind, "depth": int(timed["depth"].max())}
            entries.append(entry | _gains(timed, str(kind)) | _sizes(cells))
    table = pd.DataFrame(entries, columns=KINDS)
    bits = table["kind"].map(lambda kind: (kind.startswith("on"), -kind.count("f16"), -kind.count("q8_0")))
    return table.assign(bits=bits).sort_values(["model", "whole", "bits"], ignore_index=True).drop(columns="bits")


def _gains(timed: pd.DataFrame, kind: str) -> dict[str, stats.Estimate]:
    gains, names = {}, kind_of(timed)
    for phase in context.PHASES:
        of_phase = timed["phase"] == phase
        own, plain = (timed[of_phase & (names == k)].set_index("block")["value"] for k in (kind, PLAIN))
        gains[f"{phase}_gain"] = paired_ratio(plain, own)
    return gains


def _sizes(cells: pd.DataFrame) -> dict[str, float]:
    checks = cells["checks"].iloc[0]
    sizes = {name: float(checks[f"{name}_bytes"]) for name in ("kv", "state", "compute")}
    asked = cells.iloc[0]
    room = asked["n_ctx"] + asked["n_ubatch"] + asked["n_gen"] + 1  # one decode step warms up
    counts = {"room": int(room), "n_ubatch": int(asked["n_ubatch"]), "n": len(cells)}
    return sizes | {"rss": float(cells["peak_rss_bytes"].max())} | counts


def drift(rows: pd.DataFrame) -> pd.DataFrame:
    """Per model and kind: `kld` (nats per token) against the plain kind, `same_top`, `ppl_ratio`, `p` that it is 1.

    Intervals over chunks; `p_adjusted` over all lines; `detectable`: smallest ppl_ratio - 1 that would be found.
    """
    scored, entries = rows[(rows["workload"] == "depth") & (rows["text"] != "") & (rows["verdict"] == "valid")], []
    for row in scored.drop_duplicates("model", keep="last").itertuples():  # chunks give the interval, not processes
        tokens = np.asarray(row.series["tokens"], float)
        for name in row.caches:
            more = np.subtract(row.series[f"nll/{name}"], row.series[f"nll/{PLAIN}"])
            entry: dict[str, Any] = {"model": row.model, "kind": name}
            entry |= {k: clustered.ratio_of_sums(row.series[f"{k}/{name}"], tokens) for k in ("kld", "same_top")}
            entry["ppl_ratio"] = clustered.mapped(clustered.ratio_of_sums(more, tokens), lambda x: float(np.exp(x)))
            entry["p"] = clustered.p_value(more / tokens)
            entry["detectable"] = float(np.expm1(clustered.detectable(more / tokens)))
            entries.append(entry | {"chunks": len(tokens), "n_ctx": row.n_ctx})
    table = pd.DataFrame(entries, columns=DRIFT)
    return table.assign(p_adjusted=clustered.adjusted(table["p"].tolist()) if len(table) else [])


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
