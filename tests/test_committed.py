"""What is committed, held against what it was made from: rows, numbers in prose, pictures, README.

`make manifest` packs the rows that were added and writes `data/manifest.json` anew: rows by journal, and numbers in
prose that no output there shows.
"""

import hashlib
import json
import re
from pathlib import Path

import pytest

from llama_meter import journal, paths
from plamo_study.show import theme

MANIFEST = paths.DATA / "manifest.json"
PAGES = sorted(path.stem for path in paths.NOTEBOOKS.glob("*.ipynb"))
NUMBER = re.compile(r"(?<![\w.,-])(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?![\w-]|[.,]\d)")
NO_PROSE = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)|\$[^$]*\$|<!--.*?-->|<[^>]*>", re.DOTALL)
PAGE_LINKS = re.compile(r"\]\(notebooks/([\w-]+)\.ipynb")
BLOCK = re.compile(r"\n\s*\n|\n(?=\d+\. |[-|] )")


def numbers(text):
    """Numbers of two digits and more, without names of notebooks such as 05."""
    found = NUMBER.findall(NO_PROSE.sub(" ", text))
    return {each for each in found if len(re.sub(r"\D", "", each)) > 1 and not re.match(r"0\d", each)}


def cells(page):
    """A page's cells."""
    return json.loads((paths.NOTEBOOKS / f"{page}.ipynb").read_text(encoding="utf-8"))["cells"]


def shown(some):
    """Numbers in the texts that cells put out."""
    data = [each["data"] for cell in some for each in cell.get("outputs", []) if "data" in each]
    texts = ("".join(text) for each in data for kind, text in each.items() if kind.startswith("text/"))
    return set().union(*map(numbers, texts))


def typed(page):
    """Numbers in a page's prose that no output of their section shows."""
    sections, found = [[]], set()
    for cell in cells(page):
        if cell["cell_type"] == "markdown" and "".join(cell["source"]).startswith("#"):
            sections.append([])
        sections[-1].append(cell)
    for section in sections:
        prose = ("".join(cell["source"]) for cell in section if cell["cell_type"] == "markdown")
        found |= set().union(*map(numbers, prose)) - shown(section)
    return sorted(found)


def counted(path):
    """Rows and facts of a journal, and the beginning of its hash."""
    data = journal.stored(path)
    kinds = [json.loads(line)["kind"] for line in data.splitlines()]
    return f"{kinds.count('row')} rows, {kinds.count('fact')} facts, {hashlib.sha256(data).hexdigest()[:16]}"


def tracked():
    """Paths of the tracked journals."""
    return [path for place in ("others", "reference") for path in journal.journals(paths.MEASURED / place)]


def journals():
    """Every tracked journal by its name."""
    return {path.relative_to(paths.MEASURED).as_posix(): counted(path) for path in tracked()}


def manifest():
    """What `data/manifest.json` should hold."""
    return {"journals": journals(), "typed": {page: " ".join(typed(page)) for page in PAGES}}


def test_no_row_was_lost_or_changed():
    assert journals() == json.loads(MANIFEST.read_text(encoding="utf-8"))["journals"], "meant so? `make manifest`"


@pytest.mark.parametrize("page", PAGES)
def test_a_number_in_prose_stands_in_an_output_of_its_section_or_is_listed(page):
    listed = json.loads(MANIFEST.read_text(encoding="utf-8"))["typed"].get(page, "")
    assert " ".join(typed(page)) == listed, "meant so? `make manifest`"


def findings(text):
    """Blocks of README that say what was found or link a page: (their numbers, pages of which one shows each)."""
    for section in re.split(r"^(?=## )", text, flags=re.MULTILINE):
        for block in BLOCK.split(section):
            linked = PAGE_LINKS.findall(block)
            if linked or section.startswith("## What it found"):
                yield numbers(block), linked or PAGES


def test_every_number_of_readme_s_findings_stands_in_an_output_of_the_page_it_links():
    found = [*findings((paths.ROOT / "README.md").read_text(encoding="utf-8"))]
    assert sum(len(each) for each, _ in found) > 10
    known = {page: shown(cells(page)) for page in PAGES}
    assert [n for each, pages in found for n in sorted(each) if not any(n in known[page] for page in pages)] == []


def test_the_japanese_readme_has_no_number_of_its_own():
    own, english = (numbers((paths.ROOT / name).read_text(encoding="utf-8")) for name in ("README.ja.md", "README.md"))
    assert {each for each in own - english if len(each) > 2} == set(), "some short ones are words there"


@pytest.mark.long
@pytest.mark.parametrize("page", PAGES)
def test_a_picture_and_its_alt_text_are_those_of_the_data_beside_them(page):
    outputs = [each for cell in cells(page) for each in cell.get("outputs", [])]
    for number, each in enumerate(each for each in outputs if "image/png" in each.get("data", {})):
        spec, said = each["metadata"][theme.SPEC_KEY], "".join(each["data"]["text/plain"])
        data, metadata = theme.mimebundle(spec)
        assert each["metadata"]["image/png"] == metadata["image/png"], number
        assert said == data["text/plain"], number
        assert "".join(each["data"]["image/png"]).strip() == data["image/png"], f"picture {number} shows other data"


def test_what_is_measured_takes_no_more_than_15_mb():
    files = (path for place in ("others", "reference") for path in (paths.MEASURED / place).iterdir())
    assert sum(path.stat().st_size for path in files) <= 15 << 20


if __name__ == "__main__":
    for path in filter(Path.exists, tracked()):
        journal.pack(path)
    MANIFEST.write_text(json.dumps(manifest(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
