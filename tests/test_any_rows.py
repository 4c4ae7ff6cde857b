"""Pages that are true of the rows they show: other machines', fewer, disturbed, renamed, and none at all."""

import re
from dataclasses import replace
from functools import cache

import msgspec
import nbformat
import pytest
from test_notebooks import shown

from llama_meter import paths
from llama_meter.rows import Fact, Row
from plamo_study import live, measurements
from plamo_study.read import recording
from plamo_study.show import theme
from plamo_study.studies.latency import law

PAGES = sorted(path.stem for path in paths.NOTEBOOKS.glob("*.ipynb"))
MEASURED = re.compile(r"\d[\d.,]*\s?(?:ms|s|seconds?|tokens? a second|tokens/s|GB/s|GB a second|GFLOP/s|%|times)(?!\w)")
whole = recording.of_rows


def changed(rows, records):
    """One model alone, on a Mac that ran hot and on its battery, so that every process is disturbed."""
    names = {record.id: record.data["name"] for record in records if isinstance(record, Fact) and "name" in record.data}
    first = min((name for row in rows if (name := names.get(row.model))), default="")
    rows = [row for row in rows if not row.model or names[row.model] == first]
    mac = {"chip": "Apple M4 Pro", "os": "macOS 15.5", "gpu_cores": 20}
    records = [
        msgspec.structs.replace(record, data=record.data | mac)
        if isinstance(record, Fact) and record.what == "machine"
        else record
        for record in records
    ]
    hot = {"thermal": "heavy", "power_source": "battery"}
    return [
        msgspec.structs.replace(row, conditions=msgspec.structs.replace(row.conditions, **hot)) for row in rows
    ], records


@cache
def notebook(name):
    """A page's cells."""
    return nbformat.read(paths.NOTEBOOKS / f"{name}.ipynb", as_version=4).cells


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """A notebook reads a recording once: what another test changed is not kept for the next one."""
    monkeypatch.setattr(theme, "enable", lambda: None)
    monkeypatch.setattr(law, "ASKED", 100)  # requests of a simulation: what is written of them is the same
    monkeypatch.setattr(law, "TUNED", law.TUNED[:1])
    measurements.recording.cache_clear()
    yield
    measurements.recording.cache_clear()


def executed(name):
    """Every cell of a page runs, and what it shows is composed; the names that it leaves."""
    room = {}
    for number, cell in enumerate(notebook(name)):
        if cell.cell_type == "code":
            try:
                shown(cell.source, room)
            except Exception as error:
                error.add_note(f"{name}, cell {number}")
                raise
    return room


@pytest.mark.whole
@pytest.mark.timeout(400)  # a simulation whose model has another name is made anew
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_written_from_other_rows(name, monkeypatch):
    def of_rows(rows, records, *where):
        return whole(*changed([row for row in rows if isinstance(row, Row)], records), *where)

    for module in (recording, live):
        monkeypatch.setattr(module, "of_rows", of_rows)
    executed(name)


SEVERAL = {
    "02-roofline": "02-trace",
    "05-quantization": "05-quality",
    "03-batch-scaling": "03-replicas",
    "06-context": "06-memory",
    "04-right-answers": "04-hybrids",
    "08-speculative": "08-drafters",
}


@pytest.mark.whole
@pytest.mark.parametrize(("name", "absent"), SEVERAL.items())
def test_a_page_stands_without_a_study_that_there_was_no_time_for(name, absent, monkeypatch):
    usual, lacks = measurements.recorded, [absent]

    def some(study, *how):
        found = usual(study, *how)
        if study not in lacks:  # recorded rows that the page shows beside its own
            return found
        lacks.remove(study)
        return replace(found, rows=found.rows.head(0), facts={})

    monkeypatch.setattr(measurements, "recorded", some)
    executed(name)


@pytest.mark.whole
@pytest.mark.parametrize("name", [name for name in PAGES if recording.added(name, "shape")])
def test_a_page_is_written_from_the_rows_of_a_gpu(name, monkeypatch):
    there = recording.added(name, "shape")[0]
    usual = measurements.recorded
    monkeypatch.setattr(
        measurements, "recorded", lambda study, *how: replace(there) if study == name else usual(study, *how)
    )
    executed(name)


@pytest.mark.parametrize("name", PAGES)
def test_no_sentence_outside_of_a_quotation_holds_a_measured_number(name):
    prose = [cell.source for cell in notebook(name) if cell.cell_type == "markdown"]
    said = "\n".join(line for text in prose for line in text.splitlines() if not line.startswith(">"))
    said = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", "", said, flags=re.DOTALL)
    assert MEASURED.findall(said) == []


def test_a_measured_number_in_a_sentence_is_noticed():
    assert MEASURED.search("PLaMo 2 needs 8 ms for a token")
    assert MEASURED.search("eight write 56 tokens a second")
    assert MEASURED.search("Q5_0 reads 0.6 times as fast")
    assert not MEASURED.search("a prompt of 512 tokens in Q4_0, with a window of 2,048")
