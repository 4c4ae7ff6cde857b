"""Notebook 06: every token is evaluated once, everyone's answer is their own, and waits come from the right calls."""

import pytest
from conftest import ATTENTION, HYBRID, mini_file

from plamo_study.measure.cells import Arrival
from plamo_study.measure.process import work
from plamo_study.measure.worker import Job
from plamo_study.studies.chunked import analysis, plan, workload

DECODING, STEPS, PROMPT = 3, 2, 96
WAYS = [("whole", 0), ("apart", 32), ("together", 32), ("together", 40)]


def arrival(model=HYBRID, **fields):
    usual = {"depth": 16, "n_gen": STEPS, "n_seq": DECODING, "n_arriving": PROMPT, "way": "together", "n_chunk": 32}
    return Arrival(model=model, scale="mini", dtype="F16", **usual | fields)


def run(cell):
    outcome = work(Job(cell=cell, path=str(mini_file(cell.model))), 100.0, worker="plamo_study.studies.chunked.worker")
    assert outcome.status == "ok", outcome.failure
    return outcome.measured


@pytest.mark.parametrize(("way", "n_chunk"), WAYS)
def test_every_token_is_evaluated_once_and_only_a_prompt_at_once_stops_the_others(way, n_chunk):
    cell = arrival(way=way, n_chunk=n_chunk)
    calls = workload.calls(cell)
    of_prompt = sum(dict(call).get(DECODING, 0) for call in calls)
    assert of_prompt == PROMPT + STEPS
    steps = sum(0 in dict(call) for call in calls)
    chunks = -(-PROMPT // n_chunk) if n_chunk else 0
    assert steps == 2 * STEPS + chunks
    assert workload.lengths(cell) == dict.fromkeys(range(DECODING), 16 + steps) | {DECODING: PROMPT + STEPS}


@pytest.mark.parametrize("model", [HYBRID, ATTENTION])
@pytest.mark.parametrize(("way", "n_chunk"), WAYS[:3])
def test_everyone_gets_the_answer_that_they_get_alone(model, way, n_chunk):
    measured = run(arrival(model, way=way, n_chunk=n_chunk))
    assert measured.valid, measured.checks
    assert len(measured.series["error"]) == DECODING + 1
    *decoding, prompt = measured.requests
    n_calls = len(workload.calls(arrival(way=way, n_chunk=n_chunk)))
    assert len(measured.samples_ns[0]) == n_calls
    assert [len(request.token_ns) for request in measured.requests] == [
        *[sum(0 in dict(call) for call in workload.calls(arrival(way=way, n_chunk=n_chunk)))] * DECODING, 1 + STEPS
    ]  # fmt: skip
    assert prompt.token_ns[0] > prompt.arrived_ns >= decoding[0].token_ns[STEPS - 1]


@pytest.mark.parametrize(
    ("model", "unified", "formed"), [(HYBRID, False, 2), (HYBRID, True, 2), (ATTENTION, False, 2), (ATTENTION, True, 1)]
)
def test_a_mixed_call_is_one_micro_batch_only_on_attention_with_one_buffer(model, unified, formed):
    measured = run(arrival(model, kv_unified=unified))
    pairs = zip(measured.series["micro-batch"], measured.series["of call"], strict=True)
    first = [size for size, call in pairs if call == STEPS]
    assert len(first) == formed
    assert sum(first) == DECODING + 32


def test_waits_are_gaps_between_tokens_and_the_first_token_ends_the_last_chunk():
    asked = workload.calls(cell := arrival(way="apart"))
    times = [1.0] * STEPS + [10.0, 1.0, 10.0, 2.0, 10.0, 1.0] + [5.0] * STEPS
    gaps, ttft, full = analysis._during(cell, asked, times)
    assert (gaps, ttft, full) == ([11.0, 12.0, 11.0], 33.0, [10.0] * 3)
    whole = arrival(way="whole", n_chunk=0)
    gaps, ttft, _ = analysis._during(whole, workload.calls(whole), [1.0] * STEPS + [30.0] + [5.0] * STEPS)
    assert (gaps, ttft) == ([35.0], 30.0)


def test_every_mixed_cell_of_the_plan_has_its_parts_beside_it():
    cells = plan.chunked("mini").cells
    mixed = [cell for cell in cells if isinstance(cell, Arrival) and cell.way == "together"]
    parts = {(cell.workload, cell.model, cell.shape[0]) for cell in cells if cell.workload == "decode"}
    prompts = {(cell.model, cell.n_prompt) for cell in cells if cell.workload == "prefill"}
    assert mixed
    assert all(("decode", cell.model, cell.n_seq + 1) in parts for cell in mixed)
    assert all((cell.model, cell.n_chunk) in prompts for cell in mixed)
