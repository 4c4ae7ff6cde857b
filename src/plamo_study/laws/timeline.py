"""Where the time of a phase goes, operator class by operator class, and how near each comes to the machine's ceilings.

Every function takes the frame of a study's rows, "trace" cells among them, and estimates over processes. Shares are of
the time spent computing nodes: the recorder's own time is counted apart, and `overhead` gives the total cost of
recording. Rates above a ceiling are no error: activations are read from caches, the ceiling is of memory.
"""

from typing import Any

import numpy as np
import pandas as pd

from llama_meter import stats
from llama_meter.stats import Estimate
from llama_meter.workloads.operators import CLASSES
from plamo_study.arithmetic import ceilings
from plamo_study.arithmetic.roofline import Ceilings, Model, band
from plamo_study.read.usable import main_rows
from plamo_study.stats.estimates import paired_ratio

PHASES = ("prefill", "decode")
QUANTITIES = ("ns", "bytes", "flops", "nodes")
EACH: dict[str, tuple[str, ...]] = {name: (name,) for name in CLASSES}  # every class is a group of its own
NO_RATES: dict[str, Any] = dict.fromkeys(("read", "compute", "bound", "of_ceiling"))  # of a class without nodes


def works(rows: pd.DataFrame) -> pd.DataFrame:
    """Every class of every phase of every row: model, block, phase, class, ns, bytes, flops, nodes.

    Of one prefill, or one mean decode step; `ns` is the median over the row's recordings.
    """
    entries = []
    for row in _traces(rows).to_dict("records"):
        of_row = {"model": row["model"], "block": row["block"]}
        entries += [of_row | entry for entry in of_series(row["series"], row["n_gen"])]
    return pd.DataFrame(entries, columns=["model", "block", "phase", "class", *QUANTITIES])


def of_series(series: dict[str, list[float]], n_gen: int) -> list[dict[str, Any]]:
    """The works of one row, from its series: phase, class, ns, bytes, flops, nodes of one prefill or mean step."""
    entries = []
    for phase, name in dict.fromkeys(tuple(key.split("/")[:2]) for key in series if key.count("/") == 2):
        per = n_gen if phase == "decode" else 1
        counted = {what: series.get(f"{phase}/{name}/{what}", [0.0]) for what in QUANTITIES}
        entries.append(
            {"phase": phase, "class": name} | {what: float(np.median(values)) / per for what, values in counted.items()}
        )
    return entries


def shares(rows: pd.DataFrame, by: dict[str, tuple[str, ...]] = EACH) -> pd.DataFrame:
    """Per model, phase and class: `share` of the phase's operator time, and `us` of a prefill or of one step.

    `by`: groups of classes, e.g. GROUPS; by default every class is its own group. Classes that a model lacks are left
    out, except "other", whose share is always given.
    """
    return _shares(works(rows), by)


def _shares(traced: pd.DataFrame, parts: dict[str, tuple[str, ...]]) -> pd.DataFrame:
    traced, entries = traced[traced["class"].isin(CLASSES)], []
    for (model, phase), group in traced.groupby(["model", "phase"]):
        total = group.groupby("block")["ns"].sum()
        for name, classes in parts.items():
            part = group[group["class"].isin(classes)].groupby("block")["ns"].sum().reindex(total.index, fill_value=0.0)
            if part.any() or name == "other":
                times = {"share": stats.median((part / total).tolist()), "us": stats.median((part / 1e3).tolist())}
                entries.append({"model": model, "phase": phase, "class": name} | times)
    return pd.DataFrame(entries, columns=["model", "phase", "class", "share", "us"])


