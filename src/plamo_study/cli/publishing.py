"""Executed notebooks as pages or articles: `plamo-study publish`."""

from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from llama_meter import paths
from plamo_study.cli import report
from plamo_study.cli.guard import alone
from plamo_study.live.at_hand import NOTEBOOK


class Format(StrEnum):
    """What a notebook becomes."""

    html = "html"
    markdown = "markdown"


class Code(StrEnum):
    """What becomes of its code."""

    folded = "folded"
    shown = "shown"
    none = "none"


def publish(
    notebooks: Annotated[
        list[Path] | None, typer.Argument(help="executed notebooks, whoever executed them; none: all in reports/")
    ] = None,
    form: Annotated[
        Format,
        typer.Option("--format", help="html: an offline page each; markdown: a folder each, with SVG, PNG and CSV"),
    ] = Format.html,
    out: Annotated[
        Path | None, typer.Option(help="folder to write into; default: reports/ for pages, here for articles")
    ] = None,
    author: Annotated[str, typer.Option(help="your name, for the page and its citation")] = "",
    code: Annotated[
        Code | None,
        typer.Option(help="default: folded on pages, none in articles, as not every site folds what Markdown holds"),
    ] = None,
) -> None:
    """Make offline HTML pages or Markdown articles of executed notebooks; nothing is executed or measured."""
    into = out or (paths.REPORTS if form is Format.html else Path())
    of_reports = paths.REPORTS.is_dir() and (not notebooks or into.resolve() == paths.REPORTS)
    with alone(paths.REPORTS) if of_reports else nullcontext():
        write(notebooks, form, into, " ".join(author.split()), code)


def write(
    notebooks: list[Path] | None = None,
    form: Format = Format.html,
    into: Path | None = None,
    author: str = "",
    code: Code | None = None,
) -> None:
    """Write the pages or articles of these notebooks, else of all that `run` completed, and print what was written.

    They go into reports/ unless a folder is named.
    """
    from plamo_study.publish import articles, pages  # 0.9 s of nbconvert, which `run` does without

    into = into or paths.REPORTS
    completed = [path for path in paths.REPORTS.glob("*.ipynb") if not path.name.endswith(".partial.ipynb")]
    completed.sort(key=lambda path: (path.stem != NOTEBOOK, path.name))  # what was measured here comes first
    if form is Format.markdown:
        made = articles.publish(notebooks or completed, into, author, (code or Code.none).value)
    else:
        made = pages.publish(
            notebooks or completed, into, author, (code or Code.folded).value, index=None if notebooks else True
        )
    for path in made.paths:
        report.console.print(f"published {report.short(path)}")
    if made.wordless:
        report.console.print(
            f"{made.wordless} pictures have no words for readers who cannot see them, and bear the heading above them. "
            "In altair, .properties(description='...') gives a chart words.",
            soft_wrap=True,
        )
