"""Chapter 3: everyone's answer is their own, a crash takes one replica, memory is counted where it is, none is left.

Real processes, really killed.
"""

import os
import random
import time
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import built
import foreign_models
import psutil
import pytest
from conftest import ATTENTION, HYBRID, mini
from test_disaggregation import child_of
from test_runner import sweeping
from test_watch import made_up

from llama_meter import journal
from llama_meter.cells import Replicas
from llama_meter.measure import files, machine, peers, runner, watch
from llama_meter.measure.plan import Plan
from llama_meter.measure.request import sweep
from llama_meter.models import given, recipes
from llama_meter.rows import Conditions, Evidence, Row
from plamo_study.studies.batch_scaling import plan

WORKLOAD = plan.replicas("mini").workload
PROMPT, STEPS = 16, 12
KILLS, ROWS = 3, 6
LONGEST_S, PATIENCE_S = 0.8, 10.0


def replicas(n_processes, n_seq, model=HYBRID, **fields):
    usual = {"scale": "mini", "dtype": "F16", "n_prompt": PROMPT, "n_gen": STEPS, "n_threads": 2}
    return Replicas(model=model, n_processes=n_processes, n_seq=n_seq, **usual | fields)


def run(cell):
    return built.measured(cell, workload=WORKLOAD, right=False)


def arrangements(planned):
    return {(cell.n_processes, cell.n_seq) for cell in planned.cells if isinstance(cell, Replicas)}


def test_a_file_is_loaded_no_more_often_than_fits_into_memory(tmp_path, monkeypatch):
    varied = sweep(files=str(foreign_models.write(tmp_path / "a.gguf")), n_seq="4")
    monkeypatch.setattr(machine, "memory_bytes", lambda: 3 * given.FILES[varied.files[0]].n_bytes)
    planned = plan.replicas("mini", sweep=varied)
    assert {cell.files for cell in planned.cells if cell.files} == {varied.files}
    assert arrangements(planned) == {(1, 4), (2, 2)}


def test_every_sequence_gets_the_answer_that_it_gets_alone():
    measured = run(replicas(2, 2, ATTENTION))
    assert measured.valid, measured.checks
    assert len(measured.series["error"]) == len(measured.requests) == 4
    assert measured.n_evaluated == 4 * (PROMPT + STEPS)
    for request in measured.requests:
        assert len(request.token_ns) == STEPS + 1
        assert all(before < after for before, after in pairwise([0, *request.token_ns]))
    ends = [first + sum(steps) for first, steps in zip(measured.prefill_ns, measured.samples_ns, strict=True)]
    assert max(ends) == max(request.token_ns[-1] for request in measured.requests)


def test_prompts_that_share_a_call_are_mixed_up_in_one_process():
    together = run(replicas(1, 2, policy="packed"))
    assert together.valid is False
    assert together.checks["second_path_error"] > 0.05


@pytest.mark.long
def test_a_killed_replica_takes_its_own_requests_and_no_others():
    steps = 20 * STEPS
    measured = run(replicas(2, 2, killed=1, n_gen=steps))
    assert measured.valid, measured.checks
    kept, lost = measured.requests[:2], measured.requests[2:]
    assert [len(request.token_ns) for request in kept] == [steps + 1] * 2
    assert not any(request.failure for request in kept)
    assert all("killed" in request.failure and (steps + 1) // 2 < len(request.token_ns) <= steps for request in lost)
    assert measured.checks["finished"] == 2


@pytest.mark.long
@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="only Linux counts shares of pages")
def test_mapped_weights_are_in_memory_once_private_and_repacked_ones_once_a_process():
    files.make_models(replace(plan.replicas("mini"), gates=()))
    mapped, private, repacked = (
        run(replicas(2, 1, **kind)) for kind in ({}, {"use_mmap": False}, {"dtype": plan.REPACKED})
    )
    size = recipes.model_path(*replicas(2, 1).files[0]).stat().st_size
    assert 0 < sum(mapped.series["mapped"]) <= 1.05 * size  # less where another test has mapped the file as well
    assert mapped.checks["own_bytes"] == 0
    assert sum(private.series["mapped"]) == 0
    assert private.checks["own_bytes"] == pytest.approx(size, rel=0.05)
    assert sum(repacked.series["mapped"]) > 0
    assert repacked.checks["own_bytes"] > 0


def test_replicas_are_no_others_to_one_another():
    usual = {"cpus": 2, "waited_ns": 3, "involuntary": 1}
    watch._parts.clear()
    watch.take_over(
        [
            Evidence(wall_ns=100, cpu_ns=90, others_ns=100, **usual),
            Evidence(wall_ns=110, cpu_ns=100, others_ns=95, **usual),
        ]
    )
    (apart,) = watch._parts
    watch._parts.clear()
    assert (apart.cpu_ns, apart.others_ns, apart.waited_ns, apart.involuntary) == (190, 5, 6, 2)


def test_an_arrangement_is_judged_by_what_others_took_and_not_by_its_own_waiting():
    def marked(cell, **fields):
        found = Evidence(cpus=2, wall_ns=10**9, **{"others_ns": 0, "waited_ns": 0} | fields)
        row = made_up(cell, Conditions(load_1min=0.0, timed=found, whole=found))
        return bool(watch.disturbed([row]))

    for arrangement in ((1, 4), (4, 1)):
        assert not marked(replicas(*arrangement), waited_ns=10**9)
        assert marked(replicas(*arrangement), others_ns=10**9)
    assert marked(mini("decode", n_gen=4), waited_ns=10**9)


# ------------------------------------------------------------------ kill -9


SMALL = Plan("replicas", "mini", (replicas(2, 1, n_gen=200),), (), None, ROWS, 0, 60.0, workload=WORKLOAD)


@pytest.mark.whole
def test_no_row_is_lost_or_doubled_and_no_process_left_when_replicas_and_runners_are_killed(tmp_path):
    path, moments, killed = tmp_path / "j.jsonl", random.Random(7), 0
    seen: dict[str, Row] = {}
    for _ in range(KILLS):
        runs = psutil.Process(sweeping(SMALL, path))
        child_of(runs, peers.__name__)
        time.sleep(moments.uniform(0.0, LONGEST_S))
        with suppress(psutil.NoSuchProcess):  # it just ended
            if victim := child_of(runs, peers.__name__):
                victim.kill()
                killed += 1
        time.sleep(moments.uniform(0.0, LONGEST_S / 2))
        family = runs.children(recursive=True)
        runs.kill()
        os.waitpid(runs.pid, 0)
        assert not psutil.wait_procs(family, timeout=PATIENCE_S)[1], "a process outlived its runner"
        rows = {row.key: row for row in journal.latest_rows(journal.read(path))}
        assert seen.items() <= rows.items(), "a finished row changed"
        seen = rows
    summary = runner.sweep(SMALL, path)
    written = [record for record in journal.read(path) if isinstance(record, Row)]
    assert len(written) == len({row.key for row in written}) == len(summary.rows) == ROWS
    assert {row.key: row for row in summary.rows} == {row.key: row for row in written}
    assert killed
    for row in written:
        assert row.status == "ok" or "replica" in row.failure.message, row.failure
