"""What the command line writes on: consoles and JSON that show control characters instead of obeying them.

Names of files, words of servers and engines, rows of other machines: whoever wrote them, they reach a terminal here.
"""

from collections.abc import Iterable
from typing import Any

import msgspec
import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from plamo_study.foreign import plain

KEPT = "\n\t\xa0\u3000\r"  # rich lets a carriage return through only where this program ends a line with it


class Terminal(Console):
    """A console whose own colours and movements are the only ones: no text is markup, nor escapes into commands."""

    def __init__(self, stderr: bool = False):
        super().__init__(stderr=stderr, markup=False, highlight=False)

    def render_str(self, text: str, **given: Any) -> Text:
        """A text as it will be printed: columns are as wide as that."""
        return super().render_str(plain(text), **given)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """What is printed, piece by piece."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=plain(segment.text, KEPT))


def echo(value: Any) -> None:
    """Write a value as one line of JSON."""
    said = msgspec.json.encode(value).decode()
    typer.echo("".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in said))
