"""A claim is a sentence, an estimate, a threshold, and the verdict that follows: holds, does not hold, inconclusive."""

from typing import Any

from plamo_study.analysis.stats import Claim, Estimate


def above(claim: str, model: str, estimate: Estimate, threshold: float) -> dict[str, Any]:
    """That a quantity exceeds `threshold`."""
    return _claim(claim, model, estimate, f"above {threshold:g}", estimate.above(threshold))


def below(claim: str, model: str, estimate: Estimate, threshold: float) -> dict[str, Any]:
    """That a quantity stays under `threshold`."""
    return _claim(claim, model, estimate, f"below {threshold:g}", estimate.below(threshold))


def within(claim: str, model: str, estimate: Estimate, low: float, high: float) -> dict[str, Any]:
    """That a quantity lies in [low, high]: what "the same" needs."""
    return _claim(claim, model, estimate, f"{low:.3g} to {high:.3g}", estimate.within(low, high))


def _claim(claim: str, model: str, estimate: Estimate, wanted: str, verdict: Claim) -> dict[str, Any]:
    return {"claim": claim, "model": model, "estimate": estimate, "wanted": wanted, "verdict": verdict}
