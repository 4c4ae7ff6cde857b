"""What executed notebooks say: their findings and answered questions, for the pages and documents that quote them.

    notebooks = collect(paths.NOTEBOOKS)                           # or read(): data/findings.json, as committed
    asked(notebooks, "04-quantization", "Does it read more than a tenth slower?")
    quoted(notebooks, "01-phase-asymmetry", r"(.+) reads (\\S+) tokens a second")

A number that a document quotes is computed once, in the notebook that it names.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd

from llama_meter import paths
from llama_meter.disk import growing, text
from llama_meter.errors import StudyError
from plamo_study.show.evidence import ROWS_KEY
from plamo_study.show.findings import ANSWERS, FINDINGS, METADATA

FILE = paths.DATA / "findings.json"
GUIDE = "12-levers"  # which reads this, and so says nothing here
MEND = "python tools/readme.py"
COLUMNS = ["question", "of", "figure", "asked", "why", "answer", "value", "low", "high", "notebook"]
NUMBER = r"-?[\d,]+(?:\.\d+)?(?:e[+-]?\d+)?"
FIGURE = re.compile(rf"(?P<value>{NUMBER}) \[(?P<low>{NUMBER}), (?P<high>{NUMBER})")
RANGE = re.compile(rf"(?P<low>{NUMBER}) to (?P<high>{NUMBER})")
Known = Mapping[str, Mapping[str, Any]]


def collect(folder: Path, source: str = "") -> dict[str, dict[str, Any]]:
    """The `title`, `findings`, `questions` and `rows` (whose they are) of each executed notebook in a folder, by name.

    `source`: only of those that show such rows. What is no notebook, or shows neither, is left out.
    """
    notebooks = {}
    for path in sorted(path for path in folder.glob("*.ipynb") if path.stem != GUIDE):
        try:
            notebook = nbformat.read(path, as_version=4)
        except (OSError, ValueError, nbformat.ValidationError):
            continue
        said = _said(notebook)
        if (said["findings"] or said["questions"]) and source in ("", said["rows"].get("source")):
            notebooks[path.stem] = said
    return notebooks


def _said(notebook: nbformat.NotebookNode) -> dict[str, Any]:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    metadata = [output.get("metadata", {}) for output in outputs]
    metadata += [entry["text/markdown"] for entry in metadata if isinstance(entry.get("text/markdown"), dict)]
    first = notebook.cells[0].source if notebook.cells else ""
    return {
        "title": first.partition("\n")[0].removeprefix("# "),
        "rows": next((dict(entry[ROWS_KEY]) for entry in metadata if ROWS_KEY in entry), {}),
        "findings": [line for entry in metadata for line in entry.get(FINDINGS, [])],
        "questions": [
            {"question": line["claim"], "of": line["of"], "figure": line["figure"], "asked": line["needed"],
             "why": line.get("why", ""), "answer": ANSWERS.get(line["verdict"], line["verdict"])}
            for entry in metadata for line in entry.get(METADATA, [])
        ],
    }  # fmt: skip


def written(notebooks: Known) -> str:
    """The file's text: a finding or a question a line."""
    return json.dumps(notebooks, ensure_ascii=False, indent=1, sort_keys=True) + "\n"


def write(notebooks: Known) -> None:
    """Write FILE."""
    with growing(FILE) as partial:
        partial.write_text(written(notebooks), encoding="utf-8")


def read() -> dict[str, dict[str, Any]]:
    """What the committed notebooks say. StudyError where FILE is missing or broken."""
    try:
        return dict(json.loads(text(FILE)))
    except ValueError as error:
        raise StudyError(str(FILE), f"is no list of findings ({error})", MEND) from None


def asked(notebooks: Known, notebook: str, pattern: str) -> pd.DataFrame:
    """The answers to the questions of a notebook that a pattern matches, a line for each of what was asked; COLUMNS.

    `value`, `low` and `high` are those of `figure`, with its digits; of a range its two ends and their mean.
    StudyError where no question matches: it names those that there are.
    """
    lines = notebooks.get(notebook, {}).get("questions", [])
    matching = [line for line in lines if re.search(pattern, line["question"], re.IGNORECASE)]
    if not matching:
        there = "; ".join(dict.fromkeys(line["question"] for line in lines)) or "nothing"
        mend = "ask it there, or name another question where this one is named"
        raise StudyError(f"question {pattern!r}", f"{notebook} does not ask it; it asks: {there}", mend)
    return pd.DataFrame(
        [line | _numbers(line["figure"]) | {"notebook": notebook} for line in matching], columns=COLUMNS
    )


def _numbers(figure: str) -> dict[str, float]:
    nothing = {"value": float("nan"), "low": float("nan"), "high": float("nan")}
    if match := FIGURE.search(figure) or RANGE.search(figure):
        read = {name: float(number.replace(",", "")) for name, number in match.groupdict().items()}
        return nothing | {"value": (read["low"] + read["high"]) / 2} | read
    alone = re.match(NUMBER, figure)
    return nothing | ({"value": float(alone[0].replace(",", ""))} if alone else {})


def quoted(notebooks: Known, notebook: str, pattern: str) -> tuple[str, ...]:
    """The groups of a pattern in the first finding of a notebook that it matches. StudyError where none does."""
    lines = notebooks.get(notebook, {}).get("findings", [])
    for line in lines:
        if match := re.search(pattern, line):
            return match.groups()
    mend = "say it there, or quote another finding where this one is quoted"
    raise StudyError(f"finding {pattern!r}", f"{notebook} has none; it says: {'; '.join(lines) or 'nothing'}", mend)
