"""Notebooks from the command line: measure what they need, execute them, publish their pages."""

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from llama_meter import journal, paths
from llama_meter.cells import Gate
from llama_meter.errors import StudyError
from llama_meter.measure import machine, runner
from llama_meter.measure.asked import NOTHING, Sweep, sweep
from llama_meter.measure.durations import lasts
from llama_meter.models import given as files_given
from plamo_study.cli import publishing, report
from plamo_study.cli.guard import alone
from plamo_study.live import at_hand as core, budget, conduct, live
from plamo_study.plans import registry as studies
from plamo_study.plans.handover import is_pair
from plamo_study.plans.your_machine import first_round
from plamo_study.run import inputs, parameters, runs
from plamo_study.run.parameters import VARIED

NOTEBOOK_S = 15.0  # to execute one, about
NOTEBOOK_BYTES = 1 << 30  # of a kernel and what runs it: a third of that on recorded rows


@dataclass(frozen=True)
class Asked:
    """Notebooks by name (none: all) and how to run them; without a scale, each runs at its own.

    `values` are parameters. `minutes`: for measuring, 0 without a limit; `at_most`: a larger limit for the rows that
    findings need. `force`: also if nothing changed. `json`: print the rows. `published`: write the pages too.
    """

    notebooks: list[str]
    source: str
    scale: str | None
    values: dict[str, str]
    minutes: float = 0.0
    at_most: float = 0.0
    force: bool = False
    json: bool = False
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


def at_hand(minutes: float | None, force: bool, files: list[str]) -> int:
    """Measure this machine with these files or the study's models, and publish its page and all others; exit code.

    A machine without rows gets its page as soon as the first round is measured, and anew at the end: where the minutes
    are enough for all blocks of what the first round measures.

    Raises StudyError when the disk is too full, a file cannot be written or must not be measured, or the engine cannot
    be probed.
    """
    with alone(paths.REPORTS):
        limit, scale = core.MINUTES if minutes is None else minutes, core.SCALE
        every = sweep(files=files)
        first = first_round(scale, every)
        planned, began, times = conduct.build(core.NOTEBOOK, scale, asked=every), time.monotonic(), 1.0
        soon, rounds = conduct.build(core.NOTEBOOK, scale, asked=first), [every]
        lacking, new = core.missing([planned]), not core.measured(soon)
        if new:
            pace = core.probed(planned.scale)
            times = pace.times
            _say_how_long(live.expected_s(planned, 0, times), lacking, limit, pace)
            whole_s = lasts(replace(soon, blocks=planned.blocks), pace=times)
            rounds = [first, every] if not limit or whole_s <= 60 * limit else rounds  # else blocks would be cut
        report.beforehand([live.Ahead(planned, limit, times)])
        code = 0
        for varied in rounds:
            summary = report.measure(core.NOTEBOOK, scale, journal.LOCAL, minutes=limit, asked=varied)
            if new and varied is every:
                report.console.print(f"files and measuring took {(time.monotonic() - began) / 60:.1f} minutes")
            own = {"source": "live", "minutes": limit, "scale": scale} | varied.texts()
            own |= {"files": msgspec.json.encode(files).decode()} if files else {}
            names = [core.NOTEBOOK] if varied is first else []
            asked = Asked(names, "recorded", None, {}, force=force, published=True, of_page={core.NOTEBOOK: own})
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
    """Those with values of their own first, then by number, with those that show the rows of all others last.

    For files of a user's own and no names: those that take such files, in order of need, the page of a machine first.
    """
    notebooks = runs.find_notebooks(asked.notebooks)
    if asked.of_own_files:
        need, paired = list(studies.NOTEBOOKS), is_pair(sweep(files=asked.values["files"]))
        own = (path for path in notebooks if "files" in parameters.declared(path))
        return sorted(
            (path for path in own if paired or path.stem != studies.OF_PAIRS), key=lambda p: need.index(p.stem)
        )
    return sorted(notebooks, key=lambda path: (path.stem not in asked.of_page, path.stem in studies.OF_ALL))


