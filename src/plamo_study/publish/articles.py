"""Publish an executed notebook as a folder of Markdown: NAME.md, figures as SVG and PNG, data as CSV.

The text is made of the page's own HTML, so both say the same and refuse the same. It holds no HTML, unless code is
folded: GitHub and Qiita render some of it, Zenn none. A picture in the text is a PNG, which all three show.

A folder remembers what was written into it, with hashes. What has been edited since is never replaced.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import vl_convert
from bs4 import BeautifulSoup, NavigableString, Tag

from llama_meter.disk import growing
from llama_meter.errors import StudyError
from plamo_study.publish import executed, exporter, pages, tables
from plamo_study.publish.exporter import Code
from plamo_study.show.theme import VEGALITE

MEMORY = ".published.json"  # in the folder of an article: {file: SHA-256}
ENDINGS = {"image/svg+xml": "svg", "image/png": "png", "image/jpeg": "jpg"}
RAISED = dict(zip("0123456789+-−()n", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻⁽⁾ⁿ", strict=True))
LOWERED = dict(zip("0123456789+-−()", "₀₁₂₃₄₅₆₇₈₉₊₋₋₍₎", strict=True))
SPECIAL = re.compile(r"[\\`*<$~]|(?<!\w)_|_(?!\w)")
BRACKETS = re.compile(r"\[[^\[\]^][^\[\]]+\](?![\[(:])|[\[\]]")  # an interval is no link, and stays legible
BEGINS = re.compile(r"^(\d*)([-+#.)](?=\s|$)|[=>])")  # a paragraph that would be a list, a heading or a quotation
ENTITY = re.compile(r"&(?=#?\w+;)")
BLOCKS = {"p", "div", "figure", "table", "pre", "ul", "ol", "blockquote", "details", "hr", "dl", "section", "article",
          *(f"h{n}" for n in range(1, 7))}  # fmt: skip


def publish(sources: Sequence[Path], out_dir: Path, author: str = "", code: Code = "none") -> pages.Published:
    """Write a folder NAME in `out_dir` for each executed notebook.

    Raises StudyError, before anything is written, as `pages.publish` does, and when a file lies there that `publish`
    did not write or that was edited since.
    """
    names = pages.names_of(sources)
    notebooks = [executed.read(source) for source in sources]
    places = {name: f"../{quote(name)}/{quote(name)}.md" for name in names}
    files: dict[Path, bytes] = {}
    stale, wordless = [], 0
    for notebook, source in zip(notebooks, sources, strict=True):
        page = pages.page(notebook, source, places, code, tex=True)
        folder, made = out_dir / page.name, _article(page, author, code, exporter.language(notebook))
        stale += _stale(folder, made)
        files |= {folder / name: content for name, content in made.items()}
        wordless += page.wordless
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:  # left last in, first out: texts appear after their pictures, what is remembered last
        for path, content in files.items():
            stack.enter_context(growing(path)).write_bytes(content)
    for path in stale:
        path.unlink(missing_ok=True)
    return pages.Published([path for path in files if path.suffix == ".md"], wordless)


def _article(page: pages.Page, author: str, code: Code, language: str) -> dict[str, bytes]:
    """The files of an article by their names in its folder, the text first."""
    made = _Article(page.name, code, language)
    first, *blocks = made.blocks(BeautifulSoup(page.body, "html.parser"))
    of_rows, cited = page.about.of_rows(), page.about.cite(page.title, author)
    by = " · ".join(part for part in (of_rows, f"published by {author}" if of_rows and author else author) if part)
    title = f"{first} · {escaped(page.about.where)}" if page.about.where and first.startswith("# ") else first
    whole = [title, *([f"*{escaped(by)}*"] if by else []), *blocks]
    whole += ["---", escaped(f"Cite as: {cited}.")] if cited else []
    files = {f"{page.name}.md": ("\n\n".join(whole) + "\n").encode(), **made.files}
    memory = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    return {MEMORY: json.dumps(memory, ensure_ascii=False, indent=1).encode(), **files}


def _stale(folder: Path, files: Mapping[str, bytes]) -> list[Path]:
    """What an older article left that this one lacks; StudyError for a file that is not as `publish` left it."""
    try:
        memory = dict(json.loads((folder / MEMORY).read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError):
        memory = {}

    def ours(name: str) -> bool:
        return hashlib.sha256((folder / name).read_bytes()).hexdigest() == memory.get(name)

    for name, content in files.items():
        path = folder / name
        if name != MEMORY and path.is_file() and not ours(name) and path.read_bytes() != content:
            why = "was edited after publish wrote it" if name in memory else "is not of publish, and is left as it is"
            raise StudyError(str(path), why, "move it, or publish into another folder with --out")
    inside = [name for name in memory if name not in files and re.fullmatch(r"(figures|data)/[^/\\]+", name)]
    return [folder / name for name in inside if (folder / name).is_file() and ours(name)]


def escaped(text: str) -> str:
    """Text as it stands in Markdown, on one line."""
    plain = ENTITY.sub("&amp;", SPECIAL.sub(r"\\\g<0>", re.sub(r"\s+", " ", text)))
    return BRACKETS.sub(lambda match: match[0] if len(match[0]) > 1 else f"\\{match[0]}", plain)


@dataclass
class _Article:
    """Writes a page's tree as Markdown; `files` are the pictures and tables met so far."""

    name: str
    code: Code
    language: str
    files: dict[str, bytes] = field(default_factory=dict)
    anchors: dict[str, str] = field(default_factory=dict)
    n_pictures: int = 0

    def blocks(self, tree: BeautifulSoup) -> list[str]:
        """The blocks of the whole text, its title first."""
        for anchor in tree.select("a.anchor-link"):
            anchor.decompose()
        for part in tree.select("details.detail, details.detail > summary, details.detail > div"):
            part.unwrap()  # not every site folds what Markdown holds
        self.anchors = _anchors(tree)
        return list(self._blocks(tree))

    def _blocks(self, parent: Tag) -> Iterator[str]:
        """The blocks below an element; what stands between them is a paragraph."""
        loose: list[Any] = []
        for node in [*parent.children, None]:
            if node is None or (isinstance(node, Tag) and (node.name in BLOCKS or node.find(list(BLOCKS)))):
                paragraph = re.sub(r"  \n +", "  \n", "".join(map(self._inline, loose)).strip())
                if paragraph:
                    yield paragraph if paragraph.startswith("$$") else BEGINS.sub(r"\1\\\2", paragraph)
                loose = []
                if node is not None:
                    yield from self._block(node)
            else:
                loose.append(node)

    def _block(self, tag: Tag) -> Iterator[str]:
        match tag.name:
            case "h1" | "h2" | "h3" | "h4" | "h5" | "h6":
                yield f"{'#' * int(tag.name[1])} {self._line(tag)}"
            case "hr":
                yield "---"
            case "pre":
                yield _fenced(tag.get_text(), "text" if _is(tag, "text") else "")
            case "details" if _is(tag, "code"):
                yield from self._code(tag)
            case "details":
                summary = tag.find("summary")
                words = self._line(summary) if summary else ""
                if summary:
                    summary.extract()
                yield from [f"**{words}**"] if words else []
                yield from self._blocks(tag)
            case "blockquote":
                yield "\n".join(f"> {line}".rstrip() for line in "\n\n".join(self._blocks(tag)).split("\n"))
            case "ul" | "ol":
                yield self._list(tag)
            case "table":
                yield from self._table(tag)
            case "figure":
                yield from self._figure(tag)
            case _:
                yield from self._blocks(tag)

    def _code(self, tag: Tag) -> Iterator[str]:
        pre = tag.find("pre")
        fence = _fenced(pre.get_text() if pre else "", self.language)
        summary = tag.find("summary")
        words = summary.get_text() if summary else "Code"
        yield f"<details><summary>{words}</summary>\n\n{fence}\n\n</details>" if self.code == "folded" else fence

    def _list(self, tag: Tag) -> str:
        items, first = [], int(str(tag.get("start") or 1))
        for number, item in enumerate(tag.find_all("li", recursive=False), first):
            mark = f"{number}. " if tag.name == "ol" else "- "
            nested = "\n".join(self._blocks(item)) if item.find("p") is None else "\n\n".join(self._blocks(item))
            items.append(mark + nested.replace("\n", "\n" + " " * len(mark)))
        return re.sub(r"\n +(?=\n)", "\n", ("\n\n" if tag.find("p") else "\n").join(items))

    def _table(self, tag: Tag) -> Iterator[str]:
        caption = tag.find("caption")
        if isinstance(caption, Tag):
            yield self._line(caption)
        heads: list[tuple[list[str], list[Tag]]] = []
        body: list[tuple[list[str], list[Tag]]] = []
        for row in tag.find_all("tr"):
            cells = row.find_all(["th", "td"], recursive=False)
            line = []
            for cell in cells:
                line += [self._line(cell).replace("|", "\\|"), *[""] * (int(str(cell.get("colspan") or 1)) - 1)]
            is_head = bool(row.find_parent("thead")) or (not heads and not body and not row.find("td"))
            (heads if is_head else body).append((line, cells))
        width = max((len(line) for line, _ in heads + body), default=0)
        right = [_is_right([cells for _, cells in body], column) for column in range(width)]
        lines = [heads[-1][0] if heads else [], ["--:" if aligned else "---" for aligned in right]]
        lines += [line for line, _ in heads[:-1] + body]
        yield "\n".join("| " + " | ".join(line + [""] * (width - len(line))) + " |" for line in lines if width)

    def _figure(self, tag: Tag) -> Iterator[str]:
        image, script = tag.find("img"), tag.find("script")
        if not isinstance(image, Tag):
            return
        shown = self._inline(image)
        links = []
        if isinstance(script, Tag):
            spec, stem = json.loads(script.get_text()), f"{self.name}-{self.n_pictures}"
            svg = vl_convert.vegalite_to_svg(spec, vl_version=VEGALITE, allowed_base_urls=[])
            links.append(f"[SVG]({self._file(f'figures/{stem}.svg', svg.encode())})")
            datasets = tables.tables(spec)
            for number, rows in enumerate(datasets, 1):
                which = f"-{number}" if len(datasets) > 1 else ""
                file = self._file(f"data/{stem}{which}.csv", exporter.csv_text(rows).encode())
                links.append(f"[{f'Data {number}' if which else 'Data'} (CSV)]({file})")
        yield shown
        if links:
            yield " · ".join(links)

    def _file(self, name: str, content: bytes) -> str:
        """Add a file; returns its address from the text."""
        self.files[name] = content
        return quote(name)

    def _line(self, tag: Tag) -> str:
        """All that an element holds, on one line."""
        return " ".join("".join(self._inline(node) for node in tag.children).split())

    def _inline(self, node: Any) -> str:
        if isinstance(node, NavigableString):
            return escaped(str(node)) if type(node) is NavigableString else ""  # the others are comments
        inner = "".join(map(self._inline, node.children))
        match node.name:
            case "strong" | "b":
                return _marked(inner, "**")
            case "em" | "i" | "var":
                return _marked(inner, "*")
            case "del" | "s":
                return _marked(inner, "~~")
            case "code":
                return _code_span(node.get_text())
            case "br":
                return "  \n"  # in a table, whose lines are one line each, it becomes a blank
            case "sup" | "sub":
                return _shifted(node.get_text(), inner, node.name == "sup")
            case "span" if _is(node, "tex"):
                return _formula(node.get_text())
            case "a" if node.get("href"):
                return self._link(str(node["href"]), inner)
            case "img":
                return self._image(node)
            case "summary" | "script":
                return ""
            case "p" | "div" | "li":
                return inner + " "
            case _:
                return inner

    def _link(self, href: str, words: str) -> str:
        path, hash_sign, section = href.partition("#")
        if hash_sign and not path:
            section = self.anchors.get(unquote(section), "")
            return f"[{words}](#{section})" if section else words
        if hash_sign and "://" not in href:
            href = f"{path}#{_slug(unquote(section).replace('-', ' '))}"
        return f"[{words}]({href.replace('(', '%28').replace(')', '%29').replace(' ', '%20')})"

    def _image(self, tag: Tag) -> str:
        kind, _, content = str(tag["src"]).removeprefix("data:").partition(";base64,")
        if kind not in ENDINGS:
            raise StudyError(self.name, f"holds a picture of type {kind[:40]!r}", f"one of {', '.join(ENDINGS)}")
        self.n_pictures += 1
        file = self._file(f"figures/{self.name}-{self.n_pictures}.{ENDINGS[kind]}", base64.b64decode(content))
        return f"![{escaped(str(tag['alt']))}]({file})"


