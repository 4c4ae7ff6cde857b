"""Chapter 7: every token is evaluated once, everyone's answer is their own, and waits come from the right calls."""

import pytest
from built import measured
from conftest import ATTENTION, HYBRID

from llama_meter import cells
from llama_meter.cells import Arrival
from llama_meter.errors import StudyError
from llama_meter.measure.asked import sweep
from plamo_study.read import metrics
from plamo_study.studies.latency import chunk_calls, chunked_plan as chunked

DECODING, STEPS, PROMPT = 3, 2, 96
WAYS = [("whole", 0), ("apart", 32), ("together", 32), ("together", 40)]
WORKLOAD = chunked.chunked("mini").workload


def arrival(model=HYBRID, **fields):
    usual = {"depth": 16, "n_gen": STEPS, "n_seq": DECODING, "n_arriving": PROMPT, "way": "together", "n_chunk": 32}
    return Arrival(model=model, scale="mini", dtype="F16", **usual | fields)


ALONE = arrival(way="apart", n_seq=0, depth=0, n_chunk=40)


def run(cell):
    return measured(cell, workload=WORKLOAD)


@pytest.mark.parametrize(("way", "n_chunk"), WAYS)
def test_every_token_is_evaluated_once_and_only_a_prompt_at_once_stops_the_others(way, n_chunk):
    cell = arrival(way=way, n_chunk=n_chunk)
    asked = chunk_calls.calls(cell)
    assert sum(dict(call).get(DECODING, 0) for call in asked) == PROMPT + STEPS
    steps = sum(0 in dict(call) for call in asked)
    assert steps == 2 * STEPS + (-(-PROMPT // n_chunk) if n_chunk else 0)
    assert chunk_calls.lengths(cell) == dict.fromkeys(range(DECODING), 16 + steps) | {DECODING: PROMPT + STEPS}


@pytest.mark.long
@pytest.mark.parametrize(
    ("cell", "formed"),
    [
        (arrival(way="apart"), 0),
        (arrival(ATTENTION, way="whole", n_chunk=0), 0),
        (arrival(kv_unified=True), 2),
        (arrival(ATTENTION), 2),
        (arrival(ATTENTION, kv_unified=True), 1),
    ],
    ids=["apart", "whole", "hybrid, one buffer", "attention", "attention, one buffer"],
)
def test_everyone_gets_their_own_answer_and_only_attention_with_one_buffer_forms_one_micro_batch(cell, formed):
    found, asked = run(cell), chunk_calls.calls(cell)
    assert len(found.series["error"]) == DECODING + 1
    assert len(found.samples_ns[0]) == len(asked)
    *decoding, prompt = found.requests
    steps = sum(0 in dict(call) for call in asked)
    assert [len(request.token_ns) for request in found.requests] == [*[steps] * DECODING, 1 + STEPS]
    assert prompt.token_ns[0] > prompt.arrived_ns >= decoding[0].token_ns[STEPS - 1]
    pairs = zip(found.series.get("micro-batch", []), found.series.get("of call", []), strict=True)
    first = [size for size, call in pairs if call == STEPS]
    assert len(first) == formed
    assert sum(first) == (DECODING + 32 if formed else 0)


def test_a_prompt_that_nobody_decodes_beside_is_chunks_alone():
    assert chunk_calls.calls(ALONE) == (((0, 40),), ((0, 40),), ((0, 16),), *[((0, 1),)] * STEPS)
    assert [request.id for request in run(ALONE).requests] == ["prompt"]


def test_what_a_user_asks_is_planned_with_the_parts_of_every_call():
    planned = chunked.chunked("mini", sweep=sweep(n_prompt="96,40", n_chunk="40,64", n_seq="2", flash_attn="off"))
    arrivals = [cell for cell in planned.cells if isinstance(cell, Arrival)]
    assert {(cell.n_arriving, cell.flash_attn) for cell in arrivals} == {(96, "off"), (40, "off")}
    assert {cell.n_seq for cell in arrivals if cell.way == "together"} == {2}
    beside = {(cell.n_arriving, cell.way, cell.n_chunk) for cell in arrivals if cell.n_seq and not cell.kv_unified}
    assert beside == {
        (96, "whole", 0),
        (96, "apart", 40),
        (96, "apart", 64),
        (96, "together", 40),
        (96, "together", 64),
        (40, "whole", 0),
        (40, "together", 40),
    }
    alone = {cell.n_chunk for cell in arrivals if not cell.n_seq and cell.n_arriving == 96}
    assert alone >= {0, 40, 64, 39, 63}
    required = planned.cells[: planned.needed]
    assert {(cell.way, cell.n_chunk) for cell in required if cell.n_seq} == {("whole", 0), ("apart", 64)}
    with pytest.raises(StudyError, match="n_chunk 128"):
        chunked.chunked("mini", sweep=sweep(n_prompt="96", n_chunk="128"))


# Made-up rows: a chunk takes a millisecond a token, a step two, a call both.


def made_up(cell, chunk=lambda n: n * 1e-3, step=2e-3):
    def seconds(call):
        n = dict(call).get(cell.n_seq, 0)
        return (chunk(n) if n else 0) + (step if cell.n_seq and 0 in dict(call) else 0)

    row = cells.columns(cell) | {"status": "ok", "verdict": "valid", "anchor": False, "drift": 0.0, "text": ""}
    row |= {"samples_ns": [[round(seconds(call) * 1e9) for call in chunk_calls.calls(cell)]], "build": "stock"}
    return [row | {"machine": "m", "engine": "e", "block": block} for block in range(6)]


def test_an_arrival_tells_its_waits_apart():
    found = {
        metric: (unit, value, samples.tolist())
        for metric, unit, value, samples in metrics.arrival(made_up(arrival(way="apart"))[0])
    }
    assert {unit for unit, _, _ in found.values()} == {"s"}
    assert {name: value for name, (_, value, _) in found.items()} == pytest.approx(
        {"chunk": 32e-3, "step before": 2e-3, "itl": 34e-3, "itl_max": 34e-3, "ttft": 3 * 32e-3 + 4e-3}
    )
    assert found["itl"][2] == pytest.approx([34e-3] * 3)
    whole = {name: value for name, _, value, _ in metrics.arrival(made_up(arrival(way="whole", n_chunk=0))[0])}
    assert (whole["itl_max"], whole["ttft"]) == pytest.approx((99e-3, 96e-3))
    ((name, _, value, samples),) = metrics.arrival(made_up(ALONE)[0])
    assert (name, value, len(samples)) == ("chunk", 40e-3, 2)
