"""Estimates with intervals. The process is the unit: every input is one number per process.

Chosen for what they cover with 3 to 10 processes (`plamo-study selfcheck --coverage` simulates it): the percentile
bootstrap of a median covers 75 % with 3 processes and 87 % with 7, of a sum about 84 %; none is used here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

import numpy as np
from scipy import special  # and not scipy.stats, which takes longer to load than most pages to compute

CONFIDENCE = 0.95
ENOUGH = 6  # values from which the whole range covers a median with 95 %: 1 - 2 ** (1 - n)
CROSSING_LEVELS = (0.90, 0.93)  # what a crossing's interval covers at the least, below and from ENOUGH blocks on
NEEDED = {0.5: 1, 0.9: 29, 0.95: 59, 0.99: 299}  # samples for a 95 % distribution-free bound on a percentile
Claim = Literal["holds", "does not hold", "inconclusive"]
NAN = float("nan")


@dataclass(frozen=True)
class Estimate:
    """A value with its interval from `n` processes; the bounds are NaN where n is too small to say.

    `level`: what the interval covers, 0.95 unless n is too small for it. `units`: one number per process, which
    p-values come from (empty where there are none); `in_logs`: they are logarithms.
    """

    value: float
    low: float
    high: float
    n: int
    level: float = CONFIDENCE
    units: tuple[float, ...] = field(default=(), repr=False)
    in_logs: bool = field(default=True, repr=False)

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

    def p(self, threshold: float) -> float:
        """Two-sided p that the quantity is `threshold`, by a t test of the units; NaN where there are too few."""
        if len(self.units) < 2 or (self.in_logs and threshold <= 0):
            return NAN
        off = np.asarray(self.units) - (np.log(threshold) if self.in_logs else threshold)
        alike = np.ptp(off) < 1e-12
        return float(abs(off[0]) < 1e-12) if alike else t_test(off)

    def scaled(self, factor: float) -> "Estimate":
        """The same estimate in another unit (a positive factor)."""
        moved = np.asarray(self.units) + np.log(factor) if self.in_logs else np.asarray(self.units) * factor
        units = tuple(moved.tolist())
        return replace(self, value=self.value * factor, low=self.low * factor, high=self.high * factor, units=units)

    def per(self, work: float) -> "Estimate":
        """`work` over this quantity, such as a rate from a time: the bounds change places."""
        units = tuple((np.log(work) - np.asarray(self.units)).tolist()) if self.in_logs and work > 0 else ()
        return replace(self, value=work / self.value, low=work / self.high, high=work / self.low, units=units)

    def __format__(self, spec: str) -> str:
        if np.isnan(self.low):
            return f"{self.value:{spec}} (n = {self.n})"
        level = "" if called_95(self.level) else f"; {self.level:.0%}"
        return f"{self.value:{spec}} [{self.low:{spec}}, {self.high:{spec}}{level}]"


def called_95(level: float) -> bool:
    """Whether an interval of this level may be called one of 95 %."""
    return level >= CONFIDENCE - 1e-9


def median(values: Sequence[float]) -> Estimate:
    """Median over processes, with an interval from order statistics: exact for any distribution.

    From six values on two neighbouring order-statistic intervals are interpolated to 95 % (Hettmansperger and Sheather
    1986, "Confidence intervals based on interpolated order statistics"). Below, the interval is the whole range and
    carries its own level, 1 - 2 ** (1 - n): 94 % of five values, 88 % of four, 75 % of three.
    """
    ordered = np.sort(np.asarray(values, float))
    n = len(ordered)
    if n < 2:
        return Estimate(float(np.median(ordered)) if n else NAN, NAN, NAN, n)
    low, high = _order_statistics(ordered)
    logs = tuple(np.log(values).tolist()) if ordered[0] > 0 else ()
    level = CONFIDENCE if n >= ENOUGH else 1 - 2.0 ** (1 - n)
    return Estimate(float(np.median(ordered)), float(low), float(high), n, level, logs)


def rate(work: float, seconds: Sequence[float]) -> Estimate:
    """Work per second: `work` over the median time of the processes that each did it. One slow process moves little."""
    return median(seconds).per(work)


def ratio(numerator: Sequence[float], denominator: Sequence[float], value: float | None = None) -> Estimate:
    """Ratio of two quantities measured in the same blocks.

    `value` is the quotient of the two medians, so that it divides the rates printed beside it; it can be given where
    these rest on more processes than the pairs. The interval is of the logarithms' differences, paired by block: order
    statistics from six blocks on, Student's t below (differences of like processes are symmetric, so t covers what it
    says). Where quotient and differences disagree the interval is extended to hold the quotient.
    """
    above, below = np.asarray(numerator, float), np.asarray(denominator, float)
    logs = np.log(above) - np.log(below)
    n = len(logs)
    if value is None:
        value = float(np.median(above) / np.median(below)) if n else NAN
    if n < 2:
        return Estimate(value, NAN, NAN, n)
    low, high = (float(np.exp(bound)) for bound in paired_bounds(logs))
    return Estimate(value, min(low, value), max(high, value), n, CONFIDENCE, tuple(logs.tolist()))


def paired_bounds(differences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 95 % interval of the middle of paired differences: (..., blocks) with at least two blocks to two (...)."""
    n = differences.shape[-1]
    if n >= ENOUGH:
        return _order_statistics(np.sort(differences))
    middle, reach = differences.mean(-1), t_quantile(n - 1) * differences.std(-1, ddof=1) / n**0.5
    return middle - reach, middle + reach


