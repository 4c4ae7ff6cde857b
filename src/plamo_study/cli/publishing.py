"""Executed notebooks as pages or articles: `plamo-study publish`."""

from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from llama_meter import paths
from plamo_study.cli import report
from plamo_study.cli.guard import alone
from plamo_study.studies.your_machine.at_hand import NOTEBOOK


class Format(StrEnum):
    """What a notebook becomes."""

    html = "html"
    markdown = "markdown"


def publish(
    notebooks: Annotated[
        list[Path] | None, typer.Argument(help="executed notebooks, whoever executed them; none: all in reports/")
    ] = None,
    form: Annotated[
        Format,
        typer.Option("--format", help="html: an offline page each; markdown: a folder each, with its figures"),
    ] = Format.html,
    out: Annotated[
        Path | None, typer.Option(help="folder to write into; default: reports/ for pages, here for articles")
    ] = None,
    author: Annotated[str, typer.Option(help="your name, for the page and its citation")] = "",
) -> None:
    """Make offline HTML pages or Markdown articles of executed notebooks; nothing is executed or measured."""
    into = out or (paths.REPORTS if form is Format.html else Path())
    of_reports = paths.REPORTS.is_dir() and (not notebooks or into.resolve() == paths.REPORTS)
    with alone(paths.REPORTS) if of_reports else nullcontext():
        write(notebooks, form, into, " ".join(author.split()))


def write(
    notebooks: list[Path] | None = None,
    form: Format = Format.html,
    into: Path | None = None,
    author: str = "",
) -> None:
    """Write the pages or articles of these notebooks, else of all that `run` completed, and print what was written.

    They go into reports/ unless a folder is named.
    """
    from plamo_study.publish import pages  # 0.9 s of nbconvert, which `run` does without

    completed = [path for path in paths.REPORTS.glob("*.ipynb") if not path.name.endswith(".partial.ipynb")]
    completed.sort(key=lambda path: (path.stem != NOTEBOOK, path.name))  # what was measured here comes first
    for path in pages.publish(
        notebooks or completed, into or paths.REPORTS, form.value, author, index=None if notebooks else True
    ):
        report.console.print(f"published {report.short(path)}")
