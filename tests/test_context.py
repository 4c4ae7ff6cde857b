"""Depth, caches and the loop without one: the engine's part on real processes, the arithmetic on known curves."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import llama_cpp.llama_cpp as llama
import numpy as np
import pandas as pd
import pytest
from conftest import ATTENTION, HYBRID, mini, mini_file

from plamo_study.analysis import growth, own_ceilings, roofline, stats
from plamo_study.engine import filling, library
from plamo_study.engine.session import EngineError, Session, SessionConfig
from plamo_study.errors import StudyError
from plamo_study.measure import frame, journal, plan, runner
from plamo_study.measure.cells import columns
from plamo_study.measure.recording import Recording
from plamo_study.oracle.compare import relative_error
from plamo_study.oracle.forward import Oracle
from plamo_study.studies.batch_scaling import plan as batch_scaling_plan
from plamo_study.studies.collect import collect
from plamo_study.studies.context import (
    analysis as context,
    drift,
    memory as context_memory,
    plan as plan_context,
    prediction as context_prediction,
    ways,
    workload as depth,
)

PART = 64
TOKENS = np.random.default_rng(1).integers(5, 500, 4 * PART)
LADDER = {"n_prompt": 8 * PART, "n_ubatch": PART, "n_gen": 2, "flash_attn": "on"}


def opened(model, whole=True, room=16 * PART, **fields):
    log = []
    library.capture_log(log)
    config = SessionConfig(n_ctx_seq=room, n_ubatch=PART, n_gpu_layers=0, swa_full=whole, **fields)
    return Session(mini_file(model), config), log


# ------------------------------------------------------------------ filled memories


@pytest.mark.parametrize("flash", ["on", "off"])
@pytest.mark.parametrize("model", [HYBRID, ATTENTION])
def test_a_memory_filled_to_its_own_depth_is_the_same_memory(model, flash):
    session, log = opened(model, flash_attn=flash)
    with session:
        session.prefill({0: TOKENS[:PART]})
        state = session.get_state(0)
        assert filling.filled(session, state, PART, filling.memory(log).cells) == state


@pytest.mark.parametrize("type_kv", ["f16", "q8_0"])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("model", [HYBRID, ATTENTION])
def test_a_filled_memory_goes_on_by_steps_as_in_one_call(model, whole, type_kv):
    session, log = opened(model, whole, flash_attn="on", type_k=type_kv, type_v=type_kv)
    with session:
        session.prefill({0: TOKENS[:PART]})
        deep = filling.filled(session, session.get_state(0), 10 * PART, filling.memory(log).cells)
        session.clear()
        session.set_state(0, deep, 10 * PART)
        for token in TOKENS[:4]:
            session.decode({0: int(token)})
        stepped = session.logits()
        session.clear()
        session.set_state(0, deep, 10 * PART)
        assert relative_error(stepped, session.prefill({0: TOKENS[:4]})[0][-1]) < 0.02


def test_depth_changes_what_a_filled_memory_says():
    session, log = opened(ATTENTION)
    with session:
        session.prefill({0: TOKENS[:PART]})
        state, said = session.get_state(0), []
        for deep in (PART, 10 * PART):
            session.clear()
            session.set_state(0, filling.filled(session, state, deep, filling.memory(log).cells), deep)
            session.decode({0: 9})
            said.append(session.logits())
        assert relative_error(*said) > 0.01


@pytest.mark.parametrize(
    "spoil", [lambda s: s[:-8], lambda s: s + b"more", lambda s: b"else" + s[4:], lambda s: s[:40]]
)
def test_a_state_of_another_layout_is_refused(spoil):
    session, log = opened(ATTENTION)
    with session:
        session.prefill({0: TOKENS[:PART]})
        with pytest.raises(EngineError, match="otherwise than"):
            filling.filled(session, spoil(session.get_state(0)), 2 * PART, filling.memory(log).cells)


@pytest.mark.parametrize(("type_kv", "whole"), [("f16", True), ("f16", False), ("q4_0", False)])
def test_the_log_reserves_what_arithmetic_says(type_kv, whole):
    for model in (HYBRID, ATTENTION):
        session, log = opened(model, whole, flash_attn="on", type_k=type_kv, type_v=type_kv)
        with session:
            taken = filling.memory(log)
        found = context_prediction.reserved(journalled(model), f"on/{type_kv}/{type_kv}", 16 * PART, PART, whole)
        assert taken.kv == pytest.approx(found["kv"], rel=0.01)
        assert taken.state == pytest.approx(found["state"], rel=0.05)


def journalled(model):
    from plamo_study.measure.files import model_fact

    return model_fact(model, "mini", "F16")


# ------------------------------------------------------------------ workloads and plans


def test_logits_that_are_not_finite_make_a_depth_invalid(monkeypatch):
    cell = mini("depth", **LADDER)
    assert depth.run(cell, mini_file(), print).valid
    monkeypatch.setattr(Session, "logits", lambda self, row=0: np.full(self.n_vocab, np.nan, np.float32))
    assert depth.run(cell, mini_file(), print).valid is False


def test_a_ladder_doubles_and_ends_where_it_was_told_to():
    assert depth.depths(mini("depth", n_prompt=1024, n_ubatch=128)) == (0, 128, 256, 512, 1024)
    assert depth.depths(mini("depth", n_prompt=384, n_ubatch=128)) == (0, 128, 256, 384)
    assert depth.depths(mini("depth", n_prompt=1024, n_ubatch=128, label="few")) == (0, 1024)


@pytest.mark.parametrize("scale", ["mini", "shape", "weights"])
def test_every_plan_has_a_gate_for_every_model_and_goes_beyond_the_trained_context(scale):
    for make in (plan_context.context, plan_context.memory, plan_context.naive):
        planned = make(scale)
        models = {model for cell in planned.cells for model, _, _ in cell.files}
        assert models == {gate.model for gate in planned.gates}
        assert all(at == scale for cell in (*planned.cells, *planned.gates) for _, at, _ in cell.files)
    deepest = max(columns(cell)["n_prompt"] for cell in plan_context.context(scale).cells)
    assert deepest > plan.registry.spec(HYBRID, scale).context_length


@pytest.mark.parametrize("n_prompt", [0, 100, 1 << 20])
def test_depths_that_cannot_be_measured_are_refused(n_prompt):
    with pytest.raises(StudyError):
        plan_context.check(mini("depth", n_prompt=n_prompt))


def test_drift_is_for_the_trained_embedded_models():
    with pytest.raises(StudyError, match="embedded"):
        plan_context.drift("shape")
    assert all(cell.caches and cell.text_sha256 for cell in plan_context.drift("mini").cells)


# ------------------------------------------------------------------ a small study, measured and shown


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """All kinds of cells on the embedded models in two blocks, as a recording."""
    base = mini("depth", **LADDER)
    few = plan.change(base, model=ATTENTION, way=ways.FEW)
    text = plan_context.drift("mini").cells[0]
    read, matmul = plan.both_ceilings("mini")
    cells = (
        base,
        plan.change(base, model=ATTENTION),
        plan.change(base, way=ways.WALK, n_ctx=4 * PART),
        few,
        plan.change(few, flash_attn="off"),
        plan.change(few, flash_attn="off", way=ways.WHOLE_WINDOW),
        plan.change(base, workload="naive", n_prompt=16, n_gen=8),
        plan.change(text, n_threads=1, n_ctx=128, n_chunks=2, caches=("on/q8_0/q8_0", "on/q4_0/q4_0")),
        plan.change(read, n_bytes=1 << 20),
        matmul,
    )
    gates = tuple(mini("gate", model, n_prompt=16) for model in (HYBRID, ATTENTION))
    planned = plan.Plan(
        "05-context",
        "mini",
        cells,
        gates,
        mini("decode", n_gen=4),
        2,
        0,
        60.0,
        worker=plan_context.memory("mini").worker,
    )
    path = tmp_path_factory.mktemp("small") / "05.jsonl"
    summary = runner.sweep(planned, path)
    assert not summary.failed
    facts = frame.facts(journal.read(path))
    return Recording(frame.frame(summary.rows, facts), facts, "05-context", "mini", "live")


def part_of(recording, *labels, workload="depth"):
    rows = recording.rows
    kept = (rows["workload"] != workload) | rows["label"].isin(labels) | (rows["text"] != "")
    return replace(recording, rows=rows[kept])


def test_every_depth_of_every_process_is_timed_and_counted(small):
    found = context.samples(small.rows)
    ladder = found[(found["label"] == "") & (found["model"] == HYBRID)]
    assert sorted(set(ladder["depth"])) == [0, 64, 128, 256, 512]
    assert len(ladder) == 2 * 2 * 5
    walked = found[found["label"] == ways.WALK]
    assert sorted(set(walked[walked["phase"] == "prefill"]["depth"])) == [0, 64, 128, 192]
    assert set(walked[walked["phase"] == "decode"]["depth"]) == {256}
    rows = small.rows[(small.rows["workload"] == "depth") & (small.rows["label"] == "") & (small.rows["text"] == "")]
    assert set(rows["n_evaluated"]) == {5 * (PART + 3)}


def test_a_window_that_keeps_everything_reserves_more(small):
    table = context_memory.kinds(part_of(small, ways.FEW, ways.WHOLE_WINDOW).rows)
    plain = table[table["kind"] == "off/f16/f16"].set_index("whole")
    assert plain.loc[True, "kv"] > plain.loc[False, "kv"]


def test_fewer_bits_in_the_cache_drift_further(small):
    table = context_memory.drift(small.rows).set_index("kind")["kld"]
    assert 0 < table["on/q8_0/q8_0"].value < table["on/q4_0/q4_0"].value


def test_the_loop_without_a_cache_evaluates_every_text_anew(small):
    loops = small.rows[small.rows["workload"] == "naive"]
    for checks in loops["checks"]:
        assert checks["naive_tokens"] == sum(range(16, 16 + 8))
        assert checks["cached_tokens"] == 16 + 8 - 1


def test_the_curves_of_another_machine_foretell_no_loop(small):
    depths = part_of(small, ways.LADDER)
    assert len(context_memory.loop_prediction(small.rows, depths.rows, 16, 8))
    elsewhere = replace(depths, rows=depths.rows.assign(machine="another"))
    assert context_memory.loop_prediction(small.rows, elsewhere.rows, 16, 8).empty


# ------------------------------------------------------------------ laws on curves that are known

DEPTHS = np.array([256.0, 768, 1280, 2304, 4352, 8448, 16640])


def curve_of(times, index=DEPTHS, noise=0.002):
    rng = np.random.default_rng(5)
    return pd.DataFrame({block: times * (1 + 0.05 * block) * rng.normal(1, noise, len(index)) for block in range(4)},
                        index=index)  # fmt: skip


@pytest.mark.parametrize(
    ("times", "law"),
    [
        (np.full(7, 0.02), "constant"),
        (0.02 + 1e-6 * DEPTHS, "linear"),
        (0.02 + 1e-6 * DEPTHS + 3e-10 * DEPTHS**2, "quadratic"),
        (0.02 + 4e-6 * np.minimum(DEPTHS, 2048) + 3e-7 * np.maximum(DEPTHS - 2048, 0), "linear with a bend"),
    ],
)
def test_a_law_is_recognised_with_its_coefficients(times, law):
    found = growth.growth(curve_of(times), knot=2048.0)
    assert found.law == law
    assert found.chosen_by >= 3
    assert found.coefficients[0].low <= 0.02 * 1.09
    assert found.coefficients[0].high >= 0.0198
    assert abs(found.worst) < 0.02


def test_a_bend_is_no_law_of_a_model_without_a_window():
    times = 0.02 + 4e-6 * np.minimum(DEPTHS, 2048)
    assert growth.growth(curve_of(times), knot=0.0).law != growth.BENT


def test_a_time_that_would_fall_again_is_continued_by_a_line():
    falling = pd.Series(0.02 + 2e-6 * DEPTHS - 5e-11 * DEPTHS**2, index=DEPTHS)
    at = growth.continued(falling)
    assert at(np.array([DEPTHS[-1]]))[0] == pytest.approx(falling.iloc[-1])
    assert at(np.array([1e6]))[0] > at(np.array([1e5]))[0] > falling.iloc[-1]
    down = growth.continued(pd.Series(0.02 - 1e-7 * DEPTHS, index=DEPTHS))
    assert down(np.array([1e6]))[0] == pytest.approx(0.02 - 1e-7 * DEPTHS[-1]), "no time is negative"


def rows_of(times, machine="m"):
    """Rows of ladders whose times are known: model -> (seconds per token of prefill, of decode) at a depth.

    Three blocks that differ by a thousandth: an interval of them is narrow, and holds what it should.
    """
    rows = []
    for block in range(3):
        for model, (read, write) in times.items():
            at = [0, 512, 1024, 2048, 4096, 8192, 16384]
            parts = [int(512e9 * read(d + 256.0) * (1 + 0.001 * block)) for d in at]
            steps = [int(1e9 * write(d + 4.0) * (1 + 0.001 * block)) for d in at for _ in range(8)]
            cell = {"workload": "depth", "text": "", "label": "", "model": model, "n_gen": 8, "n_ubatch": 512}
            cell |= {
                "machine": machine,
                "n_threads": 2,
                "n_gpu_layers": 0,
                "status": "ok",
                "flash_attn": "on",
                "type_k": "f16",
                "type_v": "f16",
                "use_mmap": True,
                "block": block,
                "anchor": False,
            }
            series = {"part_depth": [float(d) for d in at], "step_depth": [d + 1.0 + i for d in at for i in range(8)]}
            cell |= {"n_prompt": 16384, "disturbed": False}
            rows.append(cell | {"samples_ns": [parts, steps], "series": series, "verdict": "valid", "drift": 0.0})
    return pd.DataFrame(rows)


def test_prefill_takes_over_where_both_take_the_same_time():
    rows = rows_of({"plamo-2-x": (lambda d: 0.01, lambda d: 0.05)})
    table = context.takeover(rows, {}).set_index("n_out")
    assert table.loc[256, "tokens"].value == pytest.approx(5 * 256, rel=0.01)
    assert not table.loc[256, "extrapolated"]
    assert table.loc[2048, "tokens"].value == pytest.approx(5 * 2048, rel=0.01)


def test_a_takeover_beyond_the_deepest_says_so_and_one_that_never_comes_too():
    rows = rows_of({"plamo-2-x": (lambda d: 0.001, lambda d: 0.05)})
    table = context.takeover(rows, {}).set_index("n_out")
    assert table.loc[1024, "extrapolated"]
    never = rows_of({"plamo-2-x": (lambda d: 1e-9, lambda d: 0.05)})
    assert np.isnan(context.takeover(never, {}).set_index("n_out").loc[2048, "tokens"].value)


FLAT, STEEP = (lambda d: 0.05), (lambda d: 0.04 + 2e-6 * d)


def test_a_crossing_that_the_deepest_does_not_settle_has_no_upper_bound():
    depths = [0.0, 4096.0, 8192.0, 16384.0]
    ratios = np.outer([1.3, 1.1, 0.97, 0.95], [0.8, 1.0, 1.25])  # the processes disagree by more than the curve falls
    found = stats.crossing(depths, ratios)
    assert 7000 < found.value < 8000
    assert np.isinf(found.high)


# ------------------------------------------------------------------ the window that llama.cpp leaves out

WINDOWED = "plamo-2-x with window"


def test_a_window_is_seen_in_the_time_it_saves():
    flat_then = lambda d: 0.04 + 2e-6 * min(d, 2048)  # noqa: E731
    rows = rows_of({"plamo-2-x": (FLAT, STEEP), WINDOWED: (FLAT, flat_then), "plamo-3-y": (FLAT, FLAT)})
    table = context.explained(rows).set_index(["phase", "depth"])["ratio"]
    assert table["decode", 1024].within(0.99, 1.01) == "holds"
    assert table["decode", 16384].value == pytest.approx((0.04 + 2e-6 * 2048) / (0.04 + 2e-6 * 16388), rel=0.01)


def test_a_build_with_a_window_names_the_model_and_gives_it_that_shape():
    model = {"name": "m", "assumptions": ["its width"], "shape": {"arch": "plamo2", "layers": 4, "window": 0}}
    assert frame.computed(model, {}) is model
    found = frame.computed(model, {"window": 2048})
    assert frame.starred(found) == "m with window*"
    assert found["shape"]["window"] == 2048
    assert roofline.layers(found | {"tensors": {"ssm_in": {"count": 2}}}) == (2, 2, 0), "no layer sees everything"
    attention = model | {"shape": model["shape"] | {"arch": "plamo3"}}
    assert frame.computed(attention, {"window": 2048}) is attention


def test_the_oracle_with_a_window_forgets_what_lies_outside():
    whole, tokens = Oracle(mini_file(HYBRID)), TOKENS[:40]
    expected = whole.logits(tokens)
    assert np.array_equal(Oracle(mini_file(HYBRID), window=40).logits(tokens), expected)
    windowed = Oracle(mini_file(HYBRID), window=16).logits(tokens)
    assert np.array_equal(windowed[:16], expected[:16])
    assert all(relative_error(windowed[t], expected[t]) > 1e-3 for t in range(16, 40))


def test_a_build_that_claims_a_window_it_has_not_is_found_out(tmp_path):
    liar = tmp_path / "liar"
    shutil.copytree(Path(llama._base_path), liar, symlinks=True)
    (liar / "engine.toml").write_text('description = "a copy"\ncorrects = ["window"]\nwindow = 64\n')
    cell = mini("prefill", n_prompt=16)
    planned = plan.Plan("05-context", "mini", (cell,), (mini("gate", n_prompt=96),), cell, 1, 0, 60.0, compared=(cell,))
    summary = runner.sweep(planned, tmp_path / "j.jsonl", beside=[liar])
    table = frame.frame(summary.rows, frame.facts(journal.read(tmp_path / "j.jsonl")))
    verdicts = table[~table["anchor"]].groupby(["model", "workload"])["verdict"].first().to_dict()
    assert verdicts[HYBRID, "gate"] == verdicts[HYBRID, "prefill"] == "valid"
    name = f"{HYBRID} with window"
    assert verdicts[name, "gate"] == verdicts[name, "prefill"] == "invalid"
    (checks,) = table[(table["model"] == name) & (table["workload"] == "gate")]["checks"]
    assert checks["without_window"] < 0.01 < checks["prefill_error"]


# ------------------------------------------------------------------ two notebooks, one step


def test_the_short_decode_cell_is_the_first_of_notebook_03():
    near = [cell for cell in plan_context.context("shape").cells if cell.workload == "decode" and cell.depth]
    there = [
        cell
        for cell in batch_scaling_plan.batch_scaling("shape").cells
        if cell.workload == "decode" and cell.n_seq == 1
    ]
    assert {plan.change(cell, seed=0) for cell in near} <= set(there)


def test_another_build_measures_what_the_stock_engine_measures_too():
    planned = plan_context.context("shape")
    assert {cell.way for cell in planned.compared} == {ways.LADDER, ways.WALK}
    assert set(planned.compared) <= set(planned.cells)


# ------------------------------------------------------------------ arithmetic


@pytest.mark.parametrize("turns", [[], [500.0], [500.0, 3000.0]])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_every_turn_of_a_function_is_found(turns, sign):
    assert growth.turns(lambda x: sign * np.prod([at - x for at in turns]), 1.0) == pytest.approx(turns)


def test_the_hybrid_needs_less_than_attention_without_a_window_from_its_state_on():
    own, other = journalled(HYBRID), journalled(ATTENTION)
    rows = rows_of({HYBRID: (FLAT, FLAT), ATTENTION: (FLAT, FLAT)})
    table = context_prediction.meeting_points(rows, {HYBRID: own, ATTENTION: other}).set_index("phase")
    (at,) = table.loc["decode", "whole"]
    whole = context_prediction.without_window(other)
    assert roofline.decode_bytes(own, at) == pytest.approx(roofline.decode_bytes(whole, at), rel=1e-6)
    assert roofline.decode_bytes(own, at + 100) < roofline.decode_bytes(whole, at + 100)


def test_pages_make_room_for_what_is_not_used():
    fact = journalled(HYBRID)
    (row,) = context_prediction.paged({HYBRID: fact}, [HYBRID], 1e9, 4096).to_dict("records")
    per_token = roofline.kv_bytes_per_token(fact) * 2
    assert row["reserved"] == per_token * 4096 + roofline.state_bytes(fact)
    assert row["used"] == pytest.approx(per_token * 4097 / 2 + roofline.state_bytes(fact))
    assert row["fit"] < row["fit_paged"]
    assert 1 < row["gain"] < 2


def test_the_rate_of_attention_follows_from_what_a_token_of_depth_adds():
    name = "plamo-2-1b*"
    recording = collect("05-context", "recorded", "shape")
    model, limit = recording.facts[name], own_ceilings.limits(recording.rows, recording.facts[name])
    at_a_third = 3 * (2 * 2 * 8 * 2048) / limit.matmul  # two products of 2 FLOPs, 8 layers, 16 heads of 128
    machine = recording.rows["machine"].iloc[0]
    rows = rows_of({name: (lambda d: 0.01 + at_a_third * d, lambda d: 0.05)}, machine)
    ceilings = recording.rows[recording.rows["workload"].isin(["read", "matmul"])]
    (row,) = context_prediction.attention_rates(pd.concat([ceilings, rows]), {name: model}).to_dict("records")
    assert row["phase"] == "prefill", "a time that does not grow has no rate"
    assert row["share"].value == pytest.approx(1 / 3, rel=0.02)
    assert row["added"].value == pytest.approx(3 * row["allowed"], rel=0.02)


def test_a_drift_candidate_is_its_reference_when_nothing_differs():
    cell = plan.change(plan_context.drift("mini").cells[0], n_threads=1, n_ctx=64, n_chunks=1)
    found = drift.run(plan.change(cell, caches=("off/f16/f32",)), mini_file(), print)
    assert found.valid
    assert SimpleNamespace(**found.checks).second_path_error < 0.01
    assert found.series["kld/off/f16/f32"][0] / found.series["tokens"][0] < 1e-4
