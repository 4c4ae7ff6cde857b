"""Estimates with intervals. The process is the unit: every input is one number per process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
RESAMPLES = 4999
SEED = 20261120
NEEDED = {0.5: 1, 0.9: 29, 0.95: 59, 0.99: 299}  # samples for a 95 % distribution-free bound on a percentile
Claim = Literal["holds", "does not hold", "inconclusive"]


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval from `n` processes; the bounds are NaN where n is too small to say."""

    value: float
    low: float
    high: float
    n: int

    def above(self, threshold: float) -> Claim:
        """Whether the quantity exceeds `threshold`, or the interval straddles it."""
        if self.low > threshold:
            return "holds"
        return "does not hold" if self.high < threshold else "inconclusive"

    def below(self, threshold: float) -> Claim:
        """Whether the quantity stays under `threshold`, or the interval straddles it."""
        if self.high < threshold:
            return "holds"
        return "does not hold" if self.low > threshold else "inconclusive"

    def within(self, low: float, high: float) -> Claim:
        """Whether the quantity lies in [low, high]: the equivalence test that "no difference" needs."""
        if low <= self.low and self.high <= high:
            return "holds"
        return "does not hold" if self.high < low or self.low > high else "inconclusive"

    def scaled(self, factor: float) -> "Estimate":
        """The same estimate in another unit."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor, self.n)

    def __format__(self, spec: str) -> str:
        if np.isnan(self.low):
            return f"{self.value:{spec}} (n = {self.n})"
        return f"{self.value:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


def median(values: Sequence[float]) -> Estimate:
    """Median over processes with a percentile-bootstrap interval."""
    return _bootstrap((values,), lambda x, axis=-1: np.median(x, axis=axis))


def throughput(tokens: Sequence[float], seconds: Sequence[float]) -> Estimate:
    """Tokens per second: all tokens over all time, resampled by process."""
    return _bootstrap((tokens, seconds), lambda t, s, axis=-1: np.sum(t, axis=axis) / np.sum(s, axis=axis))


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Estimate:
    """Ratio of two quantities measured in the same blocks: exp of the median log ratio, paired by block."""
    logs = np.log(np.asarray(numerator, float)) - np.log(np.asarray(denominator, float))
    in_logs = median(logs.tolist())
    return Estimate(float(np.exp(in_logs.value)), float(np.exp(in_logs.low)), float(np.exp(in_logs.high)), in_logs.n)


def percentile(samples: Sequence[float], q: float) -> float:
    """The q-quantile, or NaN when there are too few samples for a distribution-free bound on it."""
    return float(np.quantile(samples, q)) if len(samples) >= NEEDED[q] else float("nan")


def variation(values: Sequence[float]) -> float:
    """Coefficient of variation: standard deviation over mean; NaN for fewer than two values."""
    return float(np.std(values, ddof=1) / np.mean(values)) if len(values) > 1 else float("nan")


def _bootstrap(data: tuple[Sequence[float], ...], statistic: Callable[..., np.ndarray]) -> Estimate:
    arrays = tuple(np.asarray(values, float) for values in data)
    n = len(arrays[0])
    value = float(statistic(*arrays)) if n else float("nan")
    if n < 2:
        return Estimate(value, float("nan"), float("nan"), n)
    interval = stats.bootstrap(
        arrays,
        statistic,
        paired=True,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(SEED),
    ).confidence_interval
    return Estimate(value, float(interval.low), float(interval.high), n)
