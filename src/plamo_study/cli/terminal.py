"""Output of the command line: consoles and JSON that show control characters instead of interpreting them.

File names, messages of servers and engines, rows of other machines: text from any source reaches a terminal here.
What an output cannot encode is escaped, and a table that does not fit is narrowed or written line by line.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import typer
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from llama_meter.disk import plain

KEPT = "\n\t\xa0\u3000\r"  # rich passes a carriage return only where this program ends a line with it
FRAME = 3  # characters that a column takes besides its text: a line and two blanks


def prepare() -> None:
    """Make the standard streams usable: none closed, and no text that one of them cannot encode is an error."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:  # closed: the next file or pipe would take its number
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


class Terminal(Console):
    """A console with only its own colours and cursor movements: text is never markup or a control sequence."""

    def __init__(self, stderr: bool = False):
        super().__init__(stderr=stderr, markup=False, highlight=False)

    def render_str(self, text: str, **given: Any) -> Text:
        """A text as printed, so that column widths fit."""
        return super().render_str(plain(text), **given)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The printed segments, with control characters shown."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=plain(segment.text, KEPT))


class Grid:
    """A table that is legible at any width, because no word in it is ever cut.

    Where it does not fit, the columns named in `leave` go, the last first, and are named below it. Where that is not
    enough, every line is written as a list: its first cell, then each column's heading and cell.
    """

    def __init__(self, *headings: str, title: str | Text = "", leave: Sequence[str] = ()):
        self.headings, self.title, self.leave = headings, title, leave
        self.lines: list[list[str | Text]] = []
        self.last_bold = False

    def add(self, *cells: str | Text, bold: bool = False) -> None:
        """Add a line; missing cells at its end are empty."""
        self.lines.append([*cells, *[""] * (len(self.headings) - len(cells))])
        self.last_bold = bold

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The widest form that fits."""
        shown = list(range(len(self.headings)))
        limits = [self._limits(console, options, column) for column in shown]
        for name in (*reversed(self.leave), None):
            narrow = sum(limits[column][0] + FRAME for column in shown) + 1
            if narrow <= options.max_width:
                yield self._table(shown, limits, options.max_width)
                break
            if name is not None:
                shown.remove(self.headings.index(name))
        else:
            yield from self._list(console)
            return
        if left := [heading for column, heading in enumerate(self.headings) if column not in shown]:
            enough = sum(least + FRAME for least, _ in limits) + 1
            yield Text(f"no room for {', '.join(left)}: `COLUMNS={enough}` before the command shows all")

    def _limits(self, console: Console, options: ConsoleOptions, column: int) -> tuple[int, int]:
        """The width of a column's longest word, and of its longest line."""
        cells = [Text(self.headings[column]), *(self._text(console, line[column]) for line in self.lines)]
        widths = [Measurement.get(console, options.update_width(10_000), cell) for cell in cells]
        return max(width.minimum for width in widths), max(width.maximum for width in widths)

    def _table(self, shown: list[int], limits: list[tuple[int, int]], width: int) -> Table:
        """Room beyond the longest words goes to the columns that lack most of it."""
        widths = {column: limits[column][0] for column in shown}
        room = width - 1 - sum(widths[column] + FRAME for column in shown)
        while room and (lacking := [column for column in shown if widths[column] < limits[column][1]]):
            widths[max(lacking, key=lambda column: limits[column][1] / widths[column])] += 1
            room -= 1
        made = Table(title=self.title or None)
        for column in shown:
            made.add_column(self.headings[column], width=widths[column])
        for line in self.lines:
            bold = self.last_bold and line is self.lines[-1]
            made.add_row(*(line[column] for column in shown), style="bold" if bold else None)
        return made

    def _list(self, console: Console) -> Iterable[Text]:
        if self.title:
            yield self._text(console, self.title)
        for line in self.lines:
            cells = [self._text(console, cell) for cell in line]
            yield Text.assemble((cells[0].plain, "bold"))
            for heading, cell in zip(self.headings[1:], cells[1:], strict=True):
                if cell.plain:
                    yield Text.assemble(f"  {heading}: ", cell)

    def _text(self, console: Console, cell: str | Text) -> Text:
        return console.render_str(cell) if isinstance(cell, str) else cell


def echo(value: Any) -> None:
    """Write a value as one line of JSON, in characters that the output can encode."""
    said, encoding = msgspec.json.encode(value).decode(), getattr(sys.stdout, "encoding", None) or "utf-8"
    typer.echo("".join(c if c.isprintable() and _encodes(c, encoding) else _escaped(c) for c in said))


def _encodes(character: str, encoding: str) -> bool:
    if character.isascii() or encoding.lower().replace("-", "") == "utf8":
        return True
    try:
        character.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _escaped(character: str) -> str:
    """A character as JSON escapes it: beyond U+FFFF in two halves."""
    halves = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{int.from_bytes(halves[i : i + 2]):04x}" for i in range(0, len(halves), 2))