@lru_cache
def t_quantile(freedom: int) -> float:
    """Student's t that a two-sided 95 % interval reaches to."""
    return float(special.stdtrit(freedom, 0.5 + CONFIDENCE / 2))


def t_test(values: np.ndarray) -> float:
    """Two-sided p that independent values have the mean 0: Student's t test, 0 where all are alike."""
    n, error = len(values), values.std(ddof=1)
    return float(2 * special.stdtr(n - 1, -abs(values.mean()) * n**0.5 / error)) if error else 0.0


def crossing(x: Sequence[float], ratios: np.ndarray, points: int = 2001) -> Estimate:
    """Where the ratio of two curves passes 1 for the last time, with an interval by inverting the paired comparison.

    `ratios`: (len(x), blocks), at least two blocks; between the points of `x` their logarithms are interpolated. The
    value is where the median ratio passes 1. The interval reaches over every x around it at which the paired interval
    holds 1 (Fieller 1954) and carries the level that the simulation gives it. A bound is infinite where that reaches an
    end of `x`; all are NaN where nothing passes 1.
    """
    grid = np.linspace(float(x[0]), float(x[-1]), points)
    logs = np.array([np.interp(grid, x, column) for column in np.log(np.asarray(ratios, float)).T])
    middle, n = np.median(logs, axis=0), len(logs)
    passes = np.flatnonzero(np.sign(middle[:-1]) * np.sign(middle[1:]) < 0)
    if not len(passes) or n < 2:
        return Estimate(NAN, NAN, NAN, n)
    at = int(passes[-1])
    value = grid[at] + (grid[at + 1] - grid[at]) * middle[at] / (middle[at] - middle[at + 1])
    low, high = paired_bounds(logs.T)
    open_at = (low <= 0) & (high >= 0)
    first, last = at, at + 1
    while first >= 0 and open_at[first]:
        first -= 1
    while last < points and open_at[last]:
        last += 1
    begin, end = grid[first] if first >= 0 else -np.inf, grid[last] if last < points else np.inf
    return Estimate(float(value), float(begin), float(end), n, CROSSING_LEVELS[n >= ENOUGH])


def percentile(samples: Sequence[float], q: float) -> float:
    """The q-quantile, or NaN when there are too few samples for a distribution-free bound on it."""
    return float(np.quantile(samples, q)) if len(samples) >= NEEDED[q] else NAN


def variation(values: Sequence[float]) -> float:
    """Coefficient of variation: standard deviation over mean; NaN for fewer than two values."""
    return float(np.std(values, ddof=1) / np.mean(values)) if len(values) > 1 else NAN


def _order_statistics(ordered: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bounds for the median of values sorted along the last axis: their whole range, from `ENOUGH` on interpolated."""
    n = ordered.shape[-1]
    k, inward = _interpolated(n) if n >= ENOUGH else (0, 0.0)
    low = (1 - inward) * ordered[..., k] + inward * ordered[..., k + 1]
    high = (1 - inward) * ordered[..., n - 1 - k] + inward * ordered[..., n - 2 - k]
    return low, high


@lru_cache
def _interpolated(n: int) -> tuple[int, float]:
    """The last order statistic k (from 0) that still covers 95 %, and how far inward of it 95 % lies."""
    covers = 1 - 2 * special.bdtr(np.arange(n // 2), n, 0.5)
    k = int(np.flatnonzero(covers >= CONFIDENCE)[-1])
    outer, inner = covers[k], covers[k + 1] if k + 1 < len(covers) else 0.0
    share = (outer - CONFIDENCE) / (outer - inner)
    return k, float((n - k - 1) * share / (k + 1 + (n - 2 * k - 2) * share))
