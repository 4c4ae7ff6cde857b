"""Chapter 3: everyone's answer is their own, and memory is counted where it is. In real processes."""

import os
from dataclasses import replace
from itertools import pairwise

import built
import pytest
from conftest import ATTENTION, HYBRID, mini
from test_watch import made_up

from llama_meter.cells import Replicas
from llama_meter.measure import files, watch
from llama_meter.models import recipes
from llama_meter.rows import Conditions, Evidence
from plamo_study.studies.batch_scaling import plan

WORKLOAD = plan.replicas("mini").workload
PROMPT, STEPS = 16, 12


def replicas(n_processes, n_seq, model=HYBRID, **fields):
    usual = {"scale": "mini", "dtype": "F16", "n_prompt": PROMPT, "n_gen": STEPS, "n_threads": 2}
    return Replicas(model=model, n_processes=n_processes, n_seq=n_seq, **usual | fields)


def run(cell):
    return built.measured(cell, workload=WORKLOAD, right=False)


def test_every_sequence_gets_the_answer_that_it_gets_alone():
    measured = run(replicas(2, 2, ATTENTION))
    assert measured.valid, measured.checks
    assert len(measured.requests) == 4
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


def test_an_arrangement_is_judged_by_what_others_took_and_not_by_its_own_waiting():
    def marked(cell, **fields):
        found = Evidence(cpus=2, wall_ns=10**9, **{"others_ns": 0, "waited_ns": 0} | fields)
        row = made_up(cell, Conditions(load_1min=0.0, timed=found, whole=found))
        return bool(watch.disturbed([row]))

    for arrangement in ((1, 4), (4, 1)):
        assert not marked(replicas(*arrangement), waited_ns=10**9)
        assert marked(replicas(*arrangement), others_ns=10**9)
    assert marked(mini("decode", n_gen=4), waited_ns=10**9)
