"""What context costs: samples with the depth each was taken at, and memory and effects of kinds of attention and cache.

Times are seconds per token. Estimates are over processes, comparisons are paired by block. A kind is "flash/K/V": flash
attention, type of keys, type of values. `reserved` is what a context takes by the tensor table.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from llama_meter.cells import LADDER, WHOLE_WINDOW
from plamo_study.arithmetic import roofline
from plamo_study.arithmetic.roofline import Model
from plamo_study.read.frame import WITH_WINDOW, usable
from plamo_study.stats.estimates import NS, compare, events, ratio_of_sums

PHASES = ("prefill", "decode")
OF_CELL = ("model", "ladder", "flash_attn", "type_k", "type_v", "use_mmap", "n_ubatch", "block", "machine")
PLAIN = "off/f16/f16"
SIZES = ("kv", "state", "compute")
KINDS = ["model", "whole", "kind", *SIZES, "room", "n_ubatch"]


def _at_depth(rows: pd.DataFrame) -> pd.DataFrame:
    """The usable rows that timed depths."""
    depths = usable(rows)
    return depths[(depths["workload"] == "depth") & (depths["text"] == "")]


def samples(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per usable process, phase and depth, which `estimate` and `compare` take.

    The cell's fields, block and machine; `phase`, "prefill" or "decode"; `depth`; `value`, seconds per token (median
    over repetitions). `ladder`: "" for one of depths whose memory is filled, "walk" where every token was computed,
    "few" for the first and the last depth.
    """
    return events(_at_depth(rows), OF_CELL, _by_depth, "phase", "depth", "value")


def _by_depth(row: Any) -> Iterator[dict[str, Any]]:
    """Phase, depth and seconds per token of one process."""
    parts, steps = row.samples_ns
    first = [depth - n % row.n_gen - 1 for n, depth in enumerate(row.series["step_depth"])]  # one step warms up
    for phase, depths, taken, size in (
        ("prefill", row.series["part_depth"], parts, row.n_ubatch),
        ("decode", first, steps, 1),
    ):
        grouped = pd.Series(taken, dtype=float).groupby(pd.Series(depths, dtype=int).to_numpy()).median()
        for depth, ns in grouped.items():
            yield {"phase": phase, "depth": int(depth), "value": ns / NS / size}


def curves(timed: pd.DataFrame, phase: str) -> dict[str, pd.DataFrame]:
    """Seconds per token of the ladders by model: a row per depth, a column per block."""
    ladders = timed[(timed["phase"] == phase) & (timed["ladder"] == LADDER)]
    return {
        name: group.pivot_table(index="depth", columns="block", values="value")
        for name, group in ladders.groupby("model")
    }


def explained(timed: pd.DataFrame) -> pd.DataFrame:
    """The hybrid with its published window over the same without, per model, phase and depth, as `compare` gives it.

    `estimate`: ratio of times, paired by block; `first` and `second`: seconds per token with the window and without.
    """
    ladders = timed[timed["ladder"] == LADDER]
    plain = ladders["model"].str.replace(WITH_WINDOW, "", regex=False)
    ladders = ladders.assign(model=plain, window=ladders["model"].str.contains(WITH_WINDOW).astype(bool))
    return compare(ladders, of="window", to="not window", by="model phase depth")


def kind_of(rows: pd.DataFrame) -> pd.Series:
    """The kind of each row."""
    return rows["flash_attn"] + "/" + rows["type_k"] + "/" + rows["type_v"]


def kinds(rows: pd.DataFrame) -> pd.DataFrame:
    """Per model and kind, what the engine reserved: `kv`, `state`, `compute`, bytes by its log.

    `whole`: sliding layers keep everything; `room`: tokens the context has room for; `n_ubatch`.
    """
    depths, entries = _at_depth(rows), []
    for (model, ladder, kind), cells in depths.assign(kind=kind_of(depths)).groupby(["model", "ladder", "kind"]):
        cell = cells.iloc[0]
        room = int(cell["n_ctx"] + cell["n_ubatch"] + cell["n_gen"] + 1)  # one decode step warms up
        entry = {"model": model, "whole": ladder == WHOLE_WINDOW, "kind": kind, "room": room}
        sizes = {name: float(cell["checks"][f"{name}_bytes"]) for name in SIZES}
        entries.append(entry | sizes | {"n_ubatch": int(cell["n_ubatch"])})
    table = pd.DataFrame(entries, columns=KINDS)
    bits = table["kind"].map(lambda kind: (kind.startswith("on"), -kind.count("f16"), -kind.count("q8_0")))
    return table.assign(bits=bits).sort_values(["model", "whole", "bits"], ignore_index=True).drop(columns="bits")


def drift(rows: pd.DataFrame) -> pd.DataFrame:
    """Per model and kind: `kld`, nats per token against the plain kind; its interval is over chunks of text."""
    scored, entries = rows[(rows["workload"] == "depth") & (rows["text"] != "") & (rows["verdict"] == "valid")], []
    for row in scored.drop_duplicates("model", keep="last").itertuples():  # chunks give the interval, not processes
        tokens = np.asarray(row.series["tokens"], float)
        for name in row.caches:
            kld = ratio_of_sums(row.series[f"kld/{name}"], tokens)
            entries.append({"model": row.model, "kind": name, "kld": kld})
    return pd.DataFrame(entries, columns=["model", "kind", "kld"])


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
