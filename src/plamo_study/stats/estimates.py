"""Frames in, estimates and verdicts out: medians over processes, ratios paired by block, shares and sums over chunks.

For tokens in chunks the unit is the chunk, never the token, since neighbouring tokens are alike. Neighbouring chunks of
one text are alike too: an interval holds for texts like this one.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy import special

from llama_meter import stats
from llama_meter.errors import StudyError
from llama_meter.stats import CONFIDENCE, Estimate, t_quantile, t_test

NS = 1e9
NAN = float("nan")
Numbers = Sequence[float] | np.ndarray
SUM_LEVELS = (  # least number of chunks, and the lowest coverage of their interval, simulated at commit 53f8ee5
    (32, 0.95),
    (24, 0.90),
    (20, 0.85),
    (16, 0.80),
    (12, 0.70),
    (8, 0.60),
    (3, 0.55),
)
NUMBERS = ["value", "low", "high", "n"]  # an estimate's numbers, as columns for pandas and altair
VARIES = {"key", "value", "samples", "order", "replicate", "verdict", "disturbed", "usable", "drift", "failure"}
COLUMNS = ["claim", "model", "estimate", "wanted", "verdict", "p", "p_adjusted"]


def paired_ratio(numerator: pd.Series, denominator: pd.Series) -> Estimate:
    """Ratio of two series by block, over the blocks that both have."""
    both = pd.concat([numerator, denominator], axis=1, keys=["top", "bottom"]).dropna()
    return stats.ratio(both["top"].tolist(), both["bottom"].tolist())


def events(
    rows: pd.DataFrame, carried: Sequence[str], of_row: Callable[[Any], Iterable[dict[str, Any]]], *names: str
) -> pd.DataFrame:
    """One line per event of each row: the row's columns `carried`, then `names`, which `of_row` gives of its events."""
    lines = [
        [*(getattr(row, name) for name in carried), *(event[name] for name in names)]
        for row in rows.itertuples()
        for event in of_row(row)
    ]
    return pd.DataFrame(lines, columns=[*carried, *names])


def estimate(
    frame: pd.DataFrame, by: str | Sequence[str] = (), work: str | float | None = None, times: float = 1.0
) -> pd.DataFrame:
    """The median over processes of each group, with its interval.

    Parameters
    ----------
    frame
        One line per process; lines whose `value` is missing are left out.
    by
        Columns that name a group: a list, or one string separated by blanks.
    work
        The work behind one value, a number or a column: the estimate is then `work` over the median, such as tokens per
        second from seconds. `value` may be anything a cell computed: `frame.assign(value=frame.value / frame.n_seq)`.
    times
        A factor for another unit, such as 1e3 for milliseconds.

    Returns
    -------
    DataFrame
        The columns of `by`; `value`, `low`, `high`, `n` (processes); `noise`, their coefficient of variation;
        and `estimate`, the input of `claim` and `table`.

    Raises
    ------
    StudyError
        A group holds two different cells, which no median should mix; the error names the columns that differ.

    """
    names, entries = names_of(by), []
    worked = [work] if isinstance(work, str) else []
    for key, group in _groups(frame[frame["value"].notna()], names, "estimate", worked):
        middle = stats.median(group["value"].tolist())
        if work is not None:
            middle = middle.per(float(group[work].iloc[0]) if isinstance(work, str) else work)
        noise = stats.variation(group["value"].tolist())
        entries.append(dict(zip(names, key, strict=True)) | as_columns(middle.scaled(times)) | {"noise": noise})
    return pd.DataFrame(entries, columns=[*names, *NUMBERS, "noise", "estimate"])


def compare(frame: pd.DataFrame, of: str, to: str, by: str | Sequence[str] = ()) -> pd.DataFrame:
    """The ratio of `of` to `to`: the median of the ratios of pairs, each pair from one block.

    `of` and `to` select lines with expressions of `DataFrame.query`. Blocks that lack one of the two are left out.

    Returns
    -------
    DataFrame
        The columns of `by`; the ratio as `value`, `low`, `high`, `n` (pairs) and `estimate`; and the medians of both
        sides as estimates, `first` and `second`. Their quotient need not be the ratio, which is paired.

    Raises
    ------
    StudyError
        A group holds two different cells on one of the sides.

    """
    names, entries = names_of(by), []
    frame = frame[frame["value"].notna()]
    first, second = (dict(_groups(frame.query(side), names, side)) for side in (of, to))
    for key in first:
        if key in second:
            one, other = _by_block(first[key]), _by_block(second[key])
            both = [block for block in one if block in other]
            sides = {"first": stats.median([*one.values()]), "second": stats.median([*other.values()])}
            ratio = stats.ratio([one[block] for block in both], [other[block] for block in both])
            entries.append(dict(zip(names, key, strict=True)) | as_columns(ratio) | sides)
    return pd.DataFrame(entries, columns=[*names, *NUMBERS, "estimate", "first", "second"])


def as_columns(measured: Estimate) -> dict[str, Any]:
    """An estimate and its numbers, as fields of a frame's line."""
    return {"value": measured.value, "low": measured.low, "high": measured.high, "n": measured.n, "estimate": measured}


