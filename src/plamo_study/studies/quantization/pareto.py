"""The files worth having: those that no other file beats in everything. It does not know what is compared."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from plamo_study.analysis.stats import Estimate


def front(points: pd.DataFrame, better: Mapping[str, str]) -> list[bool]:
    """Whether each row is on the Pareto front. `better`: column -> "more" or "less".

    A row is off the front when another is at least as good in every column and better in one, and there not only by
    values but with intervals apart (numbers have none). Rows that lack a value are off the front and beat nobody.
    """
    worst = {name: _bounds(points[name], wanted) for name, wanted in better.items()}
    known = np.all([~np.isnan(middle) for middle, _, _ in worst.values()], axis=0)
    return [
        bool(known[i]) and not any(known[j] and _beats(worst, j, i) for j in range(len(points)))
        for i in range(len(points))
    ]


def _beats(columns: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]], one: int, other: int) -> bool:
    if any(middle[one] > middle[other] for middle, _, _ in columns.values()):
        return False
    return any(high[one] < low[other] for _, low, high in columns.values())


def _bounds(values: pd.Series, wanted: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Value, low and high of a column, turned so that less is better."""
    bounds = np.array([_three(value) for value in values], dtype=float).reshape(-1, 3)
    if wanted == "more":
        bounds = -bounds[:, [0, 2, 1]]
    return bounds[:, 0], bounds[:, 1], bounds[:, 2]


def _three(value: Estimate | float | None) -> tuple[float, float, float]:
    if isinstance(value, Estimate):
        alone = value.low != value.low
        return value.value, value.value if alone else value.low, value.value if alone else value.high
    return (float("nan"),) * 3 if value is None else (float(value),) * 3
