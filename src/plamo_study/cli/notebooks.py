"""Notebooks from the command line: measure what they need, execute them, publish their pages."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any, Literal

import msgspec

from llama_meter import journal, paths
from llama_meter.cells import Gate
from llama_meter.errors import StudyError
from llama_meter.measure import machine, runner
from llama_meter.measure.asked import NOTHING, Sweep, sweep
from llama_meter.measure.plan import Plan
from llama_meter.models import given as files_given
from plamo_study.cli import publishing, report
from plamo_study.cli.guard import alone
from plamo_study.live import budget, conduct
from plamo_study.run import inputs, parameters, runs
from plamo_study.run.parameters import VARIED
from plamo_study.studies import registry as studies
from plamo_study.studies.two_files.plan import is_pair
from plamo_study.studies.your_machine import at_hand as core
from plamo_study.studies.your_machine.plan import first_round

NOTEBOOK_BYTES = 1 << 30  # of a kernel and what runs it: a third of that on recorded rows


@dataclass(frozen=True)
class Asked:
    """Notebooks by name (none: all) and how to run them; without a scale, each runs at its own.

    `values` are parameters. `minutes`: for measuring, 0 without a limit. `force`: also if nothing changed.
    `published`: write the pages too.
    """

    notebooks: list[str]
    source: str
    scale: str | None
    values: dict[str, str]
    minutes: float = 0.0
    force: bool = False
    published: bool = False
    of_page: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # further values, by notebook

    @property
    def of_own_files(self) -> bool:
        """Whether a user's files decide which notebooks run."""
        return bool(self.values.get("files")) and not self.notebooks


def execute(asked: Asked) -> int:
    """Measure every notebook's studies, then execute the notebooks side by side; returns the exit code.

    Raises StudyError, before anything is measured, for invalid arguments and while another run is active.
    """
    values = {"source": asked.source} | ({"scale": asked.scale} if asked.scale else {}) | asked.values
    parameters.typed(source=asked.source, scale=asked.scale or studies.RANDOM_WEIGHTS)
    for path, assigned in parameters.assign(_in_order(asked), values).items():
        if path.stem in studies.NOTEBOOKS:
            parameters.typed(**assigned)
        _asked(path, values)
    with alone(paths.REPORTS):
        return _execute(asked, values)


def at_hand(minutes: float | None, files: list[str]) -> int:
    """Measure this machine with these files or the study's models, and publish its page and all others; exit code.

    A machine without rows gets its page as soon as the first round is measured, and anew at the end.

    Raises StudyError when the disk is too full, or a file cannot be written or must not be measured.
    """
    with alone(paths.REPORTS):
        limit, scale = core.MINUTES if minutes is None else minutes, core.SCALE
        every = sweep(files=files)
        first = first_round(scale, every)
        planned = conduct.build(core.NOTEBOOK, scale, asked=every)
        sizes, new = core.missing([planned]), not core.measured(conduct.build(core.NOTEBOOK, scale, asked=first))
        if new:
            _say_how_long(planned, sizes, limit)
        rounds = [first, every] if new else [every]
        code = 0
        for varied in rounds:
            summary = report.measure(core.NOTEBOOK, scale, journal.LOCAL, minutes=limit, asked=varied)
            own = {"source": "live", "minutes": limit, "scale": scale} | varied.texts()
            own |= {"files": msgspec.json.encode(files).decode()} if files else {}
            names = [core.NOTEBOOK] if varied is first else []
            asked = Asked(names, "recorded", None, {}, published=True, of_page={core.NOTEBOOK: own})
            with _measured_here([core.NOTEBOOK]):
                code = _execute(asked, {"source": "recorded"}) or int(not summary.well)
            page = paths.REPORTS / f"{core.NOTEBOOK}.html"
            if varied is first and page.exists():
                said = f"{report.short(page)} is the first page: measuring goes on, and it is written anew at the end"
                report.console.print(said, style="bold", soft_wrap=True)
        return code


def _asked(path: Path, values: Mapping[str, Any]) -> Sweep:
    """Files and values that a notebook's parameters ask for. Raises StudyError for those that make no sense."""
    declared = parameters.declared(path)
    return sweep(**{name: values[name] for name in VARIED if name in values and declared.get(name) == "str"})


