"""Does speed depend on what the weights are? The same tensors with other values in them (models/values.py), side by side.

Frames in, estimates out. A process is one number; comparisons are paired by block.
"""

from typing import Any

import pandas as pd

from plamo_study.analysis import stats, timing
from plamo_study.models.values import DENORMAL, LIFELIKE
from plamo_study.studies.context import analysis
from plamo_study.studies.context.workload import FEW

WITHIN = (0.95, 1.05)  # times the usual time: a difference beyond it would move what this study prints
KINDS = {LIFELIKE: "heavy tails and outliers", DENORMAL: "states and inputs below 1e-38, sharp attention"}


def by_values(rows: pd.DataFrame) -> pd.DataFrame:
    """A line a model, kind of values, phase and depth: seconds a token over those with the usual values.

    `usual`: seconds with these; `ratio`: paired by block; `same`: whether the ratio lies within `WITHIN`.
    """
    entries: list[dict[str, Any]] = []
    for phase in analysis.PHASES:
        found = {model.rstrip("*"): times for model, times in analysis.curves(rows, phase, FEW).items()}
        for model, kind in ((m, k) for m in found for k in KINDS if f"{m}-{k}" in found):
            usual, other = found[model], found[f"{model}-{kind}"]
            for depth in usual.index.intersection(other.index):
                ratio = timing.paired_ratio(other.loc[depth].dropna(), usual.loc[depth].dropna())
                entry = {"model": f"{model}*", "values": kind, "phase": phase, "depth": int(depth)}
                entry |= {"usual": stats.median(usual.loc[depth].dropna().tolist()), "ratio": ratio}
                entries.append(entry | {"same": ratio.within(*WITHIN)})
    return pd.DataFrame(entries, columns=["model", "values", "phase", "depth", "usual", "ratio", "same"])
