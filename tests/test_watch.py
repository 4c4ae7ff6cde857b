"""The watch: what is counted around a worker, what marks a row, and how starved workers differ from hanging ones."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace

import msgspec
import psutil
import pytest
from conftest import ATTENTION, HYBRID, mini, mini_file
from crosscheck import planted as crosscheck_watch
from test_runner import small_plan

from plamo_study.measure import bench, disturbances, frame, journal, machine, process, runner, watch
from plamo_study.measure.cells import Idle
from plamo_study.measure.process import work
from plamo_study.measure.rows import Conditions, Evidence, Row
from plamo_study.measure.worker import Job
from plamo_study.models import registry, synthetic
from plamo_study.present import evidence
from plamo_study.studies import collect

SPIN = "while True: pass"
SECOND = 10**9
LIMIT_S = 3.0  # beyond the CPU time in which a worker only imports, on slow machines too


@pytest.fixture
def busy_core():
    """One core, for this test and its workers, and a process that never leaves it: the other core is not touched."""
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system does not pin processes")
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    spinning = subprocess.Popen([sys.executable, "-c", SPIN])
    yield
    spinning.kill()
    spinning.wait()
    os.sched_setaffinity(0, allowed)


def run(cell, path=None, limit_s=60.0):
    return work(Job(cell=cell, path=str(path or mini_file(cell.model))), limit_s)


def row_of(outcome, cell):
    conditions = Conditions(load_1min=0.0, timed=outcome.measured.evidence, whole=outcome.evidence)
    return made_up(cell, conditions, outcome.status)


def made_up(cell, conditions, status="ok", key="k"):
    return Row(
        schema=1, key=key, study="s", cell=cell, replicate=0, block=0, order=0, engine="e", machine="m", status=status,
        started="now", elapsed_ns=1, pid=1, conditions=conditions,
    )  # fmt: skip


def is_disturbed(cell, **fields):
    return bool(cause(cell, **fields))


def cause(cell, conditions=None, **fields):
    """What marks a row of such evidence, under such conditions; "" for nothing."""
    found = Evidence(cpus=2, **{"wall_ns": SECOND, "others_ns": 0, "waited_ns": 0} | fields)
    told = Conditions(load_1min=0.0, timed=found, whole=found, **conditions or {})
    return watch.causes([made_up(cell, told)]).get("k", "")


def test_a_worker_s_evidence_is_its_own():
    outcome = run(mini("decode", n_gen=64))
    timed, whole = outcome.measured.evidence, outcome.evidence
    assert sum(outcome.measured.samples_ns[0]) <= timed.wall_ns < whole.wall_ns
    assert 0 < timed.cpu_ns < whole.cpu_ns
    assert timed.cpus == os.cpu_count()
    assert whole.others_ns >= 0
    if not machine.MACOS:
        assert timed.waited_ns >= 0


def of_living_threads(pid):
    return sum(ran for ran, _ in (machine.threads(pid) or {}).values())


def test_what_a_helper_s_threads_ran_is_its_own_after_they_are_gone():
    """A thread that works for a fifth of a second and ends, over and over, as a server's do that answers requests."""
    told = (
        "import hashlib, sys, threading\n"
        "def work():\n    for _ in range(60): hashlib.sha256(bytes(1 << 20)).digest()\n"
        "for _ in sys.stdin:\n"
        "    thread = threading.Thread(target=work); thread.start(); thread.join(); print(flush=True)\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", told], **pipes) as helper:
        before, began = watch._of_helpers([helper.pid])[0], of_living_threads(helper.pid)
        for _ in range(3):
            print(file=helper.stdin, flush=True)
            helper.stdout.readline()
        ran = watch._of_helpers([helper.pid])[0] - before
        living = of_living_threads(helper.pid) - began
        helper.stdin.close()
    assert ran >= 3 * 10_000_000
    assert living < ran / 2 or sys.platform == "darwin"  # the sum over living threads would call the rest others'


def test_every_repetition_and_no_warm_up_is_in_the_timed_part():
    once, thrice = (run(mini("prefill", n_prompt=64, repetitions=n)).measured for n in (1, 3))
    for measured in (once, thrice):
        assert sum(sum(sample) for sample in measured.samples_ns) <= measured.evidence.wall_ns
    assert thrice.evidence.voluntary >= 0


def test_a_worker_beside_a_busy_process_is_marked(busy_core):
    cell = mini("decode", n_gen=256)
    row = row_of(run(cell), cell)
    assert watch.waited(row.conditions) > 0.1
    assert watch.disturbed([row]) == {"k"}


