"""Names that come in with rows: whatever they hold, pages and notebooks show them and obey none of it."""

from collections import Counter

import pandas as pd
import pytest
from bs4 import BeautifulSoup
from nbconvert.filters import markdown2html

from llama_meter import journal, paths
from llama_meter.disk import plain_name as plain, plainly
from llama_meter.rows import Fact
from plamo_study.show.tables import Table, escaped

REFERENCE = paths.MEASURED / "reference"
JS = "javascript:alert(1)"
HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)",
    "<style>",
    "<!-- ",
    "</td></tr></table><script>alert(1)</script>",
    '" onmouseover="alert(1)',
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    f"[x]({JS})",
    "![x](http://evil.example/x.png)",
    f"<{JS}>",
    "`",
    "**Disturbed: all of it is wrong**",
    "a | b | c",
    "a\n\n# A title\n\n",
    "$\\href{" + JS + "}{x}$",
    "\x1b]0;owned\x07",
    "\u202egnp.exe",
    "x" * 5000,
    "> x",
]
UNWRITABLE = ["\ud800", "a\udfff"]  # JSON has no such text
FREE = "plamo-2-1b* (of AMD EPYC, 2 x 3.1 GHz): 98 % [97, 99] ~ a_b"


def tags(html: str) -> Counter:
    """What a browser would do something for: elements, their attributes, and where links lead.

    Left out are links that only a click follows, to an address that stands there, or to a heading.
    """
    names: Counter = Counter()
    for tag in BeautifulSoup(html, "html.parser").find_all(True):
        if tag.name == "a" and str(tag.get("href", "")).startswith(("http://", "https://", "#")):
            continue
        leads = [f"{tag.name} {key}={tag[key][:11]}" for key in ("href", "src") if key in tag.attrs]
        names.update([tag.name, *(f"{tag.name} {key}" for key in tag.attrs if key != "id"), *leads])
    return names


@pytest.mark.parametrize("shown", [plain, escaped], ids=["a name", "a sentence of anybody's"])
def test_no_hostile_text_does_anything_in_a_sentence(shown):
    def page(text: str) -> str:
        return f"# On {text}.\n\nOn {text} **it, {text}, is** as fast as {text}.\n\n- Of {text}: {text}\n"

    quiet = tags(markdown2html(page("a name")))
    for text in HOSTILE + UNWRITABLE:
        found = tags(markdown2html(page(shown(text))))
        assert found == quiet, text


def test_no_hostile_text_does_anything_in_a_table():
    def both(text: str) -> list[Counter]:
        made = Table(pd.DataFrame({"chip": [text, "x"], text: ["y", text]}), note=f"A note on {text}.")
        return [tags(made._repr_html_()), tags(markdown2html(made._repr_markdown_()))]

    quiet = both("a name")
    for text in HOSTILE + UNWRITABLE:
        found = both(text)
        del found[1]["code"]  # which a table may hold
        for page, harmless in zip(found, quiet, strict=True):
            assert set(page - harmless) <= {"p"}, text  # what stands under a table with a star


def test_what_names_are_made_of_stays_as_it_is():
    assert escaped(FREE) == FREE.replace("*", r"\*")
    for path in journal.journals(REFERENCE):
        for record in journal.read(path):
            if isinstance(record, Fact):
                assert plainly(record.data) == record.data
