"""Frames in, estimates and verdicts out: medians over processes, ratios paired by block, claims against thresholds."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pandas as pd

from llama_meter import stats
from llama_meter.errors import StudyError
from llama_meter.stats import CONFIDENCE, Claim, Estimate
from plamo_study.stats import clustered

NS = 1e9


def paired_ratio(numerator: pd.Series, denominator: pd.Series) -> stats.Estimate:
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
    twice = frame.duplicated([*names, "machine", "block"], keep=False)
    if twice.any():
        mixed = frame[twice]
        group = next(iter(mixed.groupby(names, dropna=False)))[1] if names else mixed
        varying = [name for name in group if name not in OWN | {"block"} and group[name].astype(str).nunique() > 1]
        if not varying and "usable" in group and not group["usable"].all():
            why = "a group holds a block twice, once as it was measured again"
            raise StudyError(what, why, "keep the rows that count: m[m.usable]")
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


COLUMNS = ["claim", "model", "estimate", "wanted", "verdict", "p", "p_adjusted"]


def above(claim: str, model: str, estimate: Estimate, threshold: float) -> dict[str, Any]:
    """The claim that a quantity exceeds `threshold`."""
    return _claim(claim, model, estimate, f"above {threshold:g}", estimate.above(threshold), estimate.p(threshold))


def below(claim: str, model: str, estimate: Estimate, threshold: float) -> dict[str, Any]:
    """The claim that a quantity is below `threshold`."""
    return _claim(claim, model, estimate, f"below {threshold:g}", estimate.below(threshold), estimate.p(threshold))


def within(claim: str, model: str, estimate: Estimate, low: float, high: float) -> dict[str, Any]:
    """The claim that a quantity lies in [low, high]: "the same", as two one-sided tests.

    Of both bounds the one that is harder to rule out decides: inside, both have to be; outside, it is the nearer one.
    """
    p = max(estimate.p(low), estimate.p(high))
    return _claim(claim, model, estimate, f"{low:.3g} to {high:.3g}", estimate.within(low, high), p)


def family(entries: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """The claims of one table, corrected for their number; columns COLUMNS, `p_adjusted` after the correction."""
    table = pd.DataFrame(entries, columns=COLUMNS[:-1])
    table["p_adjusted"] = clustered.adjusted(table["p"].tolist())
    table.loc[~(table["p_adjusted"] <= 1 - CONFIDENCE), "verdict"] = "inconclusive"
    return table


def _claim(claim: str, model: str, estimate: Estimate, wanted: str, verdict: Claim, p: float) -> dict[str, Any]:
    return {"claim": claim, "model": model, "estimate": estimate, "wanted": wanted, "verdict": verdict, "p": p}
