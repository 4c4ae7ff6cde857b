"""What `make study` measures here: three processes a cell, one proof, a gate of parts, and what it says beforehand."""

import shutil
from dataclasses import replace
from pathlib import Path

import foreign_models
import msgspec
import pytest

from llama_meter import journal, paths
from llama_meter.cells import Decode, Prefill, Read
from llama_meter.errors import StudyError
from llama_meter.measure import durations, plan, runner
from llama_meter.measure.asked import sweep
from llama_meter.models import given, registry
from llama_meter.rows import Measured
from plamo_study.live import at_hand, budget, live
from plamo_study.plans import registry as studies
from plamo_study.plans.your_machine import first_round, your_machine
from plamo_study.read import frame, recording

HYBRID, ATTENTION = plan.MODELS


def page(scale):
    """The plan of this machine's page."""
    return studies.STUDIES[at_hand.NOTEBOOK].plan(scale)


@pytest.fixture(scope="module")
def lean():
    """A lean plan of a small model."""
    base = Prefill(model=HYBRID, scale="mini", dtype="F16", n_prompt=16)
    cells = (base, plan.change(base, workload="decode", depth=8, n_gen=4, n_seq=2, policy="shared"))
    return plan.lean(at_hand.NOTEBOOK, "mini", cells)


@pytest.fixture(scope="module")
def swept(lean, tmp_path_factory):
    """That plan, measured with far more time than it needs."""
    path = tmp_path_factory.mktemp("lean") / f"{at_hand.NOTEBOOK}.mini.jsonl"
    return runner.sweep(lean, path, minutes=30), path


@pytest.mark.long
def test_a_lean_plan_is_three_processes_a_cell_of_which_the_first_proves_all(swept):
    rows = recording.framed(swept[0].rows, swept[1])[0]
    assert not rows.anchor.any()
    timed = rows[rows.workload != "gate"]
    assert timed.groupby("workload").size().between(3, 4).all(), "one more where another program computed"
    assert [("second_path" in checks) for checks in timed.checks] == [n == 0 for n in timed.replicate]
    assert set(timed.verdict) == {"valid"}


@pytest.mark.parametrize(("ended", "verdict"), [("wrong", "invalid"), ("crashed", "ungated"), ("not there", "ungated")])
def test_without_its_proof_no_process_of_a_cell_is_right(swept, ended, verdict):
    summary, path = swept
    ends = {"wrong": {"valid": False}, "crashed": {"status": "abort", "valid": None, "samples_ns": []}}
    first = next(row for row in summary.rows if row.replicate == 0 and isinstance(row.cell, Decode))
    changed = [row for row in summary.rows if row is not first]
    changed += [msgspec.structs.replace(first, **ends[ended])] if ended in ends else []
    rows = frame.frame(changed, frame.facts(journal.read(path)))
    assert set(rows[(rows.workload == "decode") & (rows.replicate > 0)].verdict) == {verdict}
    assert set(rows[rows.workload == "prefill"].verdict) == {"valid"}


def test_a_page_is_measured_where_every_file_that_it_needs_has_rows(lean, swept, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "MEASURED", tmp_path)
    assert not at_hand.measured(lean)
    target = journal.journal_path(at_hand.NOTEBOOK, "mini", journal.LOCAL)
    target.parent.mkdir(parents=True)
    shutil.copy(swept[1], target)
    assert at_hand.measured(lean)
    other = tuple(plan.change(cell, model=ATTENTION) for cell in lean.cells)
    assert not at_hand.measured(plan.lean(at_hand.NOTEBOOK, "mini", lean.cells + other))


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("of", ["mini", "shape", "file"])
def test_the_first_round_measures_cells_of_the_whole_plan_on_files_that_nothing_quantizes(
    of, gpu, tmp_path, monkeypatch
):
    for module, name in ((given, "FILES"), (registry, "_given"), (registry, "_paths")):
        monkeypatch.setattr(module, name, {})
    monkeypatch.setattr(paths, "MODELS", tmp_path)
    every = sweep(files=str(foreign_models.write(tmp_path / "llama.gguf"))) if of == "file" else sweep()
    scale = "shape" if of == "file" else of
    first, whole = (your_machine(scale, gpu, each) for each in (first_round(scale, every), every))
    assert set(first.asked) < set(whole.asked)
    assert first.cells[: first.needed] == whole.cells[: whole.needed]
    files = {file for cell in first.asked for file in cell.files}
    assert files == {file for cell in whole.cells[: whole.needed] for file in cell.files}
    assert {cell.shape[0] for cell in first.cells if isinstance(cell, Decode)} == {1, 4, 5}
    assert first.blocks == 2 < whole.blocks


