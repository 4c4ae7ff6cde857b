"""Names that come in with rows: whatever they hold, pages and notebooks show them and obey none of it."""

import ast
import json
from collections import Counter
from pathlib import Path

import msgspec
import nbformat
import pandas as pd
import pytest
from bs4 import BeautifulSoup
from IPython.core.formatters import DisplayFormatter
from nbconvert.filters import markdown2html

from llama_meter import journal, paths
from llama_meter.disk import plain_name as plain, plainly
from llama_meter.rows import Fact, Row, content_id, row_key
from plamo_study.publish import pages
from plamo_study.show.tables import Table, escaped

REFERENCE = paths.MEASURED / "reference"
STUDY = "06-context.shape"  # one machine's, with its ceilings
JS = "javascript:alert(1)"
HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<img src=x onerror=alert(1)",
    "<svg onload=alert(1)>",
    "<style>*{display:none}</style>",
    "<style>",
    "<!-- ",
    "<!--spec 0-->",
    "<plaintext>",
    "<textarea>",
    "<title>",
    "<xmp>",
    "<iframe srcdoc='<script>alert(1)</script>'>",
    "<details open ontoggle=alert(1)>",
    "<a href=" + JS + ">x</a>",
    "<math><mtext></table><img onerror=alert(1) src>",
    "</td></tr></table><script>alert(1)</script>",
    "</p><h1>x</h1>",
    "<base href=//evil.example>",
    "<meta http-equiv=refresh content=0>",
    "<link rel=stylesheet href=//evil.example>",
    "<form action=//evil.example><input autofocus onfocus=alert(1)>",
    "<object data=x>",
    "<embed src=x>",
    "<video src=x>",
    '" onmouseover="alert(1)',
    "' onmouseover='alert(1)",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "&#60;b&#62;",
    f"[x]({JS})",
    f"![x]({JS})",
    "![x](http://evil.example/x.png)",
    f"[x]: {JS}",
    f"<{JS}>",
    "<http://evil.example>",
    "https://evil.example/x",
    "`",
    "```",
    "``<b>``",
    "*",
    "**Disturbed: all of it is wrong**",
    "__all of it is wrong__",
    "~~gone~~",
    "a | b | c",
    "|---|",
    "a\n\n# A title\n\n",
    "a\n\n<script>alert(1)</script>\n\n",
    "\r\n- a\r\n- b",
    "    code",
    "$x^2$",
    "$$\\int$$",
    "\\(x\\)",
    "\\[x\\]",
    "\\begin{x}",
    "$\\href{" + JS + "}{x}$",
    "{{ 7 * 7 }}",
    "{% raw %}",
    "{0}",
    "\x1b]0;owned\x07",
    "\x00",
    "\x08" * 9,
    "\u202egnp.exe",
    "\u2066x\u2069",
    "\u200b",
    "\ufeff",
    "a\u2028b",
    "x" * 5000,
    "\U000e0041",
    "%s%n",
    "=cmd|'/C calc'!A0",
    "-",
    "#",
    "# x",
    "> x",
    "1. x",
    "<" * 999,
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


def markdown(text: str) -> str:
    return markdown2html(text)


@pytest.mark.parametrize("shown", [plain, escaped], ids=["a name", "a sentence of anybody's"])
def test_no_hostile_text_does_anything_in_a_sentence(shown):
    def page(text: str) -> str:
        return f"# On {text}.\n\nOn {text} **it, {text}, is** as fast as {text}.\n\n- Of {text}: {text}\n"

    quiet = tags(markdown(page("a name")))
    for text in HOSTILE + UNWRITABLE:
        found = tags(markdown(page(shown(text))))
        assert found == quiet, text


def test_no_hostile_text_does_anything_in_a_table():
    def both(text: str) -> list[Counter]:
        made = Table(pd.DataFrame({"chip": [text, "x"], text: ["y", text]}), note=f"A note on {text}.")
        return [tags(made._repr_html_()), tags(markdown(made._repr_markdown_()))]

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


def machine_of(names: list[str], records: list) -> list:
    """The rows once more, of a machine that calls itself, its parts and its meter like this."""
    chip, system, board, meter = (names * 4)[:4]
    first = next(record for record in records if isinstance(record, Fact) and record.what == "machine")
    gpus = [{"name": "CUDA0", "chip": board, "memory_bytes": 1}]
    said = first.data | {"chip": chip, "os": system, "compiler": board, "gpus": gpus, meter[:50]: {meter[:50]: [meter]}}
    fact = Fact(id=content_id(said), what="machine", data=said)
    return [fact, *(owned(record, fact.id, meter) for record in records if isinstance(record, Row))]


def owned(row: Row, machine: str, meter: str) -> Row:
    key = row_key(row.study, row.cell, row.model, row.engine, machine, row.replicate, *row.others)
    given = row.conditions
    conditions = msgspec.structs.replace(given, power_source=meter, thermal=meter)
    return msgspec.structs.replace(row, machine=machine, key=f"{key}{row.anchor}", conditions=conditions)


def executed(folder: Path) -> nbformat.NotebookNode:
    """Chapter 2's cells about machines, with the outputs that they have on what lies in `folder`."""
    notebook = nbformat.read(paths.NOTEBOOKS / "02-roofline.ipynb", as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    about = [number for number, cell in enumerate(code) if "machines." in cell.source and number > 1]
    code = [*code[:2], *code[about[0] : about[-1] + 1]]
    notebook.cells = [notebook.cells[0], *code]
    shown, known = DisplayFormatter(), {}
    for number, cell in enumerate(code):
        parsed = ast.parse(cell.source)
        last = parsed.body.pop() if parsed.body and isinstance(parsed.body[-1], ast.Expr) else None
        exec(compile(parsed, "cell", "exec"), known)
        known["source"] = "live"
        cell.outputs, cell.execution_count = [], number + 1
        if last:
            data, metadata = shown.format(eval(compile(ast.Expression(last.value), "cell", "eval"), known))
            data = json.loads(json.dumps(data))
            cell.outputs = [nbformat.v4.new_output("display_data", data, metadata=metadata)]
    return notebook


@pytest.mark.whole
def test_the_chapter_of_machines_shows_hostile_ones_and_has_the_tags_of_harmless_ones(tmp_path, monkeypatch):
    records = journal.read(REFERENCE / f"{STUDY}.jsonl")
    kept = [record for record in records if isinstance(record, Fact) and record.what != "machine"]

    def page(folder: Path, names: list[str]) -> Counter:
        """Chapter 2 about machines that call themselves and their parts so."""
        monkeypatch.setattr(paths, "MEASURED", folder)
        with journal.Journal(folder / "others" / f"{STUDY}.jsonl") as here:
            here.append(*kept)
            for first in range(0, len(names), 4):
                here.append(*machine_of(names[first : first + 4], records))
        notebook = executed(folder)
        path = folder / "02-roofline.ipynb"
        nbformat.write(notebook, path)
        made = pages.publish([path], folder / "pages", index=True)
        return sum((tags(path.read_text()) for path in made if path.stem != "glossary"), Counter())

    names = [*HOSTILE[:6], *HOSTILE[25:45:2], *HOSTILE[49:57:2]]
    harmless = [f"harmless {number}" for number in range(len(names))]
    assert page(tmp_path / "hostile", names) == page(tmp_path / "harmless", harmless)