def rates(rows: pd.DataFrame, models: dict[str, Model]) -> pd.DataFrame:
    """`shares` with what each class achieves: `read` (B/s), `compute` (FLOP/s), and the ceilings' `bound` on it.

    `bound`: the nearer ceiling by arithmetic, "memory" or "compute"; `of_ceiling`: the time it allows over the time
    taken, at the ceilings' best samples; all None where a class has no nodes. Also `n_bytes`, `n_flops` and `nodes` of
    a prefill or of one step. A model whose ceilings were not measured beside it is left out.
    """
    traced, entries = works(rows), []
    limits = ceilings.limits(rows, {name: models[name] for name in traced["model"].unique()})
    traced = traced[traced["model"].isin(limits)]
    for entry in _shares(traced, EACH).to_dict("records"):
        same = (traced["model"] == entry["model"]) & (traced["phase"] == entry["phase"])
        entries.append(entry | _achieved(traced[same & (traced["class"] == entry["class"])], limits[entry["model"]]))
    counted = ["n_bytes", "n_flops", "nodes"]
    return pd.DataFrame(entries, columns=["model", "phase", "class", "share", "us", *counted, *NO_RATES])


def _achieved(part: pd.DataFrame, limits: Ceilings) -> dict[str, Any]:
    if part.empty:
        return dict.fromkeys(("n_bytes", "n_flops", "nodes"), 0.0) | NO_RATES
    n_bytes, n_flops, nodes = (float(part[what].max()) for what in QUANTITIES[1:])
    seconds = (part["ns"] / 1e9).tolist()
    allowed = band(n_flops, n_bytes, limits)

    def over(work: float) -> Estimate:
        return stats.median([work / s for s in seconds])

    rate = {"read": over(n_bytes), "compute": over(n_flops), "bound": allowed.bound, "of_ceiling": over(allowed.low)}
    return {"n_bytes": n_bytes, "n_flops": n_flops, "nodes": nodes} | rate


def overhead(rows: pd.DataFrame) -> pd.DataFrame:
    """Cost of recording per model and phase: `ratio` of a recorded phase to the plain ones around it.

    `computing`: the same without the callback's own time, the cost of computing node by node; `callback`: share of
    the recorded phase; `floor`: share of it that nodes would take if they computed nothing; `adds_up`: the largest
    difference of spans to phases and of phases to the wall time; `engine_clock`: llama.cpp's own time of the recorded
    calls over the phases' time.
    """
    entries = []
    traces = _traces(rows)
    for model, group in traces.groupby("model"):
        group = group.set_index("block")
        for phase in PHASES:
            if all(f"{phase}/recorded" in series for series in group["series"]):
                entries.append({"model": model, "phase": phase} | _overhead(group, phase))
    return pd.DataFrame(entries)


def _overhead(group: pd.DataFrame, phase: str) -> dict[str, Any]:
    parts = pd.DataFrame(
        [cost(*row, phase) for row in zip(group["series"], group["checks"], strict=True)], index=group.index
    )
    return {
        "ratio": paired_ratio(parts["recorded"], parts["plain"]),
        "computing": paired_ratio(parts["recorded"] - parts["callback"], parts["plain"]),
        "callback": stats.median((parts["callback"] / parts["recorded"]).tolist()),
        "floor": stats.median((parts["floor"] / parts["recorded"]).tolist()),
        "adds_up": float(group["checks"].map(lambda checks: checks["off_wall"]).max()),
        "engine_clock": stats.median(group["checks"].map(lambda checks: checks["engine_clock"]).tolist()),
    }


def cost(series: dict[str, list[float]], checks: dict[str, Any], phase: str) -> dict[str, float]:
    """What recording costs one row's phase, in mean nanoseconds of a request.

    `recorded`, and `plain`: the mean of the plain request before and the one after it; `callback`: of the recorded one,
    `floor`: of it, what its nodes would take if they computed nothing.
    """
    around = np.array(series[f"{phase}/plain"])
    nodes = sum(values[0] for key, values in series.items() if key.startswith(phase) and key.endswith("/nodes"))
    return {
        "recorded": float(np.mean(series[f"{phase}/recorded"])),
        "plain": float(np.mean((around[:-1] + around[1:]) / 2)),
        "callback": float(np.mean(series[f"{phase}/callback/ns"])),
        "floor": float(checks["floor_ns"] * nodes),
    }


def _traces(rows: pd.DataFrame) -> pd.DataFrame:
    traced = main_rows(rows)
    return traced[traced["workload"] == "trace"]
