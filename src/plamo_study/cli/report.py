"""Display of the command line: progress with the time left, tables, summaries. Messages on stderr, tables on stdout."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from llama_meter import journal, paths
from llama_meter.cells import Gate
from llama_meter.engine.builds import OnStep
from llama_meter.errors import StudyError
from llama_meter.measure import plan, runner
from llama_meter.measure.asked import NOTHING, Sweep
from llama_meter.models.registry import GIVEN
from llama_meter.rows import Row
from plamo_study.cli.terminal import Terminal
from plamo_study.live import conduct, live

if TYPE_CHECKING:  # these load Jupyter and SciPy, which few commands need
    from plamo_study.run.runs import RunResult

console = Terminal(stderr=True)
DONE = ("ok", "unchanged")


def place(reference: bool) -> str:
    """The place where a command stores its rows."""
    return journal.REFERENCE if reference else journal.LOCAL


def measure(
    study: str, scale: str, place: str, asked: Sweep = NOTHING, announces: bool = False, **how: Unpack[conduct.How]
) -> runner.Summary:
    """Measure a study with a progress bar: the running cell, failures, and the time left."""
    planned = conduct.build(study, scale, asked=asked)
    path = journal.journal_path(study, planned.scale, place)
    return sweep(planned, path, asked, announces, **how)


def sweep(
    planned: plan.Plan, path: Path, asked: Sweep = NOTHING, announces: bool = False, **how: Unpack[conduct.How]
) -> runner.Summary:
    """Measure a plan, showing progress. `asked`: what of it a user chose."""
    return conduct.measure(planned, path, Bar(planned, path), asked, announces, **how)


class Bar(live.Listener):
    """A progress bar on the terminal, and lines above and below it."""

    def __init__(self, planned: plan.Plan, path: Path):
        self.study, self.scale, self.path = planned.study, planned.scale, path
        self.said, self.failures = set[str](), list[str]()

    def begin(self, before: list[str]) -> None:
        """Print what to know beforehand."""
        for line in before:
            console.print(line, soft_wrap=True)

    @contextmanager
    def writing(self) -> Iterator[live.OnBytes]:
        """Show a bar per file that is written."""
        with bytes_progress() as progress:
            yield lambda file, done, total: progress(file)(done, total)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Show the bar."""
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
        )
        with Progress(*columns, console=console) as self.bar:
            self.task = self.bar.add_task(self.study, total=None, left="")
            yield

    def progress(self, event: runner.Progress) -> None:
        """Move the bar; print what is wrong with a row."""
        now, left = f"{self.study} {live.named(event.task.cell)}", live.left(event.remaining_s)
        self.bar.update(self.task, total=event.total, completed=event.done, description=now, left=left)
        row = event.row
        if row and (row.status != "ok" or row.valid is False) and not row.cell.asks_whether:
            self.refuse(row)
        elif row and (said := live.speed(row)):
            console.print(said, style="dim", highlight=False)

    def refuse(self, row: Row) -> None:
        """Print once what is wrong with a row."""
        if (said := live.trouble(row)) not in self.said:
            console.print(said, style="red" if isinstance(row.cell, Gate) else "yellow", soft_wrap=True)
            self.said.add(said)

    def fail(self, text: str, name: str) -> None:
        """Keep what is wrong for the end."""
        self.failures.append(text)

    def end(self, summary: runner.Summary, no_time: str) -> None:
        """Print what was measured, what lacks, and what to do about it."""
        console.print(
            f"{self.study} at {self.scale}: {summary.measured} cells measured, {len(summary.rows)} rows, "
            f"{len(summary.failed)} failed or wrong ({short(self.path)})"
        )
        if no_time:
            console.print(f"{self.study}: {no_time}", soft_wrap=True)
        for said in self.failures:
            console.print(f"{self.study}: {said}", style="red", soft_wrap=True)
        if summary.unexpected:
            which = "--file FILE" if self.scale == GIVEN else f"--scale {self.scale}"
            how = f"plamo-study measure {self.study} {which} --retry-failed"
            console.print(f"{self.study}: rows that failed stay, and fail this call again; `{how}` measures them anew")
        if summary.lacking:
            lacks = f"{conduct.lacking(summary)}; {conduct.MORE}"
            console.print(f"{self.study}: {lacks}", style="red", soft_wrap=True)


def beforehand(plans: Sequence[plan.Plan], minutes: float) -> None:
    """Say what to know before several studies."""
    for line in live.beforehand(plans, minutes):
        console.print(line, soft_wrap=True)


@contextmanager
def bytes_progress(verb: str = "writing") -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """A bar per file that is written (or what `verb` says); nothing is shown when nothing is."""
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as bar:
        tasks: dict[str, int] = {}

        def of(name: str) -> Callable[[int, int], None]:
            def update(done: int, total: int) -> None:
                if name not in tasks:
                    tasks[name] = bar.add_task(f"{verb} {name}", total=total)
                bar.update(tasks[name], completed=done, total=total)  # type: ignore[arg-type] # rich's TaskID is an int

            return update

        yield of


def summary(results: "list[RunResult]") -> bool:
    """Print the outcome of each notebook; return whether any failed."""
    for result in results:
        where = (
            short(result.output) if result.output else f"cell {result.cell}: {result.error} {result.message}".strip()
        )
        style = "green" if result.status in DONE else "red"
        said = Text.assemble((result.status, style), f" {result.notebook.name} in {result.seconds:.0f} s: {where}")
        console.print(said, soft_wrap=True)
    return any(result.status not in DONE for result in results)


class Steps:
    """Announces each step of a long command: its number and the total."""

    def __init__(self, total: int):
        self.total, self.done = total, 0

    def begin(self, what: str) -> None:
        """Begin the next step."""
        self.done += 1
        console.print(Text.assemble((f"{self.done} of {self.total}", "bold"), f": {what}"))


def joined_parameters(arguments: list[str]) -> list[str]:
    """Write papermill's `-p NAME VALUE` as the single word that a repeatable option needs: `-p NAME=VALUE`."""
    joined, rest = [], iter(arguments)
    for word in rest:
        joined.append(word)
        if word == "-p":
            name = next(rest, "")
            joined.append(name if "=" in name else f"{name}={next(rest, '')}")
    return joined


def name_and_value(text: str) -> tuple[str, str]:
    """Split NAME=VALUE."""
    name, _, value = text.partition("=")
    if not name.isidentifier():
        raise StudyError(f"-p {text}", "is not NAME VALUE", "plamo-study run -p source recorded")
    return name, value


def short(path: Path) -> str:
    """A path relative to the project if it is inside."""
    return str(path.relative_to(paths.ROOT)) if path.is_relative_to(paths.ROOT) else str(path)


@contextmanager
def building(name: str) -> Iterator[OnStep]:
    """A progress bar with the current step of a build."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(f"{name}: starting", total=None)

        def on_step(what: str, done: int, steps: int) -> None:
            said = f"{what}, {done} of {steps}" if steps else what
            bar.update(task, description=f"{name}: {said}", completed=done, total=steps or None)

        yield on_step
