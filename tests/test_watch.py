"""The watch: what is counted around a worker, what marks a row, and how starved workers differ from hanging ones."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import msgspec
import pytest
from conftest import mini, mini_file
from test_runner import remembered, small_plan

from llama_meter import journal, paths
from llama_meter.engine import kernels
from llama_meter.measure import machine, process, runner, watch
from llama_meter.measure.process import work
from llama_meter.measure.worker import Job
from llama_meter.rows import Conditions, Evidence, Row, State
from plamo_study.read import frame
from plamo_study.read.recording import recorded as recorded_rows
from plamo_study.show import evidence

SECOND = 10**9
LIMIT_S = 2.0  # beyond the CPU time in which a worker only imports, on slow machines too


@pytest.fixture
def busy_core():
    """One core, for this test and its workers, and a process that never leaves it: the other core is not touched."""
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system does not pin processes")
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield
    spinning.kill()
    spinning.wait()
    os.sched_setaffinity(0, allowed)


def run(cell, path=None, limit_s=60.0):
    return work(Job(cell=cell, path=str(path or mini_file(cell.model))), limit_s)


def made_up(cell, conditions, status="ok", key="k"):
    where = {"study": "s", "replicate": 0, "block": 0, "order": 0, "engine": "e", "machine": "m"}
    ended = {"status": status, "started": "now", "elapsed_ns": 1, "pid": 1, "conditions": conditions}
    return Row(schema=1, key=key, cell=cell, **where, **ended)


def row_of(outcome, cell):
    conditions = Conditions(load_1min=0.0, timed=outcome.measured.evidence, whole=outcome.evidence)
    return made_up(cell, conditions, outcome.status)


# ---------------------------------------------------------------- what is counted


def test_a_worker_s_evidence_is_its_own_and_holds_every_repetition():
    for cell in (mini("decode", n_gen=64), mini("prefill", n_prompt=64, repetitions=3)):
        outcome = run(cell)
        timed, whole = outcome.measured.evidence, outcome.evidence
        assert sum(map(sum, outcome.measured.samples_ns)) <= timed.wall_ns < whole.wall_ns
        assert 0 < timed.cpu_ns < whole.cpu_ns
        assert timed.cpus == os.cpu_count()
        assert whole.others_ns >= 0
        assert machine.MACOS or timed.waited_ns >= 0


# ---------------------------------------------------------------- what a worker meets


@pytest.mark.long
def test_a_worker_beside_a_busy_process_is_marked_and_one_past_its_limit_gets_more_time(busy_core, monkeypatch):
    cell = mini("decode", n_gen=256)
    row = row_of(run(cell), cell)
    assert watch.waited(row.conditions) > 0.1
    assert watch.disturbed([row]) == {"k"}
    monkeypatch.setattr(process, "MOST_LIMITS", 2)
    outcome = run(mini("decode", n_gen=30_000, n_threads=2), limit_s=LIMIT_S)
    assert (outcome.status, outcome.failure.signal) == ("starved", "")
    assert "other programs" in outcome.failure.message
    assert outcome.elapsed_ns > 1.9 * LIMIT_S * SECOND


# ---------------------------------------------------------------- what marks a row


def judged(cell, before=None, after=None, status="ok", **counted):
    """What marks a row of a second on a machine in this state, with these counts of its timed part."""
    found = Evidence(cpus=4, **{"wall_ns": SECOND, "others_ns": 0, "waited_ns": 0} | counted)
    conditions = Conditions(before=before, timed=found, whole=found, **msgspec.structs.asdict(after or State()))
    return watch.causes([made_up(cell, conditions, status)]).get("k", "")


TIMED, TWO = mini("decode", n_gen=4), mini("decode", n_gen=4, n_threads=2)
OFFLOADED = mini("decode", n_gen=4, n_gpu_layers=-1)
HALF, PART = SECOND // 2, SECOND // 100


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"power_source": "battery"}, watch.BATTERY),
        ({"power_mode": "low"}, watch.LOW_POWER),
        ({"thermal": "heavy"}, watch.HEAT),
        ({"memory_pressure": "critical"}, watch.MEMORY),
    ],
)
def test_a_row_is_marked_by_the_state_before_it_as_by_the_state_after_it(change, why):
    other = State(**change)
    for cell in (TIMED, OFFLOADED):
        assert judged(cell, before=other) == judged(cell, after=other) == why
    assert judged(mini("gate"), before=other, after=other) == ""


@pytest.mark.case(6)
@pytest.mark.parametrize(
    ("cell", "counted", "why"),
    [
        (TIMED, {"others_ns": SECOND}, watch.OTHERS),
        (TIMED, {"waited_ns": HALF}, watch.WAITED),
        (TIMED, {"hot": 1}, watch.HEAT),
        (TIMED, {"stops": 1}, watch.STOPPED),
        (mini("gate"), {"others_ns": 2 * SECOND, "waited_ns": SECOND, "throttled_ns": SECOND}, ""),
        (TWO, {"throttled_ns": HALF, "waited_ns": SECOND, "cpu_ns": 2 * SECOND}, watch.QUOTA),
        (TWO, {"throttled_ns": PART, "cpu_ns": 2 * SECOND}, ""),
        # two threads that got one CPU: from a limit that this system does not show, or from other programs
        (TWO, {"cpu_ns": SECOND}, watch.STARVED),
        (mini("decode", n_gen=4, n_threads=2, n_gpu_layers=-1), {"cpu_ns": SECOND}, ""),  # they wait for the GPU
    ],
)
def test_a_row_is_marked_by_what_slowed_it_where_its_result_is_a_time(cell, counted, why):
    assert judged(cell, **counted) == why
    assert why != watch.QUOTA or judged(cell, status="starved", **counted) == why


def test_no_recorded_row_is_marked_by_a_rule_that_came_after_it():
    marks = {}
    for path in (path for place in ("others", "reference") for path in journal.journals(paths.MEASURED / place)):
        marks |= watch.causes([row for row in journal.latest_rows(journal.read(path)) if isinstance(row, Row)])
    assert set(marks.values()) == {watch.OTHERS, watch.WAITED, watch.LOAD}


def test_a_short_timed_part_is_judged_by_the_whole_worker_and_an_old_row_by_the_load_before_it():
    short = Evidence(wall_ns=SECOND // 50, cpus=2, others_ns=SECOND // 50, waited_ns=0)
    calm, crowded = (Evidence(wall_ns=SECOND, cpus=2, others_ns=ns) for ns in (0, SECOND))
    for whole in (calm, crowded):
        row = made_up(mini("prefill"), Conditions(load_1min=0.0, timed=short, whole=whole))
        assert bool(watch.disturbed([row])) == (whole is crowded)
    two = mini("decode", n_gen=4, n_threads=2)
    rows = [made_up(two, Conditions(load_1min=load), key=str(load)) for load in (2.2, 4)]
    assert watch.disturbed(rows) == {"4"}


# ---------------------------------------------------------------- what is measured again


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """A sweep of a small plan on a calm machine where the first `times` processes of its first cell find a crowd."""
    crowd, calm = (Evidence(wall_ns=SECOND, cpus=2, others_ns=ns, waited_ns=ns) for ns in (SECOND, 0))
    cells = (mini("prefill", n_prompt=16), mini("prefill", n_prompt=24))

    def swept(times, blocks, extra_blocks=0, again=0, **changes):
        left = [times]

        def made(job, *rest, **how):
            outcome, hit = remembered(job, *rest, **how), job.cell == cells[0] and left[0] > 0
            left[0] -= hit
            found = crowd if hit else calm
            outcome = msgspec.structs.replace(outcome, evidence=found, **changes if hit else {})
            return msgspec.structs.replace(outcome, measured=msgspec.structs.replace(outcome.measured, evidence=found))

        monkeypatch.setattr(watch, "calm", lambda: True)
        monkeypatch.setattr(runner, "work", made)
        path = tmp_path / f"{times}.jsonl"
        planned = replace(small_plan(cells, blocks=blocks), extra_blocks=extra_blocks)
        summary = runner.sweep(planned, path)
        assert runner.sweep(planned, path).measured == again
        table = frame.frame(summary.rows, frame.facts(journal.read(path)))
        return summary, [row for row in summary.rows if row.cell == cells[0]], table

    return swept


def test_a_disturbed_row_is_measured_again_in_its_block_within_the_plan_s_budget(sweep):
    summary, rows, table = sweep(1, blocks=2, extra_blocks=1)
    assert [(row.block, row.replicate) for row in rows] == [(0, 0), (0, 1000), (1, 1)]
    assert watch.disturbed(summary.rows) == {rows[0].key}
    assert len({row.key for row in summary.rows}) == len(summary.rows)
    assert table["disturbed"].sum() == 1
    assert len(sweep(20, blocks=3, extra_blocks=1, again=2)[1]) == 3 + 2, "a block's worth is two cells"


def test_a_starved_cell_is_measured_again_and_is_a_failure_after_three_attempts(sweep):
    summary, rows, table = sweep(1, blocks=1, status="starved")
    assert [row.status for row in rows] == ["starved", "ok"]
    assert summary.failed == []
    assert list(table[table["status"] == "starved"]["verdict"]) == ["starved"]
    assert [row.status for row in sweep(20, blocks=1, status="starved")[0].failed] == ["starved"] * 3


def test_a_page_on_a_disturbed_recording_says_first_what_marked_most_rows_and_how_much_those_met():
    recorded = recorded_rows("01-phase-asymmetry", "shape")
    rows, first = recorded.rows, recorded.rows["block"] == 0
    crowded = replace(recorded, rows=rows.assign(disturbed=True, disturbed_by="others", others=0.47))
    assert evidence.of_rows(crowded).data.startswith("**Disturbed: other programs took 47% of the machine")
    assert "Disturbed" not in evidence.of_rows(recorded).data
    assert evidence.disturbed(rows.assign(disturbed=first)) == "", "a few disturbed rows are left out in silence"


# ---------------------------------------------------------------- what is said of it


def test_what_runs_in_parallel_takes_no_less_than_each_of_its_parts():
    """The clock starts before the first thread is let go: a thread that woke late once gave 1,005 GB/s."""
    waits = [partial(time.sleep, 0.002)] * 4
    assert min(kernels._in_parallel(waits) for _ in range(50)) >= 2 * 10**6
