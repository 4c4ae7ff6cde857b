"""An executed notebook as HTML: nbconvert walks through the cells, the blocks of `web/notebook.html.j2` write them.

Code is folded; the tags `hide-input`, `hide-output` and `hide-cell` omit parts. An output keeps its richest form that
works offline. A chart is a PNG with alt text, with the spec to draw it again and its data as CSV.
"""

import base64
import csv
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
from jinja2 import pass_context
from jinja2.runtime import Context
from nbconvert.exporters.templateexporter import TemplateExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from pygments import highlight  # type: ignore[import-untyped]  # ships no types; three names are used
from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]  # the same
from pygments.lexers import PythonLexer  # type: ignore[import-untyped]  # the same
from traitlets.config import Config

from plamo_study.errors import StudyError

WEB = Path(__file__).parent / "web"
SHOWN = ["image/png", "text/html", "text/markdown", "text/plain"]  # the richest first
FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠", "\t", "\r", "\n")  # begins one in a spreadsheet
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
        yield "python", lambda source: highlight(source, PythonLexer(), HtmlFormatter(nowrap=True))
        yield "inline_json", _inline_json
        yield "csv_link", _csv_link


def body(notebook: nbformat.NotebookNode, name: str) -> str:
    """Return the cells of `notebook` in reading order as HTML; `name` is for error messages and names of files.

    Raises StudyError for TeX formulas, which need an external script.
    """
    exporter = _Exporter(
        config=SETTINGS,
        extra_template_basedirs=[str(WEB.parent)],  # by default the current folder, which may be anybody's
        template_name=WEB.name,
        template_file="notebook.html.j2",
    )
    return str(exporter.from_notebook_node(notebook, {"metadata": {"name": name}})[0])


class _Renderer(IPythonRenderer):
    """Markdown to HTML with anchors on headings; refuses TeX, since the page has no typesetter."""

    def __init__(self, name: str, attachments: dict[str, dict[str, str]]):
        super().__init__(escape=False, attachments=attachments)
        self.notebook = name

    def inline_math(self, body: str) -> str:
        """Refuse `$body$`, and the other notations of TeX."""
        raise StudyError(
            self.notebook,
            f"the TeX formula {body.strip()!r} needs a typesetter that an offline page does not have",
            "write it in Unicode with <sub>, <sup> and <var>, or as a code block; a dollar sign is \\$",
        )

    def block_math(self, body: str) -> str:
        """Refuse `$$body$$`."""
        return self.inline_math(body)

    def latex_environment(self, name: str, body: str) -> str:
        """Refuse an environment."""
        return self.inline_math(body)


@pass_context
def _markdown_of_cell(context: Context, source: str) -> str:
    return markdown(source, context["resources"]["metadata"]["name"], context["cell"].get("attachments", {}))


def markdown(source: str, name: str, attachments: dict[str, dict[str, str]] | None = None) -> str:
    """Return Markdown as HTML, attachments inside; `name` is for error messages."""
    return str(MarkdownWithMath(renderer=_Renderer(name, attachments or {})).render(source))


def _inline_json(value: Any) -> str:
    """Return JSON in which no text can end the surrounding script element."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _inert(value: Any) -> Any:
    """A cell of a table that no spreadsheet calculates: a text that would begin a formula gets an apostrophe first."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def _csv_link(spec: dict[str, Any]) -> str:
    """A chart's data as a link to a CSV file; with several tables, each line names its own."""
    found = list(spec.get("datasets", {}).values()) or [spec.get("data", {}).get("values", [])]
    several = len(found) > 1
    lines = [{"table": n} | line if several else line for n, lines in enumerate(found, 1) for line in lines]
    lines = [{_inert(name): _inert(value) for name, value in line.items()} for line in lines]
    written = io.StringIO()
    writer = csv.DictWriter(written, dict.fromkeys(name for line in lines for name in line), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return "data:text/csv;charset=utf-8;base64," + base64.b64encode(written.getvalue().encode()).decode()
