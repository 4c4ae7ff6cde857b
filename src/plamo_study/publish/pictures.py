"""The pictures of a notebook that anybody may have executed, brought into the form in which ours leave a kernel.

A Vega-Lite chart, in any of the forms that altair shows it, becomes a PNG with words and its spec; a picture without
words gets the heading above it.
"""

import json
import re
from typing import Any

import nbformat

from llama_meter.errors import StudyError
from plamo_study.show import theme

VEGALITE = re.compile(r"application/vnd\.vegalite\.v\d+(\+|\.)json")
EMBEDDED = "})({"  # in altair's HTML: its script calls itself with the spec
KINDS = ("image/svg+xml", "image/png", "image/jpeg")
SCRIPTED = re.compile(r"<(script|iframe|object|embed|canvas|video|audio)\b", re.IGNORECASE)
VIEWED = re.compile(r"(image|audio|video)/|application/(pdf$|vnd\.(?!jupyter))")  # of these a text is only a name
HEADING = re.compile(r"^#+\s+(.*?)\s*#*$", re.MULTILINE)


def uniform(notebook: nbformat.NotebookNode, name: str) -> int:
    """Bring the pictures of a notebook into one form, in place; return how many had no words.

    Raises StudyError for a chart whose data lies elsewhere: a page must be complete in itself.
    """
    wordless, heading = 0, name
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            heading = next(reversed(HEADING.findall(cell.source)), heading)
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            spec = None if theme.SPEC_KEY in output.get("metadata", {}) else _spec(data)
            if spec is not None:
                wordless += not spec.get("description") and not spec.get("title")
                output.data, output.metadata = map(nbformat.from_dict, _chart(spec, heading, name))
            if lost := _lost(output.get("data", {})):
                why, mend = (
                    f"cell {number} shows {lost}, which a page cannot",
                    "show it there as SVG, PNG, HTML or text",
                )
                raise StudyError(name, why, mend)
            for kind in KINDS:
                if kind in data and theme.SPEC_KEY not in output.metadata:
                    said = output.metadata.setdefault(kind, {})
                    if not str(said.get("alt") or "").strip():
                        words = str(data.get("text/plain", ""))
                        wordless += not words or words.startswith("<")
                        said["alt"] = heading if not words or words.startswith("<") else words
    return wordless


def _lost(data: dict[str, Any]) -> str:
    """What of an output would be missing on a page, which runs no scripts; "" where some form of it is shown.

    What HTML alone cannot hold there, polish.py refuses.
    """
    html, text = str(data.get("text/html", "")), str(data.get("text/plain", "")).strip()
    drawn = SCRIPTED.search(html)
    if any(kind in data for kind in (*KINDS, "text/markdown")) or (html and not drawn):
        return ""
    others = [kind for kind in data if kind not in ("text/html", "text/plain")]
    named = drawn or not text or text.startswith("<") or any(map(VIEWED.match, others))
    return others[0] if others and named else ""


def _spec(data: dict[str, Any]) -> dict[str, Any] | None:
    """The Vega-Lite spec of an output, None where there is none."""
    for kind, value in data.items():
        if VEGALITE.fullmatch(kind):
            return dict(json.loads(value) if isinstance(value, str) else value)
    html = str(data.get("text/html", ""))
    if "vegaEmbed" not in html or EMBEDDED not in html:
        return None
    try:
        spec, _ = json.JSONDecoder().raw_decode(html, html.index(EMBEDDED) + len(EMBEDDED) - 1)
    except ValueError:
        return None
    return dict(spec) if "vega-lite" in str(spec.get("$schema", "")) else None


def _chart(spec: dict[str, Any], heading: str, name: str) -> theme.MimeBundle:
    remote = next(_addresses(spec), None)
    if remote:
        raise StudyError(name, f"holds a chart whose data lies at {remote}", "read it in the notebook, then draw it")
    title = spec.get("title")
    title = title.get("text") if isinstance(title, dict) else title
    words = " ".join(title) if isinstance(title, list) else title
    return theme.mimebundle({**spec, "description": spec.get("description") or words or heading})


def _addresses(part: Any) -> Any:
    """The addresses from which a spec would load data or pictures."""
    if isinstance(part, dict):
        for key, value in part.items():
            if key == "url" and isinstance(value, str) and not value.startswith("data:"):
                yield value
            elif key not in ("datasets", "values"):
                yield from _addresses(value)
    elif isinstance(part, list):
        for item in part:
            yield from _addresses(item)
