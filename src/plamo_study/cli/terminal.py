"""Output of the command line: consoles and JSON that show control characters instead of interpreting them.

File names, messages of servers and engines, rows of other machines: text from any source reaches a terminal here.
"""

from collections.abc import Iterable
from typing import Any

import msgspec
import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from plamo_study.foreign import plain

KEPT = "\n\t\xa0\u3000\r"  # rich passes a carriage return only where this program ends a line with it


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


def echo(value: Any) -> None:
    """Write a value as one line of JSON."""
    said = msgspec.json.encode(value).decode()
    typer.echo("".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in said))
