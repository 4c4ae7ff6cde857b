"""Notebook 06: every token is evaluated once, everyone's answer is their own, and waits come from the right calls."""

import pandas as pd
import pytest
from conftest import ATTENTION, HYBRID, mini_file

from plamo_study.measure import cells
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
    times = [1.0] * STEPS + [10.0, 1.0, 10.0, 2.0, 10.0, 1.0] + [5.0] * STEPS
    assert analysis._during(arrival(way="apart"), times) == ([11.0, 12.0, 11.0], 33.0)
    assert analysis.full_calls(arrival(way="apart"), times) == [10.0] * 3
    times = [1.0] * STEPS + [30.0] + [5.0] * STEPS
    assert analysis._during(arrival(way="whole", n_chunk=0), times) == ([35.0], 30.0)


def test_a_prompt_that_nobody_decodes_beside_is_chunks_alone():
    cell = arrival(way="apart", n_seq=0, depth=0, n_chunk=40)
    assert workload.calls(cell) == (((0, 40),), ((0, 40),), ((0, 16),), *[((0, 1),)] * STEPS)
    measured = run(cell)
    assert measured.valid, measured.checks
    assert analysis.full_calls(cell, [1.0, 2.0, 3.0, 4.0, 5.0]) == [1.0, 2.0]
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

    asked = workload.calls(cell)
    row = cells.columns(cell) | {"status": "ok", "verdict": "valid", "anchor": False, "drift": 0.0, "text": ""}
    row |= {"samples_ns": [[round(seconds(call) * 1e9) for call in asked]], "machine": "m", "build": "b", "engine": "e"}
    row["series"] = {"of call": [cell.n_gen] * micro_batches, "micro-batch": [8.0] * micro_batches}
    return [row | {"block": block} for block in range(6)]


def test_the_budget_takes_the_largest_chunk_that_is_predicted_to_keep_it():
    rows = made_up(arrival(way="whole", n_chunk=0))
    for n in (16, 32, 48):
        rows += made_up(arrival(way="apart", n_chunk=n)) + made_up(arrival(way="apart", n_chunk=n, n_seq=0, depth=0))
    found = analysis.within_budget(pd.DataFrame(rows), (0.5, 0.35, 0.1))
    assert found["n_chunk"].tolist() == [32, 32, 0]
    assert found["kept"].tolist()[:2] == ["yes", "yes"]
    assert found["promised"].iloc[0] == pytest.approx(0.034)
    assert found["largest"].iloc[0].value == pytest.approx(0.034)


def test_a_budget_that_the_measured_wait_breaks_is_called_broken():
    rows = made_up(arrival(way="whole", n_chunk=0)) + made_up(arrival(way="apart", n_chunk=16))
    rows += made_up(arrival(way="apart", n_chunk=32), step=60e-3)
    rows += made_up(arrival(way="apart", n_chunk=16, n_seq=0, depth=0), chunk=lambda n: 1e-3)
    found = analysis.within_budget(pd.DataFrame(rows), (0.1,))
    assert found["kept"].tolist() == ["no"]


def test_calls_are_predicted_from_micro_batches_alone():
    rows = made_up(arrival()) + made_up(arrival(n_seq=0, depth=0, way="apart", n_chunk=31), chunk=lambda n: 40e-3)
    rows += made_up(arrival(way="apart")) + made_up(arrival(n_seq=0, depth=0, way="apart"), chunk=lambda n: 16e-3)
    step = {"workload": "decode", "n_seq": DECODING + 1, "samples_ns": [[4_000_000] * 6]}
    rows += [row | step for row in made_up(arrival())]
    found = analysis.predicted(pd.DataFrame(rows)).set_index("way")
    assert found["formed"].to_dict() == {"together": 2, "apart": 1}
    assert found.loc["together", "promised"].value == pytest.approx(0.044)
    assert found.loc["apart", "promised"].value == pytest.approx(0.016)
    assert found.loc["apart", "ratio"].value == pytest.approx(2.0)


def test_a_chunk_a_token_short_of_a_tile_is_held_against_a_whole_one():
    alone = {"n_seq": 0, "depth": 0, "way": "apart", "n_arriving": 256}
    rows = made_up(arrival(n_chunk=63, **alone), chunk=lambda n: 90e-3) + made_up(arrival(n_chunk=64, **alone))
    (found,) = analysis.across_the_tile(pd.DataFrame(rows)).to_dict("records")
    assert found["ratio"].value == pytest.approx(90 / 64)


def test_a_build_is_held_against_stock_by_the_size_of_chunks():
    alone = {"n_seq": 0, "depth": 0, "way": "apart", "n_chunk": 32}
    off = made_up(arrival(flash_attn="off", **alone), chunk=lambda n: 20e-3)
    stock, other = made_up(arrival(**alone), chunk=lambda n: 60e-3), made_up(arrival(**alone), chunk=lambda n: 15e-3)
    rows = [row | {"build": "stock"} for row in stock + off] + [row | {"build": "partial-tiles"} for row in other]
    found = analysis.by_size(pd.DataFrame(rows)).set_index("how")["ratio"]
    assert found["stock"] is None
    assert found["stock, no flash attention"].value == pytest.approx(3)
    assert found["partial-tiles"].value == pytest.approx(4)


def test_longer_neighbours_are_held_against_shorter_ones():
    rows = made_up(arrival()) + made_up(arrival(depth=64), step=18e-3) + made_up(arrival(n_seq=1))
    (found,) = analysis.neighbours(pd.DataFrame(rows)).to_dict("records")
    assert (found["short"], found["long"]) == (16, 64)
    assert found["ratio"].value == pytest.approx(50 / 34)


def test_the_same_work_both_ways_gains_nothing_where_a_call_costs_its_parts():
    rows = made_up(arrival(way="whole", n_chunk=0)) + made_up(arrival(way="apart")) + made_up(arrival(), step=1e-3)
    found = analysis.equal_work(pd.DataFrame(rows)).set_index("way")["gain"]
    assert found["apart"].value == pytest.approx(1.0)
    assert found["together"].value > 1