def test_a_full_disk_is_said_with_what_is_needed_before_a_file_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "MODELS", tmp_path)
    sizes = at_hand.missing([page("shape")])
    assert 7.5e9 < sum(sizes.values()) < 8.6e9
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 3 << 30}))
    with pytest.raises(StudyError, match="SCALE=mini"):
        at_hand.missing([page("shape")])
    assert not list(Path(tmp_path).iterdir())


@pytest.fixture
def recorded(lean, swept, tmp_path, monkeypatch):
    """A reference machine with two builds: a second a process, and 1 GB/s and 1 GFLOP/s. Seconds of that plan there."""
    monkeypatch.setattr(paths, "MEASURED", tmp_path)
    target = journal.journal_path(at_hand.NOTEBOOK, "mini", journal.REFERENCE)
    target.parent.mkdir(parents=True)
    rows = [msgspec.structs.replace(row, elapsed_ns=10**9) for row in swept[0].rows]
    for cell in plan.ceilings("mini", False, (7,)):
        worked = {"n_bytes": 10**9} if isinstance(cell, Read) else {"n_flops": 10**9, "n_bytes": 0}
        rows += [msgspec.structs.replace(rows[0], cell=cell, samples_ns=[[10**9]] * 3, **worked)]
    with journal.Journal(target) as kept:
        for build in ("one", "other"):
            for number, row in enumerate(rows):
                kept.append(msgspec.structs.replace(row, key=f"{build} {number}", engine=build))
    return len(lean.cells) * lean.blocks + sum(1 / durations.at_once(gate) for gate in lean.gates)


def test_every_forecast_reads_one_clock(lean, recorded, monkeypatch):
    monkeypatch.setattr(budget, "_plan", lambda *_: lean)
    forecasts = (durations.lasts(lean), live.expected_s(lean, 0), budget.lasts(at_hand.NOTEBOOK, "mini", 0))
    assert forecasts == (pytest.approx(recorded),) * 3, "gates share their time, and a build beside adds none"
    assert durations.lasts(lean, pace=2.0) == live.expected_s(lean, 0, 2.0) == pytest.approx(2 * recorded)


def test_rows_of_this_machine_go_before_its_probe_and_need_no_time_again(lean, swept, recorded):
    first = next(row for row in swept[0].rows if isinstance(row.cell, Prefill))
    own = [msgspec.structs.replace(first, elapsed_ns=3 * 10**9)]
    assert durations.lasts(lean, own, pace=2.0) == pytest.approx(3 * (recorded - 1))
    crashed = [msgspec.structs.replace(first, status="abort")]
    assert durations.lasts(lean, crashed, pace=2.0) == pytest.approx(2 * recorded)
    target = journal.journal_path(at_hand.NOTEBOOK, "mini", journal.LOCAL)
    target.parent.mkdir()
    shutil.copy(swept[1], target)
    assert live.expected_s(lean, 0, 2.0) == 0
    assert live.expected_s(replace(lean, blocks=lean.blocks + 2), 0) > 0


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(("read", "matmul", "times"), [(1, 1, 1), (2, 2, 0.5), (2, 0.25, 4), (0.5, 2, 2)])
def test_the_slower_ceiling_says_how_much_longer_a_process_takes_here(read, matmul, times, monkeypatch):
    def probe(cell, **_):
        rate = read if isinstance(cell, Read) else matmul
        worked = "n_bytes" if isinstance(cell, Read) else "n_flops"
        return Measured(samples_ns=[[10**6]] * 3, valid=True, **{worked: int(rate * 10**6)})

    monkeypatch.setattr(at_hand, "measured_once", probe)
    assert at_hand.probed("mini") == at_hand.Pace(read * 1e9, matmul * 1e9, times)
    assert at_hand.probed("shape").times == 1, "nothing was recorded at this scale"
