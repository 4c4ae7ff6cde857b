"""Pages of files of a user's own: one that is disturbed, two types of a model, a study without time."""

from dataclasses import replace

import msgspec
import nbformat
import pandas as pd
import pytest
from test_notebooks import shown

from llama_meter import paths
from llama_meter.errors import StudyError
from llama_meter.models import synthetic
from plamo_study import live, measurements, runs
from plamo_study.read.frame import frame
from plamo_study.read.recording import read
from plamo_study.show import theme

HYBRID, ATTENTION = "plamo-2-1b", "plamo-3-nict-2b"
PAGES = [
    path.stem
    for path in sorted(paths.NOTEBOOKS.glob("*.ipynb"))
    if "files" in runs.declared(path) and path.stem != "A-methods"
]


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(theme, "enable", lambda: None)
    measurements.recording.cache_clear()
    yield
    measurements.recording.cache_clear()


def as_given(study):
    """Recorded rows of a study as if two files had been given: the engine as released, and no invented model."""
    part = read(study, "recorded", "shape") or read(study, "recorded", "mini")
    rows = part.rows.assign(model=part.rows.model.str.rstrip("*"))
    rows = rows[rows.model.isin(["", HYBRID, ATTENTION]) & rows.build.isin(["stock", ""])]
    usual = rows[rows.model.ne("")].groupby("model").dtype.agg(lambda types: types.mode().iloc[0])
    rows = rows[rows.model.eq("") | (rows.dtype == rows.model.map(usual))].reset_index(drop=True)
    names = {name.rstrip("*"): fact for name, fact in part.facts.items()}
    return replace(part, rows=rows, facts=part.facts | names, source="live")


def of_models(*models):
    """Rows of files of these models, and those without a file."""
    return lambda part: replace(part, rows=part.rows[part.rows.model.isin(["", *models])].reset_index(drop=True))


def two_types(part):
    """The first model's file beside one of another type, with the same times."""
    part = of_models(HYBRID)(part)
    if part.study.startswith("B-"):  # its rows are of two types already
        return part
    again = part.rows[part.rows.model.ne("")]
    again = again.assign(dtype="Q4_K_M", key=again.key + "+", fact=again.fact + "+")
    facts = {
        f"{fact}+": part.facts[fact] | {"dtype": "Q4_K_M"} for fact in part.rows.fact.unique() if fact in part.facts
    }
    return replace(part, rows=pd.concat([part.rows, again], ignore_index=True), facts=part.facts | facts)


def first_alone(part):
    """Nothing of any study but a page's own."""
    return part if part.study in PAGES else replace(part, rows=frame([], {}), facts={}, lacks="no time")


def uncounted(part):
    """A mixture of experts, whose bytes a token are not computed, beside another program."""
    part = replace(of_models(HYBRID)(part), source="live")
    names = set(part.rows.fact)
    facts = {
        name: fact | {"uncounted": "a mixture"} if name in names and "shape" in fact else fact
        for name, fact in part.facts.items()
    }
    return replace(part, facts=facts, rows=part.rows.assign(disturbed=True, disturbed_by="load"))


SETS = {
    "one disturbed file whose bytes are not counted": uncounted,
    "two types of a model": two_types,
    "no time for a second study": first_alone,
}
CASES = [(name, changed) for name in PAGES for changed in [*SETS][:2]] + [("05-quantization", [*SETS][2])]


@pytest.mark.long
@pytest.mark.parametrize(("name", "changed"), CASES)
def test_a_page_of_own_files_is_written_from_any_of_their_rows(name, changed, monkeypatch):
    monkeypatch.setattr(live, "collect", lambda study, _: SETS[changed](as_given(study)))
    own = [str(synthetic.make(model, "mini", "Q8_0")) for model in (HYBRID, ATTENTION)]
    room = {}
    for number, cell in enumerate(nbformat.read(paths.NOTEBOOKS / f"{name}.ipynb", as_version=4).cells):
        if cell.cell_type == "code":
            try:
                shown(cell.source, room)
            except StudyError as error:
                if "nothing was measured" not in error.why:
                    raise
                return  # recorded rows without this file
            except Exception as error:
                error.add_note(f"{name}, cell {number}")
                raise
            room |= {"files": msgspec.json.encode(own).decode()} if number == 1 else {}
    assert room["request"].source == "live"
