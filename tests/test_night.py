"""A whole night with two files of a user's, by a clock that is set forward: every notebook that takes files."""

import json
import sys
from collections import Counter
from datetime import UTC, datetime, timedelta

import foreign_models
import nbformat
import pytest
from conftest import mini_file

from llama_meter import journal, paths
from llama_meter.cells import Gate
from llama_meter.measure import files, machine, runner, watch
from llama_meter.measure.process import Outcome, TimeUpError
from llama_meter.measure.request import Request, sweep
from llama_meter.models import check, recipes, registry
from llama_meter.rows import Evidence, Measured, Row
from plamo_study import live, runs
from plamo_study.cli import notebooks
from plamo_study.studies import registry as studies

MINUTES = 480
TAKES = {"gate": 60.0, "prefill": 15.0, "decode": 10.0}  # seconds of a process
OTHER_PYTHON, OTHER_BUILD = "3.11.99", "b" * 64


class Clock:
    """A clock that only measuring sets forward."""

    passed = 0.0

    @staticmethod
    def now(zone):
        return datetime(2026, 1, 1, 22, tzinfo=UTC) + timedelta(seconds=Clock.passed)


class Night:
    """What was measured, in order, and what the command said."""

    def __init__(self):
        self.cells, self.interrupt_after = [], None

    def work(self, job, limit_s, engine="", workload="", ends_at=float("inf")):
        """Takes its time by the fake clock, and is right."""
        takes = TAKES.get(job.cell.workload, 5.0)
        if Clock.passed + takes > ends_at:
            Clock.passed = ends_at
            raise TimeUpError
        if len(self.cells) == self.interrupt_after:
            raise KeyboardInterrupt
        Clock.passed += takes
        self.cells.append((job.cell, job.replicate))
        of_gate = isinstance(job.cell, Gate)
        measured = Measured(samples_ns=[] if of_gate else [[10**6] * 4], valid=True, n_bytes=10**6)
        return Outcome(status="ok", pid=1, evidence=Evidence(wall_ns=round(takes * 1e9)), measured=measured)


@pytest.fixture
def night(tmp_path, monkeypatch):
    """A project without rows, and two files as large as those of full size."""
    for name in ("MODELS", "MEASURED", "REPORTS"):
        monkeypatch.setattr(paths, name, tmp_path / name.lower())
    paths.MEASURED.mkdir()
    (paths.MEASURED / "reference").symlink_to(paths.ROOT / "data/measured/reference")
    monkeypatch.setattr(registry, "FILES", {})
    files = [str(foreign_models.write(tmp_path / f"{arch} モデル.gguf", arch)) for arch in ("llama", "jamba")]
    check.requested(files)
    found, engine = Night(), runner.engine_facts()
    monkeypatch.setattr(runner, "engine_facts", lambda folder="": engine)
    monkeypatch.setattr(runner, "work", found.work)
    monkeypatch.setattr(runner.Bench, "now", lambda bench: Clock.now(UTC))
    monkeypatch.setattr(runner, "monotonic", lambda: Clock.passed)
    monkeypatch.setattr(Clock, "passed", 0.0)
    monkeypatch.setattr(watch, "disturbed", lambda rows: set())
    monkeypatch.setattr(machine, "at_once", lambda n_threads, n_bytes: 1)
    live._offloads.cache_clear()
    monkeypatch.setattr(live.server, "program", lambda: None)
    monkeypatch.setattr(runs, "run", executed)
    monkeypatch.setattr(live.Line, "show", lambda line, text, row: print(text, file=sys.stderr))
    return found, files


def executed(notebook, values, *_):
    """As the notebook's kernel does: its studies, within its minutes."""
    request = Request.of(runs.assign([notebook], values)[notebook])
    for study, _ in studies.of_notebook(notebook.stem, request.scale, request.sweep.files):
        live.collect(study, request)
    return runs.RunResult(notebook, "ok", notebook)


def go(files, minutes=MINUTES):
    return notebooks.run([], {"source": "live", "files": json.dumps(files), "minutes": minutes})


def rows():
    found = [journal.read(path) for path in sorted(paths.MEASURED.glob("local/*.jsonl"))]
    return [record for records in found for record in records if isinstance(record, Row)]


