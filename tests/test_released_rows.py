"""Pages of a reader's released weights: names without a star, no invented model, and every cell runs.

Each cell has one process, as after a short night: nothing has an interval.
"""

from functools import partial

import msgspec
import nbformat
import pytest
from test_left_out import shown

from llama_meter import journal, paths
from llama_meter.journal import LOCAL, REFERENCE
from llama_meter.measure import plan, runner
from llama_meter.rows import Fact, Row
from plamo_study import measurements
from plamo_study.laws import simulations
from plamo_study.live import collect
from plamo_study.plans import registry
from plamo_study.read import recording
from plamo_study.show import theme

pytestmark = pytest.mark.whole

RELEASED = {"scale": "weights", "synthetic": False, "assumptions": [], "findings": []}


def released(record):
    """A recorded row or fact as one of released weights; None for a row of the invented model, which has none."""
    if isinstance(record, Row):
        if plan.MATCHED in str(record.cell):
            return None
        of_file = hasattr(record.cell, "scale")
        cell = msgspec.structs.replace(record.cell, scale="weights") if of_file else record.cell
        return msgspec.structs.replace(record, cell=cell)
    if isinstance(record, Fact) and record.what == "model":
        data = {name: value for name, value in record.data.items() if name != "trained"} | RELEASED
        return msgspec.structs.replace(record, data=data)
    return record


def recorded(study):
    """The recorded journal of a study, at full size where there is one: its facts, and the rows of its first block."""
    paths_of = [journal.journal_path(study, scale, REFERENCE) for scale in ("shape", "mini")]
    records = next((journal.read(path) for path in paths_of if path.exists()), [])
    return [record for record in records if isinstance(record, Fact) or record.block <= 0]


@pytest.fixture
def as_released(tmp_path, monkeypatch):
    """A function that lets these studies be rows of released weights, measured here."""

    def become(studies):
        folder = tmp_path / "measured"
        rewritten = {}
        for study in studies:
            at, records = registry.shown_at(study, "weights"), recorded(study)
            records = [*filter(None, map(released, records))] if at == "weights" else records
            rewritten[f"{study}.{at}.jsonl"] = b"".join(msgspec.json.encode(each) + b"\n" for each in records)
        for place in (REFERENCE, journal.OTHERS):
            (folder / place).parent.mkdir(exist_ok=True)
            (folder / place).symlink_to(paths.MEASURED / place)
        (folder / LOCAL).mkdir()
        for name, content in rewritten.items():
            if content:
                (folder / LOCAL / name).write_bytes(content)
        monkeypatch.setattr(paths, "MEASURED", folder)

    def measured(study, scale, at, *_):
        rows = journal.latest_rows(journal.read(journal.journal_path(study, at, LOCAL)))
        return runner.Summary(recording.of_one_machine(rows), 0), ""

    monkeypatch.setattr(collect, "_measured", measured)
    monkeypatch.setattr(theme, "enable", lambda: None)
    monkeypatch.setattr(simulations, "ASKED", 100)  # requests of a simulation: what is written of them is the same
    monkeypatch.setattr(simulations, "at_rate", partial(simulations.at_rate, n=100))
    measurements.recording.cache_clear()
    yield become
    measurements.recording.cache_clear()


@pytest.mark.parametrize("notebook", registry.NOTEBOOKS)
def test_every_cell_runs_on_rows_of_released_weights(notebook, as_released):
    own = [study for study, _ in registry.of_notebook(notebook, "weights")]
    as_released(own or registry.STUDIES)
    room: dict[str, object] = {}
    for number, cell in enumerate(nbformat.read(paths.NOTEBOOKS / f"{notebook}.ipynb", as_version=4).cells):
        if cell.cell_type == "code":
            shown(cell.source, f"{notebook}, cell {number}", room)
        if "parameters" in cell.metadata.get("tags", []):
            given = {"source": "live", "scale": "weights"}
            room |= {name: value for name, value in given.items() if name in room}