def test_a_worker_kept_from_computing_is_starved_and_gets_more_time_than_its_limit(busy_core, monkeypatch):
    monkeypatch.setattr(process, "MOST_LIMITS", 2)
    outcome = run(mini("decode", n_gen=30_000, n_threads=2), limit_s=LIMIT_S)
    assert (outcome.status, outcome.failure.signal) == ("starved", "")
    assert "other programs" in outcome.failure.message
    assert outcome.elapsed_ns > 1.9 * LIMIT_S * SECOND


def test_a_hang_beside_a_busy_process_is_a_hang(busy_core, tmp_path, monkeypatch):
    monkeypatch.setattr(process, "MOST_LIMITS", 20)  # tests run on this core as well
    path = synthetic.write(registry.spec(HYBRID, "mini"), "F16", tmp_path / "array.gguf", head_count_array=True)
    outcome = run(mini("prefill"), path, limit_s=LIMIT_S)
    assert (outcome.status, outcome.failure.stage) == ("hang", "prefill")


def workers():
    """Processes started from here that became workers."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            found += [child] if "plamo_study.measure.worker" in child.cmdline() else []
    return set(found)


@contextmanager
def while_it_runs(do):
    """Do this to each worker of the block from a thread, as soon as there is one."""
    known, over = workers(), threading.Event()

    def look():
        while not over.wait(0.05):
            for worker in workers() - known:
                known.add(worker)
                with suppress(psutil.NoSuchProcess, ProcessLookupError):
                    do(worker, over)

    thread = threading.Thread(target=look)
    thread.start()
    yield
    over.set()
    thread.join()


def stop(process):
    process.send_signal(signal.SIGSTOP)
    while not machine.is_stopped(process.pid):
        time.sleep(0.01)


def stop_and_go_on(worker, over):
    while not over.wait(0.1):
        worker.suspend()
        over.wait(0.1)
        worker.resume()


def test_a_worker_that_was_stopped_for_a_moment_is_marked():
    cell = mini("decode", n_gen=1500)
    with while_it_runs(stop_and_go_on):
        outcome = run(cell)
    row = row_of(outcome, cell)
    assert row.status == "ok"
    assert row.conditions.timed.stops > 0
    assert watch.causes([row]) == {"k": watch.STOPPED}


def test_a_worker_that_is_stopped_longer_than_its_limit_does_not_hang():
    def once(worker, over):
        worker.suspend()
        over.wait(1.5 * LIMIT_S)
        worker.resume()

    cell = mini("decode", n_gen=64)
    with while_it_runs(once):
        outcome = run(cell, limit_s=LIMIT_S)
    assert outcome.status == "ok"
    assert outcome.evidence.held_ns > LIMIT_S * SECOND
    assert watch.causes([row_of(outcome, cell)]) == {"k": watch.STOPPED}


def test_a_worker_that_stays_stopped_is_given_up_and_is_no_hang(monkeypatch):
    monkeypatch.setattr(process, "MOST_LIMITS", 2)
    with while_it_runs(lambda worker, over: worker.suspend()):
        outcome = run(mini("decode", n_gen=64), limit_s=1.0)
    assert (outcome.status, outcome.failure.message) == ("starved", process.SILENT["stopped"])
    assert not psutil.pid_exists(outcome.pid)


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="this Python cannot ask of a child without waiting for its end")
def test_a_process_that_computes_for_a_worker_and_is_stopped_is_seen():
    with subprocess.Popen(["sleep", "60"]) as helper:
        with watch.timed(helper.pid):
            pass
        with watch.timed(helper.pid):
            stop(helper)
        helper.send_signal(signal.SIGCONT)
        with watch.timed(helper.pid):
            pass
        helper.kill()
    assert [part.stops for part in watch._parts[-3:]] == [0, 1, 0]


def test_a_look_that_comes_late_means_that_the_machine_stood_still():
    onlooker = watch.Onlooker(os.getpid())
    onlooker.looked_ns -= 70 * SECOND
    assert onlooker.held(5.0)
    assert onlooker.held_ns >= 70 * SECOND
    assert not onlooker.held(5.0)


def test_what_keeps_the_whole_machine_slow_marks_a_timed_row():
    timed, gate = mini("decode", n_gen=4), mini("gate")
    nothing = {"power_source": "ac", "power_mode": "automatic", "thermal": "nominal"}
    assert cause(timed, nothing) == ""
    assert cause(timed, {"power_source": "unknown", "power_mode": "powersave", "thermal": "unknown"}) == ""
    assert cause(timed, nothing | {"power_source": "battery"}) == watch.BATTERY
    assert cause(timed, nothing | {"power_mode": "low"}) == watch.LOW_POWER
    assert cause(timed, nothing | {"thermal": "moderate"}) == watch.HEAT
    assert cause(gate, nothing | {"thermal": "moderate"}) == ""


def test_a_busy_gpu_marks_what_left_it_alone_and_no_more():
    busy = {"gpu_used": 0.9}
    assert cause(mini("decode", n_gen=4), busy) == cause(Idle(seconds=1), busy) == watch.GPU
    assert cause(mini("decode", n_gen=4, n_gpu_layers=-1), busy) == ""
    assert cause(mini("decode", n_gen=4), {"gpu_used": 0.03}) == ""


def test_what_others_take_of_the_machine_marks_a_row():
    cell = mini("decode", n_gen=4)
    assert not is_disturbed(cell)
    assert not is_disturbed(cell, others_ns=SECOND // 50)
    assert is_disturbed(cell, others_ns=SECOND // 2)
    assert is_disturbed(cell, stolen_ns=SECOND // 2)
    assert is_disturbed(cell, waited_ns=SECOND // 2)


def test_an_offloaded_row_that_mostly_waits_for_its_gpu_is_not_marked():
    assert not is_disturbed(mini("decode", n_gen=4, n_gpu_layers=-1), cpu_ns=SECOND // 50, voluntary=40_000)


def test_results_that_are_no_times_are_never_disturbed():
    for workload in ("gate", "replay", "quality", "scan", "ranges"):
        assert not is_disturbed(mini(workload), others_ns=2 * SECOND, waited_ns=SECOND)


def test_where_nobody_counts_waiting_what_others_take_decides():
    cell = mini("decode", n_gen=4)
    assert not is_disturbed(cell, waited_ns=None)
    assert is_disturbed(cell, waited_ns=None, others_ns=SECOND // 2)


def test_a_short_timed_part_is_judged_by_the_whole_worker():
    short = Evidence(wall_ns=SECOND // 50, cpus=2, others_ns=SECOND // 50, waited_ns=0)
    calm, crowded = (Evidence(wall_ns=SECOND, cpus=2, others_ns=ns) for ns in (0, SECOND))
    cell = mini("prefill")
    assert not watch.disturbed([made_up(cell, Conditions(load_1min=0.0, timed=short, whole=calm))])
    assert watch.disturbed([made_up(cell, Conditions(load_1min=0.0, timed=short, whole=crowded))])


def test_rows_without_evidence_are_judged_by_the_load_before_them():
    rows = [
        made_up(mini("decode", n_gen=4, n_threads=2), Conditions(load_1min=load), key=str(load)) for load in (2.2, 4)
    ]
    assert watch.disturbed(rows) == {"4"}


def test_evidence_left_out_of_old_rows_decodes_and_new_evidence_comes_back(tmp_path):
    old = msgspec.json.encode(made_up(mini("prefill"), Conditions(load_1min=0.0)))
    assert b"timed" not in old
    assert b"whole" not in old
    found = Evidence(wall_ns=3, cpus=2, waited_ns=1)
    row = made_up(mini("prefill"), Conditions(load_1min=0.0, timed=found, whole=found))
    with journal.Journal(tmp_path / "j.jsonl") as opened:
        opened.append(row)
    assert journal.read(tmp_path / "j.jsonl") == [row]


CROWDED = Evidence(wall_ns=SECOND, cpus=2, others_ns=SECOND, waited_ns=SECOND)
CALM = Evidence(wall_ns=SECOND, cpus=2, others_ns=0, waited_ns=0)


def crowded_once(cells, evidence=CROWDED, **changes):
    """`work`, but the first process of each of these cells finds a crowded machine, and all others a calm one."""
    left = list(cells)

    def made(job, *rest, **how):
        outcome, hit = work(job, *rest, **how), job.cell in left
        if hit:
            left.remove(job.cell)
        found = evidence if hit else CALM
        outcome = msgspec.structs.replace(outcome, evidence=found, **changes if hit else {})
        return msgspec.structs.replace(outcome, measured=msgspec.structs.replace(outcome.measured, evidence=found))

    return made


@pytest.fixture
def calm(monkeypatch):
    monkeypatch.setattr(watch, "calm", lambda: True)


def test_a_disturbed_row_is_measured_again_in_its_block_and_never_twice(tmp_path, monkeypatch, calm):
    cells = (mini("prefill", n_prompt=16), mini("prefill", n_prompt=24))
    planned = replace(small_plan(cells, blocks=2), extra_blocks=1)
    monkeypatch.setattr(bench, "work", crowded_once([cells[0]]))
    first = runner.sweep(planned, tmp_path / "j.jsonl")
    rows = [row for row in first.rows if row.cell == cells[0]]
    assert [(row.block, row.replicate) for row in rows] == [(0, 0), (0, 1000), (1, 1)]
    assert watch.disturbed(first.rows) == {rows[0].key}
    assert len({row.key for row in first.rows}) == len(first.rows)
    assert runner.sweep(planned, tmp_path / "j.jsonl").measured == 0
    table = frame.frame(first.rows, frame.facts(journal.read(tmp_path / "j.jsonl")))
    assert table["disturbed"].sum() == 1


def test_repeats_end_with_the_plan_s_budget(tmp_path, monkeypatch, calm):
    cells = (mini("prefill", n_prompt=16),)
    planned = replace(small_plan(cells, blocks=3), extra_blocks=1)
    monkeypatch.setattr(bench, "work", crowded_once(cells * 20))
    rows = [row for row in runner.sweep(planned, tmp_path / "j.jsonl").rows if row.cell == cells[0]]
    assert len(rows) == 3 + 1


def test_a_starved_cell_is_measured_again_and_then_counts_as_no_failure(tmp_path, monkeypatch, calm):
    cells = (mini("prefill", n_prompt=16), mini("prefill", n_prompt=24))
    monkeypatch.setattr(bench, "work", crowded_once([cells[0]], status="starved"))
    summary = runner.sweep(small_plan(cells, blocks=1), tmp_path / "j.jsonl")
    assert [row.status for row in summary.rows if row.cell == cells[0]] == ["starved", "ok"]
    assert summary.failed == []
    table = frame.frame(summary.rows, frame.facts(journal.read(tmp_path / "j.jsonl")))
    assert list(table[table["status"] == "starved"]["verdict"]) == ["starved"]


def test_a_cell_that_starves_every_time_is_a_failure_after_three_attempts(tmp_path, monkeypatch, calm):
    cells = (mini("prefill", n_prompt=16),)
    monkeypatch.setattr(bench, "work", crowded_once(cells * 20, status="starved"))
    summary = runner.sweep(small_plan(cells, blocks=1), tmp_path / "j.jsonl")
    assert [row.status for row in summary.failed] == ["starved"] * 3


@pytest.fixture(scope="module")
def recorded():
    names = ("01-phase-asymmetry", "03-batch-scaling", "04-quantization", "05-context")
    return {name: collect.collect(name, "recorded", "shape") for name in names}


FINDINGS = {
    "01-phase-asymmetry": lambda known, own: evidence.verified(own),
    "03-batch-scaling": lambda known, own: evidence.verified(own),
    "04-quantization": lambda known, own: evidence.verified(own),
    "05-context": lambda known, own: evidence.verified(own),
}


@pytest.mark.parametrize("study", FINDINGS)
def test_a_finding_on_a_disturbed_recording_says_so_first_and_no_other_does(recorded, study):
    calm, rows = recorded[study], recorded[study].rows
    crowded = replace(calm, rows=rows.assign(disturbed=True, disturbed_by="others", others=0.47))
    said = FINDINGS[study](recorded, crowded).data
    assert said.startswith("**Disturbed: other programs took 47% of the machine while this was measured.**")
    assert "Disturbed" not in FINDINGS[study](recorded, calm).data


def test_the_sentence_names_what_marked_most_rows_and_how_much_those_met(recorded):
    rows = recorded["01-phase-asymmetry"].rows
    first = rows["block"] == 0
    drifted = rows.assign(disturbed=first, disturbed_by=first.map({True: "waited", False: ""}), others=0.004)
    drifted = drifted.assign(waited=first.map({True: 0.2, False: 0.0069}), drift=first.map({True: 0.0, False: 0.31}))
    assert "31%" in evidence.disturbed(drifted)
    waited = drifted.assign(disturbed=True, disturbed_by="waited").assign(waited=0.0069)
    waited.loc[~first, "waited"] = 0.25
    assert "0.25" in evidence.disturbed(waited)
    for cause in evidence.DISTURBED_BY:
        assert evidence.disturbed(rows.assign(disturbed=True, disturbed_by=cause, drift=0.2))


def test_a_few_disturbed_rows_are_left_out_in_silence(recorded):
    rows = recorded["01-phase-asymmetry"].rows
    few = rows.assign(disturbed=rows["block"] == 0)
    assert evidence.disturbed(few) == ""
    assert ATTENTION in few["model"].str.rstrip("*").unique()


@pytest.mark.timeout(600)
def test_a_load_runs_in_the_block_it_is_planted_in(monkeypatch, calm):
    monkeypatch.setattr(machine, "performance_cores", lambda: 1)
    (quiet, loaded) = sorted(crosscheck_watch.trial(4, sweeps=2).sweeps, key=lambda each: each.load)
    assert not quiet.load
    assert set(quiet.overlaps) == {0.0}
    assert (loaded.seed, loaded.block) in disturbances.blocks_of([loaded], marked=False)
