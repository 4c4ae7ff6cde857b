"""Read an executed notebook, and refuse it by its cell unless every output can be shown where no script runs."""

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat

from llama_meter import paths
from llama_meter.errors import StudyError
from plamo_study.run import runs
from plamo_study.show import theme

SHOWN = ["image/svg+xml", "image/png", "image/jpeg", "text/html", "text/markdown", "text/plain"]  # the richest first
VEGALITE = re.compile(r"application/vnd\.vegalite\.v\d+(\+|\.)json")
WORDED = re.compile(r"application/(json$|vnd\.jupyter\.)")  # text beside these says what they hold
HOMES = re.compile(rf"(?:/home|/Users)/[^/\s\"'<>&]+|{re.escape(str(Path.home()))}(?=/)")
SHOW_ELSE = "show it there as PNG, SVG, a table or text"


def read(source: Path) -> nbformat.NotebookNode:
    """Return a notebook whose cells all ended well, without home folders; StudyError for any other file."""
    stem = source.stem.removesuffix(".partial")
    of_study = (paths.NOTEBOOKS / f"{stem}.ipynb").exists() or not source.is_file()
    mend = f"plamo-study run {stem}" if of_study else f"jupyter nbconvert --to notebook --execute --inplace '{source}'"
    if not source.is_file():
        raise StudyError(str(source), "no such notebook", mend)
    try:
        notebook = nbformat.read(source, as_version=4)
        notebook.nbformat_minor = max(notebook.nbformat_minor, 5)  # cells may have ids that an older format forbids
        _, notebook = nbformat.validator.normalize(notebook)
        nbformat.validate(notebook)
    except Exception as problem:  # nbformat and JSON each raise their own kind here
        why = next(iter(str(problem).splitlines()), type(problem).__name__)
        raise StudyError(str(source), f"not a readable notebook ({why})", mend) from problem
    notebook.cells = [cell for cell in notebook.cells if runs.MARKED not in cell.metadata.get("tags", ())]
    if gaps := runs.unfinished(notebook):
        raise StudyError(str(source), f"cell {gaps[0]} was not executed to its end ({len(gaps)} were not)", mend)
    for number, cell in enumerate(notebook.cells):
        cell.source = HOMES.sub("~", cell.source)
        with drawing(f"{source.name}, cell {number}"):
            for output in cell.get("outputs", ()):
                _prepare(output, f"{source.name}, cell {number}")
    return notebook


@contextmanager
def drawing(where: str) -> Iterator[None]:
    """Let whatever the makers of pictures and pages raise be a StudyError of this place."""
    try:
        yield
    except StudyError:
        raise
    except Exception as problem:  # vl-convert, nbconvert and base64 each raise their own kind
        why = next(iter(str(problem).splitlines()), type(problem).__name__)
        raise StudyError(where, f"cannot be shown on a page ({why})", SHOW_ELSE) from problem


def _prepare(output: nbformat.NotebookNode, where: str) -> None:
    """Draw a Vega-Lite chart, take home folders out of texts; StudyError for what no page can show."""
    if "text" in output:
        output.text = HOMES.sub("~", output.text)
    data = output.get("data", {})
    spec = next((value for kind, value in data.items() if VEGALITE.fullmatch(kind)), None)
    if spec is not None and theme.SPEC_KEY not in output.metadata:
        output.data, output.metadata = map(nbformat.from_dict, _chart(spec, where))
        return
    rich = [kind for kind in data if kind not in SHOWN]
    told = "text/plain" in data and all(map(WORDED.match, rich))
    if rich and not told and not set(SHOWN[:-1]) & set(data):
        raise StudyError(where, f"shows {rich[0]}, which a page cannot", SHOW_ELSE)
    for kind in data:
        if kind.startswith("text/"):
            data[kind] = HOMES.sub("~", data[kind])
        elif kind in ("image/png", "image/jpeg"):
            base64.b64decode(data[kind].replace("\n", ""), validate=True)


def _chart(spec: Any, where: str) -> theme.MimeBundle:
    """A chart of anybody's as a picture with words."""
    spec = json.loads(spec) if isinstance(spec, str) else spec
    if re.search(r'"url": "(?!data:)|"(?:mark|type)": "image"', json.dumps(spec)):  # an image's address may be a row's
        raise StudyError(
            where, "holds a chart whose data or pictures lie elsewhere", "read it in the notebook, then draw it"
        )
    title = spec.get("title", "")
    title = title.get("text", "") if isinstance(title, dict) else title
    return theme.mimebundle({**spec, "description": spec.get("description") or str(title) or "A chart"})


def whose(notebook: nbformat.NotebookNode) -> str:
    """Whose rows a notebook shows, from the metadata of its outputs; "" where it does not say."""
    kinds = [
        of for cell in notebook.cells for out in cell.get("outputs", ()) for of in out.get("metadata", {}).values()
    ]
    said = [of[theme.ROWS_KEY] for of in kinds if isinstance(of, dict) and theme.ROWS_KEY in of]
    live = any(entry.get("source") == "live" for entry in said)
    of_source = [entry for entry in said if (entry.get("source") == "live") == live]
    days = sorted(str(day) for entry in of_source for day in entry.get("days", ()))
    parts = [str(entry.get(name, "")) for name in ("machine", "device", "engine") for entry in of_source]
    parts += [" to ".join(dict.fromkeys((days[0], days[-1])))] if days else []
    begin = "Measured by the publisher" if live else "Reference rows"
    return " · ".join([begin, *dict.fromkeys(filter(None, parts))]) if said else ""
