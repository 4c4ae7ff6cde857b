"""Simulations that were made before: a page of recorded rows looks them up, and whatever differs is simulated anew.

A simulation is named by its whole content: requests, policy, slots, and the step model's numbers to nine digits,
because a fit differs between processors in the last ones. `tools/simulated.py` makes the file again.
"""

import csv
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256

from plamo_study import paths
from plamo_study.studies.scheduling.loop import Load
from plamo_study.studies.scheduling.steps import StepModel, told

FILE = paths.MEASURED / "reference" / "10-simulated.csv"
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
        lines.writerows([name, *map(repr, found.values())] for name, found in sorted(used.items()))
    return len(used)


@cache  # reads a file, for each simulation of a page
def _recorded() -> dict[str, Figures]:
    if not FILE.exists():
        return {}
    with FILE.open(newline="", encoding="utf-8") as file:
        lines = csv.DictReader(file)
        return {line.pop("simulation"): {name: float(each) for name, each in line.items()} for line in lines}
