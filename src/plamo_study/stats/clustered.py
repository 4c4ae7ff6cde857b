"""Intervals for tokens in chunks: the unit is the chunk, never the token, since neighbouring tokens are alike.

Neighbouring chunks of one text are alike too: an interval holds for texts like this one. Nothing here knows models.
"""

from collections.abc import Callable, Sequence

import numpy as np
from scipy import special

from llama_meter.stats import CONFIDENCE, Estimate, family_level, t_quantile, t_test

Numbers = Sequence[float] | np.ndarray
POWER = 0.8
NAN = float("nan")
SUM_LEVELS = (  # least number of chunks, and an interval's lowest coverage under the noise of stats/coverage.py
    (32, 0.95),
    (24, 0.90),
    (20, 0.85),
    (16, 0.80),
    (12, 0.70),
    (8, 0.60),
    (3, 0.55),
)


def ratio_of_sums(numerators: Numbers, denominators: Numbers, among: int = 1) -> Estimate:
    """Ratio of two sums: a mean per token when the denominators count tokens.

    The interval is Student's, of the linearised ratio (Cochran 1977, section 6), after Hall's transformation, which
    removes the chunks' skewness (Hall 1992, "On the removal of skewness by transformation"). Its level is `sum_level`:
    heavy tails take some thirty chunks to show. `among`: as in `stats.selected`.
    """
    above, below = np.asarray(numerators, float), np.asarray(denominators, float)
    n = len(above)
    value = float(above.sum() / below.sum()) if n else NAN
    if n < 3:
        return Estimate(value, NAN, NAN, n)
    off = (above - value * below) / below.mean()
    error = float(off.std(ddof=1)) / n**0.5
    if not error:
        return Estimate(value, value, value, n)
    skewness = float((off**3).sum() * n / ((n - 1) * (n - 2))) / (error**3 * n**2)
    reach = t_quantile(n - 1, family_level(among))
    low, high = value - error * _unskewed(reach, skewness), value - error * _unskewed(-reach, skewness)
    return Estimate(value, low, high, n, sum_level(n), tuple((value + off).tolist()), in_logs=False, among=among)


def sum_level(n: int) -> float:
    """The least coverage of an interval of `ratio_of_sums` with n chunks, simulated at commit 53f8ee5."""
    return next((level for least, level in SUM_LEVELS if n >= least), NAN)


def _unskewed(t: float, skewness: float) -> float:
    """Inverse of Hall's transformation t + g t^2 / 3 + g^2 t^3 / 27 + g / 6, with g the skewness over sqrt(n)."""
    if abs(skewness) < 1e-9:
        return t
    return float(3 / skewness * (np.cbrt(1 + skewness * (t - skewness / 6)) - 1))


def quantile(q: float, below: Numbers, tokens: Numbers, grid: Sequence[float], values: Sequence[float]) -> Estimate:
    """The q-quantile over tokens; `values` are quantiles at `grid`, `below` counts each chunk's tokens up to it.

    The interval of the share below is converted to one of the quantile, as in Woodruff 1952 ("Confidence intervals
    for medians and other position measures"). NaN bounds where it reaches past the largest value.
    """
    share, value = ratio_of_sums(below, tokens), float(np.interp(q, grid, values))
    if np.isnan(share.low) or share.value + q - share.low >= 1:
        return Estimate(value, NAN, NAN, share.n)
    low, high = np.interp([share.value + q - share.high, share.value + q - share.low], grid, values)
    return Estimate(value, min(float(low), value), max(float(high), value), share.n, share.level)


def mapped(estimate: Estimate, function: Callable[[float], float]) -> Estimate:
    """An estimate after an increasing function, applied to its bounds too."""
    return Estimate(
        function(estimate.value), function(estimate.low), function(estimate.high), estimate.n, estimate.level
    )


def p_value(differences: Numbers) -> float:
    """Two-sided p that differences per chunk have the mean 0 (paired t test); 1 where all are 0, NaN below two."""
    values = np.asarray(differences, float)
    if len(values) < 2:
        return NAN
    return t_test(values) if values.any() else 1.0


def detectable(differences: Numbers) -> float:
    """Smallest true mean difference that such chunks detect with a power of 80 %, two-sided at 5 %.

    (t(0.975) + t(0.8)) · s / √n, Bloom 1995 ("Minimum detectable effects"); in the unit of the differences.
    """
    n = len(differences)
    if n < 2:
        return NAN
    return float((t_quantile(n - 1) + special.stdtrit(n - 1, POWER)) * np.std(differences, ddof=1) / n**0.5)


def adjusted(p_values: Sequence[float]) -> list[float]:
    """Benjamini-Hochberg-adjusted p-values in the given order; NaN stays NaN and does not count.

    Each is the smallest of p · n / rank over the p-values that are no smaller (Benjamini and Hochberg 1995).
    """
    p = np.array(p_values, float)
    tested = ~np.isnan(p)
    order = np.flatnonzero(tested)[np.argsort(p[tested])[::-1]]  # the largest first
    ranks = np.arange(len(order), 0, -1)
    p[order] = np.minimum.accumulate(np.minimum(p[order] * len(order) / ranks, 1))
    return p.tolist()


def rate(successes: int, n: int) -> Estimate:
    """A share of `n` independent trials with its exact (Clopper-Pearson) interval."""
    if not n:
        return Estimate(NAN, NAN, NAN, 0)
    outside, failures = (1 - CONFIDENCE) / 2, n - successes
    low = special.betaincinv(successes, failures + 1, outside) if successes else 0.0
    high = special.betaincinv(successes + 1, failures, 1 - outside) if failures else 1.0
    units = (1.0,) * successes + (0.0,) * failures
    return Estimate(successes / n, float(low), float(high), n, units=units, in_logs=False, success=1.0)