@pytest.mark.whole
@pytest.mark.timeout(300)
def test_a_night_interrupted_and_updated_measures_every_notebook_that_takes_files_in_order_and_ends_in_time(
    night, capfd, monkeypatch
):
    found, given_files = night
    found.interrupt_after = 40
    with pytest.raises(KeyboardInterrupt):
        go(given_files)
    kept, began, engine, machine_facts = rows(), Clock.passed, runner.engine_facts(), machine.facts()
    assert len(kept) == found.interrupt_after
    assert engine["pinned"], "else a build of other bytes is another engine"
    monkeypatch.setattr(machine, "facts", lambda: machine_facts | {"python": OTHER_PYTHON})
    monkeypatch.setattr(runner, "engine_facts", lambda folder="": engine | {"sha256": OTHER_BUILD})
    found.interrupt_after = None
    capfd.readouterr()
    assert go(given_files) == 0
    said = capfd.readouterr().err
    assert "Measures for 8 h 0 min at most, until" in said
    assert 0.8 * 60 * MINUTES <= Clock.passed - began <= 60 * MINUTES, "plans of a fixed length may end early"
    taken = [name for name in studies.NOTEBOOKS if "files" in runs.declared(paths.NOTEBOOKS / f"{name}.ipynb")]
    taken.remove(studies.OF_PAIRS)
    assert f"{studies.OF_PAIRS} is left out" in said, "the files are of two models"
    measured = rows()
    assert len({row.key for row in measured}) == len(measured) == len(found.cells)
    assert {row.key for row in kept} < {row.key for row in measured}
    assert len({row.machine for row in measured}) == len({row.engine for row in measured if row.engine}) == 1
    assert len({row.system for row in measured}) == 2, "what was updated stands beside the rows"
    order = list(dict.fromkeys(row.study for row in sorted(measured, key=lambda row: row.started)))
    assert list(dict.fromkeys(map(studies.notebook_of, order))) == taken, "in order of need, the machine's page first"
    for study in order:
        own = [row for row in sorted(measured, key=lambda row: row.started) if row.study == study]
        plan = live.build(study, "mini", sweep=sweep(files=given_files))
        assert {row.cell.files[0] for row in own if row.cell.files} == set(plan_files(plan)), "each file has its share"
        first = {}
        for number, row in enumerate(own):
            for file in row.cell.files:
                first.setdefault(file, (number, row.cell.workload))
        assert {workload for _, workload in first.values()} == {"gate"}, "a file is judged before it is timed"
        blocks = Counter(row.cell for row in own if not row.anchor and not isinstance(row.cell, Gate))
        assert all(blocks[cell] >= 2 for cell in plan.cells[: plan.needed])
        for cell in set(plan.cells) - set(blocks):
            assert any(f"*{study}: " in line and "No time for" in line for line in said.splitlines()), cell


def test_two_files_of_one_model_are_paired_in_a_night(tmp_path):
    smaller = tmp_path / "smaller.gguf"
    files.quantize(mini_file(), smaller, recipes.by_name("Q8_0"))
    of_a_night = Request.of({"files": [str(mini_file()), str(smaller)]})
    assert studies.OF_PAIRS in [path.stem for path in notebooks.chosen([], of_a_night)]


def plan_files(plan):
    return dict.fromkeys(file for cell in plan.cells for file in cell.files)


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize("study", ["your-machine", "03-batch-scaling"])
def test_a_live_notebook_without_further_parameters_ends_within_its_minutes_with_numbers_of_its_own(study, night):
    page = paths.NOTEBOOKS / f"{studies.notebook_of(study)}.ipynb"
    defaults = next(cell for cell in nbformat.read(page, 4).cells if "parameters" in cell.metadata.get("tags", ()))
    room = {}
    exec(defaults.source, room)
    found = live.collect(study, Request("live", room["scale"], room["minutes"], sweep=sweep(files=night[1])))
    assert Clock.passed <= 60 * room["minutes"]
    assert found.source == "live"
    timed = found.rows[(found.rows["workload"] != "gate") & (found.rows["model"] != "") & ~found.rows["anchor"]]
    assert set(timed["verdict"]) <= {"valid", "consistent"}
    assert timed["block"].nunique() >= 2, "a block alone says nothing"
    assert timed["model"].nunique() == 2, "each file is measured"