def _anchors(tree: BeautifulSoup) -> dict[str, str]:
    """The anchors that a Markdown renderer gives the headings, by those of the page."""
    anchors: dict[str, str] = {}
    seen: dict[str, int] = {}
    for heading in tree.find_all(re.compile("^h[1-6]$")):
        slug = _slug(heading.get_text())
        seen[slug] = seen.get(slug, -1) + 1
        anchors[str(heading.get("id", ""))] = slug if not seen[slug] else f"{slug}-{seen[slug]}"
    return anchors


def _slug(text: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    return quote(re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-"))


def _fenced(text: str, language: str) -> str:
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{ticks}{language}\n{text.strip(chr(10))}\n{ticks}"


def _formula(text: str) -> str:
    """TeX between dollars; a displayed formula on lines of its own, as Zenn wants it."""
    return f"$$\n{text.strip('$').strip()}\n$$" if text.startswith("$$") else text


def _code_span(text: str) -> str:
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    text = " ".join(text.split())
    text = f" {text} " if text.startswith("`") or text.endswith("`") else text
    return f"{ticks}{text}{ticks}"


def _marked(inner: str, mark: str) -> str:
    """Emphasis around text; blanks stay outside, where Markdown wants them."""
    text = inner.strip()
    before, after = (" " if inner[:1].isspace() else ""), (" " if inner[-1:].isspace() else "")
    return f"{before}{mark}{text}{mark}{after}" if text else inner


def _shifted(text: str, inner: str, up: bool) -> str:
    """A superscript or subscript: as Unicode has it, else after ^ or _."""
    forms = RAISED if up else LOWERED
    if text and all(letter in forms for letter in text):
        return "".join(forms[letter] for letter in text)
    return f"^{inner}" if up else f"\\_{inner}"


def _is(tag: Tag, kind: str) -> bool:
    """Whether an element is of a class of the page."""
    return kind in (tag.get("class") or ())


def _is_right(body: Sequence[Sequence[Tag]], column: int) -> bool:
    cells = [row[column] for row in body if column < len(row)]
    return bool(cells) and all(_is(cell, "number") for cell in cells)
