"""Publish executed notebooks with nbconvert: HTML pages without scripts, or folders of Markdown with their figures.

A page is complete in itself: its pictures are inside, and its content security policy forbids every script and every
request, so markup in the name of a row does nothing. Nothing is executed here.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import nbformat
from bs4 import BeautifulSoup
from nbconvert import HTMLExporter, MarkdownExporter
from traitlets.config import Config

from llama_meter import paths
from llama_meter.disk import growing
from llama_meter.errors import StudyError
from plamo_study import runs
from plamo_study.show import theme
from plamo_study.show.tables import escaped

HERE = Path(__file__).parent
GLOSSARY = HERE / "glossary.md"
LINK = re.compile(r"(?<!!)\[([^\[\]]+)\]\((?![a-z]+:)(?:[^()\s#]*/)?([^()\s#/]+)\.(?:ipynb|md)(#[^()\s]*)?\)")
INTRODUCTION = (
    "How fast do language models run on llama.cpp, and can you trust their answers? PLaMo 2 keeps a recurrent state, "
    "PLaMo 3 has attention only. Each page asks one question, measures it, and says whose machine did."
)
FIRST = ("your-machine", "04-right-answers")  # of the index: what to run, and whether its answers are right
SHOWN = ["image/svg+xml", "image/png", "image/jpeg", "text/html", "text/markdown", "text/plain"]  # the richest first
HOMES = re.compile(rf"(?:/home|/Users)/[^/\s\"'<>&]+|{re.escape(str(Path.home()))}(?=/)")
JAPANESE = re.compile("[\u3041-\u30ff]")
SETTINGS = Config(
    NbConvertBase={"display_data_priority": SHOWN},
    TagRemovePreprocessor={
        "enabled": True,
        "remove_cell_tags": {"hide-cell"},
        "remove_input_tags": {"hide-input"},
        "remove_all_outputs_tags": {"hide-output", "detail"},  # detail: the first rows of a frame
    },
)


def publish(
    sources: Sequence[Path], out_dir: Path, form: str = "html", author: str = "", index: bool | None = None
) -> list[Path]:
    """Write a page, or a folder in Markdown, for each executed notebook; return the paths of the texts.

    `index`: also write the index of the pages and the glossary; by default where there are several pages.

    Raises StudyError, before anything is written, for a notebook that is missing, untitled or did not run to its end.
    """
    names = _names(sources)
    notebooks = [read(source) for source in sources]
    index = form == "html" and (len(sources) > 1 if index is None else index)
    if form == "html":
        places = {name: f"{quote(name)}.html" for name in (*names, *([GLOSSARY.stem] if index else []))}
    else:
        places = {name: f"../{quote(name)}/{quote(name)}.md" for name in names}
    shared = {"author": author, "index": index, "version": metadata.version("plamo-study")}
    files: dict[Path, bytes] = {}
    entries: dict[str, str] = {}
    for notebook, source in zip(notebooks, sources, strict=True):
        _link(notebook, places)
        about = shared | {"whose": whose_rows(notebook)}
        page, title, finding, picture = _page(notebook, source, about)
        article = {} if form == "html" else _article(notebook, source, about)
        whose = f" *{escaped(str(about['whose']))}*" if about["whose"] else ""
        entries[source.stem] = (
            f"## [{escaped(title)}]({places[source.stem]})\n\n{escaped(finding)}{whose}\n\n{picture or ''}"
        )
        files |= {out_dir / source.stem / name: of for name, of in article.items()}
        if form == "html":
            files[out_dir / f"{source.stem}.html"] = page
    if index:
        ordered = [entries[name] for name in dict.fromkeys((*FIRST, *entries)) if name in entries]
        listed = "\n\n".join(["# Write-ups", INTRODUCTION, *ordered])
        for name, text in (("index", listed), (GLOSSARY.stem, GLOSSARY.read_text(encoding="utf-8"))):
            made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text)])
            files[out_dir / f"{name}.html"] = _page(made, Path(f"{name}.ipynb"), shared)[0]
    with ExitStack() as stack:  # left last in, first out: the index appears after all the pages it names
        for path, content in reversed(files.items()) if index else files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(growing(path)).write_bytes(content)
    return [path for path in files if path.suffix in (".html", ".md")]


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
    for cell in notebook.cells:
        cell.source = HOMES.sub("~", cell.source)
        for output in cell.get("outputs", ()):
            if "text" in output:
                output.text = HOMES.sub("~", output.text)
            texts = {kind: text for kind, text in output.get("data", {}).items() if kind.startswith("text/")}
            output.get("data", {}).update({kind: HOMES.sub("~", text) for kind, text in texts.items()})
    return notebook


def whose_rows(notebook: nbformat.NotebookNode) -> str:
    """Whose rows a notebook shows, from the metadata of its first output that says so; "" where none does."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    kinds = [kind for output in outputs for kind in output.get("metadata", {}).values() if isinstance(kind, dict)]
    about: dict[str, Any] = next((kind[theme.ROWS_KEY] for kind in kinds if theme.ROWS_KEY in kind), {})
    begin = "Measured by the publisher" if about.get("source") == "live" else "Reference rows"
    parts = [*(about.get(name, "") for name in ("machine", "device", "engine")), " to ".join(about.get("days", ()))]
    return " · ".join([begin, *filter(None, parts)]) if about else ""


