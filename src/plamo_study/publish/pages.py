"""Publish executed notebooks: one HTML file for each and, where there are several, an index.

A page carries its styles and its pictures. Vega, from vl-convert's bundle, draws the charts again. A page made alone
carries it and is complete in itself; the pages of a site share one copy, `vega.js` beside them. The content security
policy forbids all requests and all scripts except those inlined here, named by their hashes, and the one that these
load. Without Vega, without JavaScript and on paper, a chart's PNG is shown.

Nothing is executed here; `runs` does that.
"""

import base64
import functools
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import Any

import jinja2
import nbformat
import vl_convert
from bs4 import BeautifulSoup, Tag
from markupsafe import Markup

from llama_meter import paths
from llama_meter.disk import growing
from llama_meter.errors import StudyError
from plamo_study.publish import executed, exporter, pictures
from plamo_study.publish.executed import About
from plamo_study.publish.exporter import WEB, Code
from plamo_study.publish.polish import polish
from plamo_study.show.theme import VEGALITE

GLOSSARY = "glossary"
LIBRARY = "vega.js"  # of a site, beside its pages
SHARED = "// Vega for the charts of the pages beside it, written by plamo-study publish.\n"  # how that file begins
TITLE = "PLaMo on llama.cpp: write-ups"
UPSTREAM = paths.DATA / "upstream"  # reports that pages link to, published beside them
STORIES = {  # of the index: the study's pages by what a reader wants
    "Your machine": ("your-machine",),
    "Learn": ("00-start-here", "01-phase-asymmetry", "02-roofline", "03-batch-scaling", "05-context-length"),
    "Choose": ("04-quantization", "04b-quality", "16-two-files", "13-machines"),
    "Serve": (
        "06-chunked-prefill", "07-replicas", "08-speculative", "09-disaggregation", "10-scheduling", "11-serving",
    ),
    "Trust": ("14-methods", "15-hybrids", "17-builds", "03b-batching-law"),
}  # fmt: skip
MORE = "More"  # heading of pages that no story names, where others are
SAID = 4  # fewest words of bold text that is a finding and not an emphasis
DISTURBED = "Disturbed"  # first word on a page of a disturbed recording; the finding follows below
CONTENTS = 3  # fewest sections that get a list of contents
REPORT_LINK = re.compile(r"\]\(([^()\s#]+\.md)")
OURS = re.compile(  # how every page begins
    r'<!doctype html>\n<html lang="..">\n<head>\n<meta charset="utf-8">\n'
    r"<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; img-src data:;"
)
JAPANESE = re.compile("[\u3041-\u30ff]")


@dataclass(frozen=True)
class Page:
    """One notebook as HTML, with its entry in the index.

    `title` is text, `finding` the bold text of the paragraph below it, `picture` the first chart, `sections` the
    anchors and texts of its headings, `folds` whether a section is folded.
    `wordless`: pictures that have no words of their own.
    """

    name: str
    title: str
    finding: Markup
    picture: Markup
    sections: list[tuple[str, str]]
    folds: bool
    body: Markup
    about: About
    wordless: int = 0

    @property
    def heading(self) -> str:
        """The title, with the machine whose rows are shown."""
        return f"{self.title} · {self.about.where}" if self.about.where else self.title

    @property
    def language(self) -> str:
        """The language that a browser should read the page in."""
        return "ja" if JAPANESE.search(self.title) else "en"


@dataclass(frozen=True)
class Published:
    """What was written, in reading order, and how many pictures have no words of their own."""

    paths: list[Path]
    wordless: int


