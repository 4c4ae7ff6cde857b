"""How a time grows with depth: constant, linear, quadratic, or two lines that meet; and where a function changes sign.

Curves are frames with a row per depth and a column per process (block). A law is fitted to the medians, residuals
weighted by one over the time. The simplest law is chosen that no other beats strongly by the Bayesian information
criterion. Every process is also fitted by itself, which gives the intervals. It knows no models.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import optimize

from llama_meter import stats
from llama_meter.stats import Estimate

TERMS: dict[str, tuple[Callable[[np.ndarray, float], np.ndarray], ...]] = {
    "constant": (lambda x, knot: np.ones_like(x),),
    "linear": (lambda x, knot: np.ones_like(x), lambda x, knot: x),
    "quadratic": (lambda x, knot: np.ones_like(x), lambda x, knot: x, lambda x, knot: x**2),
    "linear with a bend": (
        lambda x, knot: np.ones_like(x),
        lambda x, knot: x,
        lambda x, knot: np.maximum(x - knot, 0.0),
    ),
}
BENT = "linear with a bend"
STRONG = 6.0  # difference in the criterion from which the evidence is called strong (Kass and Raftery 1995)
FARTHEST = float(1 << 20)  # tokens: the search goes no further
NAN = float("nan")
Function = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Growth:
    """The law of a curve, its strength, how many single processes choose it, and its coefficients with intervals.

    `coefficients`: seconds, seconds per token of depth, then per token squared, or the change of slope at the bend.
    `strength`: how far its criterion is below that of the best simpler law, NaN for the simplest. `worst`: the
    law's largest relative error at a median.
    """

    law: str
    strength: float
    chosen_by: int
    n: int
    coefficients: tuple[Estimate, ...]
    worst: float


def growth(curve: pd.DataFrame, knot: float = 0.0) -> Growth:
    """The law of a curve of at least five depths. `knot`: the depth at which the model allows a bend (0: none)."""
    whole = curve.dropna(axis="columns")
    depth, middle = whole.index.to_numpy(float), whole.median(axis="columns").to_numpy()
    criteria = {law: criterion(depth, middle, law, knot) for law in laws(depth, knot)}
    law = simplest(criteria)
    simpler = [criteria[name] for name in criteria if len(TERMS[name]) < len(TERMS[law])]
    single = [fit(depth, whole[block].to_numpy(), law, knot) for block in whole]
    chosen = [best(depth, whole[block].to_numpy(), knot) for block in whole]
    off = at(law, knot, fit(depth, middle, law, knot))(depth) / middle - 1
    return Growth(
        law=law,
        strength=min(simpler) - criteria[law] if simpler else NAN,
        chosen_by=chosen.count(law),
        n=len(chosen),
        coefficients=tuple(stats.median([c[k] for c in single]) for k in range(len(TERMS[law]))),
        worst=float(off[np.argmax(np.abs(off))]),
    )


def laws(depth: np.ndarray, knot: float) -> list[str]:
    """The laws that can be distinguished: a bend needs two depths on either side."""
    bend = min((depth < knot).sum(), (depth > knot).sum()) >= 2
    return [law for law in TERMS if law != BENT or (knot and bend)]


def fit(depth: np.ndarray, seconds: np.ndarray, law: str, knot: float = 0.0) -> np.ndarray:
    """Coefficients of a law, least squares of relative residuals."""
    design = _design(depth, law, knot) / seconds[:, None]
    scale = np.abs(design).max(axis=0)
    solution, *_ = np.linalg.lstsq(design / scale, np.ones(len(depth)), rcond=None)
    return np.asarray(solution / scale)


def at(law: str, knot: float, coefficients: np.ndarray) -> Function:
    """The law as a function of depth."""
    return lambda x: np.asarray(_design(np.atleast_1d(np.asarray(x, float)), law, knot) @ coefficients)


def _design(depth: np.ndarray, law: str, knot: float) -> np.ndarray:
    return np.column_stack([term(depth, knot) for term in TERMS[law]])


def criterion(depth: np.ndarray, seconds: np.ndarray, law: str, knot: float = 0.0) -> float:
    """Bayesian information criterion of a law, n ln(RSS / n) + k ln n; lower is better."""
    residuals = at(law, knot, fit(depth, seconds, law, knot))(depth) / seconds - 1
    n = len(depth)
    return float(n * np.log(max((residuals**2).sum() / n, 1e-12)) + len(TERMS[law]) * np.log(n))


def best(depth: np.ndarray, seconds: np.ndarray, knot: float = 0.0) -> str:
    """The law that one process's curve chooses."""
    return simplest({law: criterion(depth, seconds, law, knot) for law in laws(depth, knot)})


def simplest(criteria: dict[str, float]) -> str:
    """The law with the fewest terms that no other beats by `STRONG`; of two equally simple ones, the better."""
    enough = [law for law, value in criteria.items() if value - min(criteria.values()) < STRONG]
    return min(enough, key=lambda law: (len(TERMS[law]), criteria[law]))


def continued(curve: pd.Series, knot: float = 0.0) -> Function:
    """Seconds at any depth: interpolated between measured depths, continued beyond them by the law without a jump.

    Before the first measured depth, the first time holds. A law that would fall beyond the last depth is replaced by a
    line, and a falling line by the last time.
    """
    points = curve.dropna()
    depth, seconds = points.index.to_numpy(float), points.to_numpy(float)
    law = best(depth, seconds, knot)
    beyond = at(law, knot, fit(depth, seconds, law, knot))
    if beyond(np.array([FARTHEST]))[0] < seconds[-1]:
        intercept, slope = fit(depth, seconds, "linear")
        beyond = at("linear", 0.0, np.array([intercept, max(slope, 0.0)]))
    last = float(beyond(depth[-1:])[0])

    def time(x: np.ndarray) -> np.ndarray:
        wanted = np.asarray(x, float)
        outside = seconds[-1] + beyond(wanted).reshape(wanted.shape) - last
        return np.where(wanted > depth[-1], outside, np.interp(wanted, depth, seconds))

    return time


def total(at: Function, tokens: np.ndarray, points: int = 4097) -> np.ndarray:
    """Sum of the time of every token from 0 up to each of `tokens` (trapezoids over `points` depths)."""
    grid = np.concatenate([[0.0], np.geomspace(1.0, max(float(np.max(tokens)), 2.0), points)])
    values = at(grid)
    sums = np.concatenate([[0.0], np.cumsum((values[1:] + values[:-1]) / 2 * np.diff(grid))])
    return np.asarray(np.interp(tokens, grid, sums))


def turns(difference: Callable[[float], float], start: float, end: float = FARTHEST) -> list[float]:
    """Every place between `start` and `end` where a function changes its sign."""
    points = np.geomspace(start, end, 400)
    above = [difference(float(point)) > 0 for point in points]
    changes = [k for k in range(1, len(points)) if above[k] != above[k - 1]]
    return [float(optimize.brentq(difference, float(points[k - 1]), float(points[k]))) for k in changes]
