"""A sweep loses nothing, doubles nothing, and goes on after every failure."""

import os
import random
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import groupby
from pathlib import Path

import msgspec
import psutil
import pytest
from conftest import ATTENTION, HYBRID, mini

from llama_meter import journal, paths
from llama_meter.cells import Prefill
from llama_meter.errors import StudyError
from llama_meter.measure import plan, process, runner, watch
from llama_meter.measure.plan import Tasks
from llama_meter.models import check, registry, synthetic
from llama_meter.rows import Conditions, Row
from plamo_study import live
from plamo_study.cli.terminal import shown
from plamo_study.read import frame

KILLS, LONGEST_S = 5, 0.8


def small_plan(cells=None, blocks=3):
    cells = cells or tuple(mini("prefill", model, n_prompt=n) for model in (HYBRID, ATTENTION) for n in (16, 24))
    gates, anchor = (mini("gate", n_prompt=32),), mini("decode", n_gen=4)
    return plan.Plan("small", "mini", cells, gates, anchor, blocks, 0, 30.0, anchors=1)


_outcomes = {}


def remembered(job, *rest, **how):
    """`process.work`, but a cell's worker runs once, and its outcome is repeated."""
    if (asked := (job.cell, *rest)) not in _outcomes:
        _outcomes[asked] = process.work(job, *rest, **how)
    return _outcomes[asked]


@pytest.fixture
def once(monkeypatch):
    """A worker for each cell, not for each row: for tests of what is measured when, and not of how."""
    monkeypatch.setattr(runner, "work", remembered)
    monkeypatch.setattr(runner, "CALM_S", 0.0)


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """One sweep of the small plan: its journal, its summary, and what it told of its progress."""
    path, events = tmp_path_factory.mktemp("swept") / "j.jsonl", []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "work", remembered)
        return path, runner.sweep(small_plan(), path, events.append), events


def test_blocks_are_shuffled_between_anchors_after_the_gate_and_a_second_sweep_measures_nothing(swept, once):
    path, first, events = swept
    assert (first.measured, first.failed) == (1 + 3 * 5 + 1, [])
    second = runner.sweep(small_plan(), path)
    assert (second.measured, second.rows) == (0, first.rows)
    assert first.rows[0].cell.workload == "gate"
    assert [row.block for row in first.rows if row.anchor] == [0, 1, 2, 3]
    orders = [[row.cell for row in first.rows if row.block == block and not row.anchor] for block in range(3)]
    assert all(sorted(order, key=repr) == sorted(orders[0], key=repr) for order in orders)
    assert len({repr(order) for order in orders}) > 1
    finished = [event for event in events if event.row]
    assert [event.done for event in finished] == list(range(1, 18))
    assert all(event.total == 17 for event in events)
    assert finished[5].remaining_s > finished[-1].remaining_s == 0


def test_the_builds_of_a_cell_follow_one_another_in_an_order_of_their_own():
    planned = small_plan()
    block = Tasks(replace(planned, compared=planned.cells), ["older", "newer"]).shuffled(0, planned.cells)
    runs = [[task.engine for task in group] for _, group in groupby(block, key=lambda task: task.cell)]
    assert [sorted(run) for run in runs] == [["", "newer", "older"]] * len(planned.cells)
    assert len(set(map(tuple, runs))) > 1


def test_disturbed_rows_are_measured_again_by_the_same_command(tmp_path, monkeypatch, once):
    monkeypatch.setattr(runner, "MOST_BLOCKS", 2)
    asked, path = replace(small_plan(small_plan().cells[:1], blocks=2), extra_blocks=1), tmp_path / "j.jsonl"
    monkeypatch.setattr(watch, "disturbed", lambda rows: {row.key for row in rows})
    first = runner.sweep(asked, path, minutes=60)
    assert len({row.key for row in first.rows}) == len(first.rows) == 1 + 2 + 3 + 1, "one block's worth a call"
    assert runner.sweep(asked, path, minutes=60).measured == 1
    monkeypatch.setattr(watch, "disturbed", lambda rows: set())
    assert runner.sweep(asked, path, minutes=60).measured == 0


