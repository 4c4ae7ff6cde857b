"""Publish executed notebooks: one self-contained HTML file for each, and an index.

A page carries its styles, its pictures and, where there are charts, Vega from vl-convert's bundle. Its content security
policy forbids all requests and all scripts except the two inlined here, named by their hashes. Without
JavaScript and on paper, a chart's PNG is shown.

Nothing is executed here; `runs` does that.
"""

import base64
import csv
import functools
import hashlib
import io
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import jinja2
import nbformat
import vl_convert
from bs4 import BeautifulSoup
from markupsafe import Markup, escape

from plamo_study.errors import StudyError
from plamo_study.growing import growing
from plamo_study.present.theme import VEGALITE
from plamo_study.publish import cells, runs
from plamo_study.publish.polish import polish

WEB = Path(__file__).parent / "web"
GLOSSARY = "glossary"
AUTHORS = "The plamo-study authors"  # as CITATION.cff names them
SAID = 4  # fewest words of bold text that is a finding and not an emphasis
DISTURBED = "Disturbed"  # first word on a page of a disturbed recording; the finding follows below


@dataclass(frozen=True)
class Page:
    """One notebook as HTML, with its entry in the index.

    `title` is text, `finding` the bold text of the paragraph below it, `picture` the first chart.
    """

    name: str
    title: str
    finding: Markup
    picture: cells.Piece | None
    body: Markup
    charts: bool
    run: str
    values: str


def publish(sources: Sequence[Path], out_dir: Path) -> list[Path]:
    """Write index, one page per executed notebook, and glossary into `out_dir`; return their paths in this order.

    No file is replaced until all are written: a full disk leaves the old pages.

    Raises StudyError, before anything is written, when a notebook is missing, was not fully executed, has no
    title, or would need a script or another host.
    """
    if not sources:
        raise StudyError("publish", "there is no executed notebook", "plamo-study run")
    names = [source.stem for source in sources]
    for name in names:
        if names.count(name) > 1 or name in ("index", GLOSSARY):
            raise StudyError(name, "two pages would share this name", "rename one of the notebooks")
    known = {*names, GLOSSARY}
    pages = [_page(_read(source), source, known) for source in sources]
    glossary = _page(_glossary(), Path(f"{GLOSSARY}.md"), known)
    out_dir.mkdir(parents=True, exist_ok=True)
    beside = zip([None, *pages], pages, [*pages[1:], None], strict=False)
    files = {
        f"{page.name}.html": _render(
            "page.html.j2", page=page, before=before, after=after, scripts=scripts() if page.charts else []
        )
        for before, page, after in beside
    }
    files[f"{GLOSSARY}.html"] = _render("page.html.j2", page=glossary, before=None, after=None, scripts=[])
    files = {"index.html": _render("index.html.j2", pages=pages, scripts=[])} | files
    with ExitStack() as stack:  # left last in, first out: the index appears after all the pages it names
        for name, text in files.items():
            partial = stack.enter_context(growing(out_dir / name))
            partial.write_text(text, encoding="utf-8", newline="\n")
    return [out_dir / name for name in files]


def _glossary() -> nbformat.NotebookNode:
    text = (Path(__file__).parent / f"{GLOSSARY}.md").read_text(encoding="utf-8")
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text)])


def _page(notebook: nbformat.NotebookNode, source: Path, published: set[str]) -> Page:
    made = cells.pieces(notebook, source.name)
    body = _environment().get_template("body.html.j2").render(pieces=made)
    tree = polish(body, source.name, published)
    title, finding = _headline(tree, source)
    record = notebook.metadata.get("papermill", {})
    return Page(
        name=source.stem,
        title=title,
        finding=finding,
        picture=next((piece for piece in made if piece.kind == "chart"), None),
        body=Markup(_with_specs(str(tree), made, source.stem)),
        charts=any(piece.spec for piece in made),
        run=_date(record.get("end_time")),
        values=", ".join(f"{name} = {value}" for name, value in record.get("parameters", {}).items()),
    )


def _read(source: Path) -> nbformat.NotebookNode:
    run_it = f"plamo-study run {source.stem.removesuffix('.partial')}"
    if not source.is_file():
        raise StudyError(str(source), "no such notebook", run_it)
    try:
        notebook = nbformat.read(source, as_version=4)
    except Exception as problem:  # nbformat and JSON each raise their own kind here
        raise StudyError(str(source), f"not a readable notebook ({problem})", run_it) from problem
    gaps = runs.unfinished(notebook)
    if gaps:
        raise StudyError(str(source), f"cell {gaps[0]} was not executed to its end", run_it)
    return notebook


def _headline(tree: BeautifulSoup, source: Path) -> tuple[str, Markup]:
    heading = tree.find("h1")
    if heading is None:
        raise StudyError(str(source), "has no title", "begin its first cell with '# '")
    anchor = heading.select_one("a.anchor-link")
    title = heading.get_text().removesuffix(anchor.get_text() if anchor else "")
    below = (part for part in heading.find_all_next("p") if not part.get_text().startswith(DISTURBED))
    paragraph = next(below, None)
    bold = [part for part in paragraph.find_all("strong") if len(part.get_text().split()) >= SAID] if paragraph else []
    said = bold[0] if bold else paragraph
    return title.strip(), Markup(said.decode_contents()) if said else Markup("")


def _with_specs(body: str, made: Sequence[cells.Piece], name: str) -> str:
    """Insert the chart specs and their data, after the check that no notebook brings scripts of its own."""
    specs = [piece.spec for piece in made if piece.spec]
    for number, spec in enumerate(specs):
        script = f'<script type="application/json">{_inline_json(spec)}</script>'
        caption = (
            f'<figcaption><a download="{escape(name)}-{number + 1}.csv" href="{_csv(spec)}">Data (CSV)</a></figcaption>'
        )
        body = body.replace(f"<!--spec {number}-->", script + caption)
    return body


def _csv(spec: dict[str, Any]) -> str:
    """A chart's data as a link to a CSV file; with several tables, each line names its own."""
    found = list(spec.get("datasets", {}).values()) or [spec.get("data", {}).get("values", [])]
    several = len(found) > 1
    lines = [{"table": n} | line if several else line for n, lines in enumerate(found, 1) for line in lines]
    written = io.StringIO()
    writer = csv.DictWriter(written, dict.fromkeys(name for line in lines for name in line), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return "data:text/csv;charset=utf-8;base64," + base64.b64encode(written.getvalue().encode()).decode()


def _inline_json(value: Any) -> str:
    """Return JSON in which no text can end the surrounding script element."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _date(moment: str | None) -> str:
    return f"{datetime.fromisoformat(moment):%Y-%m-%d %H:%M}" if moment else ""


def _render(template: str, **content: Any) -> str:
    style = (WEB / "page.css").read_text(encoding="utf-8")
    said = {"style": Markup(style), "version": _version(), "authors": AUTHORS}
    return _environment().get_template(template).render(said | content)


@functools.cache
def scripts() -> list[tuple[Markup, str]]:
    """Return the scripts of a page with charts, each with its hash for the content security policy."""
    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VEGALITE).replace(
        "</script", "<\\/script"
    )
    texts = [bundle, (WEB / "charts.js").read_text(encoding="utf-8")]
    return [(Markup(text), _hash(text)) for text in texts]


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@functools.cache
def _environment() -> jinja2.Environment:
    loader = jinja2.FileSystemLoader(WEB)
    return jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)


def _version() -> str:
    try:
        return metadata.version("plamo-study")
    except metadata.PackageNotFoundError:
        return "(not installed)"
