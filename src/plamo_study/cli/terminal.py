"""Output of the command line: consoles and JSON that show control characters instead of interpreting them.

File names, messages of servers and engines, rows of other machines: text from any source reaches a terminal here.
What an output cannot encode is escaped.
"""

import os
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from llama_meter.disk import plain

KEPT = "\n\t\xa0\u3000\r"  # rich passes a carriage return only where this program ends a line with it


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


def grid(*headings: str, title: str | Text = "") -> Table:
    """A table whose long words are folded where they do not fit, and never cut."""
    made = Table(title=title or None)
    for heading in headings:
        made.add_column(heading, overflow="fold")
    return made