def _names(sources: Sequence[Path]) -> list[str]:
    names = [source.stem for source in sources]
    if not names:
        mend = "plamo-study run, or publish recorded ones: plamo-study publish notebooks/*.ipynb"
        raise StudyError("publish", "there is no executed notebook", mend)
    if len({*names, "index", GLOSSARY.stem}) < len(names) + 2:
        raise StudyError(", ".join(names), "two pages would share a name", "rename one of the notebooks")
    return names


def _link(notebook: nbformat.NotebookNode, places: Mapping[str, str]) -> None:
    """Let links to sources lead to their pages; a link to what is not published becomes its words."""

    def lead(match: re.Match[str]) -> str:
        words, name, section = match.groups()
        return f"[{words}]({places[unquote(name)]}{section or ''})" if unquote(name) in places else words

    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = LINK.sub(lead, cell.source)
        for output in cell.get("outputs", []):
            if (text := output.get("data", {}).get("text/markdown")) is not None:
                output.data["text/markdown"] = LINK.sub(lead, text)


def _page(notebook: nbformat.NotebookNode, source: Path, about: Mapping[str, Any]) -> tuple[bytes, str, str, Any]:
    """A notebook as an HTML page, with its title, its first finding or paragraph and its first picture."""
    exporter = HTMLExporter(
        config=SETTINGS,
        extra_template_basedirs=[str(HERE)],  # by default the current folder, which may be anybody's
        template_name="page",
        exclude_input=True,  # the code is in the notebook
        exclude_output_prompt=True,
    )
    style = (HERE / "page.css").read_text(encoding="utf-8")
    title = next((line[2:] for cell in notebook.cells for line in cell.source.split("\n") if line.startswith("# ")), "")
    if not title:
        raise StudyError(str(source), "has no title", "begin its first cell with '# '")
    of_page = {**about, "style": style, "title": title, "language": "ja" if JAPANESE.search(title) else "en"}
    resources = {"metadata": {"name": source.stem, "path": str(source.parent)}, "page": of_page}
    html, _ = exporter.from_notebook_node(notebook, resources)
    tree = BeautifulSoup(html, "html.parser")
    main: Any = tree.select_one("main")
    for table in main.select("table"):
        table.wrap(
            tree.new_tag("div", attrs={"class": "scroll", "tabindex": "0", "role": "region", "aria-label": "table"})
        )
    line = main.select_one(":is(p, li):has(strong):not(blockquote *)") or main.select_one("p:not(blockquote *)")
    return f"{tree}\n".encode(), title, f"{line.get_text(' ', strip=True) if line else ''}", main.select_one("img")


def _article(notebook: nbformat.NotebookNode, source: Path, about: Mapping[str, Any]) -> dict[str, bytes]:
    """A notebook as Markdown and its figures, by their names in its folder."""
    exporter = MarkdownExporter(
        config=SETTINGS, extra_template_basedirs=[str(HERE)], template_name="article", exclude_input=True
    )
    resources = {
        "metadata": {"name": source.stem},
        "unique_key": "figure",
        "output_files_dir": "figures",
        "page": about,
    }
    text, made = exporter.from_notebook_node(notebook, resources)
    return {f"{source.stem}.md": f"{text.strip()}\n".encode(), **made["outputs"]}
