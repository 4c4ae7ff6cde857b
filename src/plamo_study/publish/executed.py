"""An executed notebook before it is published: read, refused unless complete, and asked what it says of its rows."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import nbformat

from llama_meter import paths
from llama_meter.errors import StudyError
from plamo_study.run import runs
from plamo_study.show.theme import ROWS_KEY

AUTHORS = "The plamo-study authors"  # as CITATION.cff names them
FOLDERS = re.compile(r"(?<![\w.:])(~|\.{0,2})/(?:[^/\"'\[\],\n]*/)*")  # before the name of a file
RECORDED, LIVE = "recorded", "live"  # values of the parameter `source` of the study's notebooks


@dataclass(frozen=True)
class About:
    """What a notebook says of its rows and of its run; "" for what it does not say.

    `source`: "recorded" (rows of the study's reference machines), "live" (rows of whoever ran it), or "" where it shows
    no rows of this package. `days`: when they were measured. `run`: when the notebook was executed. `values`: what its
    parameters were set to.
    """

    source: str = ""
    machine: str = ""
    device: str = ""
    engine: str = ""
    days: str = ""
    version: str = ""
    run: str = ""
    values: str = ""

    @property
    def where(self) -> str:
        """The chip, and which part of it computed: "Apple M4 Pro, GPU"."""
        return ", ".join(part for part in (self.machine, self.device) if part)

    @property
    def badge(self) -> str:
        """Whose rows a page shows, in a few words; "" where it shows none."""
        if self.source == LIVE:
            return "your rows"
        return f"reference: {self.machine}" if self.source and self.machine else ("reference" if self.source else "")

    def of_rows(self) -> str:
        """Whose rows a page shows; "" where it shows none."""
        if not self.source:
            return ""
        whose = "Reference rows" if self.source == RECORDED else "Measured"
        where = {RECORDED: f": {self.where}", LIVE: f" on {self.where}"}[self.source] if self.where else ""
        return " · ".join(part for part in (whose + where, self.engine, self.days) if part)

    def cite(self, title: str, author: str) -> str:
        """The line to cite a page by; "" where nobody is named and no rows are shown.

        Recorded rows are the study's, whoever publishes them. Live ones are never credited to the study's authors.
        """
        if self.source == RECORDED:
            rows = f"plamo-study {self.version}{f', rows of {self.where}' if self.where else ''}"
            return ", ".join(part for part in (AUTHORS, f"“{title}”", rows, self.day) if part)
        if self.source == LIVE:
            measured = f"measured{f' on {self.where}' if self.where else ''} with plamo-study {self.version}"
            return ", ".join(part for part in (author, f"“{title}”", measured, self.day) if part)
        return ", ".join(part for part in (author, f"“{title}”", self.day) if part) if author else ""

    @property
    def day(self) -> str:
        """When the rows were measured or, where that is not said, when the notebook was run."""
        return self.days or self.run[:10]


def read(source: Path) -> nbformat.NotebookNode:
    """Return a notebook, every cell of which was executed to its end; StudyError for any other file."""
    run_it = _run_it(source)
    if not source.is_file():
        raise StudyError(str(source), "no such notebook", run_it)
    try:
        notebook = nbformat.read(source, as_version=4)
        notebook.nbformat_minor = max(notebook.nbformat_minor, 5)  # cells may have ids that an older format forbids
        _, notebook = nbformat.validator.normalize(notebook)
        nbformat.validate(notebook)
    except Exception as problem:  # nbformat and JSON each raise their own kind here
        why = next(iter(str(problem).splitlines()), type(problem).__name__)
        raise StudyError(str(source), f"not a readable notebook ({why})", run_it) from problem
    notebook.cells = [cell for cell in notebook.cells if runs.MARKED not in cell.metadata.get("tags", ())]
    for cell in notebook.cells:
        if "injected-parameters" in cell.metadata.get("tags", ()):
            cell.source = without_folders(cell.source)
    gaps = runs.unfinished(notebook)
    if gaps:
        n_code = sum(cell.cell_type == "code" and bool(cell.source.strip()) for cell in notebook.cells)
        why = f"cell {gaps[0]} was not executed to its end ({len(gaps)} of {n_code} cells with code were not)"
        raise StudyError(str(source), why, run_it)
    return notebook


def _run_it(source: Path) -> str:
    """The command that makes a complete notebook of this name."""
    stem = source.stem.removesuffix(".partial")
    if is_of_study(stem) or not source.is_file():
        return f"plamo-study run {stem}"
    return f"jupyter nbconvert --to notebook --execute --inplace '{source}'"


def without_folders(text: str) -> str:
    """Text with files by their names alone: where they lie is nobody's business."""
    return FOLDERS.sub("", text)


def is_of_study(name: str) -> bool:
    """Whether a notebook of this name is one of the study's."""
    return (paths.NOTEBOOKS / f"{name}.ipynb").exists()


def about(notebook: nbformat.NotebookNode) -> About:
    """What a notebook says of its rows, in the metadata of its outputs or else by its parameters, and of its run."""
    record, said = notebook.metadata.get("papermill", {}), list(_said(notebook))
    source = next((kind for kind in (LIVE, RECORDED) for entry in said if entry.get("source") == kind), "")
    of_source = [entry for entry in said if entry.get("source") == source]
    days = sorted(str(day) for entry in of_source for day in entry.get("days", ()))
    return About(
        source=source or _source_parameter(notebook),
        machine=_joined(of_source, "machine"),
        device=_joined(of_source, "device"),
        engine=_joined(of_source, "engine"),
        days=" to ".join(dict.fromkeys((days[0], days[-1]))) if days else "",
        version=_joined(of_source, "version") or metadata.version("plamo-study"),
        run=_ended(notebook),
        values=", ".join(
            f"{name} = {without_folders(str(value))}" for name, value in record.get("parameters", {}).items()
        ),
    )


def _said(notebook: nbformat.NotebookNode) -> Iterator[dict[str, Any]]:
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            for of_kind in output.get("metadata", {}).values():
                if isinstance(of_kind, dict) and isinstance(of_kind.get(ROWS_KEY), dict):
                    yield of_kind[ROWS_KEY]


def _joined(said: list[dict[str, Any]], name: str) -> str:
    return " and ".join(dict.fromkeys(str(entry[name]) for entry in said if entry.get(name)))


def _source_parameter(notebook: nbformat.NotebookNode) -> str:
    """The parameter `source` of a notebook that uses this package; "" where it has none."""
    if not any("plamo_study" in cell.source for cell in notebook.cells if cell.cell_type == "code"):
        return ""
    value = ""
    for cell in notebook.cells:  # an injected cell follows the one with the defaults
        if {"parameters", "injected-parameters"} & set(cell.metadata.get("tags", ())):
            value = _assigned(cell.source, "source") or value
    return value if value in (RECORDED, LIVE) else ""


def _assigned(code: str, name: str) -> str:
    """The text that a cell of plain assignments gives a name."""
    try:
        lines = ast.parse(code).body
    except SyntaxError:
        return ""
    for line in lines:
        targets = [line.target] if isinstance(line, ast.AnnAssign) else getattr(line, "targets", [])
        value = getattr(line, "value", None)
        if isinstance(value, ast.Constant) and any(
            isinstance(target, ast.Name) and target.id == name for target in targets
        ):
            return str(value.value)
    return ""


def _ended(notebook: nbformat.NotebookNode) -> str:
    """When the notebook was executed, by papermill or by Jupyter; "" where neither wrote it down."""
    times = [notebook.metadata.get("papermill", {}).get("end_time")]
    times += [time for cell in notebook.cells for time in cell.metadata.get("execution", {}).values()]
    moments = []
    for time in times:
        try:
            moments.append(datetime.fromisoformat(str(time)).replace(tzinfo=None))
        except ValueError:
            continue
    return f"{moments[0] if times[0] and moments else max(moments):%Y-%m-%d %H:%M}" if moments else ""
