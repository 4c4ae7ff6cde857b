"""What executed notebooks say: their findings and answered questions, for the page that quotes them.

notebooks = collect(paths.NOTEBOOKS)
asked(notebooks, "04-quantization", "Does it read more than a tenth slower?")
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd

from llama_meter.errors import StudyError
from plamo_study.show.evidence import ROWS_KEY
from plamo_study.show.findings import ANSWERS, FINDINGS, METADATA

GUIDE = "12-levers"  # which reads this, and so says nothing here
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
