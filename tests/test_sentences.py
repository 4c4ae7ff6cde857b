"""A reader divides: where two numbers and their ratio stand in one sentence, these divide to it, or it says to what."""

from dataclasses import replace

import nbformat
import pandas as pd
import pytest

from plamo_study import paths
from plamo_study.analysis.stats import Estimate
from plamo_study.present import sentences, tables
from plamo_study.present.tables import table
from plamo_study.publish import readme

NOTEBOOKS = sorted(path.stem for path in paths.NOTEBOOKS.glob("*.ipynb"))

PLANTED = "**x reads 6.1 [5.1, 129.0] times as fast as it writes** (7,899 [7,298, 8,607] against 252 [96, 1,454] t/s)"


def said_by(notebook):
    """Everything that a notebook's code says of its recorded rows, as committed: nbval holds it against the code."""
    cells = nbformat.read(paths.NOTEBOOKS / f"{notebook}.ipynb", as_version=4).cells
    outputs = [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]
    return [output.data["text/markdown"] for output in outputs if "text/markdown" in output.get("data", {})]


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_every_generated_sentence_divides_or_says_to_what(notebook):
    texts = said_by(notebook)
    assert texts
    assert [passage for text in texts for passage in sentences.contradictions(text)] == []


@pytest.mark.parametrize("document", readme.PARTS)
def test_every_document_divides_or_says_to_what(document):
    assert sentences.contradictions((paths.ROOT / document).read_text()) == []


def test_a_planted_contradiction_is_found():
    assert len(sentences.contradictions(f"Before it. {PLANTED}, and after it.")) == 1
    assert sentences.contradictions(PLANTED.replace("6.1 [", "31.3 [")) == []


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("5.0 times as fast (129 against 27.0 t/s)", False),
        ("4.9 times as fast (129 against 27.0 t/s)", True),  # pairs may differ from medians by so much
        ("5.0 times as fast (129 against 27.0 t/s; these divide to 4.78)", True),
        ("5.0 [4.1, 5.2] times as fast (129 [1, 2; 75%] against 27.0 [1, 2] t/s; these divide to 4.9)", False),
        ("4.78 times as fast (129 against 27.0 t/s)", True),
        ("4.8 times as fast (129 [127, 132] against 27.0 [25.9, 28.2] t/s)", True),
        ("4.5 (n = 1) times as fast (129 (n = 1) against 27.0 (n = 1) t/s)", False),
        ("4.8 [4.1, 5.2; 75%] times as fast (129 [1, 2; 75%] against 27.0 [1, 2; 75%] t/s)", True),
        ("12 times as long (1,200 against 100 ms)", True),
        ("13 times as long (1,200 against 100 ms)", False),
        ("0.50 times as fast (2e+03 against 4e+03 t/s)", True),
        ("0.90 times as fast (2e+03 against 4e+03 t/s)", False),
        ("2.0 times as fast (1 against 0.5 t/s)", True),
    ],
)
def test_printed_figures_are_read_as_far_as_they_are_printed(text, right):
    assert len(list(sentences.quotients(text))) == 1
    assert (sentences.contradictions(text) == []) is right


def test_the_helper_writes_what_the_reader_checks():
    first, second = Estimate(129.4, 127, 132, 7), Estimate(27.04, 25.9, 28.2, 7)
    times, rates = sentences.quotient(Estimate(129.4 / 27.04, 4.5, 5.1, 7), first, second, "t/s", ".1f")
    assert (times, rates) == ("4.8 [4.5, 5.1] times", "(129 [127, 132] against 27.0 [25.9, 28.2] t/s)")
    text = f"**x reads {times} as fast as it writes** {rates}"
    assert [found.divides() for found in sentences.quotients(text)] == [True]


def test_a_ratio_far_from_the_quotient_of_its_numbers_is_printed_with_it():
    ratio, first, second = Estimate(4.4, 4.1, 5.1, 7), Estimate(100, 90, 110, 7), Estimate(25, 24, 26, 7)
    text = " ".join(sentences.quotient(ratio, first, second, "t/s", ".1f"))
    assert [(found.divides(), found.said) for found in sentences.quotients(text)] == [(True, "4.0")]
    near = sentences.quotient(replace(ratio, value=4.1), first, second, "t/s", ".1f")
    assert [found.said for found in sentences.quotients(" ".join(near))] == [None]
    same = sentences.quotient(replace(ratio, value=4.2), first, second, "t/s", ".0f")
    assert [found.said for found in sentences.quotients(" ".join(same))] == [None], "both are printed as 4"


def test_a_table_shows_the_quotient_of_two_numbers_beside_a_ratio_that_is_far_from_it_and_says_once_why():
    line = {"ratio": Estimate(4.4, 4.1, 5.1, 7), "a": Estimate(100, 90, 110, 7), "b": 25.0}
    lines = [line, line | {"b": 23.0}, line | {"b": None}, line | {"ratio": None}]
    columns = {"a": ("a", ".0f"), "ratio": ("times", ".1f")}
    shown = table(pd.DataFrame(lines, dtype=object), columns, "A note.", {"ratio": ("a", "b")})
    assert shown.frame["times"].tolist() == ["4.4 [4.1, 5.1] (4.0)", "4.4 [4.1, 5.1]", "4.4 [4.1, 5.1]", "n/a"]
    assert shown.notes == [f"A note. {tables.PAIRED}"]
    near = table(pd.DataFrame(lines[1:], dtype=object), columns, "A note.", {"ratio": ("a", "b")})
    assert near.notes == ["A note."]
