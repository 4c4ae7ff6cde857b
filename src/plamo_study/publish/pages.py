"""Publish executed notebooks: one self-contained HTML file for each, and an index.

A page carries its styles, its pictures and, where there are charts, Vega from vl-convert's bundle. Its content security
policy forbids all requests and all scripts except the two inlined here, named by their hashes. Without
JavaScript and on paper, a chart's PNG is shown.

Nothing is executed here; `runs` does that.
"""

import base64
import functools
import hashlib
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
from markupsafe import Markup

from plamo_study.errors import StudyError
from plamo_study.growing import growing
from plamo_study.present.theme import VEGALITE
from plamo_study.publish import exporter, runs
from plamo_study.publish.exporter import WEB
from plamo_study.publish.polish import polish

GLOSSARY = "glossary"
TITLE = "PLaMo on llama.cpp: write-ups"
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
    picture: Markup
    body: Markup
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
    glossary = nbformat.v4.new_markdown_cell(Path(__file__).with_name(f"{GLOSSARY}.md").read_text(encoding="utf-8"))
    words = _page(nbformat.v4.new_notebook(cells=[glossary]), Path(f"{GLOSSARY}.md"), known)
    files = {"index.html": _render(title=TITLE, pages=pages)}
    for before, page, after in zip([None, *pages], pages, [*pages[1:], None], strict=False):
        files[f"{page.name}.html"] = _render(page=page, before=before, after=after)
    files[f"{GLOSSARY}.html"] = _render(page=words)
    out_dir.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:  # left last in, first out: the index appears after all the pages it names
        for name, text in files.items():
            partial = stack.enter_context(growing(out_dir / name))
            partial.write_text(text, encoding="utf-8", newline="\n")
    return [out_dir / name for name in files]


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


def _page(notebook: nbformat.NotebookNode, source: Path, published: set[str]) -> Page:
    tree = polish(exporter.body(notebook, source.stem), source.name, published)
    title, finding = _headline(tree, source)
    record = notebook.metadata.get("papermill", {})
    ended = record.get("end_time")
    return Page(
        name=source.stem,
        title=title,
        finding=finding,
        picture=_picture(tree),
        body=Markup(str(tree)),
        run=f"{datetime.fromisoformat(ended):%Y-%m-%d %H:%M}" if ended else "",
        values=", ".join(f"{name} = {value}" for name, value in record.get("parameters", {}).items()),
    )


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


def _picture(tree: BeautifulSoup) -> Markup:
    """The first chart, for the index."""
    found = tree.select_one("figure.chart img")
    return Markup(str(found).replace("<img", '<img loading="lazy"', 1)) if found else Markup("")


def _render(page: Page | None = None, **content: Any) -> str:
    """A page, or the index without one; only a page with charts carries the scripts."""
    shared = {
        "style": Markup((WEB / "page.css").read_text(encoding="utf-8")),
        "scripts": _scripts() if page and page.picture else [],
        "version": metadata.version("plamo-study"),
        "authors": AUTHORS,
    }
    return _environment().get_template("page.html.j2").render(page=page, **shared, **content)


@functools.cache
def _environment() -> jinja2.Environment:
    """It keeps templates that it has compiled."""
    return jinja2.Environment(loader=jinja2.FileSystemLoader(WEB), autoescape=True, trim_blocks=True)


@functools.cache
def _scripts() -> list[tuple[Markup, str]]:
    """The scripts of a page with charts, each with its hash for the content security policy."""
    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VEGALITE)
    texts = [bundle.replace("</script", "<\\/script"), (WEB / "charts.js").read_text(encoding="utf-8")]
    return [(Markup(text), _hash(text)) for text in texts]


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
