"""Is the probe right about servers known to be wrong and servers known to be right? Each is probed many times.

Every run starts a new server, so no run inherits another's damage.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from plamo_study.engine import server_build
from plamo_study.measure import result_file, server
from plamo_study.measure.server import Setup
from plamo_study.studies.serving import probe
from plamo_study.studies.serving.client import Target
from plamo_study.studies.serving.results import TRIALS, Trial, Trials

RUNS = 20
SLOTS, TOKENS = 4, 1536  # llama-server's own number of slots; tokens of each
SECONDS = 30.0  # of one probe, at most


def run(model: str, path: Path, build: str, runs: int = RUNS, tell: Callable[[str], None] = print) -> Trial:
    """Probe llama-server on a build with a model, `runs` times, each on a new server."""
    found: list[probe.Rightness] = []
    died = 0
    setup = Setup("llama-server", path, SLOTS, TOKENS, libraries=server_build.libraries(build))
    for number in range(runs):
        with server.started(setup) as running:
            found.append(probe.rightness(probe.Ask(Target(running.url), seconds=SECONDS)))
            died += bool(running.ended(1.0 if found[-1].failed else 0.0))
        tell(f"{model}, {build}, {number + 1} of {runs}: {found[-1].verdict}")
    sums = {name: sum(getattr(each, name) for each in found) for name in ("compared", "other", "near_ties")}
    verdicts = dict(Counter(str(each.verdict) for each in found))
    return Trial(model=model, build=build, runs=runs, verdicts=verdicts, died=died, **sums)


def keep(place: str, trials: list[Trial]) -> Path:
    """Keep trials at a place, replacing earlier ones."""
    return result_file.keep(Trials(trials), place, TRIALS)
