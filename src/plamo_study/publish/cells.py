"""Turn the cells of one executed notebook into the pieces of a page.

Code is folded, parameters and code alike; the tags `hide-input`, `hide-output` and `hide-cell` omit parts. An
output keeps its richest form that works offline. A chart is a PNG with alt text and the spec to draw it again.
"""

from dataclasses import dataclass, replace
from typing import Any

import nbformat
from nbconvert.filters import strip_ansi
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from pygments import highlight  # type: ignore[import-untyped]  # ships no types; three names are used
from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]  # the same
from pygments.lexers import PythonLexer  # type: ignore[import-untyped]  # the same

from plamo_study.errors import StudyError
from plamo_study.present.theme import SPEC_KEY

PARAMETER_TAGS = {"parameters", "injected-parameters"}


@dataclass(frozen=True)
class Piece:
    """One part of a page. `kind` is markdown, code, chart, image, html or text and determines which fields are set.

    `width` and `height` of a picture are CSS pixels; `png` is base64; `spec` is Vega-Lite; `label` names folded code.
    """

    kind: str
    html: str = ""
    text: str = ""
    label: str = ""
    png: str = ""
    alt: str = ""
    width: int = 0
    height: int = 0
    spec: dict[str, Any] | None = None


def pieces(notebook: nbformat.NotebookNode, name: str) -> list[Piece]:
    """Return the pieces of `notebook` in reading order; `name` is for error messages.

    Raises StudyError for TeX formulas, which need an external script, and for pictures without alt text.
    """
    made: list[Piece] = []
    for index, cell in enumerate(notebook.cells):
        for piece in _cell(cell, f"{name}, cell {index}"):
            if made and piece.kind == made[-1].kind == "code" and piece.label == made[-1].label:
                piece = replace(piece, html=made.pop().html + "\n" + piece.html)
            made.append(piece)
    return made


def _cell(cell: nbformat.NotebookNode, place: str) -> list[Piece]:
    tags = set(cell.metadata.get("tags", []))
    if "hide-cell" in tags or not cell.source.strip():
        return []
    if cell.cell_type == "markdown":
        return [Piece("markdown", markdown(cell, place))]
    return _code(cell, tags, place) if cell.cell_type == "code" else []


def _code(cell: nbformat.NotebookNode, tags: set[str], place: str) -> list[Piece]:
    folded, shown = [], []
    if "hide-input" not in tags:
        html = highlight(cell.source, PythonLexer(), HtmlFormatter(nowrap=True))
        folded = [Piece("code", html, label="Parameters" if tags & PARAMETER_TAGS else "Code")]
    if "hide-output" not in tags:
        shown = [piece for output in cell.outputs if (piece := _output(output, place))]
    return folded + shown


def _output(output: nbformat.NotebookNode, place: str) -> Piece | None:
    if output.output_type == "stream":
        return Piece("text", text=strip_ansi(output.text).rstrip())
    data = output.get("data", {})
    if "image/png" in data:
        return _picture(output, place)
    if "text/html" in data:
        return Piece("html", data["text/html"])
    if "text/markdown" in data:
        return Piece("markdown", markdown(nbformat.v4.new_markdown_cell(data["text/markdown"]), place))
    return Piece("text", text=strip_ansi(data["text/plain"])) if "text/plain" in data else None


def _picture(output: nbformat.NotebookNode, place: str) -> Piece:
    size = output.metadata.get("image/png", {})
    alt = size.get("alt", "").strip()
    if not alt:
        raise StudyError(
            place, "shows a picture without words", "set the alt text: IPython.display.Image(..., alt='...')"
        )
    spec = output.metadata.get(SPEC_KEY)
    png = "".join(output.data["image/png"].split())
    return Piece(
        "chart" if spec else "image",
        png=png,
        alt=alt,
        width=size.get("width", 0),
        height=size.get("height", 0),
        spec=spec,
    )


class _Renderer(IPythonRenderer):
    """Markdown to HTML with anchors on headings; refuses TeX, since the page has no typesetter."""

    def __init__(self, place: str, attachments: dict[str, dict[str, str]]):
        super().__init__(escape=False, attachments=attachments)
        self.place = place

    def inline_math(self, body: str) -> str:
        """Refuse `$body$`, and the other notations of TeX."""
        raise StudyError(
            self.place,
            f"the TeX formula {body.strip()!r} needs a typesetter that an offline page does not have",
            "write it in Unicode with <sub>, <sup> and <var>, or as a code block; a dollar sign is \\$",
        )

    def block_math(self, body: str) -> str:
        """Refuse `$$body$$`."""
        return self.inline_math(body)

    def latex_environment(self, name: str, body: str) -> str:
        """Refuse an environment."""
        return self.inline_math(body)


def markdown(cell: nbformat.NotebookNode, place: str) -> str:
    """Return a Markdown cell as HTML, attachments inside; `place` is for error messages."""
    renderer = _Renderer(place, cell.get("attachments", {}))
    return MarkdownWithMath(renderer=renderer).render(cell.source)
