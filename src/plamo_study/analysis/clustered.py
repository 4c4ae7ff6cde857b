"""Intervals for tokens that come in chunks: the chunk is resampled, never the token, whose neighbours are like it.

All estimates over the same chunks share their resamples, so what is compared is paired. It knows no models.
Neighbouring chunks of one text are alike too: an interval speaks of texts like this one.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from scipy import stats as distributions

from plamo_study.analysis.stats import CONFIDENCE, RESAMPLES, SEED, Estimate

Numbers = Sequence[float] | np.ndarray
POWER = 0.8
TAILS = (50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE))  # percentiles of an interval's bounds
NAN = float("nan")


def ratio_of_sums(numerators: Numbers, denominators: Numbers) -> Estimate:
    """Sum over sum, with a percentile-bootstrap interval over chunks: a mean per token when these are counted below."""
    above, below = np.asarray(numerators, float), np.asarray(denominators, float)
    n = len(above)
    if n < 2:
        return Estimate(float(above.sum() / below.sum()) if n else NAN, NAN, NAN, n)
    drawn = _counts(n)
    low, high = np.percentile((drawn @ above) / (drawn @ below), TAILS)
    return Estimate(float(above.sum() / below.sum()), float(low), float(high), n)


def quantile(q: float, below: Numbers, tokens: Numbers, grid: Sequence[float], values: Sequence[float]) -> Estimate:
    """The q-quantile over tokens; `values` are their quantiles at `grid`, `below` counts those up to it per chunk.

    The interval of the share below is turned back into one of the quantile, as in Woodruff 1952 ("Confidence intervals
    for medians and other position measures"). NaN bounds where it reaches past the largest value.
    """
    share, value = ratio_of_sums(below, tokens), float(np.interp(q, grid, values))
    if np.isnan(share.low) or share.value + q - share.low >= 1:
        return Estimate(value, NAN, NAN, share.n)
    low, high = np.interp([share.value + q - share.high, share.value + q - share.low], grid, values)
    return Estimate(value, min(float(low), value), max(float(high), value), share.n)


def mapped(estimate: Estimate, function: Callable[[float], float]) -> Estimate:
    """An estimate after a rising function: percentile bounds go with it."""
    return Estimate(function(estimate.value), function(estimate.low), function(estimate.high), estimate.n)


def p_value(differences: Numbers) -> float:
    """Two-sided p that differences per chunk have the mean 0 (paired t test); 1 where all are 0, NaN below two."""
    values = np.asarray(differences, float)
    if len(values) < 2:
        return NAN
    return float(distributions.ttest_1samp(values, 0).pvalue) if values.any() else 1.0


def detectable(differences: Numbers) -> float:
    """Smallest true mean difference that such chunks would show with a power of 80 %, two-sided at 5 %.

    (t(0.975) + t(0.8)) · s / √n, Bloom 1995 ("Minimum detectable effects"); in the unit of the differences.
    """
    n = len(differences)
    if n < 2:
        return NAN
    t = distributions.t(n - 1)
    return float((t.ppf(0.5 + CONFIDENCE / 2) + t.ppf(POWER)) * np.std(differences, ddof=1) / n**0.5)


def adjusted(p_values: Sequence[float]) -> list[float]:
    """Benjamini-Hochberg-adjusted p-values in the given order; NaN stays NaN and counts for nothing."""
    p = np.asarray(p_values, float)
    known = ~np.isnan(p)
    if known.any():
        p[known] = distributions.false_discovery_control(p[known])
    return p.tolist()


def rate(successes: int, n: int) -> Estimate:
    """A share of `n` independent trials with its exact (Clopper-Pearson) interval."""
    if not n:
        return Estimate(NAN, NAN, NAN, 0)
    interval = distributions.binomtest(successes, n).proportion_ci(CONFIDENCE, "exact")
    return Estimate(successes / n, float(interval.low), float(interval.high), n)


def paired_rates(a: Sequence[bool], b: Sequence[bool]) -> float:
    """Two-sided p that two shares of the same trials are equal: McNemar's exact test on the trials that differ."""
    differing = [x for x, y in zip(a, b, strict=True) if x != y]
    return float(distributions.binomtest(sum(differing), len(differing)).pvalue) if differing else 1.0


@lru_cache
def _counts(n: int) -> np.ndarray:
    """How often each of `n` chunks is drawn in each resample, (RESAMPLES, n)."""
    drawn = np.random.default_rng(SEED).multinomial(n, np.full(n, 1 / n), RESAMPLES)
    return drawn.astype(float)
