"""Chapter 7: every token is evaluated once, everyone's answer is their own, and waits come from the right calls."""

import pytest
from built import measured
from conftest import ATTENTION, HYBRID

from llama_meter import cells
from llama_meter.cells import Arrival
from plamo_study.studies.latency import metrics, plan

DECODING, STEPS, PROMPT = 3, 2, 96
WORKLOAD = plan.chunked("mini").workload


def arrival(model=HYBRID, **fields):
    usual = {"depth": 16, "n_gen": STEPS, "n_seq": DECODING, "n_arriving": PROMPT, "way": "together", "n_chunk": 32}
    return Arrival(model=model, scale="mini", dtype="F16", **usual | fields)


ALONE = arrival(way="apart", n_seq=0, depth=0, n_chunk=40)


def run(cell):
    return measured(cell, workload=WORKLOAD)


@pytest.mark.long
@pytest.mark.parametrize(
    "cell",
    [arrival(way="apart"), arrival(ATTENTION, way="whole", n_chunk=0), arrival(), ALONE],
    ids=["apart", "whole", "together", "alone"],
)
def test_everyone_gets_their_own_answer(cell):
    result, made = run(cell), metrics.calls(cell)
    assert len(result.samples_ns[0]) == len(made)
    *decoding, prompt = result.requests
    steps = sum(0 in dict(call) for call in made)
    assert [len(request.token_ns) for request in result.requests] == [*[steps] * cell.n_seq, 1 + STEPS]
    assert prompt.token_ns[0] > prompt.arrived_ns >= max((of.token_ns[STEPS - 1] for of in decoding), default=0)


def made_up(cell):
    """A row in which a chunk takes a millisecond a token, a step two, a call both."""

    def seconds(call):
        n = dict(call).get(cell.n_seq, 0)
        return n * 1e-3 + (2e-3 if cell.n_seq and 0 in dict(call) else 0)

    times = [round(seconds(call) * 1e9) for call in metrics.calls(cell)]
    return cells.columns(cell) | {"samples_ns": [times]}


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        (arrival(way="apart"), {"chunk": [32], "step before": [2], "itl": [34] * 3, "itl_max": [34], "ttft": [100]}),
        (arrival(way="whole", n_chunk=0), {"chunk": [96], "itl": [99], "itl_max": [99], "ttft": [96]}),
        (arrival(n_chunk=32), {"chunk": [34], "itl": [34] * 3, "itl_max": [34], "ttft": [102]}),
        (ALONE, {"chunk": [40, 40]}),
    ],
)
def test_an_arrival_tells_its_waits_apart(cell, expected):
    measured = {metric: (1e3 * samples).tolist() for metric, _, _, samples in metrics.arrival(made_up(cell))}
    shown = {metric: measured[metric][: len(times)] for metric, times in expected.items()}
    assert shown == {metric: pytest.approx(times) for metric, times in expected.items()}
