"""How the time for measuring is shared: equally, among as many studies as it is enough for, in the order of need.

A study that is meaningless in part is shown as recorded where its share is too short for all of it. Such studies time
nothing, so their results are the same on every machine but for rounding.
"""

from collections.abc import Mapping

from llama_meter.measure.asked import NOTHING, Sweep
from plamo_study.studies import registry

LEAST = {"mini": 1.0, "shape": 5.0}  # minutes of a study, below which it says nothing
WHOLE = 2.0  # minutes of one that is meaningless in part
LEFT_OUT = -1.0


def of_notebooks(scale: str, minutes: float, sweeps: Mapping[str, Sweep]) -> dict[str, list[tuple[str, str]]]:
    """What to measure for each notebook, studies with their scales, in `minutes` for all; 0: no limit.

    A notebook for which there is no time has no studies. The first in the order of need that measures always has its
    own. `sweeps`: what a user asks of each.
    """
    every = {name: of_notebook(name, scale, sweeps[name]) for name in sorted(sweeps, key=place)}
    share = minutes / max(sum(map(len, every.values())), 1)
    n, measured = 0, dict[str, list[tuple[str, str]]]()
    for name, studies in every.items():
        own = [study for study in studies if not minutes or share >= WHOLE or not registry.STUDIES[study[0]].whole]
        fits = not (minutes and n) or (n + len(own)) * LEAST[scale] <= minutes
        measured[name] = own if fits else []
        n += len(measured[name])
    return measured


def place(name: str) -> int:
    """Where a notebook, or that of a study, stands in the order of need."""
    return [*registry.NOTEBOOKS, ""].index(registry.notebook_of(name))


def of_notebook(name: str, scale: str, sweep: Sweep = NOTHING) -> list[tuple[str, str]]:
    """The studies of a notebook, or of the notebook of a study; for a user's files only those that take some."""
    return [study for study in registry.of_notebook(name, scale) if registry.varies(study[0]) or not sweep.files]


def of_study(name: str, scale: str, minutes: float, sweep: Sweep = NOTHING) -> float:
    """A study's share of its notebook's minutes; 0: what its plan takes; LEFT_OUT: shown as recorded."""
    share = minutes / max(len(of_notebook(name, scale, sweep)), 1)
    return LEFT_OUT if 0 < share < WHOLE and registry.STUDIES[name].whole else share
