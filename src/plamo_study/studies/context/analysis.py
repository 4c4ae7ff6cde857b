"""Study 05: what depth does to prefill and decode, when prefill takes over a request, and who grows slower.

Every function takes the frame of 05-context. Times are seconds per token; a part of a prompt counts at its middle.
Estimates are over processes, comparisons are paired by block.
"""

import math
from typing import Any

import numpy as np
import pandas as pd

from plamo_study.analysis import clustered, growth, stats
from plamo_study.analysis.memo import once_a_frame
from plamo_study.analysis.timing import NS, median_sample, paired_ratio
from plamo_study.analysis.usable import usable
from plamo_study.measure.frame import WITH_WINDOW
from plamo_study.studies.context.ways import LADDER, WALK

PHASES = ("prefill", "decode")
OUTPUTS = (16, 32, 64, 128, 256, 512, 1024, 2048)  # output tokens a request may have
OF_CELL = ("model", "label", "flash_attn", "type_k", "type_v", "block")
SAMPLE = [*OF_CELL, "phase", "depth", "at", "seconds"]
LEAST_DEPTHS = 5  # a law is not sought in fewer
FITS = 0.05  # a law that misses a median by more is shown, and nothing is concluded from it
NAN = float("nan")
NOWHERE = stats.Estimate(NAN, NAN, NAN, 0)
TWICE = 2.0
Knots = dict[str, float]


