"""Coverage of the intervals: studies simulated under noise like that of machines, n = 3 to 10.

Every estimator is called as the notebooks call it. The truth for a median is the noise's median, for a sum its mean.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from llama_meter import stats
from llama_meter.stats import Estimate
from plamo_study.stats import clustered

NAME = "A-coverage.json"  # simulated at commit 53f8ee5, below data/measured/<place>
SIZES = tuple(range(3, 11))
CHUNKS = (12, 16, 20, 24, 32, 40)  # chunks of a text, in addition to the sizes above
LEAST, MOST = 0.94, 0.98  # coverage allowed for an interval called 95 %
JUDGED = ("lognormal 3 %", "lognormal 7 %", "one in ten slowed", "two modes")
DEPTHS = np.array([0.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0])
CROSSING = 3000.0  # tokens: where the two simulated curves cross
TILT = 0.3  # change of the log ratio over all depths
AMONG = 6  # estimates from which one is selected
REFERENCE_DRAWS = 400_000

Draw = Callable[[np.random.Generator, int, int], np.ndarray]


def _lognormal(sigma: float) -> Draw:
    return lambda rng, cells, n: np.exp(sigma * rng.standard_normal((cells, n)))


def _slowed(rng: np.random.Generator, cells: int, n: int) -> np.ndarray:
    slow = np.where(rng.random((cells, n)) < 0.1, rng.uniform(1.3, 2.0, (cells, n)), 1.0)
    return np.asarray(_lognormal(0.03)(rng, cells, n) * slow)


def _two_modes(rng: np.random.Generator, cells: int, n: int) -> np.ndarray:
    return np.asarray(_lognormal(0.03)(rng, cells, n) * np.where(rng.random((cells, n)) < 1 / 3, 1.3, 1.0))


def _shifted_blocks(rng: np.random.Generator, cells: int, n: int) -> np.ndarray:
    return np.asarray(_lognormal(0.03)(rng, cells, n) * np.exp(0.1 * rng.standard_normal((1, n))))


NOISE: dict[str, Draw] = {
    "lognormal 3 %": _lognormal(0.03),
    "lognormal 7 %": _lognormal(0.07),
    "one in ten slowed": _slowed,  # to 1.3 to 2 times the time
    "two modes": _two_modes,  # 30 % apart, a third of the processes in the slow one
    "shift between blocks": _shifted_blocks,  # 10 %, the same for every cell of a block
}


@dataclass(frozen=True)
class Estimator:
    """An estimator as the notebooks call it: cells per study, the call, and the truth.

    `at_least`: its interval promises at least its level, with no upper bound on its coverage.
    """

    name: str
    cells: int
    estimate: Callable[[np.ndarray], Estimate]
    truth: Callable[[np.ndarray], float]
    sizes: tuple[int, ...] = SIZES
    at_least: bool = False


def _curves(noise: np.ndarray, among: int = 1) -> Estimate:
    level = (TILT * (DEPTHS - CROSSING) / DEPTHS[-1])[:, None]
    ratios = np.exp(level) * noise[: len(DEPTHS)] / noise[len(DEPTHS) :]
    return stats.crossing(DEPTHS.tolist(), ratios, 201, among)


def _largest(noise: np.ndarray) -> Estimate:
    """The largest of `AMONG` ratios that are all 1."""
    ratios = [stats.ratio(above.tolist(), below.tolist()) for above, below in zip(noise[::2], noise[1::2], strict=True)]
    return stats.selected(max(ratios, key=lambda ratio: ratio.value), AMONG)


def _soonest(noise: np.ndarray) -> Estimate:
    """The lowest of `AMONG` crossings that all lie at `CROSSING`."""
    crossings = [_curves(part, AMONG) for part in np.split(noise, AMONG)]
    return min(crossings, key=lambda crossing: np.inf if np.isnan(crossing.value) else crossing.value)


ESTIMATORS = (
    Estimator("one quantity over processes", 1, lambda x: stats.median(x[0].tolist()), lambda x: float(np.median(x))),
    Estimator("ratio paired by block", 2, lambda x: stats.ratio(x[0].tolist(), x[1].tolist()), lambda x: 1.0),
    Estimator("crossing of two curves", 2 * len(DEPTHS), _curves, lambda x: CROSSING),
    Estimator(
        "sum over chunks",
        1,
        lambda x: clustered.ratio_of_sums(x[0], np.ones(x.shape[1])),
        lambda x: float(x.mean()),
        (*SIZES, *CHUNKS),
    ),
    Estimator(f"the largest of {AMONG} ratios", 2 * AMONG, _largest, lambda x: 1.0, at_least=True),
    Estimator(f"the lowest of {AMONG} crossings", 2 * AMONG * len(DEPTHS), _soonest, lambda x: CROSSING, at_least=True),
)


def simulate(
    studies: int = 4000, seed: int = 20261121, estimators: tuple[Estimator, ...] = ESTIMATORS
) -> Iterator[dict[str, Any]]:
    """One line per estimator, noise and n: the share of `studies` whose interval covers the truth, and its verdict.

    Studies without an interval (curves that do not cross) are left out of that share; `says_nothing` is their share.
    `level`: the interval's nominal level. `judged`: "as called" where a 95 % interval covers 94 to 98 % (within two
    standard deviations of the simulation) or one with another level covers at least that level; "wrong" otherwise;
    "shown" for noise for which no level is promised.
    """
    rng = np.random.default_rng(seed)
    for estimator in estimators:
        for noise, draw in NOISE.items():
            truth = estimator.truth(draw(np.random.default_rng(seed), 1, REFERENCE_DRAWS))
            for n in estimator.sizes:
                estimates = [estimator.estimate(draw(rng, estimator.cells, n)) for _ in range(studies)]
                said = [e for e in estimates if not np.isnan(e.low)]
                covers = float(np.mean([e.low <= truth <= e.high for e in said]))
                width = float(np.median([(e.high - e.low) / e.value for e in said]))
                level = min(e.level for e in said)
                line = {"estimator": estimator.name, "noise": noise, "n": n, "level": level, "covers": covers}
                line |= {"width": width, "says_nothing": 1 - len(said) / studies}
                yield line | {"judged": judged(noise, level, covers, len(said), estimator.at_least)}


def judged(noise: str, level: float, covered: float, studies: int, at_least: bool = False) -> str:
    """Whether a coverage keeps an interval's promise: at least its level or, for 95 %, within LEAST and MOST."""
    if noise not in JUDGED:
        return "shown"
    error = 2 * (level * (1 - level) / studies) ** 0.5
    if at_least or not stats.called_95(level):
        return "as called" if covered >= level - error else "wrong"
    return "as called" if LEAST - error <= covered <= MOST + error else "wrong"


def by_size(lines: pd.DataFrame) -> pd.DataFrame:
    """One row per estimator and n: the level, the lowest and highest coverage under judged noise."""
    judged_lines = lines[lines["noise"].isin(JUDGED)].assign(wrong=lambda table: table["judged"] == "wrong")
    groups = judged_lines.groupby(["estimator", "n"], sort=False)
    return groups.agg(
        level=("level", "first"),
        least=("covers", "min"),
        most=("covers", "max"),
        wrong=("wrong", "sum"),
    ).reset_index()