def _in_order(asked: Asked) -> list[Path]:
    """In the order of need, the page of a machine first, and those that show the rows of all others last.

    For files of a user's own and no names: those that take such files, all in the order of need.
    """
    notebooks = sorted(runs.find_notebooks(asked.notebooks), key=lambda path: budget.place(path.stem))
    if not asked.of_own_files:
        return sorted(notebooks, key=lambda path: path.stem in studies.OF_ALL)
    paired = is_pair(sweep(files=asked.values["files"]))
    own = (path for path in notebooks if "files" in parameters.declared(path))
    return [path for path in own if paired or path.stem != studies.OF_PAIRS]


def _execute(asked: Asked, values: dict[str, str]) -> int:
    """Execute the first notebook at once, so that a page is there early, and the others together at the end.

    What is unchanged is neither measured nor executed, unless forced.
    """
    notebooks, is_live, scale = _in_order(asked), asked.source == "live", asked.scale or studies.RANDOM_WEIGHTS
    if asked.of_own_files and studies.OF_PAIRS not in {path.stem for path in notebooks}:
        report.console.print(f"{studies.OF_PAIRS} is left out: it takes two files of one model", soft_wrap=True)
    device = os.environ.get(conduct.DEVICE, "auto")  # the same for every notebook, and on their pages
    given, sweeps = dict[Path, dict[str, Any]](), dict[str, Sweep]()
    for path in notebooks:
        declared = parameters.declared(path)
        own: dict[str, Any] = values | (as_recorded(path.stem, scale) if asked.published else {})
        own |= {"device": device} if device != "auto" and "device" in declared else {}
        own = {name: value for name, value in own.items() if name in declared} if asked.published else own
        given[path] = own | dict(asked.of_page.get(path.stem, {}))
        sweeps[path.stem] = _asked(path, given[path])
    needs = budget.of_notebooks(scale, asked.minutes, sweeps) if is_live else {}
    n_studies = sum(map(len, needs.values()))
    for path in notebooks:
        if is_live and "minutes" in parameters.declared(path) and path.stem not in asked.of_page:
            given[path]["minutes"] = repr(asked.minutes * len(needs[path.stem]) / max(n_studies, 1))
    old = {path for path in notebooks if runs.is_current(path, given[path], paths.REPORTS, inputs.digest(path.stem))}
    todo = [path for path in notebooks if path not in old or asked.force]
    every = [(study, at, sweeps[path.stem]) for path in todo for study, at in needs.get(path.stem, [])]
    time, steps = Time(60 * asked.minutes, len(every)), report.Steps(len(every) + len(notebooks))
    report.beforehand(list(_plans(every)), asked.minutes)
    failed, results, left, here = False, list[runs.RunResult](), [], list[str]()
    for notebook in notebooks:
        own, varied, studied = given[notebook], sweeps[notebook.stem], needs.get(notebook.stem, [])
        well = True
        if notebook in todo:
            ends = [_measure(need, asked, steps, time, varied, len(every) == 1) for need in studied]
            here += [study for study, _ in budget.of_notebook(notebook.stem, scale, varied)] if is_live else []
            if is_live and not studied and budget.of_notebook(notebook.stem, scale, varied):
                ends = ["no time"]
                if not asked.published:
                    report.console.print(f"{notebook.stem} is left out: there was no time for it", style="red")
                    failed = True
                    continue
            if asked.published and set(ends) == {"no time"}:
                report.console.print(f"{notebook.stem} shows the recorded rows: there was no time for its own")
                own = {"source": "recorded"}
            well = not set(ends) & ({"failed"} if asked.published else {"failed", "in part", "no time"})
            failed |= not well
        known = well and not (asked.force and notebook in todo)  # else the next call reports this too
        if notebook is notebooks[0]:
            steps.begin(f"notebook {notebook.stem}")
            report.console.print(f"running {notebook.name}")
            page_digest = inputs.digest(notebook.stem) if known else ""
            if not runs.is_current(notebook, own, paths.REPORTS, page_digest):
                _keep_page(notebook.stem, own)
            with _measured_here(here):
                results.append(runs.run(notebook, own, paths.REPORTS, page_digest))
            if asked.published and results[0].is_new and len(notebooks) > 1:
                publishing.write()
        else:
            left.append((notebook, own, known))
    jobs = [(path, own, inputs.digest(path.stem) if known else "") for path, own, known in left]  # all is measured
    with _measured_here(here):
        for result in runs.side_by_side(jobs, paths.REPORTS, machine.at_once(1, NOTEBOOK_BYTES)):
            steps.begin(f"notebook {result.notebook.stem}")
            results.append(result)
    changed = any(result.is_new for result in results) or not (paths.REPORTS / "index.html").exists()
    if asked.published and changed and any(result.output for result in results):
        publishing.write()
    return 1 if report.summary(results) or failed else 0


