"""Make the HTML of a page self-contained, accessible and readable, or report why that is impossible.

Markdown and notebook outputs may contain any HTML. Anything that would send a request, run a script or show a picture
without alt text is refused; styles are removed, since they would affect the whole page; tables get header scopes,
right-aligned numbers and a scrolling box of their own. Sections that the notebook marks as details are folded.
"""

import functools
import operator
import re
from collections.abc import Mapping
from itertools import takewhile, zip_longest
from urllib.parse import unquote, urlsplit

from bs4 import BeautifulSoup, Tag

from llama_meter.errors import StudyError

LEADS = ("", "http", "https", "mailto")  # schemes of a link
DATA = "data:text/csv;"  # the other link that may be: to a chart's data
JSON = {"type": "application/json"}  # of the only script that may be: a chart's spec, which no browser executes
DETAIL = "data-detail"  # attribute of a heading whose section is folded
FORBIDDEN = ["script", "iframe", "object", "embed", "link", "meta", "base", "form", "video", "audio"]
WIDE_TABLE = 64
"""Sum of the longest texts of a table's columns, in characters, above which it gets the wide part of the page."""
NUMBER = re.compile(r"^[-+−±~≈<>≤≥×]?\s*\d[\d,._ ]*([eE][-+]?\d+)?\s*[%×]?$|^(n/a|NaN|inf|–|—|-)?$")


def polish(html: str, name: str, published: Mapping[str, str]) -> BeautifulSoup:
    """Return `html` as a tree, fit for a page.

    `published`: where pages lie, by the name of their source, so that links to sources lead there. A link to any other
    file becomes its text.

    Raises StudyError for anything that needs a script or another host, and for a picture without alt text.
    """
    tree = BeautifulSoup(html, "html.parser")
    _check_offline(tree, name)
    for image in tree.find_all("img"):
        if not str(image.get("alt") or "").strip():
            raise StudyError(
                name,
                "a picture has no alt text",
                "write ![what it shows](...), <img alt='what it shows'> or Image(..., alt='what it shows')",
            )
    for style in tree.find_all("style"):
        style.decompose()
    for table in tree.find_all("table"):
        _polish_table(tree, table)
    _join_code(tree)
    _polish_links(tree, published)
    _make_ids_unique(tree)
    _fold_sections(tree)
    return tree


def _check_offline(tree: BeautifulSoup, name: str) -> None:
    mend = "show a chart, a table or text instead"
    for tag in tree.find_all(True):
        if tag.name in FORBIDDEN and not (tag.name == "script" and tag.attrs == JSON):
            raise StudyError(name, f"holds <{tag.name}>, which a published page must not", mend)
        for attribute, value in tag.attrs.items():
            if attribute.startswith("on"):
                raise StudyError(name, f"holds a script in {attribute}=", mend)
            if attribute in ("src", "srcset", "poster", "background") and not str(value).startswith("data:"):
                raise StudyError(name, f"needs {value}, but a page must be complete in itself", "attach the picture")
            if attribute.endswith("href") and not str(value).startswith(DATA) and _scheme(str(value)) not in LEADS:
                raise StudyError(name, f"holds a link to {value}", "link to a page")


def _scheme(link: str) -> str:
    """The scheme as a browser reads it, ignoring blanks and control characters."""
    try:
        return urlsplit("".join(letter for letter in link if letter.isprintable() and letter != " ")).scheme
    except ValueError:  # as in http://[
        return "unknown"


def _polish_table(tree: BeautifulSoup, table: Tag) -> None:
    for head in table.select("thead th"):
        head["scope"] = "col"
    for head in table.select("tbody th"):
        head["scope"] = "row"
    _align(table)
    del table["border"]
    rows = [[len(cell.get_text().strip()) for cell in row.find_all(["td", "th"])] for row in table.find_all("tr")]
    wide = sum(max(column) for column in zip_longest(*rows, fillvalue=0)) > WIDE_TABLE
    box = tree.new_tag("div", attrs={"class": "scroll wide" if wide else "scroll", "tabindex": "0", "role": "region"})
    caption = table.find("caption")
    box["aria-label"] = caption.get_text(" ", strip=True) if caption else "table"
    table.wrap(box)


def _align(table: Tag) -> None:
    """Align columns of numbers right and all others left, heads included, unless the table has spans or styles."""
    if table.select("[colspan], [rowspan]") or table.select("td[style]"):
        return
    rows = [row.find_all(["td", "th"], recursive=False) for row in table.find_all("tr")]
    body = [row.find_all(["td", "th"], recursive=False) for row in table.select("tbody tr")]
    for column in range(max((len(row) for row in rows), default=0)):
        cells = [row[column] for row in body if column < len(row)]
        numeric = all(NUMBER.match(cell.get_text(strip=True)) for cell in cells)
        for row in rows:
            if column < len(row) and numeric:
                row[column]["class"] = "number"
    for styled in table.select("tr[style]"):
        del styled["style"]


def _join_code(tree: BeautifulSoup) -> None:
    """Put the code of cells that follow one another without an output into one fold."""
    for fold in tree.select("details.code + details.code"):
        before = fold.find_previous_sibling("details")
        if isinstance(before, Tag) and before.summary == fold.summary and before.code and fold.code:
            before.code.extend(["\n", *list(fold.code.contents)])
            fold.decompose()


def _polish_links(tree: BeautifulSoup, published: Mapping[str, str]) -> None:
    for anchor in tree.select("a.anchor-link"):
        anchor["aria-label"] = "link to this section"
    for link in tree.find_all("a", href=True):
        path, hash_sign, section = str(link["href"]).partition("#")
        if not path or _scheme(path) or path.startswith("//"):
            continue
        name, _, kind = unquote(path).rpartition("/")[2].rpartition(".")
        if kind in ("ipynb", "md") and name in published:
            link["href"] = f"{published[name]}{hash_sign}{section}"
        else:
            link.unwrap()


def _make_ids_unique(tree: BeautifulSoup) -> None:
    """Number repeated headings, so that every link leads to its own section."""
    seen: dict[str, int] = {}
    for tag in tree.find_all(id=True):
        name = str(tag["id"])
        seen[name] = seen.get(name, 0) + 1
        if seen[name] > 1:
            tag["id"] = f"{name}-{seen[name]}"
            for anchor in tag.select("a.anchor-link"):
                anchor["href"] = f"#{tag['id']}"


def _fold_sections(tree: BeautifulSoup) -> None:
    """Fold each section whose heading is marked, up to the next heading of the same or a higher level.

    The heading becomes the summary and keeps its anchor; deeper sections are folded first, within.
    """
    for level in range(6, 1, -1):
        for heading in tree.find_all(f"h{level}", attrs={DETAIL: True}):
            del heading[DETAIL]
            end = heading.find_next_sibling([f"h{number}" for number in range(1, level + 1)])
            inside = list(takewhile(functools.partial(operator.is_not, end), heading.next_siblings))
            if heading.parent is not tree or not any(str(part).strip() for part in inside):
                continue
            fold = tree.new_tag("details", attrs={"class": "detail"})
            heading.wrap(fold)
            heading.wrap(tree.new_tag("summary"))
            content = tree.new_tag("div")
            content.extend(inside)
            fold.append(content)
