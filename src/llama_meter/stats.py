"""Estimates with intervals. The process is the unit: every input is one number per process.

Chosen for what they cover with 3 to 10 processes (simulated at commit 53f8ee5): the percentile
bootstrap of a median covers 75 % with 3 processes and 87 % with 7, of a sum about 84 %; none is used here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

import numpy as np
from scipy import special  # not scipy.stats, whose import takes longer than most pages need to compute

CONFIDENCE = 0.95
FEW = 3  # processes or pairs; below, no interval is given, since two can agree by chance
ENOUGH = 6  # fewest values whose whole range covers a median with 95 %: 1 - 2 ** (1 - n)
CROSSING_LEVELS = (0.90, 0.93)  # lowest coverage of a crossing's interval, below ENOUGH blocks and from there on
STEEPEST = 30.0  # scale of the penalty on its slope in log load, for loads that split cleanly into met and failed
NEEDED = {0.9: 29, 0.95: 59, 0.99: 299}  # samples for a 95 % distribution-free bound on a percentile
Claim = Literal["holds", "does not hold", "inconclusive"]
NAN = float("nan")


@dataclass(frozen=True)
class Estimate:
    """A value with its interval from `n` processes; the bounds are NaN below FEW, where the range is printed.

    `level`: the interval's coverage, 0.95 unless n is too small for it. `units`: one number per process, from which
    p-values are computed (empty where there are none); `in_logs`: they are logarithms. `among`: the number of estimates
    from which this one was selected for its value; interval and p-values hold for all of them at once (`selected`).
    `success`: of a share, what counts for a successful trial among `units`; its p-values are exact, as its interval is.
    """

    value: float
    low: float
    high: float
    n: int
    level: float = CONFIDENCE
    units: tuple[float, ...] = field(default=(), repr=False)
    in_logs: bool = field(default=True, repr=False)
    among: int = field(default=1, repr=False)
    success: float = field(default=0.0, repr=False)

    def above(self, threshold: float) -> Claim:
        """Whether the quantity exceeds `threshold`; inconclusive where the interval straddles it."""
        if self.low > threshold:
            return "holds"
        return "does not hold" if self.high < threshold else "inconclusive"

    def below(self, threshold: float) -> Claim:
        """Whether the quantity is below `threshold`; inconclusive where the interval straddles it."""
        if self.high < threshold:
            return "holds"
        return "does not hold" if self.low > threshold else "inconclusive"

    def within(self, low: float, high: float) -> Claim:
        """Whether the quantity lies in [low, high]: the equivalence test that "no difference" needs."""
        if low <= self.low and self.high <= high:
            return "holds"
        return "does not hold" if self.high < low or self.low > high else "inconclusive"

    def p(self, threshold: float) -> float:
        """Two-sided p that the quantity equals `threshold`, by a t test of the units; NaN where there are too few."""
        if self.success:
            return _binomial(sum(unit > 0 for unit in self.units), len(self.units), threshold / self.success)
        if len(self.units) < 2 or (self.in_logs and threshold <= 0):
            return NAN
        off = np.asarray(self.units) - (np.log(threshold) if self.in_logs else threshold)
        alike = np.ptp(off) < 1e-12
        return float(abs(off[0]) < 1e-12) if alike else min(1.0, t_test(off) * self.among)

    def scaled(self, factor: float) -> "Estimate":
        """The same estimate in another unit (a positive factor)."""
        moved = np.asarray(self.units) + np.log(factor) if self.in_logs else np.asarray(self.units) * factor
        units = tuple(moved.tolist())
        return replace(
            self,
            value=self.value * factor,
            low=self.low * factor,
            high=self.high * factor,
            units=units,
            success=self.success * factor,
        )

    def per(self, work: float) -> "Estimate":
        """`work` over this quantity, such as a rate from a time: the bounds swap."""
        units = tuple((np.log(work) - np.asarray(self.units)).tolist()) if self.in_logs and work > 0 else ()
        return replace(self, value=work / self.value, low=work / self.high, high=work / self.low, units=units)

    @property
    def few(self) -> bool:
        """Whether processes are too few for an interval; a share has an exact one."""
        return self.n < FEW and bool(self.units) and not self.success

    def __format__(self, spec: str) -> str:
        if self.few:
            ends = np.array([min(self.units), max(self.units)])
            least, most = np.exp(ends) if self.in_logs else ends
            return f"{least:{spec}} to {most:{spec}} ({self.n} processes)"
        if np.isnan(self.low):
            return f"{self.value:{spec}} (n = {self.n})"
        level = "" if called_95(self.level) else f"; {self.level:.0%}"
        return f"{self.value:{spec}} [{self.low:{spec}}, {self.high:{spec}}{level}]"


def _binomial(successes: int, n: int, share: float) -> float:
    """Two-sided exact p that `n` independent trials succeed with this probability: twice the smaller tail."""
    if not n or not 0 < share < 1:
        return NAN
    below = special.bdtr(successes, n, share)
    above = special.bdtrc(successes - 1, n, share) if successes else 1.0
    return float(min(1.0, 2 * min(below, above)))


def called_95(level: float) -> bool:
    """Whether an interval of this level may be called one of 95 %."""
    return level >= CONFIDENCE - 1e-9


def median(values: Sequence[float]) -> Estimate:
    """Median over processes, with an interval from order statistics: exact for any distribution.

    For six values or more, two neighbouring order-statistic intervals are interpolated to 95 % (Hettmansperger and
    Sheather 1986, "Confidence intervals based on interpolated order statistics"). From FEW on, the interval is the
    whole range with its own level, 1 - 2 ** (1 - n): 94 % of five values, 88 % of four, 75 % of three.
    """
    ordered = np.sort(np.asarray(values, float))
    n = len(ordered)
    if n < 2:
        return Estimate(float(np.median(ordered)) if n else NAN, NAN, NAN, n)
    low, high = _order_statistics(ordered) if n >= FEW else (NAN, NAN)
    logs = tuple(np.log(values).tolist()) if ordered[0] > 0 else ()
    level = CONFIDENCE if n >= ENOUGH else 1 - 2.0 ** (1 - n)
    return Estimate(float(np.median(ordered)), float(low), float(high), n, level, logs)


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Estimate:
    """Ratio of two quantities measured in the same blocks: the median of the pairs' ratios, with its interval.

    Computed on logarithms, so that the inverse ratio is the reciprocal. The quotient of the two medians is
    another quantity, which a shift between blocks moves: a table prints it too where the two differ much.
    """
    logs = np.log(np.asarray(numerator, float)) - np.log(np.asarray(denominator, float))
    n = len(logs)
    value = float(np.exp(np.median(logs))) if n else NAN
    if n < 2:
        return Estimate(value, NAN, NAN, n)
    low, high = (float(np.exp(bound)) for bound in paired_bounds(logs)) if n >= FEW else (NAN, NAN)
    return Estimate(value, low, high, n, CONFIDENCE, tuple(logs.tolist()))


def selected(estimate: Estimate, among: int) -> Estimate:
    """An estimate chosen from `among` estimates because it is the largest or the smallest.

    Noise favours the estimate that is chosen, so its own interval covers too seldom. This interval holds for all of
    them at once with 95 % (Bonferroni); the value is still biased towards its choice. Only for medians and ratios: a
    crossing and a sum take `among` as an argument, and other estimates get NaN bounds.
    """
    logs, among = np.asarray(estimate.units), max(among, 1) * estimate.among
    if among == 1:
        return estimate
    if len(logs) < FEW or not estimate.in_logs:
        return replace(estimate, low=NAN, high=NAN, among=among)
    with np.errstate(over="ignore"):  # with few blocks, a choice among many has no finite bounds
        low, high = (float(np.exp(bound)) for bound in paired_bounds(logs, family_level(among)))
    return replace(estimate, low=low, high=high, level=CONFIDENCE, among=among)


def family_level(among: int) -> float:
    """Level of each of `among` intervals such that all hold at once with 95 % (Bonferroni)."""
    return 1 - (1 - CONFIDENCE) / max(among, 1)


def paired_bounds(differences: np.ndarray, level: float = CONFIDENCE) -> tuple[np.ndarray, np.ndarray]:
    """The interval of the median of paired differences: (..., blocks), at least two blocks, to a pair of (...).

    Order statistics where the whole range of the blocks covers `level` (from six blocks on for 95 %), else Student's t.
    Differences of like processes are symmetric, so the mean's interval covers the median there. It always contains the
    median of the values, since no median is more than a standard deviation from its mean.
    """
    n = differences.shape[-1]
    if 1 - 2.0 ** (1 - n) >= level:
        return _order_statistics(np.sort(differences), level)
    middle, reach = differences.mean(-1), t_quantile(n - 1, level) * differences.std(-1, ddof=1) / n**0.5
    return middle - reach, middle + reach


def t_quantile(freedom: int, level: float = CONFIDENCE) -> float:
    """Quantile of Student's t for a two-sided interval of this level."""
    return float(special.stdtrit(freedom, 0.5 + level / 2))


