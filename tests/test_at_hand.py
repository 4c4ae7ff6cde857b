"""What `make study` measures here: three processes a cell, one proof, and a first round that needs no quantizing."""

import foreign_models
import msgspec
import pytest

from llama_meter import journal, paths
from llama_meter.cells import Decode, Prefill
from llama_meter.measure import plan, runner
from llama_meter.measure.request import sweep
from llama_meter.models import registry
from plamo_study.read import frame
from plamo_study.studies.your_machine.plan import first_round, your_machine

HYBRID = plan.MODELS[0]


@pytest.fixture(scope="module")
def lean():
    """A lean plan of a small model."""
    base = Prefill(model=HYBRID, scale="mini", dtype="F16", n_prompt=16)
    cells = (base, plan.of_kind(Decode, base, depth=8, n_gen=4, n_seq=2, policy="shared"))
    return plan.lean("your-machine", "mini", cells)


@pytest.fixture(scope="module")
def swept(lean, tmp_path_factory):
    """That plan, measured with far more time than it needs."""
    path = tmp_path_factory.mktemp("lean") / "your-machine.mini.jsonl"
    return runner.sweep(lean, path, minutes=30), path


@pytest.mark.long
def test_a_lean_plan_is_three_processes_a_cell_of_which_the_first_proves_all(swept):
    rows = frame.frame(swept[0].rows, frame.facts(journal.read(swept[1])))
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


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("of", ["mini", "shape", "file"])
def test_the_first_round_measures_cells_of_the_whole_plan_on_files_that_nothing_quantizes(
    of, gpu, tmp_path, monkeypatch
):
    monkeypatch.setattr(registry, "FILES", {})
    monkeypatch.setattr(paths, "MODELS", tmp_path)
    every = sweep(files=str(foreign_models.write(tmp_path / "llama.gguf"))) if of == "file" else sweep()
    scale = "shape" if of == "file" else of
    first, whole = (your_machine(scale, gpu, each) for each in (first_round(scale, every), every))
    assert set(first.every_cell) < set(whole.every_cell)
    assert first.cells[: first.needed] == whole.cells[: whole.needed]
    files = {file for cell in first.every_cell for file in cell.files}
    assert files == {file for cell in whole.cells[: whole.needed] for file in cell.files}
    assert {cell.shape[0] for cell in first.cells if isinstance(cell, Decode)} == {1, 4, 5}
    assert first.blocks == whole.blocks
