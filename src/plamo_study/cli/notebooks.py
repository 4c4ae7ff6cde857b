"""Notebooks from the command line: execute them, live ones in the order of need, and publish their pages."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.text import Text

from llama_meter import paths
from llama_meter.errors import UnmeasuredError
from llama_meter.measure.request import Request
from plamo_study import live, runs
from plamo_study.cli.terminal import alone, console, short, shown
from plamo_study.studies import registry

SCALE = "shape"  # of a machine's page
LEAST = {"mini": 1.0, "shape": 5.0}  # minutes of a study, below which it says nothing
RECORDED = {"source": "recorded"}
HOME = registry.HOME.notebook
Values = Mapping[str, Any]


def run(names: Sequence[str], values: Values, force: bool = False) -> int:
    """Execute notebooks (none: all, or those that take files of yours) with parameters; the exit code.

    Their source is live, at mini, unless `values` say otherwise. Live ones share the minutes. Raises StudyError, before
    anything is measured, for wrong parameters and while another run is active.
    """
    values = {"source": "live"} | dict(values)
    if values["source"] == "live":
        values.setdefault("scale", "mini")
    if values.get("device") == "auto":
        del values["device"]
    request = Request.of(values)
    notebooks = chosen(names, request)
    assigned = runs.assign(notebooks, values)
    with alone(paths.REPORTS):
        if request.source != "live":
            return _ended(runs.side_by_side([*assigned.items()], paths.REPORTS, force))
        minutes, results = shares(notebooks, request), []
        if request.minutes:
            console.print(live.until(request.minutes))
        for path in notebooks:
            if path in minutes:
                results.append(_live(path, assigned[path] | {"minutes": minutes[path]}, force))
            else:
                console.print(f"{path.stem} is left out: there was no time for it", style="red")
        return max(_ended(results), int(len(results) < len(notebooks)))


def every_page(values: Values) -> int:
    """Measure what every notebook shows and publish all; the exit code.

    Where there is no time, or no program that a study needs, and for pages that speak of full size where models of
    5 MB fit in a cache, the recorded rows are shown.
    """
    request = Request.of({"source": "live"} | dict(values))
    notebooks = chosen([], request)
    cached = registry.OF_FULL_SIZE if request.scale == "mini" else ()
    minutes = shares([path for path in notebooks if path.stem not in cached], request)
    with alone(paths.REPORTS):
        results = []
        for path in notebooks:
            if path in minutes:
                results.append(_live(path, {"source": "live"} | dict(values) | {"minutes": minutes[path]}))
                if results[-1].output and len(results) == 1:
                    publish()
        without = [result for result in results if result.error == UnmeasuredError.__name__]
        for result in without:
            console.print(f"{result.notebook.stem} is shown as recorded: {result.message}", soft_wrap=True)
        code = _ended((result for result in results if result not in without), well=("ok", "unchanged", "in part"))
        done = {result.notebook for result in results if result.output}
        return max(code, _recorded([path for path in notebooks if path not in done]))


def at_hand(values: Values) -> int:
    """Measure this machine with your files or the study's models, and publish its page and all others; the exit code.

    A machine without a page of these files gets one as soon as a first round is measured, and anew at the end.
    """
    every = {"source": "live", "scale": SCALE} | dict(values)
    request = Request.of(every)
    first = registry.function(registry.HOME.first)(request.scale, request.sweep)
    notebooks = chosen([], Request())
    page = next(path for path in notebooks if path.stem == HOME)
    with alone(paths.REPORTS):
        rounds, code = [every | first.texts(), every] if is_new(every) else [every], 0
        for each in rounds:
            result = _live(page, each)
            code = _ended([result])
            if result.is_new:
                publish()
            if result.output and each is not every:
                where = short(paths.REPORTS / f"{HOME}.html")
                console.print(f"{where} is the first page: measuring goes on, and it is written anew at the end")
        return max(code, _recorded([path for path in notebooks if path != page]))


def chosen(names: Sequence[str], request: Request) -> list[Path]:
    """The notebooks in the order of need, those that show the rows of all others last.

    For files of a user's own and no names those that take such files.
    """
    need = [*registry.NOTEBOOKS, ""]
    order = {path: need.index(registry.notebook_of(path.stem)) for path in runs.find_notebooks(names)}
    notebooks = sorted(order, key=lambda path: order[path])
    if names or not (files := request.sweep.files):
        return sorted(notebooks, key=lambda path: path.stem in registry.OF_ALL)
    pair = len(files) > 1 and len({model for model, _, _ in files}) == 1
    if not pair:
        console.print(f"{registry.OF_PAIRS} is left out: it takes two files of one model", soft_wrap=True)
    taking = [path for path in notebooks if "files" in runs.declared(path)]
    return [path for path in taking if pair or path.stem != registry.OF_PAIRS]


def shares(notebooks: Sequence[Path], request: Request) -> dict[Path, float]:
    """The minutes of each notebook that there is time for, equal ones for each of its studies; 0: no limit.

    The first always has its own.
    """
    sizes = {path: len(registry.of_notebook(path.stem, request.scale, request.sweep.files)) for path in notebooks}
    fitting: dict[Path, int] = {}
    for path, size in sizes.items():
        n = sum(fitting.values())
        if not (request.minutes and n and size) or (n + size) * LEAST[request.scale] <= request.minutes:
            fitting[path] = size
    return {path: request.minutes * size / max(sum(fitting.values()), 1) for path, size in fitting.items()}


def is_new(values: Values) -> bool:
    """Whether there is no page of these files yet. That of another day or other files is kept, as NAME-DATE."""
    page = paths.REPORTS / f"{HOME}.ipynb"
    if not (made := runs.made(page)):
        return True
    files, start = made
    same = files == str(values.get("files", ""))
    if not same or start[:10] != f"{datetime.now(UTC):%Y-%m-%d}":
        moved = page.rename(page.with_stem(f"{HOME}-{start[:19].replace(':', '')}"))
        console.print(f"kept as {short(moved)}", soft_wrap=True)
    return not same


def publish(
    notebooks: Sequence[Path] | None = None, form: str = "html", into: Path | None = None, author: str = ""
) -> None:
    """Write the pages or articles of these notebooks, else of all that `run` completed, and print what was written.

    They go into reports/ unless a folder is named.
    """
    from plamo_study.publish import pages  # 0.9 s of nbconvert, which `run` does without

    completed = [path for path in paths.REPORTS.glob("*.ipynb") if not path.name.endswith(".partial.ipynb")]
    completed.sort(key=lambda path: (path.stem != HOME, path.name))  # what was measured here comes first
    index = None if notebooks else True
    for path in pages.publish(notebooks or completed, into or paths.REPORTS, form, author, index):
        console.print(f"published {short(path)}")


def _live(path: Path, values: Values, force: bool = False) -> runs.RunResult:
    """Execute a notebook that measures; a page that was made from the same rows before is left as it is."""
    declared = {name: value for name, value in values.items() if name in runs.declared(path)}
    with shown(path.stem) as line:
        return runs.run(path, declared, paths.REPORTS, force, line.on_line)


def _recorded(notebooks: Sequence[Path]) -> int:
    """Execute notebooks on recorded rows and publish every page, unless nothing changed; the exit code."""
    results = list(runs.side_by_side([(path, RECORDED) for path in notebooks], paths.REPORTS))
    code = _ended(results)
    if any(result.is_new for result in results) or not (paths.REPORTS / "index.html").exists():
        publish()
    return code


def _ended(results: Iterable[runs.RunResult], well: Sequence[str] = ("ok", "unchanged")) -> int:
    """Print the outcome of each notebook; 1 if any is none of `well`."""
    code = 0
    for result in results:
        is_well = result.status in well
        code = max(code, int(not is_well))
        where = (
            short(result.output) if result.output else f"cell {result.cell}: {result.error} {result.message}".strip()
        )
        line = Text.assemble((result.status, "green" if is_well else "red"), f" {result.notebook.name}: {where}")
        console.print(line, soft_wrap=True)
    return code
