"""Another build of the engine is measured in the same blocks, and the upstream report's script runs."""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import llama_cpp.llama_cpp as llama
import pytest
from conftest import ATTENTION, HYBRID, mini, mini_file
from test_runner import small_plan

from plamo_study import paths
from plamo_study.errors import StudyError
from plamo_study.measure import frame, journal, runner

SCRIPT = paths.ROOT / "data" / "upstream" / "reproduce.py"


@pytest.fixture(scope="module")
def other_build(tmp_path_factory):
    """The same libraries in another folder, under another name: what `--beside DIR` expects of a build."""
    folder = tmp_path_factory.mktemp("builds") / "other"
    shutil.copytree(Path(llama._base_path), folder, symlinks=True)
    (folder / "engine.toml").write_text('description = "a copy"\ncorrects = ["D2", "D3"]\n')
    return folder


def test_builds_share_blocks_and_each_has_its_own_gate(tmp_path, other_build):
    cells = (mini("prefill", n_prompt=16), mini("prefill", n_prompt=24))
    planned = replace(small_plan(cells, blocks=2), compared=cells[:1])
    summary = runner.sweep(planned, tmp_path / "j.jsonl", beside=[other_build])
    table = frame.frame(summary.rows, frame.facts(journal.read(tmp_path / "j.jsonl")))
    counts = table[~table["anchor"]].groupby(["build", "workload", "verdict"]).size().to_dict()
    assert counts == {
        ("corrected", "gate", "valid"): 1,
        ("corrected", "prefill", "valid"): 2,
        ("stock", "gate", "valid"): 1,
        ("stock", "prefill", "valid"): 4,
    }
    assert set(table[table["build"] == "corrected"]["block"]) == {-1, 0, 1}
    assert runner.sweep(planned, tmp_path / "j.jsonl", beside=[other_build]).measured == 0


def test_a_folder_that_is_no_build_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(StudyError, match="does not load"):
        runner.sweep(small_plan(), tmp_path / "j.jsonl", beside=[tmp_path])
    assert not [record for record in journal.read(tmp_path / "j.jsonl") if getattr(record, "status", "")]


def test_a_shared_prompt_decodes_right_and_counts_its_steps(tmp_path):
    cells = tuple(
        mini("decode", model, policy="shared", n_prompt=32, n_gen=6, n_seq=n)
        for model in (HYBRID, ATTENTION)
        for n in (1, 5)
    )
    rows = runner.sweep(small_plan(cells, blocks=1), tmp_path / "j.jsonl").rows
    decoded = [row for row in rows if row.cell.workload == "decode" and row.cell.policy == "shared"]
    assert len(decoded) == 4
    assert all(row.valid and row.n_evaluated == 6 * row.cell.n_seq for row in decoded)
    assert all(len(row.samples_ns[0]) == 6 and not row.prefill_ns for row in decoded)


def test_packed_prompts_are_timed_and_found_wrong_on_the_hybrid_alone(tmp_path):
    cells = tuple(
        mini("decode", model, policy=policy, n_prompt=32, n_gen=6, n_seq=3)
        for model in (HYBRID, ATTENTION)
        for policy in ("packed", "per_sequence")
    )
    rows = runner.sweep(small_plan(cells, blocks=1), tmp_path / "j.jsonl").rows
    valid = {(row.cell.model, row.cell.policy): row.valid for row in rows if row.cell in cells}
    wrong = {(HYBRID, "packed")}
    assert valid == {(cell.model, cell.policy): (cell.model, cell.policy) not in wrong for cell in cells}
    assert all(row.prefill_ns[0] > 0 for row in rows if row.cell in cells)


@pytest.mark.parametrize(("model", "wrong"), [(HYBRID, True), (ATTENTION, False)])
def test_the_report_s_script_shows_the_defects_on_the_hybrid_alone(model, wrong):
    done = subprocess.run([sys.executable, SCRIPT, mini_file(model)], capture_output=True, text=True, check=True)
    errors = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines()]
    assert len(errors) == 5
    assert all(error > 0.05 for error in errors) if wrong else all(error < 0.02 for error in errors)


def test_the_report_s_script_is_as_short_as_it_says():
    lines = [line for line in SCRIPT.read_text().splitlines() if line.strip() and not line.lstrip().startswith('"""')]
    assert len(lines) <= 30
