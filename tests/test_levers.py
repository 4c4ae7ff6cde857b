"""Notebook 12 quotes: what executed notebooks found, collected in one file, and Amdahl's law on it."""

import tomllib

import nbformat
import pandas as pd
import pytest
from test_any_rows import executed

from llama_meter import paths
from llama_meter.errors import StudyError
from plamo_study.show import collected
from plamo_study.show.findings import finding, question, questions
from plamo_study.stats.estimates import compare

LEVERS = tomllib.loads((paths.PUBLISHED / "levers.toml").read_text(encoding="utf-8"))
NAMED = [
    (each["key"], *where) for kind in ("lever", "claim") for each in LEVERS[kind] for where in each.get("asks", ())
]
NAMED += [(each["key"], *each[side]) for each in LEVERS["lever"] for side in ("reads", "writes", "together", "price")
          if side in each]  # fmt: skip


@pytest.mark.parametrize(("lever", "notebook", "pattern"), NAMED)
def test_every_question_that_a_lever_rests_on_is_asked_by_the_notebook_it_names(lever, notebook, pattern):
    assert len(collected.asked(collected.collect(paths.NOTEBOOKS), notebook, pattern))


def notebook(*outputs, title="# Is tea hot?"):
    """A notebook whose cells showed these things."""
    cells = [nbformat.v4.new_markdown_cell(title)]
    for shown in outputs:
        if hasattr(shown, "_repr_mimebundle_"):
            data, metadata = shown._repr_mimebundle_()
        else:
            text, metadata = shown._repr_markdown_()
            data, metadata = {"text/markdown": text}, {"text/markdown": metadata}
        cells.append(
            nbformat.v4.new_code_cell(outputs=[nbformat.v4.new_output("display_data", data, metadata=metadata)])
        )
    return nbformat.v4.new_notebook(cells=cells)


@pytest.fixture
def known(tmp_path, monkeypatch):
    """Two notebooks in a folder, collected; a third is broken."""
    lines = [{"value": (1.0, 2.0)[side] * (1 + 0.01 * n), "side": side, "machine": "m", "block": n, "model": "tea"}
             for n in range(6) for side in (0, 1)]  # fmt: skip
    ratio = compare(pd.DataFrame(lines), of="side == 1", to="side == 0", by="model")
    hot = question("Is tea hot?", ratio, above=1.5, why="a tongue burns")
    nbformat.write(notebook(finding("tea takes 1,024.5 s"), questions(hot)),
                   tmp_path / "01-tea.ipynb")  # fmt: skip
    nbformat.write(notebook(finding("of itself")), tmp_path / f"{collected.GUIDE}.ipynb")
    (tmp_path / "03-broken.ipynb").write_text("{")
    return collected.collect(tmp_path)


def test_findings_and_answers_of_every_executed_notebook_are_collected_with_their_figures(known):
    assert list(known) == ["01-tea"]
    assert (known["01-tea"]["title"], known["01-tea"]["findings"]) == ("Is tea hot?", ["tea takes 1,024.5 s"])
    (line,) = collected.asked(known, "01-tea", "^is TEA hot").to_dict("records")
    assert (line["of"], line["value"], line["low"], line["high"], line["answer"]) == ("tea", 2.0, 2.0, 2.0, "yes")
    assert (line["asked"], line["why"]) == ("above 1.5", "a tongue burns")


@pytest.mark.parametrize(
    ("figure", "numbers"),
    [("1.46 [1.33, 1.57]", (1.46, 1.33, 1.57)), ("1,043 [1,016, 1,239; 75%]", (1043, 1016, 1239)),
     ("0.55 to 0.65 (2 processes)", (0.6, 0.55, 0.65)), ("4e-05 [1e-06, 2e-03]", (4e-5, 1e-6, 2e-3))],
)  # fmt: skip
def test_a_figure_is_read_as_it_is_printed(figure, numbers):
    told = {"01": {"questions": [{"question": "q", "of": "", "figure": figure, "asked": "", "answer": "yes"}]}}
    (line,) = collected.asked(told, "01", "q").to_dict("records")
    assert (line["value"], line["low"], line["high"]) == pytest.approx(numbers)


def test_a_question_and_a_finding_that_are_not_there_are_named_with_those_that_are(known):
    with pytest.raises(StudyError, match=r"(?s)'cold'.*01-tea does not ask it; it asks: Is tea hot\?"):
        collected.asked(known, "01-tea", "cold")
    with pytest.raises(StudyError, match="05-gone does not ask it; it asks: nothing"):
        collected.asked(known, "05-gone", "hot")


def test_only_pages_that_show_the_source_asked_for_are_collected(known, tmp_path):
    assert collected.collect(tmp_path, "live") == {}, "neither says whose rows it shows"


def page(monkeypatch, known):
    """Notebook 12's names after it ran on these findings."""
    monkeypatch.setattr(collected, "collect", lambda *_: known)
    return executed(collected.GUIDE)


def test_levers_whose_notebooks_were_not_executed_are_absent_from_the_page(monkeypatch):
    known = collected.collect(paths.NOTEBOOKS)
    assert len(page(monkeypatch, known)["gains"])
    without = {name: said for name, said in known.items() if name[:2] != "04"}
    assert not page(monkeypatch, without)["gains"].lever.str.startswith("weights").any()
    assert page(monkeypatch, {})["gains"].empty


def test_a_request_gains_as_amdahl_says_and_more_of_what_it_spends_its_time_on(monkeypatch):
    room = page(monkeypatch, collected.collect(paths.NOTEBOOKS))
    for line in room["gains"].itertuples():
        assert line.value == pytest.approx(1 / (line.r / line.a["value"] + (1 - line.r) / line.b["value"]))
        assert min(line.a["low"], line.b["low"]) <= line.low <= line.value <= line.high
    cost = room["cost"].set_index("model").value
    for model, share in room["share"].items():
        read, written = room["prompt"], cost[model] * room["answer"]  # in read tokens
        assert share == pytest.approx(read / (read + written))
