"""Pages that are true of the rows they show: other machines', fewer, disturbed, renamed, and none at all."""

from dataclasses import replace

import msgspec
import nbformat
import pytest
from test_notebooks import shown

from llama_meter import paths
from llama_meter.rows import Fact, Row
from plamo_study import live, measurements
from plamo_study.read import frame, recording
from plamo_study.read.recording import Recording
from plamo_study.show import evidence, theme
from plamo_study.studies.latency import law

PAGES = sorted(path.stem for path in paths.NOTEBOOKS.glob("*.ipynb"))
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


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """A notebook reads a recording once: what another test changed is not kept for the next one."""
    monkeypatch.setattr(theme, "enable", lambda: None)
    monkeypatch.setattr(law, "SIMULATED", 100)  # requests of a simulation: what is written of them is the same
    monkeypatch.setattr(law, "TUNED", law.TUNED[:1])
    measurements.recording.cache_clear()
    yield
    measurements.recording.cache_clear()


LACKS = {  # a study of a page that there was no time for
    "05-quantization": "05-quality",
    "03-batch-scaling": "03-replicas",
    "06-context": "06-memory",
    "04-right-answers": "04-hybrids",
    "08-speculative": "08-drafters",
}


@pytest.mark.whole
@pytest.mark.timeout(400)  # a simulation whose model has another name is made anew
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_written_from_other_rows_without_a_study_that_there_was_no_time_for(name, monkeypatch):
    """Rows of a GPU where some were recorded, else those of one model on a Mac."""
    usual, lacks, of_gpu = measurements.recorded, [LACKS.get(name)], recording.added(name, "shape")

    def of_rows(rows, records, *where):
        return whole(*changed([row for row in rows if isinstance(row, Row)], records), *where)

    def recorded(study, *how):
        if study == name and of_gpu:
            return replace(of_gpu[0])
        found = usual(study, *how)
        if study not in lacks:  # recorded rows that the page shows beside its own
            return found
        lacks.remove(study)
        return replace(found, rows=found.rows.head(0), facts={})

    for module in (recording, live) if not of_gpu else ():
        monkeypatch.setattr(module, "of_rows", of_rows)
    monkeypatch.setattr(measurements, "recorded", recorded)
    room = {}
    for number, cell in enumerate(nbformat.read(paths.NOTEBOOKS / f"{name}.ipynb", as_version=4).cells):
        if cell.cell_type == "code":
            try:
                shown(cell.source, room)
            except Exception as error:
                error.add_note(f"{name}, cell {number}")
                raise


def test_a_study_without_rows_is_named_with_what_kept_it():
    lacking = Recording(frame.frame([], {}), {}, "a study", "mini", "live", lacks="the time was up")
    assert "the time was up" in evidence.of_rows(lacking).data