def publish(
    sources: Sequence[Path], out_dir: Path, author: str = "", code: Code = "folded", index: bool | None = None
) -> Published:
    """Write one page per executed notebook into `out_dir`; with an `index` also that, the glossary and linked reports.

    `index`: by default where there are several notebooks. No file is replaced until all are written: a full disk
    leaves the old pages.

    Raises StudyError, before anything is written, when a notebook is missing, was not fully executed, has no
    title, or would need a script or another host, and when a file lies there that is no page.
    """
    names = names_of(sources, ("index", GLOSSARY))
    index = len(sources) > 1 if index is None else index
    notebooks = [executed.read(source) for source in sources]
    reports = _reports(sources, notebooks, names) if index else []
    places = {name: f"{name}.html" for name in (*names, *(report.stem for report in reports))}
    places |= {GLOSSARY: f"{GLOSSARY}.html"} if index else {}
    pages = [page(*pair, places, code) for pair in zip(notebooks, sources, strict=True)]
    title = TITLE if all(map(executed.is_of_study, names)) else "Write-ups"
    shared: dict[str, Any] = {"author": author, "index": index, "title": title, "of_study": title == TITLE}
    files = {"index.html": _render(stories=_stories(pages), **shared)} if index else {}
    for before, current, after in zip([None, *pages], pages, [*pages[1:], None], strict=False):
        files[f"{current.name}.html"] = _render(page=current, before=before, after=after, **shared)
    for source in (*reports, Path(__file__).with_name(f"{GLOSSARY}.md")) if index else ():
        files[f"{source.stem}.html"] = _render(page=_of_markdown(source, places), **shared)
    if index and any(entry.picture for entry in pages):
        files[LIBRARY] = SHARED + _vega()
    written = [out_dir / name for name in files]
    for path in written:
        check_ours(path)
    out_dir.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:  # left last in, first out: the index appears after all the pages it names
        for path, text in zip(written, files.values(), strict=True):
            stack.enter_context(growing(path)).write_text(text, encoding="utf-8", newline="\n")
    return Published(written, sum(page.wordless for page in pages))


def names_of(sources: Sequence[Path], taken: Iterable[str] = ()) -> list[str]:
    """The names of pages; StudyError where there is none, or two would share one."""
    if not sources:
        mend = "plamo-study run, or publish recorded ones: plamo-study publish notebooks/*.ipynb"
        raise StudyError("publish", "there is no executed notebook", mend)
    names = [source.stem for source in sources]
    for name in names:
        if names.count(name) > 1 or name in taken:
            raise StudyError(name, "two pages would share this name", "rename one of the notebooks")
    return names


def check_ours(path: Path) -> None:
    """Raise StudyError where a file lies that `publish` did not write."""
    if not path.exists() or not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        begins = file.read(300)
        if not (begins.startswith(SHARED) if path.name == LIBRARY else OURS.match(begins)):
            raise StudyError(str(path), "is not of publish, and is left as it is", "move it, or use --out")


def _reports(sources: Sequence[Path], notebooks: Sequence[nbformat.NotebookNode], taken: Iterable[str]) -> list[Path]:
    """The reports of this project that notebooks link to, and those that these link to."""
    texts = [
        (source.parent, cell.source)
        for source, notebook in zip(sources, notebooks, strict=True)
        for cell in notebook.cells
        if cell.cell_type == "markdown"
    ]
    reports: dict[Path, None] = {}
    while texts:
        folder, text = texts.pop()
        for link in REPORT_LINK.findall(text):
            path = (folder / link).resolve()
            if path.parent == UPSTREAM and path not in reports and path.is_file() and path.stem not in taken:
                reports[path] = None
                texts.append((path.parent, path.read_text(encoding="utf-8")))
    return sorted(reports)


def _of_markdown(path: Path, places: Mapping[str, str]) -> Page:
    cell = nbformat.v4.new_markdown_cell(path.read_text(encoding="utf-8"))
    return page(nbformat.v4.new_notebook(cells=[cell]), path, places)


def page(
    notebook: nbformat.NotebookNode, source: Path, places: Mapping[str, str], code: Code = "folded", tex: bool = False
) -> Page:
    """One notebook as a page; `places`: where the pages of other sources lie. For `code` and `tex` see `exporter`."""
    wordless = pictures.uniform(notebook, source.stem)
    tree = polish(exporter.body(notebook, source.stem, code, tex), source.name, places)
    title, finding = _headline(tree, source)
    sections = [(str(heading["id"]), _text(heading)) for heading in tree.find_all("h2", id=True)]
    return Page(
        name=source.stem,
        title=title,
        finding=finding,
        picture=_picture(tree),
        sections=sections if len(sections) >= CONTENTS else [],
        folds=tree.find("details", class_="detail") is not None,
        body=Markup(str(tree)),
        about=executed.about(notebook),
        wordless=wordless,
    )


