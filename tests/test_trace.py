"""A request recorded operator by operator: it changes nothing, adds up, and is classed."""

import numpy as np
import pytest
from conftest import ATTENTION, HYBRID, mini, mini_file

from llama_meter.engine.library import capture_log
from llama_meter.engine.session import Session, SessionConfig
from llama_meter.engine.timeline import Recorder, request
from llama_meter.measure import files
from llama_meter.models import tensors
from plamo_study.arithmetic import roofline
from plamo_study.studies.roofline import operators, work as workload

MODELS = (HYBRID, ATTENTION)
PROMPT, STEPS = 24, 3


@pytest.fixture(scope="module")
def measured():
    """What is measured of each model, by name."""
    cells = {model: mini("trace", model, n_prompt=PROMPT, n_gen=STEPS) for model in MODELS}
    return {model: workload.run(cell, mini_file(model), lambda stage: None) for model, cell in cells.items()}


@pytest.fixture(scope="module")
def timelines():
    """One recording of each model, by name."""
    tokens = np.random.default_rng(0).integers(5, 500, PROMPT + STEPS, dtype=np.int32)
    found = {}
    for model in MODELS:
        with (
            Session(mini_file(model), SessionConfig(n_ctx_seq=PROMPT + STEPS)) as session,
            Recorder(session) as recorder,
        ):
            found[model], _ = recorder.record(tokens[:PROMPT], tokens[PROMPT:])
    return found


@pytest.fixture(params=MODELS)
def model(request):
    return request.param


@pytest.fixture
def timeline(timelines, model):
    return timelines[model]


def flops(node):
    return operators.counted(node)[1]


def nodes(timeline, phase):
    found = next(p for p in timeline.phases if p.name == phase)
    return [timeline.nodes[span.node] for span in found.spans if span.kind == "operator"]


# ---------------------------------------------------------------- the recording


@pytest.mark.parametrize(("name", "flash_attn"), [(HYBRID, "on"), (ATTENTION, "off")])
def test_recording_changes_no_bit_of_the_logits(name, flash_attn):
    capture_log([])
    tokens = np.random.default_rng(3).integers(5, 500, 80, dtype=np.int32)
    config = SessionConfig(n_ctx_seq=80, n_batch=48, n_ubatch=32, n_gpu_layers=0, flash_attn=flash_attn)
    with Session(mini_file(name), config) as session, Recorder(session) as recorder:
        _, plain = request(session, tokens[:75], tokens[75:])
        timeline, recorded = recorder.record(tokens[:75], tokens[75:])
    assert len(plain) == len(recorded) == 6
    assert all(np.array_equal(a, b) for a, b in zip(plain, recorded, strict=True))
    assert [s.kind for s in timeline.phases[0].spans].count("prepare") == 3  # 48 tokens are two micro-batches, 27 one
    classes = {operators.operator_class(node) for node in timeline.nodes}
    assert ({"kq", "softmax", "kqv"} if flash_attn == "off" else {"flash_attention"}) <= classes
    assert "other" not in classes
    ranges = sum(phase.duration for phase in timeline.phases)
    assert abs(1 - ranges / timeline.duration) < 0.5, "of the wall time; rows are held to ADDS_UP"


def test_spans_fill_their_phases_and_phases_the_request(timeline):
    assert [phase.name for phase in timeline.phases] == ["PREFILL", "DECODE_STEP 1", "DECODE_STEP 2", "DECODE_STEP 3"]
    for phase in timeline.phases:
        edges = [phase.start, *(span.end for span in phase.spans)]
        assert edges == [*(span.start for span in phase.spans), phase.end]
        assert edges == sorted(edges)
    stamps = [timeline.start, *(at for phase in timeline.phases for at in (phase.start, phase.end)), timeline.end]
    assert stamps == sorted(stamps)
    assert stamps[2:-2:2] == stamps[3:-2:2], "a phase begins where the last one ends"


def test_a_row_says_that_results_are_the_same(measured):
    for row in measured.values():
        timed = {"adds_up"}  # says something of the machine too
        assert all(value for name, value in row.checks.items() if isinstance(value, bool) and name not in timed)
        assert row.checks["same_bits"] is True


# ---------------------------------------------------------------- classes, bytes, FLOPs


def test_products_are_classed_and_counted_as_the_roofline_counts_them(timeline, model):
    fact, step = files.model_fact(model, "mini", "F16"), nodes(timeline, "DECODE_STEP 2")

    def of(nodes, *classes):
        return [node for node in nodes if operators.operator_class(node) in classes]

    products = of(step, *operators.PRODUCTS)
    weights, head = roofline.matmul_weights(fact), roofline.head_weights(fact)
    assert sum(map(flops, products)) == 2 * (weights + head)
    table = {tensor.name: tensor.n_bytes for tensor in tensors.tensor_table(mini_file(model))}
    assert all(node.sources[0].n_bytes == table[node.sources[0].name] for node in products)
    kinds = {kind for kind in fact["tensors"] if kind in operators.PRODUCTS}
    assert {operators.operator_class(node) for node in products} == kinds | {"head"}

    of_prefill = sum(map(flops, of(nodes(timeline, "PREFILL"), *operators.PRODUCTS)))
    ffn = sum(t["n_elements"] // t["count"] for kind, t in fact["tensors"].items() if kind in ("ffn_up", "ffn_down"))
    assert of_prefill == 2 * weights * PROMPT + 2 * head - 2 * ffn * (PROMPT - 1), "the last of one token only"
