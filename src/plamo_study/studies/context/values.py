"""Does speed depend on what the weights are? The same tensors with other values in them (models/values.py).

Frames in, estimates out. A process is one number; comparisons are paired by block.
"""

from collections.abc import Iterator
from typing import Any

import pandas as pd

from plamo_study.analysis import stats, timing
from plamo_study.models.values import DENORMAL, LIFELIKE
from plamo_study.studies.context import analysis
from plamo_study.studies.context.ways import FEW

WITHIN = (0.95, 1.05)  # times the usual time: a difference beyond it would move what this study prints
KINDS = {LIFELIKE: "heavy tails and outliers", DENORMAL: "states and inputs below 1e-38, sharp attention"}


def by_values(rows: pd.DataFrame) -> pd.DataFrame:
    """A line a model, kind of values, phase, depth and place of the weights (`mapped`: pages of the file).

    `usual`: seconds a token with the usual values; `ratio`: of the others over these, paired by block; `same`: whether
    it lies within `WITHIN`.
    """
    entries: list[dict[str, Any]] = []
    for mapped in (False, True):
        own = rows[rows["use_mmap"] == mapped]
        for phase in analysis.PHASES:
            known = {model.rstrip("*"): times for model, times in analysis.curves(own, phase, FEW).items()}
            for model, kind in ((m, k) for m in known for k in KINDS if f"{m}-{k}" in known):
                cell = {"model": f"{model}*", "values": kind, "phase": phase, "mapped": mapped}
                entries += [cell | line for line in _by_depth(known[model], known[f"{model}-{kind}"])]
    columns = ["model", "values", "phase", "depth", "mapped", "usual", "ratio", "same"]
    return pd.DataFrame(entries, columns=columns)


def _by_depth(usual: pd.DataFrame, other: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """The two beside one another at every depth that both have."""
    for depth in usual.index.intersection(other.index):
        ratio = timing.paired_ratio(other.loc[depth], usual.loc[depth])
        middle = stats.median(usual.loc[depth].dropna().tolist())
        yield {"depth": int(depth), "usual": middle, "ratio": ratio, "same": ratio.within(*WITHIN)}