def _headline(tree: BeautifulSoup, source: Path) -> tuple[str, Markup]:
    heading = tree.find("h1")
    if heading is None:
        raise StudyError(str(source), "has no title", "begin its first cell with '# '")
    below = [part for part in heading.find_all_next(["p", "li", "h2"]) if not part.get_text().startswith(DISTURBED)]
    first = list(takewhile(lambda part: part.name != "h2", below))
    paragraphs = [part for part in first if part.name == "p" and not _is_aside(part)]
    said = next(_findings(first), None) or next(iter(paragraphs), None) or next(_findings(below), None)
    return _text(heading), Markup(said.decode_contents()) if said else Markup("")


def _findings(parts: Iterable[Tag]) -> Iterator[Tag]:
    """What some paragraphs and items say in bold; of a question in bold, the first answer in the list below it."""
    for part in parts:
        bold = part.find("strong")
        answer = part.select_one("li li, ul li") if part.name == "li" else None
        if bold and answer and bold.get_text().endswith("?"):
            yield answer
        elif bold:
            yield from (strong for strong in part.find_all("strong") if len(strong.get_text().split()) >= SAID)


def _is_aside(part: Tag) -> bool:
    """Whether a paragraph is in italics as a whole, as the line that counts a page's rows."""
    slanted = part.find("em")
    return slanted is not None and slanted.get_text().strip() == part.get_text().strip()


def _stories(pages: Sequence[Page]) -> dict[str, list[Page]]:
    """The pages of the index under their headings, in reading order; without headings where none names one."""
    story = {name: heading for heading, names in STORIES.items() for name in names}
    by = {heading: [page for page in pages if story.get(page.name, MORE) == heading] for heading in (*STORIES, MORE)}
    by = {heading: entries for heading, entries in by.items() if entries}
    return {"": list(pages)} if list(by) == [MORE] else by


def _text(heading: Any) -> str:
    """The text of a heading without its anchor."""
    anchor = heading.select_one("a.anchor-link")
    return str(heading.get_text().removesuffix(anchor.get_text() if anchor else "").strip())


def _picture(tree: BeautifulSoup) -> Markup:
    """The first chart, for the index."""
    image = tree.select_one("figure.chart img")
    return Markup(str(image).replace("<img", '<img loading="lazy"', 1)) if image else Markup("")


def _render(page: Page | None = None, index: bool = False, **content: Any) -> str:
    """A page, or the index without one; only a page with charts, or with folded sections, carries their scripts."""
    shared = {
        "style": Markup((WEB / "page.css").read_text(encoding="utf-8")),
        "scripts": _scripts(page, index) if page else [],
        "library": LIBRARY if page and page.picture and index else "",
        "integrity": _hash(SHARED + _vega()) if page and page.picture and index else "",
        "index": index,
        "version": metadata.version("plamo-study"),
    }
    return _environment().get_template("page.html.j2").render(page=page, **shared, **content)


@functools.cache
def _environment() -> jinja2.Environment:
    """It keeps templates that it has compiled."""
    return jinja2.Environment(loader=jinja2.FileSystemLoader(WEB), autoescape=True, trim_blocks=True)


def _scripts(page: Page, index: bool) -> list[tuple[Markup, str]]:
    """The scripts of a page, each with its hash for the content security policy; those of a site do not carry Vega."""
    texts = [(WEB / "details.js").read_text(encoding="utf-8")] if page.folds else []
    texts += [_vega()] if page.picture and not index else []
    texts += [(WEB / "charts.js").read_text(encoding="utf-8")] if page.picture else []
    return [(Markup(text), _hash(text)) for text in texts]


@functools.cache
def _vega() -> str:
    """Vega as a script that may stand in a page."""
    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VEGALITE)
    return bundle.replace("</script", "<\\/script")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
