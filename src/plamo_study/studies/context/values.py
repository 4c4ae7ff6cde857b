"""Does speed depend on what the weights are? The same tensors with other values in them (models/values.py).

Frames in, estimates out. A process is one number; comparisons are paired by block.
"""

from itertools import product
from typing import Any

import pandas as pd

from plamo_study.analysis import stats, timing
from plamo_study.models.values import DENORMAL, LIFELIKE
from plamo_study.studies.context import analysis
from plamo_study.studies.context.workload import FEW

WITHIN = (0.95, 1.05)  # times the usual time: a difference beyond it would move what this study prints
KINDS = {LIFELIKE: "heavy tails and outliers", DENORMAL: "states and inputs below 1e-38, sharp attention"}


def by_values(rows: pd.DataFrame) -> pd.DataFrame:
    """A line a model, kind of values, phase, depth and place of the weights (`mapped`: pages of the file).

    `usual`: seconds a token with the usual values; `ratio`: of the others over these, paired by block; `same`: whether
    it lies within `WITHIN`.
    """
    entries: list[dict[str, Any]] = []
    for mapped, (phase, found) in product((False, True), _curves(rows)):
        known = found[mapped]
        for model, kind in ((m, k) for m in known for k in KINDS if f"{m}-{k}" in known):
            usual, other = known[model], known[f"{model}-{kind}"]
            for depth in usual.index.intersection(other.index):
                ratio = timing.paired_ratio(other.loc[depth].dropna(), usual.loc[depth].dropna())
                entry = {"model": f"{model}*", "values": kind, "phase": phase, "depth": int(depth), "mapped": mapped}
                entry |= {"usual": stats.median(usual.loc[depth].dropna().tolist()), "ratio": ratio}
                entries.append(entry | {"same": ratio.within(*WITHIN)})
    columns = ["model", "values", "phase", "depth", "mapped", "usual", "ratio", "same"]
    return pd.DataFrame(entries, columns=columns)


def _curves(rows: pd.DataFrame) -> list[tuple[str, dict[bool, dict[str, pd.DataFrame]]]]:
    """Seconds a token by phase, place of the weights and model."""
    places = {mapped: rows[rows["use_mmap"] == mapped] for mapped in (False, True)}
    return [
        (
            phase,
            {
                mapped: {model.rstrip("*"): times for model, times in analysis.curves(own, phase, FEW).items()}
                for mapped, own in places.items()
            },
        )
        for phase in analysis.PHASES
    ]
