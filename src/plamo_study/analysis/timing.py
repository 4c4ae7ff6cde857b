"""Times of rows: one number per process or block, and the ratio of two series paired by block."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd

from plamo_study.analysis import stats

NS = 1e9


def paired_ratio(numerator: pd.Series, denominator: pd.Series) -> stats.Estimate:
    """Ratio of two series by block, over the blocks that both have."""
    both = pd.concat([numerator, denominator], axis=1, keys=["top", "bottom"]).dropna()
    return stats.ratio(both["top"].tolist(), both["bottom"].tolist())


def median_sample(samples: list[list[int]]) -> float:
    """Median over all samples of a row, in nanoseconds."""
    return float(np.median(list(chain(*samples))))


def seconds_by_block(group: pd.DataFrame, statistic: Callable[[list[list[int]]], float]) -> pd.Series:
    """Seconds by block: a statistic of each row's samples, such as `median_sample`."""
    return group.set_index("block")["samples_ns"].map(statistic) / NS


def events(
    rows: pd.DataFrame, carried: Sequence[str], each: Callable[[Any], Iterable[dict[str, Any]]], *names: str
) -> pd.DataFrame:
    """One line per event of each row: the row's columns `carried`, then `names`, which `each` gives of its events."""
    found = [
        [*(getattr(row, name) for name in carried), *(event[name] for name in names)]
        for row in rows.itertuples() for event in each(row)
    ]  # fmt: skip
    return pd.DataFrame(found, columns=[*carried, *names])