@pytest.mark.parametrize(("n_cells", "seconds", "minutes", "blocks"), [(4, 60, 5, [0, 0, 1, 1]), (1, 3600, 70, [0])])
def test_where_the_time_is_short_the_first_cells_have_their_blocks(
    n_cells, seconds, minutes, blocks, tmp_path, monkeypatch, once
):
    measure = runner.Bench.measure

    def slow(*asked):
        return msgspec.structs.replace(measure(*asked), elapsed_ns=seconds * 10**9)

    monkeypatch.setattr(runner.Bench, "measure", slow)
    cells = tuple(mini("prefill", n_prompt=n) for n in (16, 24, 32, 40)[:n_cells])
    planned = plan.Plan("small", "mini", cells, (), None, 5, 0, 60.0)
    found = runner.sweep(planned, tmp_path / "j.jsonl", minutes=minutes)
    assert [row.block for row in found.rows] == blocks
    begun = blocks.count(0)
    assert {row.cell for row in found.rows} == set(cells[:begun])
    assert found.left_out == cells[begun:]


def test_a_cell_that_runs_when_the_time_is_up_is_cut_leaves_no_row_and_is_measured_by_the_next_call(
    tmp_path, monkeypatch
):
    cells = tuple(mini("prefill", n_prompt=n) for n in (16, 24))
    planned = plan.Plan("small", "mini", cells, (), None, 1, 0, 60.0, workload="sleeping")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PLAMO_STUDY_SLEEPING", "yes")
    cut = runner.sweep(planned, tmp_path / "j.jsonl", minutes=0.04)
    assert (cut.rows, cut.lacking, cut.left_out) == ([], 2, cells)
    assert not [child for child in psutil.Process().children(recursive=True) if "sleeping" in child.cmdline()]
    monkeypatch.delenv("PLAMO_STUDY_SLEEPING")
    whole = runner.sweep(planned, tmp_path / "j.jsonl", minutes=60)
    assert [row.status for row in whole.rows] == ["ok", "ok"]
    assert whole.lacking == 0


def test_time_to_spare_becomes_blocks(tmp_path, monkeypatch, once):
    monkeypatch.setattr(runner, "MOST_BLOCKS", 4)
    asked = small_plan((mini("prefill", n_prompt=16),), blocks=2)
    first = runner.sweep(asked, tmp_path / "j.jsonl", minutes=60)
    assert {row.block for row in first.rows if not row.anchor} == {-1, 0, 1, 2, 3}
    assert len({row.key for row in first.rows}) == len(first.rows)
    again = runner.sweep(asked, tmp_path / "j.jsonl", minutes=60)
    assert (again.measured, again.rows) == (0, first.rows)


def test_an_abort_costs_one_row_and_the_sweep_goes_on(tmp_path, once):
    bad = mini("prefill", n_prompt=512, n_seq=6, policy="packed")
    planned, path = small_plan((mini("prefill", n_prompt=16), bad), blocks=2), tmp_path / "j.jsonl"
    summary = runner.sweep(planned, path)
    assert [row.status for row in summary.rows if row.cell == bad] == ["abort", "abort"]
    assert all(row.status == "ok" for row in summary.rows if row.cell != bad)
    assert len(summary.failed) == 2
    assert runner.sweep(planned, path).measured == 0
    assert runner.sweep(planned, path, retry_failed=True).measured == 2
    with journal.Journal(path) as written:
        written.append(*(msgspec.structs.replace(row, valid=False) for row in summary.rows if row.block == 0))
    assert runner.sweep(planned, path).measured == 0
    assert runner.sweep(planned, path, retry_failed=True).measured == 4, "two aborts, a wrong row and a wrong anchor"


