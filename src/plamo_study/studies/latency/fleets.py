"""Number of machines that a load needs: days of requests shared out among simulated machines with measured calls.

Once requests are shared out, machines are independent. So all requests are shared out among all machines, but only a
random sample of the machines is simulated and represents the others. Ten thousand machines cost little more than
one.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from llama_meter.cells import Fleet
from llama_meter.errors import StudyError
from llama_meter.journal import LOCAL, REFERENCE, journal_path
from llama_meter.rows import Measured
from llama_meter.simulate import clock, policies, traffic
from llama_meter.simulate.clock import Simulated
from llama_meter.simulate.loop import Load, Served, serve
from llama_meter.simulate.steps import StepModel
from plamo_study.read import metrics
from plamo_study.read.recording import read
from plamo_study.studies.latency import observed, simulations
from plamo_study.studies.latency.plan import CALLS, WELL, digest

SAMPLE = 40  # machine-days simulated of every load
MOST, HALVINGS = 64.0, 7  # most machines tried, relative to those that just keep up; steps of the search
Figures = dict[str, float]


def run(cell: Fleet, path: Path, stage: Callable[[str], None]) -> Measured:
    """Find the fewest machines, once per repetition of the cell, each time with other requests.

    Series, one number per trial: `repetition`; `machines`, relative to those that just keep up; `well`,
    the share of the simulated requests that were served in time; `ttft_p99` and `itl_p99` (s). Valid where every
    request went to one machine and has all of its tokens.

    Raises
    ------
    StudyError
        The journal that the cell names is missing.

    """
    stage("fit")
    seen = observed.of_rows(measured_calls(cell))
    models = {name.removesuffix("*"): model for name, model in observed.fitted(seen).items()}
    typical = observed.typical(seen)
    began, tried, complete = time.monotonic(), [], []
    for repetition in range(cell.repetitions):
        stage(f"repetition {repetition}")
        days = Days(cell, models[cell.model], typical, repetition)
        tried += [{"repetition": float(repetition)} | figures for figures in fewest(days.served)]
        complete.append(days.complete)
    series = {name: [figures[name] for figures in tried] for name in tried[0]}
    checks = {"complete": all(complete), "seconds": time.monotonic() - began}
    return Measured(checks=checks, series=series, valid=all(complete))


def measured_calls(cell: Fleet) -> pd.DataFrame:
    """Rows of calls that a fleet's simulation is fitted on; StudyError if no journal here has the cell's SHA-256."""
    for source, place in (("live", LOCAL), ("recorded", REFERENCE)):
        same = digest(journal_path(CALLS, cell.scale, place)) == cell.rows_sha256
        if same and (recording := read(CALLS, source, cell.scale)):
            return recording.rows
    why = "the rows that this fleet is simulated by are not here"
    raise StudyError(f"{CALLS} at {cell.scale}", why, f"plamo-study measure {CALLS} --scale {cell.scale}")


def fewest(served: Callable[[float], Figures]) -> Iterator[Figures]:
    """Trials of a bisection (in the logarithm) for the fewest machines that serve WELL of all requests in time.
    A single trial if even MOST times the machines that keep up are not enough."""
    trial = served(MOST)
    yield trial
    low, high = 0.0, float(np.log2(MOST))
    for _ in range(HALVINGS if trial["well"] >= WELL else 0):
        middle = (low + high) / 2
        trial = served(float(2**middle))
        yield trial
        low, high = (low, middle) if trial["well"] >= WELL else (middle, high)


class Days:
    """Requests of some days for a fleet, drawn once. More machines mean the same requests further apart.

    `complete`: whether, so far, every request went to one machine and those simulated got all of their tokens.
    """

    def __init__(self, cell: Fleet, model: StepModel, typical: Load, seed: int):
        self.cell, self.model, self.complete = cell, model, True
        n, many = cell.n_machines, -(-SAMPLE // cell.n_machines)
        rate = simulations.capacity(typical, model, cell.n_seq)
        asked = (simulations.at_rate(typical, n * rate, n * cell.n_requests, seed * many + day) for day in range(many))
        self.days = [traffic.shaped(load, cell.pattern) for load in asked]
        self.per_token = 1 / rate / float(np.mean(typical.prompt))  # s of work per prompt token
        draw = np.random.default_rng([cell.seed, seed])
        self.drawn = [draw.choice(n, min(n, SAMPLE), replace=False).tolist() for _ in range(many)]

    def served(self, machines: float) -> Figures:
        """Figures of the simulated machines, with `machines` times as many as just keep up."""
        results: list[Served] = []
        for load, drawn in zip(self.days, self.drawn, strict=True):
            asked = replace(load, arrives=(np.array(load.arrives) * machines).tolist())
            shares = self._shares(asked)
            self.complete &= sum(map(len, shares)) == len(asked)
            for seed, machine in enumerate(drawn):
                if own := shares[machine]:
                    alone, rule = Simulated(self.model, seed), policies.named(self.cell.rule)
                    results.append(serve(clock.chosen(asked, own), rule, alone, self.cell.n_seq))
        self.complete &= all(result.written == sum(result.load.output) for result in results)
        names = ("ttft", "tpot", "gaps", "weights")
        ttft, tpot, *gaps = (np.concatenate([getattr(result, name) for result in results]) for name in names)
        waits = metrics.percentiles(ttft, (gaps[0], gaps[1]))
        well = float(results[0].load.within.met(ttft, tpot).mean())
        return {"machines": machines, "well": well, "ttft_p99": waits["ttft_p99"], "itl_p99": waits["itl_p99"]}

    def _shares(self, asked: Load) -> Sequence[Sequence[int]]:
        """Indices of each machine's requests."""
        if self.cell.balance == "round robin":
            return clock.round_robin(asked, self.cell.n_machines)
        work = (np.array(asked.prompt) * self.per_token).tolist()
        return clock.least_work(asked, self.cell.n_machines, work)


RUNS = {Fleet: run}  # not in the meter: fitting needs pandas, which no other cell should wait for
