"""The knee: the highest rate of arrivals at which a server still meets its objectives, by bisection.

A rate meets them when ENOUGH of its requests do. A request meets them when its first token comes within `ttft_s` of its
due time and later tokens take at most `tpot_s` each on average. The search bisects the logarithm of the rate, so its
answer is a bracket: one rate that met and one that did not.
"""

from collections.abc import Sequence

import httpx2

from plamo_study.measure.cells import Serving
from plamo_study.studies.serving import load
from plamo_study.studies.serving.client import Prompt, Target
from plamo_study.studies.serving.load import Loaded
from plamo_study.studies.serving.objectives import Objectives

ENOUGH = 0.9  # of the requests
STEPS = 5  # bisections: the bracket is a 32nd root of the first one
LOWEST, HIGHEST = 0.5, 2.0  # times the rate of one request at a time, and of all slots without mutual slowdown


OBJECTIVES = {"mini": Objectives(0.25, 0.01), "shape": Objectives(10.0, 0.4), "weights": Objectives(10.0, 0.4)}


async def sought(
    web: httpx2.AsyncClient, target: Target, prompts: Sequence[Prompt], cell: Serving, alone_s: float, seed: int
) -> tuple[Loaded, list[tuple[float, float, float]]]:
    """The load at the highest rate that met the objectives (if none did, the first one tried), and every step.

    A step: the rate, the share of requests that met, and the client's lag in seconds. The arrivals' `seed` must differ
    between servers; otherwise all of them get the same lucky or unlucky loads.
    """
    low, high = LOWEST / alone_s, HIGHEST * cell.n_seq / alone_s
    best: Loaded | None = None
    steps = []
    for number in range(STEPS):
        rate = (low * high) ** 0.5
        due = load.arrivals("poisson", len(prompts), rate, seed + number)
        loaded = await load.opened(web, target, prompts, due)
        met = [OBJECTIVES[cell.scale].met(each.due_ns, each.token_ns, each.failure) for each in loaded.answers]
        share = sum(met) / len(prompts)
        steps.append((rate, share, loaded.late_ns / 1e9))
        if share >= ENOUGH:
            low, best = rate, loaded
        else:
            high, best = rate, best or loaded
    assert best is not None
    return best, steps


def bracket(rates: Sequence[float], met: Sequence[float]) -> tuple[float, float]:
    """Highest requested rate that met the objectives and lowest that did not (1/s); NaN if there is none."""
    nan = float("nan")
    good = [rate for rate, share in zip(rates, met, strict=True) if share >= ENOUGH]
    bad = [rate for rate, share in zip(rates, met, strict=True) if share < ENOUGH]
    return max(good, default=nan), min(bad, default=nan)
