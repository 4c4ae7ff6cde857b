"""Notebook 06: every token is evaluated once, everyone's answer is their own, and waits come from the right calls."""

import numpy as np
import pandas as pd
import pytest
from conftest import ATTENTION, HYBRID, mini_file

from plamo_study.measure import cells
from plamo_study.measure.cells import Arrival
from plamo_study.measure.process import work
from plamo_study.measure.worker import Job
from plamo_study.studies.chunked import analysis, calls, measures, plan

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
    asked = calls.calls(cell)
    of_prompt = sum(dict(call).get(DECODING, 0) for call in asked)
    assert of_prompt == PROMPT + STEPS
    steps = sum(0 in dict(call) for call in asked)
    chunks = -(-PROMPT // n_chunk) if n_chunk else 0
    assert steps == 2 * STEPS + chunks
    assert calls.lengths(cell) == dict.fromkeys(range(DECODING), 16 + steps) | {DECODING: PROMPT + STEPS}


@pytest.mark.parametrize("model", [HYBRID, ATTENTION])
@pytest.mark.parametrize(("way", "n_chunk"), WAYS[:3])
def test_everyone_gets_the_answer_that_they_get_alone(model, way, n_chunk):
    measured = run(arrival(model, way=way, n_chunk=n_chunk))
    assert measured.valid, measured.checks
    assert len(measured.series["error"]) == DECODING + 1
    *decoding, prompt = measured.requests
    n_calls = len(calls.calls(arrival(way=way, n_chunk=n_chunk)))
    assert len(measured.samples_ns[0]) == n_calls
    assert [len(request.token_ns) for request in measured.requests] == [
        *[sum(0 in dict(call) for call in calls.calls(arrival(way=way, n_chunk=n_chunk)))] * DECODING, 1 + STEPS
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
    times = [1.0] * STEPS + [10.0, 1.0, 10.0, 2.0, 10.0, 1.0] + [5.0] * STEPS
    assert measures.during(arrival(way="apart"), times) == ([11.0, 12.0, 11.0], 33.0)
    assert measures.full_calls(arrival(way="apart"), times) == [10.0] * 3
    times = [1.0] * STEPS + [30.0] + [5.0] * STEPS
    assert measures.during(arrival(way="whole", n_chunk=0), times) == ([35.0], 30.0)


def test_a_prompt_that_nobody_decodes_beside_is_chunks_alone():
    cell = arrival(way="apart", n_seq=0, depth=0, n_chunk=40)
    assert calls.calls(cell) == (((0, 40),), ((0, 40),), ((0, 16),), *[((0, 1),)] * STEPS)
    measured = run(cell)
    assert measured.valid, measured.checks
    assert measures.full_calls(cell, [1.0, 2.0, 3.0, 4.0, 5.0]) == [1.0, 2.0]
    assert [request.id for request in measured.requests] == ["prompt"]


@pytest.mark.parametrize("scale", ["mini", "shape"])
def test_every_usual_cell_of_the_plan_has_its_parts_beside_it(scale):
    planned = plan.chunked(scale).cells
    usual = [c for c in planned if isinstance(c, Arrival) and c.n_arriving == plan.PROMPT and c.n_seq]
    steps = {(c.model, c.n_seq, c.flash_attn) for c in planned if c.workload == "decode"}
    chunks = {(c.model, c.n_chunk, c.flash_attn) for c in planned if isinstance(c, Arrival) and not c.n_seq}
    assert len(usual) > 20
    for cell in usual:
        fewer = cell.n_chunk - (cell.way == "together")
        assert (cell.model, fewer, cell.flash_attn) in chunks
        assert cell.way != "together" or (cell.model, cell.n_seq + 1, cell.flash_attn) in steps


def test_the_cells_that_no_page_can_do_without_come_first():
    planned = plan.chunked("mini")
    first = planned.cells[: planned.needed]
    assert {c.way for c in first if isinstance(c, Arrival) and c.n_seq} == {"whole", "apart", "together"}
    assert {c.n_chunk for c in first if isinstance(c, Arrival) and not c.n_seq} == {
        plan.USUAL_CHUNK - 1,
        plan.USUAL_CHUNK,
    }


# Made-up rows: a chunk takes a millisecond a token, a step two, a call both.


def made_up(cell, chunk=lambda n: n * 1e-3, step=2e-3, micro_batches=2):
    def seconds(call):
        n = dict(call).get(cell.n_seq, 0)
        return (chunk(n) if n else 0) + (step if cell.n_seq and 0 in dict(call) else 0)

    asked = calls.calls(cell)
    row = cells.columns(cell) | {"status": "ok", "verdict": "valid", "anchor": False, "drift": 0.0, "text": ""}
    row |= {"samples_ns": [[round(seconds(call) * 1e9) for call in asked]], "machine": "m", "build": "b", "engine": "e"}
    row["series"] = {"of call": [cell.n_gen] * micro_batches, "micro-batch": [8.0] * micro_batches}
    return [row | {"block": block} for block in range(6)]


def test_an_arrival_tells_its_waits_apart():
    row = made_up(arrival(way="apart"))[0]
    found = {metric: (unit, value, samples) for metric, unit, value, samples in measures.arrival(row)}
    assert set(found) == {"chunk", "step before", "token gap", "longest gap", "first token"}
    assert {unit for unit, _, _ in found.values()} == {"s"}
    assert found["step before"][1] == pytest.approx(2e-3)
    assert np.allclose(found["token gap"][2], [34e-3] * 3)
    assert found["longest gap"][1] == pytest.approx(34e-3)
    assert found["first token"][1] == pytest.approx(3 * 32e-3 + 2 * 2e-3)
    assert np.allclose(found["chunk"][2], [32e-3] * 3)


def test_where_nobody_decodes_only_chunks_are_told():
    row = made_up(arrival(way="apart", n_seq=0, depth=0, n_chunk=40))[0]
    assert [metric for metric, *_ in measures.arrival(row)] == ["chunk"]


def test_a_build_is_held_against_stock_by_the_size_of_chunks():
    alone = {"n_seq": 0, "depth": 0, "way": "apart", "n_chunk": 32}
    off = made_up(arrival(flash_attn="off", **alone), chunk=lambda n: 20e-3)
    stock, other = made_up(arrival(**alone), chunk=lambda n: 60e-3), made_up(arrival(**alone), chunk=lambda n: 15e-3)
    rows = [row | {"build": "stock"} for row in stock + off] + [row | {"build": "partial-tiles"} for row in other]
    found = analysis.by_size(pd.DataFrame(rows)).set_index("how")["ratio"]
    assert found["stock"] is None
    assert found["stock, no flash attention"].value == pytest.approx(3)
    assert found["partial-tiles"].value == pytest.approx(4)


def test_the_same_work_both_ways_gains_nothing_where_a_call_costs_its_parts():
    rows = made_up(arrival(way="whole", n_chunk=0)) + made_up(arrival(way="apart")) + made_up(arrival(), step=1e-3)
    found = analysis.equal_work(pd.DataFrame(rows)).set_index("way")["gain"]
    assert found["apart"].value == pytest.approx(1.0)
    assert found["together"].value > 1