def test_a_file_that_is_replaced_during_its_sweep_leaves_no_row_of_what_took_its_place(tmp_path, monkeypatch):
    """As a user does who quantizes again during a night: the gate and the facts are those of the first file."""
    monkeypatch.setattr(paths, "MODELS", tmp_path / "models")
    path = Path(shutil.copy(synthetic.make(HYBRID, "mini", "F16"), tmp_path / "own.gguf"))
    other = synthetic.write(registry.spec(HYBRID, "mini"), "F32", tmp_path / "other.gguf")
    [own] = check.requested(str(path))
    timed = tuple(Prefill(model=own.spec.name, scale="file", dtype=own.dtype, n_prompt=n) for n in (16, 24, 32))
    planned, usual, done = replace(small_plan(timed, blocks=1), gates=(), anchor=None), process.work, []

    def replacing(job, *rest, **how):
        outcome = usual(job, *rest, **how)
        if isinstance(job.cell, Prefill):
            done.append(job.cell)
            if len(done) == 2:
                other.replace(path)
        return outcome

    monkeypatch.setattr(runner, "work", replacing)
    with pytest.raises(StudyError, match="was replaced while it was measured"):
        runner.sweep(planned, tmp_path / "j.jsonl")
    assert [row.cell for row in journal.latest_rows(journal.read(tmp_path / "j.jsonl"))] == done[:1]


def sweeping(planned, path):
    """A runner in a process of its own, which ends by being killed."""
    if not (pid := os.fork()):  # loading Python anew would take longer than a row
        with suppress(BaseException):
            runner.sweep(planned, path)
        os._exit(0)
    return pid


@pytest.mark.long
def test_nothing_is_lost_or_doubled_when_the_runner_is_killed_at_random_moments(tmp_path):
    runner.engine_facts()  # or most runners would be killed while they ask which engine this is
    path, moments, planned = tmp_path / "j.jsonl", random.Random(7), small_plan(small_plan().cells[1:3], blocks=2)
    seen: dict[str, Row] = {}
    killed = 0
    for number in range(KILLS):
        pid = sweeping(planned, path)
        end = time.monotonic() + (20 if number % 2 == 0 else 0)  # every other one gets as far as another row
        while time.monotonic() < end and journal.stored(path).count(b'"kind":"row"') <= len(seen):
            time.sleep(0.02)
        time.sleep(moments.uniform(0.0, LONGEST_S))
        os.kill(pid, signal.SIGKILL)
        killed += os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        rows = {row.key: row for row in journal.latest_rows(journal.read(path))}
        assert seen.items() <= rows.items(), "a finished row changed"
        seen = rows
        if number == KILLS // 2:
            journal.pack(path)
    assert seen
    assert killed > KILLS / 2
    summary = runner.sweep(planned, path)
    written = [record for record in journal.read(path) if isinstance(record, Row)]
    assert len(written) == len({row.key for row in written}) == len(summary.rows) == 1 + 2 * 3 + 1
    assert {row.key: row for row in summary.rows} | seen == {row.key: row for row in written}
    assert summary.measured == len(written) - len(seen)


def timed(rows, anchors, cells):
    """The same rows with made-up times by block, on a calm machine."""
    calm = Conditions(load_1min=0.0)
    return [
        msgspec.structs.replace(row, conditions=calm, samples_ns=[[(anchors if row.anchor else cells)[row.block]] * 4])
        if row.block >= 0
        else row
        for row in rows
    ]


def test_a_block_whose_anchor_and_cells_drift_is_marked_and_an_anchor_alone_marks_nothing(swept):
    drift = watch.drift_by_block(timed(swept[1].rows, {0: 100, 1: 100, 2: 100, 3: 130}, {0: 1000, 1: 1000, 2: 1250}))
    assert (drift[0], drift[1]) == (0, 0)
    assert drift[2] == pytest.approx(0.25)
    drift = watch.drift_by_block(timed(swept[1].rows, {0: 100, 1: 130, 2: 100, 3: 100}, {0: 1000, 1: 1010, 2: 990}))
    assert max(drift.values()) == pytest.approx(0.01)


def test_what_is_added_to_a_block_hours_later_is_compared_with_nothing_measured_before(swept):
    _, summary, _ = swept
    rows = [row for row in summary.rows if row.block >= 0 and not row.anchor]
    assert [row.block for row in frame.in_one_go(rows)] == [row.block for row in rows], "a call that goes on"
    late = rows[-1]
    started = datetime.fromisoformat(late.started) + timedelta(hours=3)
    moved = frame.in_one_go([*rows[:-1], msgspec.structs.replace(late, started=started.isoformat())])
    assert [row.block for row in moved[:-1]] == [row.block for row in rows[:-1]]
    assert moved[-1].block not in {row.block for row in rows}


