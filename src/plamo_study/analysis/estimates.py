"""Frames in, frames out: the estimate of each group of processes, and comparisons paired by block.

A frame is what `measurements` returns, or any part of it: one process and metric per line, with `value`, `block`,
`machine` and the fields of its cell. Results have one line per group, with numbers that stay numbers.

    steps = m.query("metric == 'step' and usable and build == 'stock'")
    estimate(steps, by="model n_seq")                                  # seconds per step
    estimate(steps, by="model n_seq", work="n_seq")                    # tokens per second, all sequences together
    compare(steps, of="n_seq == 9", to="n_seq == 8", by="model")       # how many times as long, paired by block
"""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from plamo_study.analysis import stats
from plamo_study.analysis.stats import Estimate
from plamo_study.errors import StudyError

NUMBERS = ["value", "low", "high", "n"]  # an estimate's numbers, as columns for pandas and altair
OWN = {"key", "value", "samples", "order", "replicate", "verdict", "disturbed", "usable", "drift", "failure"}


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
        found = stats.median(group["value"].tolist())
        if work is not None:
            found = found.per(float(group[work].iloc[0]) if isinstance(work, str) else work)
        noise = stats.variation(group["value"].tolist())
        entries.append(dict(zip(names, key, strict=True)) | as_columns(found.scaled(times)) | {"noise": noise})
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


def as_columns(found: Estimate) -> dict[str, Any]:
    """An estimate and its numbers, as fields of a frame's line."""
    return {"value": found.value, "low": found.low, "high": found.high, "n": found.n, "estimate": found}


def names_of(columns: str | Sequence[str]) -> list[str]:
    """Column names as a list, from a list or one string separated by blanks."""
    return columns.split() if isinstance(columns, str) else list(columns)


def _groups(
    frame: pd.DataFrame, names: list[str], what: str, others: Sequence[str] = ()
) -> list[tuple[tuple[Any, ...], pd.DataFrame]]:
    """The lines of each group, with `value`, `machine`, `block` and `others` of their columns.

    Raises StudyError where two lines of a group share a block: they belong to two cells.
    """
    twice = frame.duplicated([*names, "machine", "block"], keep=False)
    if twice.any():
        mixed = frame[twice]
        group = next(iter(mixed.groupby(names, dropna=False)))[1] if names else mixed
        varying = [name for name in group if name not in OWN | {"block"} and group[name].astype(str).nunique() > 1]
        raise StudyError(
            what,
            f"a group mixes different cells: they differ in {', '.join(varying) or 'nothing but their processes'}",
            "choose one of each with .query(...), or name the columns in by=",
        )
    frame = frame[[*dict.fromkeys([*names, "machine", "block", "value", *others])]]  # groups of few columns are cheap
    if not names:
        return [((), frame)] if len(frame) else []
    return list(frame.groupby(names, dropna=False))


def _by_block(group: pd.DataFrame) -> dict[tuple[str, int], float]:
    return dict(zip(zip(group["machine"], group["block"], strict=True), group["value"].tolist(), strict=True))