def t_test(values: np.ndarray) -> float:
    """Two-sided p of Student's t test that independent values have mean 0; 0 where all are equal."""
    n, error = len(values), values.std(ddof=1)
    return float(2 * special.stdtr(n - 1, -abs(values.mean()) * n**0.5 / error)) if error else 0.0


def crossing(x: Sequence[float], ratios: np.ndarray, points: int = 2001, among: int = 1) -> Estimate:
    """The last x at which the ratio of two curves passes 1, with an interval from inverting the paired comparison.

    `ratios`: (len(x), blocks), at least two blocks; their logarithms are interpolated between the points of `x`. The
    value is where the median ratio passes 1. The interval contains every x around it at which the paired interval
    contains 1 (Fieller 1954), at the level found by simulation. A bound is infinite where it reaches an end of `x`; all
    are NaN where the ratio does not pass 1. `among`: the number of crossings from which it is `selected`.
    """
    grid = np.linspace(float(x[0]), float(x[-1]), points)
    logs = np.array([np.interp(grid, x, column) for column in np.log(np.asarray(ratios, float)).T])
    middle, n = np.median(logs, axis=0), len(logs)
    passes = np.flatnonzero(np.sign(middle[:-1]) * np.sign(middle[1:]) < 0)
    if not len(passes) or n < 2:
        return Estimate(NAN, NAN, NAN, n)
    at = int(passes[-1])
    value = grid[at] + (grid[at + 1] - grid[at]) * middle[at] / (middle[at] - middle[at + 1])
    if n < FEW:
        return Estimate(float(value), NAN, NAN, n)
    low, high = paired_bounds(logs.T, family_level(among))
    open_at = (low <= 0) & (high >= 0)
    first, last = at, at + 1
    while first >= 0 and open_at[first]:
        first -= 1
    while last < points and open_at[last]:
        last += 1
    begin, end = grid[first] if first >= 0 else -np.inf, grid[last] if last < points else np.inf
    return Estimate(float(value), float(begin), float(end), n, CROSSING_LEVELS[n >= ENOUGH], among=among)


