"""A claim is a sentence, an estimate, a threshold, and the verdict that follows: holds, does not hold, inconclusive.

The claims of one table are a family. A verdict other than "inconclusive" needs both: an interval on one side of the
threshold, and a p-value that stays at or below 5 % after Benjamini and Hochberg's correction for the whole family.
"""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from plamo_study.analysis import clustered
from plamo_study.analysis.stats import CONFIDENCE, Claim, Estimate

COLUMNS = ["claim", "model", "estimate", "wanted", "verdict", "p", "p_adjusted"]


def above(claim: str, model: str, estimate: Estimate, threshold: float) -> dict[str, Any]:
    """The claim that a quantity exceeds `threshold`."""
    return _claim(claim, model, estimate, f"above {threshold:g}", estimate.above(threshold), estimate.p(threshold))


def below(claim: str, model: str, estimate: Estimate, threshold: float) -> dict[str, Any]:
    """The claim that a quantity is below `threshold`."""
    return _claim(claim, model, estimate, f"below {threshold:g}", estimate.below(threshold), estimate.p(threshold))


def within(claim: str, model: str, estimate: Estimate, low: float, high: float) -> dict[str, Any]:
    """The claim that a quantity lies in [low, high]: "the same", as two one-sided tests."""
    sides = (estimate.p(low), estimate.p(high))
    inside = low <= estimate.value <= high
    p = max(sides) if inside else min(sides)
    return _claim(claim, model, estimate, f"{low:.3g} to {high:.3g}", estimate.within(low, high), p)


def family(entries: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """The claims of one table, corrected for their number; columns COLUMNS, `p_adjusted` after the correction."""
    table = pd.DataFrame(entries, columns=COLUMNS[:-1])
    table["p_adjusted"] = clustered.adjusted(table["p"].tolist())
    table.loc[~(table["p_adjusted"] <= 1 - CONFIDENCE), "verdict"] = "inconclusive"
    return table


def _claim(claim: str, model: str, estimate: Estimate, wanted: str, verdict: Claim, p: float) -> dict[str, Any]:
    return {"claim": claim, "model": model, "estimate": estimate, "wanted": wanted, "verdict": verdict, "p": p}
