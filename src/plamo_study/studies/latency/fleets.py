"""Number of machines that a load needs: days of requests shared out among simulated machines with measured calls.

Once requests are shared out, machines are independent. So all requests are shared out among all machines, but only a
random sample of the machines is simulated and represents the others. Ten thousand machines cost little more than
one.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from llama_meter.cells import Fleet
from llama_meter.errors import StudyError
from llama_meter.journal import LOCAL, REFERENCE, journal_path
from llama_meter.rows import Measured
from plamo_study.read.recording import read
from plamo_study.studies.latency.law import fitted, load_of, of_rows
from plamo_study.studies.latency.loop import Load, serve, shaped
from plamo_study.studies.latency.plan import CALLS, WELL, digest
from plamo_study.studies.latency.steps import MORE, Simulated, StepModel

SAMPLE = 40  # machine-days simulated of every load
MOST, HALVINGS = 64.0, 7  # most machines tried, relative to those that just keep up; steps of the search


def run(cell: Fleet, path: Path, stage: Callable[[str], None]) -> Measured:
    """Find the fewest machines, once per repetition of the cell, each time with other requests.

    Series, one number per trial: `repetition`; `machines`, relative to those that just keep up; `well`,
    the share of the simulated requests that were served in time. Valid where every request has all of its tokens.

    Raises
    ------
    StudyError
        The journal that the cell names is missing.

    """
    stage("fit")
    seen = of_rows(measured_calls(cell))
    models = {name.removesuffix("*"): model for name, model in fitted(seen).items()}
    typical = load_of(next(seen.traffic[seen.traffic["per_second"].isin(seen.loads)].itertuples()))
    series: dict[str, list[float]] = {"repetition": [], "machines": [], "well": []}
    complete = True
    for repetition in range(cell.repetitions):
        stage(f"repetition {repetition}")
        days = Days(cell, models[cell.model], typical, repetition)
        for machines, well in fewest(days.well):
            for name, value in zip(series, (float(repetition), machines, well), strict=True):
                series[name].append(value)
        complete &= days.complete
    return Measured(checks={"complete": complete}, series=series, valid=complete)


def measured_calls(cell: Fleet) -> pd.DataFrame:
    """Rows of calls that a fleet's simulation is fitted on; StudyError if no journal here has the cell's SHA-256."""
    for source, place in (("live", LOCAL), ("recorded", REFERENCE)):
        same = digest(journal_path(CALLS, cell.scale, place)) == cell.rows_sha256
        if same and (recording := read(CALLS, source, cell.scale)):
            return recording.rows
    why = "the rows that this fleet is simulated by are not here"
    raise StudyError(f"{CALLS} at {cell.scale}", why, f"{MORE} --scale {cell.scale}")


def fewest(well: Callable[[float], float]) -> Iterator[tuple[float, float]]:
    """Trials of a bisection (in the logarithm) for the fewest machines that serve WELL of all requests in time, and the
    share that each serves. A single trial if even MOST times the machines that keep up are not enough."""
    low, high = 0.0, float(np.log2(MOST))
    yield MOST, (share := well(MOST))
    for _ in range(HALVINGS if share >= WELL else 0):
        machines = float(2 ** ((low + high) / 2))
        yield machines, (share := well(machines))
        low, high = (low, (low + high) / 2) if share >= WELL else ((low + high) / 2, high)


class Days:
    """Requests of some days for a fleet, drawn once. More machines mean the same requests further apart.

    `complete`: whether, so far, those simulated got all of their tokens.
    """

    def __init__(self, cell: Fleet, model: StepModel, typical: Load, seed: int):
        self.cell, self.model, self.complete = cell, model, True
        n, many = cell.n_machines, -(-SAMPLE // cell.n_machines)
        rate = capacity(typical, model, cell.n_seq)
        asked = (at_rate(typical, n * rate, n * cell.n_requests, seed * many + day) for day in range(many))
        self.days = [shaped(load, cell.pattern) for load in asked]
        self.per_token = 1 / rate / float(np.mean(typical.prompt))  # s of work per prompt token
        draw = np.random.default_rng([cell.seed, seed])
        self.machines = [draw.choice(n, min(n, SAMPLE), replace=False).tolist() for _ in range(many)]

    def well(self, machines: float) -> float:
        """The share of requests served in time, with `machines` times as many as just keep up."""
        results = []
        for load, chosen in zip(self.days, self.machines, strict=True):
            apart = replace(load, arrives=(np.array(load.arrives) * machines).tolist())
            shares = least_work(apart, self.cell.n_machines, (np.array(load.prompt) * self.per_token).tolist())
            for seed, machine in enumerate(chosen):
                if own := shares[machine]:
                    simulated = Simulated(self.model, seed)
                    results.append(serve(apart.chosen(own), self.cell.rule, simulated, self.cell.n_seq))
        self.complete &= all(result.written == sum(result.load.output) for result in results)
        within = results[0].load.within
        return float(np.concatenate([within.met(result.ttft, result.tpot) for result in results]).mean())


def least_work(load: Load, n: int, work: list[float]) -> list[list[int]]:
    """Indices of each machine's requests if each goes to the one that finishes its queue first, by `work` (s).

    `work`: of each request alone. Where machines serve one request at a time and the work is exact, this is one
    queue before n servers.
    """
    free = [(0.0, machine) for machine in range(n)]
    shares: list[list[int]] = [[] for _ in range(n)]
    for number, arrives in enumerate(load.arrives):
        until, machine = free[0]
        shares[machine].append(number)
        heapq.heapreplace(free, (max(until, arrives) + work[number], machine))
    return shares


def at_rate(load: Load, per_second: float, n: int, seed: int = 0) -> Load:
    """`n` requests with a load's lengths, drawn at random, at `per_second` requests a second (Poisson)."""
    rng = np.random.default_rng([n, round(per_second * 1000), seed])
    which = rng.integers(0, len(load), n)
    gaps = rng.exponential(1 / per_second, n)
    return replace(load.chosen(which.tolist()), arrives=(np.cumsum(gaps) - gaps[0]).tolist())


def capacity(load: Load, model: StepModel, slots: int) -> float:
    """Most requests a second of a machine with whole prompts and full slots: λ (t_p + o t_b / b) < 1.

    `t_p`: mean seconds of a prompt; `o`: mean tokens of an answer; `t_b`: seconds of a step of all `b` slots.
    """
    read = float(np.mean([model.seconds(0, 0, n, 0) for n in load.prompt]))
    held = int(np.mean(load.prompt) + np.mean(load.output) / 2)
    step = model.seconds(slots, min(held, model.held) * slots, 0, 0)
    return 1 / (read + float(np.mean(load.output) - 1) * step / slots)


RUNS = {Fleet: run}  # not in the meter: fitting needs pandas, which no other cell should wait for