def _execute(asked: Asked, values: dict[str, str]) -> int:
    """Execute the first notebook at once, so that a page is there early, and the others together at the end.

    What is unchanged is neither measured nor executed, unless forced or asked for its rows.
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
    shares = budget.of_notebooks(sweeps, scale, asked.minutes, sweeps)
    needs = {name: budget.of_notebook(name, scale, shares[name], sweeps[name]) if is_live else [] for name in sweeps}
    steps = report.Steps(
        [budget.lasts(*need) for path in notebooks for need in needs[path.stem]] + [NOTEBOOK_S] * len(notebooks)
    )
    every = [(study, at, share, sweeps[name]) for name, of in needs.items() for study, at, share in of]
    report.beforehand(list(_ahead(every)))
    failed, results, left = False, [], []
    for notebook in notebooks:
        own, varied = given[notebook], sweeps[notebook.stem]
        if is_live and "minutes" in parameters.declared(notebook) and notebook.stem not in asked.of_page:
            own = own | {"minutes": repr(shares[notebook.stem])}
        digest = inputs.digest(notebook.stem)
        if runs.is_current(notebook, own, paths.REPORTS, digest) and not (asked.force or asked.json):
            steps.skip(len(needs[notebook.stem]))
        else:
            ends = [_measure(need, asked, steps, varied, len(every) == 1) for need in needs[notebook.stem]]
            if is_live and shares[notebook.stem] == budget.LEFT_OUT:
                ends = ["no time"]
                if not asked.published:
                    report.console.print(f"{notebook.stem} is left out: there was no time for it", style="red")
                    failed = True
                    steps.skip(1)
                    continue
            if ends:
                digest = inputs.digest(notebook.stem)
            if asked.published and set(ends) == {"no time"}:
                report.console.print(f"{notebook.stem} shows the recorded rows: there was no time for its own")
                own = {"source": "recorded"}
            well = not set(ends) & ({"failed"} if asked.published else {"failed", "in part", "no time"})
            digest = "" if asked.force or not well else digest  # the next call reports this too
            failed |= not well
        if notebook is notebooks[0]:
            steps.begin(f"notebook {notebook.stem}")
            report.console.print(f"running {notebook.name}")
            if not runs.is_current(notebook, own, paths.REPORTS, digest):
                _keep_page(notebook.stem, own)
            results.append(runs.run(notebook, own, paths.REPORTS, digest))
            if asked.published and results[0].is_new and len(notebooks) > 1:
                publishing.write()
        else:
            left.append((notebook, own, digest))
    for result in runs.side_by_side(left, paths.REPORTS, machine.at_once(1, NOTEBOOK_BYTES)):
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
        kept = page.rename(page.with_stem(f"{name}-{of}-{day}"))
        report.console.print(f"kept as {report.short(kept)}: the page of {day}", soft_wrap=True)


def _ahead(asked: Iterable[tuple[str, str, float, Sweep]]) -> Iterator[live.Ahead]:
    """The plans that are about to be measured; what has none says so when its turn comes."""
    for study, scale, minutes, chosen in asked:
        with suppress(StudyError):
            yield live.Ahead(conduct.build(study, scale, asked=_varied(study, chosen)), minutes)


def _varied(study: str, asked: Sweep) -> Sweep:
    """What a user asked, of a study that takes it."""
    return asked if studies.varies(study) else NOTHING


def _measure(
    need: tuple[str, str, float], asked: Asked, steps: report.Steps, varied: Sweep, is_all: bool = False
) -> Literal["well", "in part", "no time", "failed"]:
    """Measure one study at its scale within its share of the minutes, and return how that ended.

    "in part": a file was measured, and the finding lacks rows.

    What keeps it from being measured is said, and the next study goes on; StudyError where it `is_all` that was asked.
    """
    study, scale, share = need
    steps.begin(f"measuring {study}")
    at_most = share * asked.at_most / (asked.minutes or 1)
    try:
        varied = _varied(study, varied)
        summary = report.measure(study, scale, journal.LOCAL, minutes=share, at_most=at_most, asked=varied)
    except runner.NoTimeError as error:
        report.no_time(error, budget.enough(asked.minutes, share, error.needed_s))
        return "no time"
    except conduct.NothingError as error:
        report.console.print(str(error), soft_wrap=True)
        return "no time"
    except StudyError as error:
        if is_all:
            raise
        report.console.print(str(error), style="red", soft_wrap=True)
        return "failed"
    if asked.json:
        report.rows(summary)
    if summary.well or summary.unexpected or summary.unseen:
        return "well" if summary.well else "failed"
    return "in part" if any(row.cell.files and not isinstance(row.cell, Gate) for row in summary.rows) else "no time"


def as_recorded(notebook: str, scale: str) -> dict[str, str]:
    """Parameters of a published page on speed, which shows full-size files: embedded models of 5 MB fit in a cache."""
    of_cache = scale == "mini" and notebook in studies.OF_FULL_SIZE
    return {"source": "recorded", "scale": studies.RANDOM_WEIGHTS} if of_cache else {}


def _say_how_long(measuring_s: float, lacking: dict[str, int], limit: float, pace: core.Pace) -> None:
    """Print the expected duration, and the rates behind it."""
    measuring = measuring_s / 60
    files, size = core.writing_s(lacking) / 60, sum(lacking.values()) / 1e9
    writing = f"{files:.1f} minutes for {size:.1f} GB of files with random weights, then " if lacking else ""
    within = f", of which at most {limit:g} are used" if 0 < limit < measuring else ""
    report.console.print(
        f"This machine reads {pace.read / 1e9:.0f} GB/s and multiplies {pace.matmul / 1e9:.0f} GFLOP/s. So it takes "
        f"about {writing}{measuring:.1f} minutes for measuring{within}. Leave it alone meanwhile: what else computes "
        "is in the numbers.",
        soft_wrap=True,
    )