def test_a_wall_clock_that_is_set_during_a_sweep_loses_no_row_and_tears_no_block_apart(tmp_path, monkeypatch, once):
    hours = iter(range(0, 10**6, 7))

    class Stepping(datetime):
        """A clock that is an hour ahead or behind, or right, every time somebody looks at it."""

        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(hours=next(hours) % 3 - 1)

    monkeypatch.setattr(runner, "datetime", Stepping)
    summary = runner.sweep(small_plan(), tmp_path / "j.jsonl")
    assert (summary.measured, summary.failed) == (1 + 3 * 5 + 1, [])
    assert [row.block for row in frame.in_one_go(summary.rows)] == [row.block for row in summary.rows]
    assert runner.sweep(small_plan(), tmp_path / "j.jsonl").measured == 0


def test_marked_blocks_are_measured_again_at_most_as_often_as_planned(tmp_path, monkeypatch, once):
    monkeypatch.setattr(runner, "DRIFT_LIMIT", -1.0)
    monkeypatch.setattr(watch, "disturbed", lambda rows: set())
    cells = (mini("prefill", n_prompt=16),)
    summary = runner.sweep(replace(small_plan(cells, blocks=2), extra_blocks=1), tmp_path / "j.jsonl")
    assert max(row.block for row in summary.rows if not row.anchor) == 2


def test_verdicts_need_the_gate(swept):
    path, summary, _ = swept
    table = frame.frame(summary.rows, frame.facts(journal.read(path)))
    by_model = table[~table["anchor"] & (table["workload"] == "prefill")].groupby("model")["verdict"].unique()
    assert list(by_model[HYBRID]) == ["valid"]
    assert list(by_model[ATTENTION]) == ["ungated"], "no gate was planned for it"


@pytest.mark.parametrize(
    ("how", "why"), [({"depth": 0}, "positive"), ({"n_gen": 0}, "positive"), ({"depth": 4000, "n_gen": 200}, "fit")]
)
def test_what_cannot_be_measured_is_said_before_anything_runs(how, why):
    with pytest.raises(StudyError, match=why):
        plan.check_cell(mini("decode", **how))


def test_a_gate_that_fails_is_said_before_anything_else_is_measured_and_fails_the_call(
    tmp_path, monkeypatch, capsys, once
):
    def wrong(job, *rest, **how):
        outcome = remembered(job, *rest, **how)
        if job.cell is None or job.cell.workload != "gate":
            return outcome
        checks = outcome.measured.checks | {"decode_error": 0.5, "decode_agrees": False}
        measured = msgspec.structs.replace(outcome.measured, checks=checks, valid=False)
        return msgspec.structs.replace(outcome, measured=measured)

    order, append = [], journal.Journal.append

    def kept(self, record):
        append(self, record)
        if isinstance(record, Row):
            order.append((record.cell.workload, "gate of plamo-2-1b in F16: wrong" in printed()))

    def printed():
        said.append(capsys.readouterr().err)
        return "".join(said)

    said = []
    monkeypatch.setattr(runner, "work", wrong)
    monkeypatch.setattr(journal.Journal, "append", kept)
    with shown("small") as line:
        summary = live.measure(small_plan(blocks=1), tmp_path / "j.jsonl", line)
    assert order[0] == ("gate", False)
    assert all(told for _, told in order[1:])
    assert "decode off by 0.5" in printed()
    assert [row.cell.workload for row in summary.unexpected] == ["gate"]
    timed = {row.cell.model for row in summary.rows if not row.anchor and row.cell.workload != "gate"}
    assert timed == {ATTENTION}, "nothing is timed with the file, and the others are measured"
    assert (summary.left_out, summary.lacking) == ((), 0)
    with shown("small") as line:
        again = live.measure(small_plan(blocks=1), tmp_path / "j.jsonl", line)
    assert again.measured == 0
    assert "decode off by 0.5" in printed()[-2000:], "it is said by every call"
    within = runner.sweep(small_plan(blocks=1), tmp_path / "j.jsonl", minutes=60)
    assert (within.measured, within.lacking, within.left_out) == (0, 0, ())
