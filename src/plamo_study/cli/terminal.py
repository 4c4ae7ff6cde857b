"""What every command runs in and prints with: messages instead of tracebacks, one run at a time, progress, tables.

File names, messages of servers and engines, rows of other machines: text from any source reaches a terminal here, with
control characters shown. Messages go to stderr, tables to stdout.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.status import Status
from rich.table import Table
from rich.text import Text

from llama_meter import children, paths
from llama_meter.disk import lock, plain
from llama_meter.errors import MENDABLE, StudyError, mendable
from llama_meter.measure import machine
from plamo_study.live import Line

LOCK = ".running"
MOST_BYTES = 1000  # of a lock's text about its holder
LOG_EVERY_S = 10.0  # between two lines of progress where no terminal replaces them
ALLOWED = "\n\t\xa0\u3000\r"  # rich passes a carriage return only where this program ends a line with it


class Terminal(Console):
    """A console with only its own colours and cursor movements: text is never markup or a control sequence."""

    def __init__(self, stderr: bool = False):
        super().__init__(stderr=stderr, markup=False, highlight=False)

    def render_str(self, text: str, **how: Any) -> Text:
        """A text as printed, so that column widths fit."""
        return super().render_str(plain(text), **how)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The printed segments, with control characters shown."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=plain(segment.text, ALLOWED))


console = Terminal(stderr=True)


def grid(*headings: str, title: str | Text = "") -> Table:
    """A table whose long words are folded where they do not fit, and never cut."""
    made = Table(title=title or None)
    for heading in headings:
        made.add_column(heading, overflow="fold")
    return made


def guarded(command: Callable[[], object]) -> None:
    """Run a command line; what a user can mend becomes one message and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # no text that one of them cannot encode is an error
    children.keep_python_safe()
    try:
        command()
    except MENDABLE as error:
        study_error = mendable(error)
        if study_error is None:
            raise
        console.print(str(study_error), style="red", soft_wrap=True)
        raise SystemExit(2) from None


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder` and keep a Mac awake while the block runs.

    The system releases the lock when this process ends, however it ends.

    Raises StudyError, naming the process that holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            lock(file)
        except BlockingIOError:
            who = os.read(file, MOST_BYTES).decode(errors="replace") or "process unknown"
            raise StudyError("another run is at work", who, "wait until it ends, or end it with `kill`") from None
        os.ftruncate(file, 0)
        command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
        os.write(file, f"process {os.getpid()}, since {datetime.now():%H:%M:%S}, {command}"[:MOST_BYTES].encode())
        with machine.awake():
            yield
    finally:
        os.close(file)


class Shown(Line):
    """The line of a study on the terminal, or of a notebook that measures, beside a spinner; in a log now and then."""

    def __init__(self, study: str, status: Status):
        super().__init__(study)
        self.status, self.last, self.printed = status, "", time.monotonic()

    def show(self, text: str, row: str = "") -> None:
        """Show a line in place of the last one, and what was measured in a line of its own, which stays."""
        if row:
            console.print(row, style="dim", soft_wrap=True)
        self.last = text.replace("*", "").replace("  \n", " ")
        self.status.update(Text(self.last))
        if not console.is_terminal and time.monotonic() - self.printed > LOG_EVERY_S:
            self.printed = time.monotonic()
            console.print(self.last, soft_wrap=True)

    def fail(self, text: str, name: str = "") -> None:
        """Print what is wrong; it stays."""
        console.print(f"{self.study}: {text}", style="red", soft_wrap=True)

    def on_line(self, text: str, row: str = "", failed: bool = False) -> None:
        """Show a line of a notebook that measures."""
        if failed:
            self.fail(text)
        else:
            self.show(text, row)


@contextmanager
def shown(study: str) -> Iterator[Shown]:
    """A line about a study or notebook while it is measured, of which the last one stays."""
    with console.status(study) as status:
        line = Shown(study, status)
        yield line
    if line.last:
        console.print(line.last, soft_wrap=True)


@contextmanager
def bar(what: str) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar: call it with what is done now, how much of it, and of how much (0: unknown)."""
    shape = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*shape, console=console) as made:
        task = made.add_task(what, total=None)

        def update(now: str, done: int, total: int) -> None:
            made.update(task, description=f"{what}: {now}", completed=done, total=total or None)

        yield update


def short(path: Path) -> str:
    """A path relative to the project if it is inside."""
    return str(path.relative_to(paths.ROOT)) if path.is_relative_to(paths.ROOT) else str(path)