def threshold(loads: Sequence[float], shares: Sequence[float], level: float, n: int) -> float:
    """The load at which the expected share of `n` requests that met their objectives falls to `level`: a knee.

    `loads` and `shares` have one entry per tried load. A bisection visits few loads with few requests each, and one
    unlucky load misleads it for good, so a falling logistic curve is fitted to all loads of all servers.
    """
    from scipy import optimize  # slow to import, and one page needs it

    x, y = np.log(np.asarray(loads, float)), np.asarray(shares, float)
    away = x - x.mean()

    def loss(curve: np.ndarray) -> float:
        odds = curve[0] - curve[1] * away
        penalty = 1e-6 * curve[0] ** 2 + n / STEEPEST**2 * curve[1] ** 2
        return float(n * (np.logaddexp(0, odds) - y * odds).sum() + penalty / 2)

    middle, slope = optimize.minimize(loss, [0.0, 1.0]).x
    return float(np.exp(x.mean() + (middle - np.log(level / (1 - level))) / max(slope, 1e-3)))


def variation(values: Sequence[float]) -> float:
    """Coefficient of variation: standard deviation over mean; NaN for fewer than two values."""
    return float(np.std(values, ddof=1) / np.mean(values)) if len(values) > 1 and np.mean(values) else NAN


def _order_statistics(ordered: np.ndarray, level: float = CONFIDENCE) -> tuple[np.ndarray, np.ndarray]:
    """Bounds for the median of values sorted along the last axis: interpolated, or their range if that covers less."""
    n = ordered.shape[-1]
    k, inward = _interpolated(n, level) if 1 - 2.0 ** (1 - n) >= level else (0, 0.0)
    low = (1 - inward) * ordered[..., k] + inward * ordered[..., k + 1]
    high = (1 - inward) * ordered[..., n - 1 - k] + inward * ordered[..., n - 2 - k]
    return low, high


@lru_cache
def _interpolated(n: int, level: float) -> tuple[int, float]:
    """The last order statistic k (from 0) that covers the level, and the fraction to move inward from it."""
    covers = 1 - 2 * special.bdtr(np.arange(n // 2), n, 0.5)
    k = int(np.flatnonzero(covers >= level)[-1])
    outer, inner = covers[k], covers[k + 1] if k + 1 < len(covers) else 0.0
    share = (outer - level) / (outer - inner)
    return k, float((n - k - 1) * share / (k + 1 + (n - 2 * k - 2) * share))
