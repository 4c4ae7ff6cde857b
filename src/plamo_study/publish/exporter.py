"""An executed notebook as HTML: nbconvert walks through the cells, the blocks of `web/notebook.html.j2` write them.

Code is folded, shown or left out; the tags `hide-input`, `hide-output` and `hide-cell` omit parts, and `detail` marks
the heading of a section that a page folds. An output keeps its richest form that works offline. A chart is a PNG with
alt text, with the spec to draw it again and its data as CSV.
"""

import base64
import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from html import escape
from pathlib import Path
from typing import Any, Literal

import nbformat
from jinja2 import pass_context
from jinja2.runtime import Context
from nbconvert.exporters.templateexporter import TemplateExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from pygments import highlight  # type: ignore[import-untyped]  # ships no types; three names are used
from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]  # the same
from pygments.lexers import TextLexer, get_lexer_by_name  # type: ignore[import-untyped]  # the same
from pygments.util import ClassNotFound  # type: ignore[import-untyped]  # the same
from traitlets.config import Config

from llama_meter.errors import StudyError
from plamo_study.publish.tables import Row, tables

WEB = Path(__file__).parent / "web"
SHOWN = ["image/svg+xml", "image/png", "image/jpeg", "text/html", "text/markdown", "text/plain"]  # the richest first
FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠", "\t", "\r", "\n")  # begins one in a spreadsheet
DETAIL = "detail"  # tag of a cell whose first heading names a section that proves, or whose output is the first rows
HEADING = re.compile("<h([2-6])\\b")
Code = Literal["folded", "shown", "none"]
SETTINGS = Config(
    NbConvertBase={"display_data_priority": SHOWN},
    TagRemovePreprocessor={
        "enabled": True,
        "remove_cell_tags": {"hide-cell"},
        "remove_input_tags": {"hide-input"},
        "remove_all_outputs_tags": {"hide-output"},
    },
)


class _Exporter(TemplateExporter):
    """nbconvert's exporter with our blocks and filters.

    Not its HTMLExporter, which gives every picture without alt text one that says nothing.
    """

    def default_filters(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        """nbconvert's filters, and ours."""
        yield from super().default_filters()
        yield "markdown2html", _markdown_of_cell
        yield "colored", _colored
        yield "base64_of", lambda picture: base64.b64encode(picture.encode()).decode()
        yield "inline_json", _inline_json
        yield "csv_links", _csv_links


def body(notebook: nbformat.NotebookNode, name: str, code: Code = "folded", tex: bool = False) -> str:
    """Return the cells of `notebook` in reading order as HTML; `name` is for error messages and names of files.

    Raises StudyError for TeX formulas, which need an external script, unless the reader of the result has one (`tex`).
    """
    asked = {"code": code, "tex": tex, "language": language(notebook)}
    return str(_exporter().from_notebook_node(notebook, {"metadata": {"name": name}, "asked": asked})[0])


@cache  # its templates are compiled once
def _exporter() -> _Exporter:
    return _Exporter(
        config=SETTINGS,
        extra_template_basedirs=[str(WEB.parent)],  # by default the current folder, which may be anybody's
        template_name=WEB.name,
        template_file="notebook.html.j2",
    )


def language(notebook: nbformat.NotebookNode) -> str:
    """The language of a notebook's code, as pygments and code fences call it."""
    return str(notebook.metadata.get("language_info", {}).get("name", "python"))


class _Renderer(IPythonRenderer):
    """Markdown to HTML with anchors on headings; refuses TeX where the page has no typesetter."""

    def __init__(self, name: str, attachments: dict[str, dict[str, str]], tex: bool):
        super().__init__(escape=False, attachments=attachments)
        self.notebook, self.tex = name, tex

    def inline_math(self, body: str, fence: str = "$") -> str:
        """Refuse `$body$`, and the other notations of TeX, or mark them for the typesetter."""
        if self.tex:
            return f'<span class="tex">{fence}{escape(body)}{fence}</span>'
        raise StudyError(
            self.notebook,
            f"the TeX formula {body.strip()!r} needs a typesetter that an offline page does not have",
            "write it in Unicode with <sub>, <sup> and <var>, or as a code block; a dollar sign is \\$",
        )

    def block_math(self, body: str) -> str:
        """Treat `$$body$$` so."""
        return f"<div>{self.inline_math(body, '$$')}</div>"

    def latex_environment(self, name: str, body: str) -> str:
        """Treat an environment so."""
        return self.block_math(f"\\begin{{{name}}}{body}\\end{{{name}}}")


@pass_context
def _markdown_of_cell(context: Context, source: str) -> str:
    resources = context["resources"]
    attachments = context["cell"].get("attachments", {})
    html = markdown(source, resources["metadata"]["name"], attachments, resources["asked"]["tex"])
    return HEADING.sub(r"<h\1 data-detail", html, 1) if DETAIL in context["cell"].metadata.get("tags", ()) else html


def markdown(source: str, name: str, attachments: dict[str, dict[str, str]] | None = None, tex: bool = False) -> str:
    """Return Markdown as HTML, attachments inside; `name` is for error messages."""
    return str(MarkdownWithMath(renderer=_Renderer(name, attachments or {}, tex)).render(source))


@pass_context
def _colored(context: Context, source: str) -> str:
    try:
        lexer = get_lexer_by_name(context["resources"]["asked"]["language"])
    except ClassNotFound:
        lexer = TextLexer()
    return str(highlight(source, lexer, HtmlFormatter(nowrap=True)))


def _inline_json(value: Any) -> str:
    """Return JSON in which no text can end the surrounding script element."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _csv_links(spec: dict[str, Any]) -> list[str]:
    """A chart's data as links to CSV files, one for each of its tables."""
    texts = [csv_text(rows) for rows in tables(spec)]
    return ["data:text/csv;charset=utf-8;base64," + base64.b64encode(text.encode()).decode() for text in texts]


def _inert(value: Any) -> Any:
    """A cell of a table that no spreadsheet calculates: a text that would begin a formula gets an apostrophe first."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def csv_text(rows: list[Row]) -> str:
    """A table as CSV, headings first."""
    lines = [{_inert(name): _inert(value) for name, value in row.items()} for row in rows]
    written = io.StringIO()
    writer = csv.DictWriter(written, dict.fromkeys(name for line in lines for name in line), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return written.getvalue()