@once_a_frame
def samples(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per cell, process, phase and depth: the cell's fields, block, `phase`, `depth` and `seconds` per token.

    `at`: the depth a law is fitted at, for a part of a prompt its middle. Seconds are medians over repetitions.
    """
    found, entries = usable(rows), []
    for row in found[(found["workload"] == "depth") & (found["text"] == "")].itertuples():
        fields = {name: getattr(row, name) for name in OF_CELL}
        for phase, depth, at, seconds in _by_depth(row):
            entries.append(fields | {"phase": phase, "depth": depth, "at": at, "seconds": seconds})
    return pd.DataFrame(entries, columns=SAMPLE)


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


@once_a_frame
def curves(rows: pd.DataFrame, phase: str, label: str = LADDER, index: str = "depth") -> dict[str, pd.DataFrame]:
    """Seconds per token by model: a frame with a row per depth and a column per block; with a window after without."""
    found = samples(rows)
    found = found[(found["phase"] == phase) & (found["label"] == label)]
    groups = dict(iter(found.groupby("model")))
    names = sorted(groups, key=lambda name: (name.replace(WITH_WINDOW, ""), WITH_WINDOW in name))
    return {name: groups[name].pivot_table(index=index, columns="block", values="seconds") for name in names}


def part(rows: pd.DataFrame) -> int:
    """Tokens of the parts of a prompt that the ladders time."""
    found = rows[(rows["workload"] == "depth") & (rows["label"] == LADDER) & (rows["text"] == "")]
    return int(found["n_ubatch"].iloc[0])


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
    """Per model and phase: the fields of `growth.Growth`, and `fits`: no median is further from the law than FITS."""
    entries = []
    for phase in PHASES:
        for model, curve in curves(rows, phase, index="at").items():
            if len(curve) >= LEAST_DEPTHS:
                law = growth.growth(curve, bends.get(model, 0.0))
                entries.append({"model": model, "phase": phase, "fits": abs(law.worst) <= FITS} | vars(law))
    return pd.DataFrame(entries)


def doubling(rows: pd.DataFrame) -> pd.DataFrame:
    """Per model and phase: `last`, time at the `deepest` over that at 0, and `depth`, where it is twice as long.

    Interpolated between measured depths, NaN where the deepest does not show it: nothing here follows a fitted law.
    """
    entries = []
    for phase in PHASES:
        for model, curve in curves(rows, phase).items():
            times, last = curve.dropna(axis="columns"), paired_ratio(curve.iloc[-1], curve.iloc[0])
            depth = stats.crossing(times.index.tolist(), (times / times.iloc[0] / TWICE).to_numpy())
            entry = {"model": model, "phase": phase, "deepest": int(curve.index[-1]), "last": last, "depth": depth}
            entries.append(entry)
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
    contexts = np.geomspace(1.0, growth.FARTHEST, 1025)
    for model, curve in reading.items():
        both, knot = curve.columns.intersection(writing[model].columns), bends.get(model, 0.0)
        ways = [(growth.continued(curve[block], knot), growth.continued(writing[model][block], knot)) for block in both]
        for n_out in OUTPUTS:
            shares = [growth.total(read, contexts) / _written(write, contexts, n_out) for read, write in ways]
            tokens = clustered.mapped(stats.crossing(np.log(contexts).tolist(), np.column_stack(shares)), math.exp)
            deepest = min(curve.index[-1], writing[model].index[-1] - n_out)
            entry = {"model": model, "n_out": n_out, "tokens": tokens}
            entries.append(entry | {"extrapolated": not tokens.value <= deepest})
    return pd.DataFrame(entries)


def _written(write: growth.Function, after: np.ndarray, n_out: int) -> np.ndarray:
    before, behind = np.split(growth.total(write, np.concatenate([after, after + n_out])), 2)
    return np.asarray(behind - before)


def pairs(rows: pd.DataFrame) -> list[tuple[str, str]]:
    """(hybrid, attention) models to compare: of equal bytes first where that model is there, with a window last."""
    names = sorted(curves(rows, "decode"), key=lambda name: ("matched" not in name, WITH_WINDOW in name, name))
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


def overtaking(rows: pd.DataFrame) -> pd.DataFrame:
    """Per phase and pair: who is faster at the deepest depth both have, and from where on.

    `last`: attention's time over the hybrid's at the `deepest`; `own` and `theirs`, both rates there (t/s). `outcome`:
    "inconclusive" there; the hybrid "overtakes" or "is overtaken" ("again": it began on that side, too) where some
    depth shows the contrary, and `depth` is from where on the end holds (`stats.crossing`); "faster" or "slower
    throughout" where every depth shows it, else "in the end".
    """
    entries, rate = [], rates(rows).set_index(["model", "phase", "depth"])["rate"]
    for (phase, hybrid, other), group in compared(rows).groupby(["phase", "hybrid", "other"], sort=False):
        known = curves(rows, str(phase))
        ratios = (known[str(other)] / known[str(hybrid)]).dropna(axis="columns").loc[group["depth"]]
        outcome = _outcome(group["ratio"].tolist())
        depth = stats.crossing(ratios.index.tolist(), ratios.to_numpy()) if "overtake" in outcome else NOWHERE
        deepest = int(group["depth"].iloc[-1])
        entry = {"phase": phase, "hybrid": hybrid, "other": other, "deepest": deepest, "last": group["ratio"].iloc[-1]}
        entry |= {who: rate[name, phase, deepest] for who, name in (("own", hybrid), ("theirs", other))}
        entries.append(entry | {"outcome": outcome, "depth": depth})
    return pd.DataFrame(entries)


def _outcome(by_depth: list[stats.Estimate]) -> str:
    sides = [ratio.above(1.0) for ratio in by_depth]
    faster = sides[-1] == "holds"
    if sides[-1] == "inconclusive":
        return "inconclusive"
    if {"holds", "does not hold"} <= set(sides):
        return ("overtakes" if faster else "is overtaken") + (" again" if sides[0] == sides[-1] else "")
    return f"{'faster' if faster else 'slower'} {'in the end' if 'inconclusive' in sides else 'throughout'}"


def beginnings(rows: pd.DataFrame) -> pd.DataFrame:
    """Decode at the two shallow depths, hybrid and attention of the same blocks, by three kinds of cell.

    Per pair and cell: `kind`, `depth`, `own` and `theirs` (s per step), `ratio` of attention's time over the hybrid's.
    "ladder": the first rung, in a context with room for the deepest; "alone": a context made for these steps only,
    several processes a block, after a shared prompt the first cell of notebook 03.
    """
    entries = []
    for (kind, depth), times in _near(rows).items():
        for hybrid, other in [pair for pair in pairs(rows) if set(pair) <= set(times) and pair[1] == pairs(rows)[0][1]]:
            own, theirs = (stats.median(times[name].dropna().tolist()) for name in (hybrid, other))
            entry = {"kind": kind, "depth": depth, "hybrid": hybrid, "other": other, "own": own, "theirs": theirs}
            entries.append(entry | {"ratio": paired_ratio(times[other], times[hybrid])})
    return pd.DataFrame(entries, columns=["kind", "depth", "hybrid", "other", "own", "theirs", "ratio"])


def kinds_compared(rows: pd.DataFrame) -> stats.Estimate:
    """How much the kind of cell changes the ratio of the first pair: that of the first rung over that of the last."""
    (hybrid, other), known = pairs(rows)[0], _near(rows)
    rung, alone = (known[kind] for kind in (("ladder", 0), list(known)[-1]))
    each = pd.concat([times[other] / times[hybrid] for times in (rung, alone)], axis=1).dropna()
    first, second = (each[name].tolist() for name in each)
    return stats.ratio(first, second)


def _near(rows: pd.DataFrame) -> dict[tuple[str, int], dict[str, pd.Series]]:
    """Seconds per step by block, model by model, by kind of cell and depth."""
    known = {("ladder", 0): {model: curve.iloc[0] for model, curve in curves(rows, "decode").items()}}
    for (model, depth), seconds in _alone(rows).groupby(["model", "n_prompt"])["seconds"]:
        known.setdefault(("alone", int(depth)), {})[str(model)] = seconds.droplevel(["model", "n_prompt"])
    return dict(sorted(known.items(), key=lambda item: (item[0][0] != "ladder", item[0][1])))


def _alone(rows: pd.DataFrame) -> pd.DataFrame:
    """Seconds per step of the short decode cells by model, depth and block: the median over a block's processes."""
    found = usable(rows)
    found = found[found["workload"] == "decode"]
    found = found.assign(seconds=found["samples_ns"].map(median_sample) / NS)
    return found.groupby(["model", "n_prompt", "block"])["seconds"].median().to_frame()


@once_a_frame
def explained(rows: pd.DataFrame) -> pd.DataFrame:
    """The hybrid with its published window over the same without, per phase and depth.

    `ratio` of times, paired by block; `windowed` and `plain`: seconds per token with and without.
    """
    entries = []
    for phase in PHASES:
        known = curves(rows, phase)
        for model in (name for name in known if WITH_WINDOW in name and name.replace(WITH_WINDOW, "") in known):
            plain = known[model.replace(WITH_WINDOW, "")]
            for depth in sorted(set(known[model].index) & set(plain.index)):
                ratio = paired_ratio(known[model].loc[depth], plain.loc[depth])
                times = {"windowed": known[model].loc[depth], "plain": plain.loc[depth]}
                medians = {name: stats.median(series.dropna().tolist()) for name, series in times.items()}
                entries.append({"model": model, "phase": phase, "depth": depth, "ratio": ratio} | medians)
    return pd.DataFrame(entries, columns=["model", "phase", "depth", "ratio", "windowed", "plain"])