def _keep_page(name: str, values: Mapping[str, Any]) -> None:
    """Before this machine's page is written anew: keep that of another day or other files, NAME-FILE-DATE."""
    page = paths.REPORTS / f"{name}.ipynb"
    if name != core.NOTEBOOK or not (made := runs.made(page)):
        return
    files, day = made
    if (files, day) != (str(values.get("files", "")), f"{datetime.now(UTC):%Y-%m-%d}"):
        of = Path(next(iter(files_given.split(files)), Path("models"))).stem if files else "models"
        places = (page.with_stem(f"{name}-{of[:40]}-{day}{n}") for n in ("", *(f"-{n}" for n in range(2, 100))))
        kept = page.rename(next(place for place in places if not place.exists()))
        report.console.print(f"kept as {report.short(kept)}: the page of {day}", soft_wrap=True)


@contextmanager
def _measured_here(studied: list[str]) -> Iterator[None]:
    """Let the kernels that start meanwhile measure nothing of these studies: it was done."""
    before = os.environ.get(conduct.MEASURED, "")
    os.environ[conduct.MEASURED] = " ".join([before, *studied])
    try:
        yield
    finally:
        os.environ[conduct.MEASURED] = before


class Time:
    """The seconds of several studies, shared equally: one that ends early leaves its rest to those after it."""

    def __init__(self, seconds: float, n_studies: int):
        """No limit for 0 `seconds`."""
        self.seconds, self.n_studies = seconds, n_studies

    @property
    def minutes(self) -> float:
        """Of the next study; 0: no limit."""
        return self.seconds / self.n_studies / 60

    def spend(self, seconds: float) -> None:
        """The next study has taken so many seconds, of which what is beyond its share went to files."""
        self.seconds -= min(seconds, 60 * self.minutes)
        self.n_studies -= 1


def _plans(asked: Iterable[tuple[str, str, Sweep]]) -> Iterator[Plan]:
    """The plans that are about to be measured; what has none says so when its turn comes."""
    for study, scale, chosen in asked:
        with suppress(StudyError):
            yield conduct.build(study, scale, asked=_varied(study, chosen))


def _varied(study: str, asked: Sweep) -> Sweep:
    """What a user asked, of a study that takes it."""
    return asked if studies.varies(study) else NOTHING


def _measure(
    need: tuple[str, str], asked: Asked, steps: report.Steps, time: Time, varied: Sweep, is_all: bool = False
) -> Literal["well", "in part", "no time", "failed"]:
    """Measure one study at its scale within its share of the time, and return how that ended.

    "in part": a file was measured, and the finding lacks rows.

    What keeps it from being measured is said, and the next study goes on; StudyError where it `is_all` that was asked.
    """
    study, scale = need
    steps.begin(f"measuring {study}")
    began, spent_s = monotonic(), 0.0
    try:
        varied = _varied(study, varied)
        summary = report.measure(study, scale, journal.LOCAL, minutes=time.minutes, asked=varied)
        spent_s = runner.spent_s(summary.rows, runner.at_once)
    except StudyError as error:
        if is_all:
            raise
        report.console.print(str(error), style="red", soft_wrap=True)
        return "failed"
    finally:
        time.spend(max(monotonic() - began, spent_s))
    if summary.well or summary.unexpected or summary.unseen:
        return "well" if summary.well else "failed"
    if studies.STUDIES[study].whole:
        return "no time"
    return "in part" if any(row.cell.files and not isinstance(row.cell, Gate) for row in summary.rows) else "no time"


def as_recorded(notebook: str, scale: str) -> dict[str, str]:
    """Parameters of a published page on speed, which shows full-size files: embedded models of 5 MB fit in a cache."""
    of_cache = scale == "mini" and notebook in studies.OF_FULL_SIZE
    return {"source": "recorded", "scale": studies.RANDOM_WEIGHTS} if of_cache else {}


def _say_how_long(planned: Plan, sizes: dict[str, int], limit: float) -> None:
    """Print at once how long measuring takes at most, and what is written before it."""
    files = f"{sum(sizes.values()) / 1e9:.1f} GB of files with random weights are written first. " if sizes else ""
    most = f"Measuring takes {limit:g} minutes at most" if limit else f"{len(planned.cells)} cells are measured"
    report.console.print(
        f"{files}{most}. Leave this machine alone meanwhile: what else computes is in the numbers.", soft_wrap=True
    )
