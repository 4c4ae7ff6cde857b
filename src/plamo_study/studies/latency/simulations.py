"""Requests served by a policy on a simulated machine: waits, tokens a second, capacity; simulated once and looked up.

A simulation is named by its whole content: requests, policy, slots, and the step model's numbers to nine digits,
because a fit differs between processors in the last ones. commit 53f8ee5 made the file.
"""

import csv
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from hashlib import sha256

import numpy as np

from llama_meter import paths
from llama_meter.simulate import clock, policies
from llama_meter.simulate.clock import Simulated
from llama_meter.simulate.loop import Load, Served, serve
from llama_meter.simulate.steps import StepModel, told
from plamo_study.read.metrics import METRICS, figures

FILE = paths.MEASURED / "reference" / "07-simulated.csv"
Figures = dict[str, float]
used: dict[str, Figures] = {}  # looked up or made in this process, by name


def looked_up(what: object, load: Load, model: StepModel, simulate: Callable[[], Figures]) -> Figures:
    """The figures of a simulation, at hand or made now. `what`: policy and counts."""
    numbers = [load.arrives, load.prompt, load.output, load.within]
    name = sha256(repr(what).encode() + told(*numbers) + model.content).hexdigest()[:24]
    if name not in used:
        used[name] = _recorded().get(name) or simulate()
    return used[name]


def write() -> int:
    """Record what this process used; the number of simulations."""
    names = list(next(iter(used.values())))
    with FILE.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(["simulation", *names])
        lines.writerows([name, *map(repr, record.values())] for name, record in sorted(used.items()))
    return len(used)


@cache  # reads a file, for each simulation of a page
def _recorded() -> dict[str, Figures]:
    if not FILE.exists():
        return {}
    with FILE.open(newline="", encoding="utf-8") as file:
        lines = csv.DictReader(file)
        return {line.pop("simulation"): {name: float(value) for name, value in line.items()} for line in lines}


SEEDS, ASKED = 5, 4000  # simulations of one load, whose median counts: at least SEEDS, and ASKED requests in all
FINE = 1500  # requests of a simulation over loads


def of_served(served: Served) -> dict[str, float]:
    """METRICS of a simulation."""
    rate = served.written / (float(served.finish.max()) - served.load.arrives[0])
    return figures(served.ttft, served.tpot, (served.gaps, served.weights), rate, served.load)


def simulated(load: Load, rule: str, model: StepModel, slots: int, simulations: int = 0) -> dict[str, float]:
    """METRICS of a load by a policy: the median of `simulations` simulations, or of `seeds` if 0."""
    many = simulations or seeds(load)

    def run() -> dict[str, float]:
        return _middle([of_served(serve(load, policies.named(rule), Simulated(model, n), slots)) for n in range(many)])

    return looked_up((rule, slots, many), load, model, run)


def seeds(load: Load) -> int:
    """Number of simulations of a load: with fewer requests, more of its 99th percentile is chance."""
    return max(SEEDS, -(-ASKED // len(load)))


def _middle(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.median([run[name] for run in runs])) for name in METRICS}


def at_rate(load: Load, per_second: float, n: int = FINE, seed: int = 0) -> Load:
    """`n` requests with a load's lengths, drawn at random, at `per_second` requests a second (Poisson)."""
    rng = np.random.default_rng([n, round(per_second * 1000), seed])
    which = rng.integers(0, len(load), n)
    gaps = rng.exponential(1 / per_second, n)
    arrives = np.cumsum(gaps) - gaps[0]
    return replace(clock.chosen(load, which.tolist()), arrives=arrives.tolist())


def capacity(load: Load, model: StepModel, slots: int) -> float:
    """Most requests a second of a machine with whole prompts and full slots: λ (t_p + o t_b / b) < 1.

    `t_p`: mean seconds of a prompt; `o`: mean tokens of an answer; `t_b`: seconds of a step of all `b` slots.
    """
    read = float(np.mean([model.seconds(0, 0, n, 0) for n in load.prompt]))
    held = int(np.mean(load.prompt) + np.mean(load.output) / 2)
    step = model.seconds(slots, min(held, model.range.held) * slots, 0, 0)
    return 1 / (read + float(np.mean(load.output) - 1) * step / slots)
