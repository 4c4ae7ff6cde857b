"""Study 05: what depth does to prefill and decode, when prefill takes over a request, and who grows slower.

Every function takes the frame of 05-context. Times are seconds per token; a part of a prompt counts at its middle.
Estimates are over processes, comparisons are paired by block.
"""

from typing import Any

import numpy as np
import pandas as pd

from plamo_study.analysis import growth, stats
from plamo_study.analysis.phase_asymmetry import NS, paired_ratio
from plamo_study.analysis.usable import usable

PHASES = ("prefill", "decode")
OUTPUTS = (16, 32, 64, 128, 256, 512, 1024, 2048)  # output tokens a request may have
LADDER, WALK = "", "walk"
LEAST_DEPTHS = 5  # a law is not sought in fewer
NAN = float("nan")
Knots = dict[str, float]


def samples(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per cell, process, phase and depth: the cell's fields, block, `phase`, `depth` and `seconds` per token.

    `at`: the depth a law is fitted at, for a part of a prompt its middle. Seconds are medians over repetitions.
    """
    found, entries = usable(rows), []
    for row in found[(found["workload"] == "depth") & (found["text"] == "")].itertuples():
        fields = {name: getattr(row, name) for name in ("model", "label", "flash_attn", "type_k", "type_v", "block")}
        for phase, depth, at, seconds in _by_depth(row):
            entries.append(fields | {"phase": phase, "depth": depth, "at": at, "seconds": seconds})
    return pd.DataFrame(entries)


def _by_depth(row: Any) -> list[tuple[str, int, float, float]]:
    """(phase, depth, depth fitted at, seconds per token) of one process."""
    parts, steps = row.samples_ns
    first = [depth - n % row.n_gen - 1 for n, depth in enumerate(row.series["step_depth"])]  # one step warms up
    found = []
    for phase, depths, taken, size in (
        ("prefill", row.series["part_depth"], parts, row.n_ubatch),
        ("decode", first, steps, 1),
    ):
        grouped = pd.Series(taken, dtype=float).groupby(pd.Series(depths, dtype=int).to_numpy()).median()
        middle = size / 2 if phase == "prefill" else row.n_gen / 2
        found += [(phase, int(d), d + middle, ns / NS / size) for d, ns in grouped.items()]
    return found


def curves(rows: pd.DataFrame, phase: str, label: str = LADDER, index: str = "depth") -> dict[str, pd.DataFrame]:
    """Seconds per token by model: a frame with a row per depth and a column per block."""
    found = samples(rows)
    found = found[(found["phase"] == phase) & (found["label"] == label)]
    return {
        str(model): group.pivot_table(index=index, columns="block", values="seconds")
        for model, group in found.groupby("model")
    }


def rates(rows: pd.DataFrame) -> pd.DataFrame:
    """Per model, phase and depth: `rate` (t/s), `share` of the rate at depth 0, `noise`, `n` processes."""
    entries = []
    for phase in PHASES:
        for model, curve in curves(rows, phase).items():
            for depth, seconds in curve.iterrows():
                known = seconds.dropna().tolist()
                middle = stats.median(known)
                rate = middle.per(1.0)
                entry = {"model": model, "phase": phase, "depth": int(str(depth)), "rate": rate}
                share, noise = paired_ratio(curve.iloc[0], seconds), stats.variation(known)
                entries.append(entry | {"share": share, "noise": noise, "n": middle.n})
    return pd.DataFrame(entries)


def asymmetry(rows: pd.DataFrame) -> pd.DataFrame:
    """Per model and depth: `ratio`, how many times as fast a prompt's token is read as an answer's is written."""
    fast, slow = curves(rows, "prefill"), curves(rows, "decode")
    entries = []
    for model, curve in fast.items():
        for depth in sorted(set(curve.index) & set(slow[model].index)):
            ratio = paired_ratio(slow[model].loc[depth], curve.loc[depth])
            entries.append({"model": model, "depth": depth, "ratio": ratio})
    return pd.DataFrame(entries)


def knots(models: dict[str, dict[str, Any]]) -> Knots:
    """Where a model's own window may bend its curves, by name; 0 where it has none."""
    return {name: float(model["shape"]["window"]) for name, model in models.items() if "shape" in model}


def laws(rows: pd.DataFrame, bends: Knots) -> pd.DataFrame:
    """Per model and phase: the fields of `growth.Growth`, and `deepest`, the last depth measured."""
    entries = []
    for phase in PHASES:
        for model, curve in curves(rows, phase, index="at").items():
            if len(curve) >= LEAST_DEPTHS:
                law = growth.growth(curve, bends.get(model, 0.0))
                entries.append({"model": model, "phase": phase, "deepest": curve.index[-1]} | vars(law))
    return pd.DataFrame(entries)


def filling(rows: pd.DataFrame) -> pd.DataFrame:
    """Per model, phase and depth that both have: `ratio`, time in a filled memory over time in a computed one."""
    entries = []
    for phase in PHASES:
        walked = curves(rows, phase, WALK)
        for model, curve in curves(rows, phase).items():
            for depth in sorted(set(curve.index) & set(walked[model].index)) if model in walked else ():
                ratio = paired_ratio(curve.loc[depth], walked[model].loc[depth])
                entries.append({"model": model, "phase": phase, "depth": depth, "ratio": ratio})
    return pd.DataFrame(entries, columns=["model", "phase", "depth", "ratio"])


def takeover(rows: pd.DataFrame, bends: Knots) -> pd.DataFrame:
    """Per model and number of output tokens: `tokens` of context from which prefill takes more than half of a request.

    A request reads N tokens and then writes its output after them. Times between measured depths are interpolated;
    beyond the deepest they follow the curve's law, and `extrapolated` says so. NaN: not up to `growth.FARTHEST`.
    """
    reading, writing, entries = curves(rows, "prefill", index="at"), curves(rows, "decode", index="at"), []
    for model, curve in reading.items():
        both = curve.columns.intersection(writing[model].columns)
        for n_out in OUTPUTS:
            knot = bends.get(model, 0.0)
            found = [_taken_over(curve[block], writing[model][block], n_out, knot) for block in both]
            tokens = growth.estimate(found)
            deepest = min(curve.index[-1], writing[model].index[-1] - n_out)
            entry = {"model": model, "n_out": n_out, "tokens": tokens}
            entries.append(entry | {"extrapolated": not tokens.value <= deepest})
    return pd.DataFrame(entries)


def _taken_over(reading: pd.Series, writing: pd.Series, n_out: int, knot: float) -> float:
    read, write = growth.continued(reading, knot), growth.continued(writing, knot)
    grid = np.concatenate([[0.0], np.geomspace(1.0, growth.FARTHEST, 4096)])
    ends = growth.total(write, grid + n_out) - growth.total(write, grid)
    excess = growth.total(read, grid) - ends
    above = np.flatnonzero(excess > 0)
    if not len(above) or above[0] == 0:
        return NAN
    last = above[0]
    return float(np.interp(0.0, excess[last - 1 : last + 1], grid[last - 1 : last + 1]))


def pairs(rows: pd.DataFrame) -> list[tuple[str, str]]:
    """(hybrid, attention) models to compare: of equal bytes first where that model is there."""
    names = sorted(curves(rows, "decode"), key=lambda name: ("matched" not in name, name))
    hybrids = [name for name in names if name.startswith("plamo-2")]
    return [(hybrid, other) for hybrid in hybrids for other in names if other not in hybrids]


def compared(rows: pd.DataFrame) -> pd.DataFrame:
    """Per phase, attention model and depth: `ratio`, its time over the hybrid's; above 1 the hybrid is faster."""
    entries = []
    for phase in PHASES:
        known = curves(rows, phase)
        for hybrid, other in pairs(rows):
            for depth in sorted(set(known[hybrid].index) & set(known[other].index)):
                ratio = paired_ratio(known[other].loc[depth], known[hybrid].loc[depth])
                entries.append({"phase": phase, "hybrid": hybrid, "other": other, "depth": depth, "ratio": ratio})
    return pd.DataFrame(entries)


def overtaking(rows: pd.DataFrame, bends: Knots) -> pd.DataFrame:
    """Per phase and pair: who is faster at the deepest depth both have, and from where on.

    `last`: attention's time over the hybrid's at the `deepest`. `outcome`: "inconclusive" there; the hybrid "overtakes"
    or "is overtaken" ("again": it began on that side, too) where some depth shows the contrary, and `depth` is from
    where on the end holds, by process, interpolated; "faster" or "slower throughout" where every depth shows it, else
    "in the end"; "slower, overtaking by its law" with a `depth` extrapolated by the laws.
    """
    entries = []
    for (phase, hybrid, other), group in compared(rows).groupby(["phase", "hybrid", "other"], sort=False):
        known = curves(rows, str(phase))
        ratios = (known[other] / known[hybrid]).dropna()
        entry = {"phase": phase, "hybrid": hybrid, "other": other, "deepest": int(group["depth"].iloc[-1])}
        beyond = [
            _beyond(known[hybrid][block], known[other][block], ratios.index[-1], bends.get(other, 0.0))
            for block in ratios
        ]
        outcome, depth = _outcome(group["ratio"].tolist(), [_settled(ratios[block]) for block in ratios], beyond)
        entries.append(entry | {"last": group["ratio"].iloc[-1], "outcome": outcome, "depth": depth})
    return pd.DataFrame(entries)


def _outcome(by_depth: list[stats.Estimate], settled: list[float], beyond: list[float]) -> tuple[str, stats.Estimate]:
    sides = [ratio.above(1.0) for ratio in by_depth]
    nowhere, faster = growth.estimate([]), sides[-1] == "holds"
    if sides[-1] == "inconclusive":
        return "inconclusive", nowhere
    if {"holds", "does not hold"} <= set(sides):
        again = " again" if sides[0] == sides[-1] else ""
        return ("overtakes" if faster else "is overtaken") + again, growth.estimate(settled)
    at = nowhere if faster else growth.estimate(beyond)
    if not np.isnan(at.value):
        return "slower, overtaking by its law", at
    return f"{'faster' if faster else 'slower'} {'in the end' if 'inconclusive' in sides else 'throughout'}", nowhere


def _settled(ratio: pd.Series) -> float:
    """Depth from which a ratio stays on the side of 1 on which it ends, log-interpolated; 0 where it always is."""
    depth, logs = ratio.index.to_numpy(float), np.log(ratio.to_numpy(float))
    other_side = np.flatnonzero(np.sign(logs) != np.sign(logs[-1]))
    if not len(other_side):
        return 0.0
    k = other_side[-1]
    return float(depth[k] + (depth[k + 1] - depth[k]) * logs[k] / (logs[k] - logs[k + 1]))


def _beyond(hybrid: pd.Series, other: pd.Series, deepest: float, knot: float) -> float:
    """Depth beyond the measured ones from which the hybrid is faster, if both go on by their laws; NaN for none."""
    own, theirs = growth.continued(hybrid), growth.continued(other, knot)
    return growth.crossing(lambda x: float(theirs(np.array([x]))[0] - own(np.array([x]))[0]), deepest)
