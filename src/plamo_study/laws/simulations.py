"""Requests served by a policy on a simulated machine: waits, tokens a second, capacity; simulated once and looked up.

A simulation is named by its whole content: requests, policy, slots, and the step model's numbers to nine digits,
because a fit differs between processors in the last ones. commit 53f8ee5 made the file.
"""

import csv
from collections.abc import Callable, Sequence
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


def looked_up(
    what: object, load: Load, model: StepModel, simulate: Callable[[], Figures], *more: Sequence[float]
) -> Figures:
    """The figures of a simulation, at hand or made now. `what`: policy and counts; `more`: further numbers it uses."""
    numbers = [load.arrives, load.prompt, load.output, load.within, *more]
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
Seconds = Callable[[int], float]  # by tokens


def of_served(served: Served, arrives: list[float] | None = None) -> dict[str, float]:
    """METRICS of a simulation; `arrives`: the original arrival times (s), if the load's own are later."""
    asked = arrives or served.load.arrives
    rate = served.written / (float(served.finish.max()) - asked[0])
    return figures(served.first - np.asarray(asked), served.tpot, (served.gaps, served.weights), rate, served.load)


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


class Receiver(Simulated):
    """A machine that receives states from another one: it loads a prompt's state, in `loads(tokens)` seconds."""

    def __init__(self, model: StepModel, seed: int, loads: Seconds):
        super().__init__(model, seed)
        self.loads = loads

    def call(self, decoding: list[int], step: bool, keys: int, reading: int, chunk: int, before: int) -> float:
        """The time after a call (s)."""
        if chunk:
            self.now += self.loads(chunk)
            self._slept = False  # wake-up times were measured on prompts
            return self.now
        return super().call(decoding, step, keys, reading, 0, 0)


def disaggregated(
    load: Load, model: StepModel, slots: int, moves: tuple[Seconds, Seconds], simulations: int = 0
) -> dict[str, float]:
    """METRICS of a load that one machine prefills and another decodes; `model` is each one's, half of a shared machine.

    `moves`: seconds by tokens that a state occupies the sender and the receiver, as in `shipping`. The time
    between them is left out: sockets, and processes that wake. `simulations`: 0 for `seeds` of the load.
    """
    ships, loads = moves
    many = simulations or seeds(load)

    def run() -> dict[str, float]:
        runs = []
        for seed in range(many):
            there = clock.read_elsewhere(load, model, ships, seed)
            served = serve(there, policies.prefill_first, Receiver(model, seed + 1, loads), slots)
            runs.append(of_served(served, load.arrives))
        return _middle(runs)

    lengths = sorted(set(load.prompt))
    return looked_up(("split", slots, many), load, model, run, [*map(ships, lengths)], [*map(loads, lengths)])


def capacity(load: Load, model: StepModel, slots: int) -> float:
    """Most requests a second of a machine with whole prompts and full slots: λ (t_p + o t_b / b) < 1.

    `t_p`: mean seconds of a prompt; `o`: mean tokens of an answer; `t_b`: seconds of a step of all `b` slots.
    """
    read = float(np.mean([model.seconds(0, 0, n, 0) for n in load.prompt]))
    held = int(np.mean(load.prompt) + np.mean(load.output) / 2)
    step = model.seconds(slots, min(held, model.range.held) * slots, 0, 0)
    return 1 / (read + float(np.mean(load.output) - 1) * step / slots)