def names_of(columns: str | Sequence[str]) -> list[str]:
    """Column names as a list, from a list or one string separated by blanks."""
    return columns.split() if isinstance(columns, str) else list(columns)


def _groups(
    frame: pd.DataFrame, names: list[str], what: str, others: Sequence[str] = ()
) -> list[tuple[tuple[Any, ...], pd.DataFrame]]:
    """The lines of each group, with `value`, `machine`, `block` and `others` of their columns.

    Raises StudyError where two lines of a group share a block: they belong to two cells.
    """
    mixed = frame[frame.duplicated([*names, "machine", "block"], keep=False)]
    if len(mixed):
        group = next(iter(mixed.groupby(names, dropna=False)))[1] if names else mixed
        varying = [name for name in group if name not in VARIES | {"block"} and group[name].astype(str).nunique() > 1]
        why = f"a group mixes different cells: they differ in {', '.join(varying) or 'nothing but their processes'}"
        mend = "keep the rows that count, m[m.usable], choose one of each with .query(...), or name the columns in by="
        raise StudyError(what, why, mend)
    frame = frame[[*dict.fromkeys([*names, "machine", "block", "value", *others])]]  # groups of few columns are cheap
    if not names:
        return [((), frame)] if len(frame) else []
    return list(frame.groupby(names, dropna=False))


def _by_block(group: pd.DataFrame) -> dict[tuple[str, int], float]:
    return dict(zip(zip(group["machine"], group["block"], strict=True), group["value"].tolist(), strict=True))


# ------------------------------------------------------------------ claims


def claim(
    sentence: str,
    of: str,
    estimate: Estimate,
    above: float | None = None,
    below: float | None = None,
    between: tuple[float, float] | None = None,
) -> dict[str, Any]:
    """The claim that a quantity exceeds, or is below, a threshold, or lies between two; exactly one of them.

    Between: "the same", as two one-sided tests. Of both bounds the one that is harder to rule out decides: inside, both
    have to be; outside, it is the nearer one.
    """
    if above is not None:
        wanted, verdict, p = f"above {above:g}", estimate.above(above), estimate.p(above)
    elif below is not None:
        wanted, verdict, p = f"below {below:g}", estimate.below(below), estimate.p(below)
    else:
        low, high = between or (NAN, NAN)
        wanted, verdict = f"{low:.3g} to {high:.3g}", estimate.within(low, high)
        p = max(estimate.p(low), estimate.p(high))
    return {"claim": sentence, "model": of, "estimate": estimate, "wanted": wanted, "verdict": verdict, "p": p}


def family(claims: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """The claims of one table, corrected for their number; columns COLUMNS, `p_adjusted` after the correction."""
    table = pd.DataFrame(claims, columns=COLUMNS[:-1])
    table["p_adjusted"] = adjusted(table["p"].tolist())
    table.loc[~(table["p_adjusted"] <= 1 - CONFIDENCE), "verdict"] = "inconclusive"
    return table


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


# ------------------------------------------------------------------ shares, and sums over chunks


def rate(successes: int, n: int) -> Estimate:
    """A share of `n` independent trials with its exact (Clopper-Pearson) interval."""
    if not n:
        return Estimate(NAN, NAN, NAN, 0)
    outside, failures = (1 - CONFIDENCE) / 2, n - successes
    low = special.betaincinv(successes, failures + 1, outside) if successes else 0.0
    high = special.betaincinv(successes + 1, failures, 1 - outside) if failures else 1.0
    units = (1.0,) * successes + (0.0,) * failures
    return Estimate(successes / n, float(low), float(high), n, units=units, in_logs=False, success=1.0)


def ratio_of_sums(numerators: Numbers, denominators: Numbers) -> Estimate:
    """Ratio of two sums: a mean per token when the denominators count tokens.

    The interval is Student's, of the linearised ratio (Cochran 1977, section 6), after Hall's transformation, which
    removes the chunks' skewness (Hall 1992, "On the removal of skewness by transformation"). Its level is one of
    SUM_LEVELS: heavy tails take some thirty chunks to show.
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
    low, high = (value - error * _unskewed(side * t_quantile(n - 1), skewness) for side in (1, -1))
    level = next(level for least, level in SUM_LEVELS if n >= least)
    return Estimate(value, low, high, n, level, tuple((value + off).tolist()), in_logs=False)


def _unskewed(t: float, skewness: float) -> float:
    """Inverse of Hall's transformation t + g t^2 / 3 + g^2 t^3 / 27 + g / 6, with g the skewness over sqrt(n)."""
    if abs(skewness) < 1e-9:
        return t
    return float(3 / skewness * (np.cbrt(1 + skewness * (t - skewness / 6)) - 1))


def mapped(estimate: Estimate, function: Callable[[float], float]) -> Estimate:
    """An estimate after an increasing function, applied to its bounds too."""
    value, low, high = map(function, (estimate.value, estimate.low, estimate.high))
    return Estimate(value, low, high, estimate.n, estimate.level)


def p_value(differences: Numbers) -> float:
    """Two-sided p that differences per chunk have the mean 0 (paired t test); 1 where all are 0, NaN below two."""
    values = np.asarray(differences, float)
    if len(values) < 2:
        return NAN
    return t_test(values) if values.any() else 1.0
