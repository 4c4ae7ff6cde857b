"""Notebook 10: the simulator's policies drive the real engine, every answer is right, bad traces are refused."""

import os
import signal
import threading
from dataclasses import replace
from types import SimpleNamespace

import misbehaving
import msgspec
import numpy as np
import pytest
from conftest import ATTENTION, HYBRID, mini_file

from plamo_study.analysis import stats
from plamo_study.engine.session import Session
from plamo_study.errors import StudyError
from plamo_study.measure import recording, runner, server, sessions
from plamo_study.measure.cells import Traffic
from plamo_study.measure.plan import change
from plamo_study.measure.process import work
from plamo_study.measure.worker import Job
from plamo_study.oracle.compare import relative_error
from plamo_study.studies import cluster
from plamo_study.studies.disaggregation import requests
from plamo_study.studies.scheduling import (
    analysis,
    fleets,
    fleets_plan,
    observed,
    plan,
    policies,
    published,
    traffic,
    workload,
)
from plamo_study.studies.scheduling.analysis import METRICS
from plamo_study.studies.scheduling.clock import Simulated
from plamo_study.studies.scheduling.loop import Load, serve
from plamo_study.studies.scheduling.plan import PARTS, SERVER, SPLIT
from plamo_study.studies.scheduling.steps import AWAKE_S, fit

WORKLOAD = "plamo_study.studies.scheduling.workload"
MODELS = (HYBRID, ATTENTION)
ENOUGH = 1e-2  # of the logits: what rounding explains of F16 files; the defects guarded against are 0.4 and more


def asked(model=HYBRID, rule="chunked 64", **fields):
    usual = {"n_prompt": 256, "n_gen": 8, "n_seq": 4, "n_requests": 12, "per_second": 200.0}
    return Traffic(model=model, scale="mini", dtype="F16", rule=rule, **usual | fields)


def run(cell):
    outcome = work(Job(cell=cell, path=str(mini_file(cell.model))), 100.0, workload=WORKLOAD)
    assert outcome.status == "ok", outcome.failure
    return outcome.measured


@pytest.fixture(scope="module")
def rows():
    """What notebook 10 shows of small models; what it comes to is computed once."""
    return recording.read("10-scheduling", "recorded", "mini").rows


# ------------------------------------------------------------------ a server, which has a policy of its own


def test_a_server_gets_the_same_requests_at_the_same_times(tmp_path, monkeypatch):
    monkeypatch.setenv(server.NAMED, str(misbehaving.as_llama_server(tmp_path)))
    cell = asked(ATTENTION, SERVER, per_second=50.0)
    measured, load = run(cell), traffic.drawn(cell)
    assert [each.arrived_ns / 1e9 for each in measured.requests] == pytest.approx(load.arrives, abs=1e-6)
    assert all(each.sent_ns >= each.arrived_ns for each in measured.requests)
    assert measured.checks["answered"]
    assert measured.checks["as_alone"]


def test_a_server_is_asked_only_where_there_is_one_and_only_about_attention(tmp_path, monkeypatch):
    monkeypatch.setenv(server.NAMED, str(misbehaving.as_llama_server(tmp_path)))
    served = [cell for cell in plan.scheduling("mini").cells if cell.rule == SERVER]
    assert {cell.model for cell in served} == {ATTENTION}
    parts = {cell.n_threads for cell in plan.scheduling("mini").cells if cell.rule == PARTS and cell.model == ATTENTION}
    assert {cell.n_threads for cell in served} <= parts, "what its rule is simulated with"
    monkeypatch.setattr(server, "find", lambda: None)
    assert not [cell for cell in plan.scheduling("mini").cells if cell.rule == SERVER]


# ------------------------------------------------------------------ the engine, driven by policies


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rule", ["shared", "chunked 64", "decode first 64", "static batches", "apart 32", "budget 10"])
def test_every_answer_is_the_one_its_tokens_give_alone(model, rule):
    """Slots are left and filled, prompts ride along in pieces, sequences move: no answer notices."""
    cell = asked(model, rule)
    measured = run(cell)
    assert measured.valid, measured.checks
    assert measured.checks["second_path_error"] < ENOUGH
    load = traffic.drawn(cell)
    assert [request.n_prompt for request in measured.requests] == load.prompt
    assert [len(request.token_ns) for request in measured.requests] == load.output
    for request in measured.requests:
        assert request.arrived_ns < request.token_ns[0], "no token before its prompt"
        assert all(np.diff(request.token_ns) > 0)
    series = measured.series
    assert sum(series["chunk"]) == sum(load.prompt)
    assert sum(series["decoding"]) == sum(load.output) - len(load)
    assert max(series["decoding"]) <= cell.n_seq
    assert len(series["chunk"]) == len(measured.samples_ns[0])
    if rule == "chunked 64":
        assert max(series["chunk"]) <= 64
    if rule == "apart 32":
        assert not any(many and chunk for many, chunk in zip(series["decoding"], series["chunk"], strict=True))


@pytest.mark.parametrize("model", MODELS)
def test_two_processes_that_share_the_work_answer_the_same_requests_at_the_same_times(model):
    cell = asked(model, SPLIT, n_threads=2)
    measured, load = run(cell), traffic.drawn(cell)
    assert measured.valid, measured.checks
    assert measured.checks["second_path_error"] < ENOUGH
    assert [half(cell).n_threads for half in (requests.sending, requests.receiving)] == [1, 1], "of two threads in all"
    assert [request.n_prompt for request in measured.requests] == load.prompt
    assert [len(request.token_ns) for request in measured.requests] == load.output
    assert [request.arrived_ns / 1e9 for request in measured.requests] == pytest.approx(load.arrives, abs=1e-6)
    moved = zip(measured.requests, measured.series["shipped"], measured.series["loaded"], strict=True)
    for request, shipped, loaded in moved:
        assert shipped > 0
        assert loaded > 0
        assert shipped + loaded < (request.token_ns[0] - request.arrived_ns) / 1e9, "a part of its first token's time"
        assert all(np.diff(request.token_ns) > 0)


def test_the_engine_makes_the_calls_that_the_simulation_makes():
    """All are there at once, so no clock decides: both sides have to do the same, call by call."""
    cell = asked(rule="chunked 64", per_second=1e9)
    series = run(cell).series
    made = []

    class Watched(Simulated):
        def call(self, decoding, step, keys, reading, chunk, before):
            made.append((len(decoding) if step else 0, keys if step else 0, chunk, before))
            return super().call(decoding, step, keys, reading, chunk, before)

        def steps(self, decoding, keys, most, until):
            return [self.call(decoding, True, keys, -1, 0, 0)]

    load = Load([0.0] * 12, traffic.drawn(cell).prompt, traffic.drawn(cell).output)
    serve(load, policies.chunked(64), Watched(known(cell)), cell.n_seq)
    names = ("decoding", "keys", "chunk", "before")
    first = next(n for n, many in enumerate(series["decoding"]) if many)  # the first request may come a call earlier
    live = list(zip(*(map(int, series[name]) for name in names), strict=True))
    assert live[first:] == made[first:]


def known(cell):
    """A step model of calls that all take a millisecond, of every kind that the cell can make."""
    many = range(1, cell.n_seq + 1)
    steps = [(n, n * held, 0, 0) for n in many for held in (1, 2 * cell.n_prompt) for _ in range(3)]
    chunks = [(0, 0, n, at) for n in range(1, cell.n_prompt + 1) for at in (0, 64, cell.n_prompt)]
    made = np.array(steps + chunks)
    return fit("even", observed.Calls(*made.T, np.full(len(made), 1e-3)))


def test_a_sequence_put_aside_goes_on_as_if_it_had_stayed():
    """Memory for two requests and a half: states are saved and loaded, and the answers are still right."""
    cell, load = asked(), Load([0.0] * 8, [64] * 8, [8] * 8)
    rng = np.random.default_rng(0)
    config = sessions.config(cell, cell.n_prompt + cell.n_gen, n_seq_max=cell.n_seq, swa_full=False)
    with Session(mini_file(), config) as session:
        tokens = [rng.integers(10, session.n_vocab, 64 + 8 - 1, dtype=np.int32) for _ in range(8)]
        live = workload.Live(session, tokens)
        live.start()
        served = serve(load, policies.shared, live, cell.n_seq, room=3 * 64 + 10, preempt="save")
        assert served.preempted > 0
        assert sorted(live.logits) == list(range(8))
        for number, logits in live.logits.items():
            session.clear()
            alone = session.prefill({0: tokens[number]})[0][-1]
            assert relative_error(logits, alone) < ENOUGH


@pytest.mark.parametrize("model", MODELS)
def test_parts_hold_every_kind_of_call_that_traffic_makes(model):
    cell = asked(model, PARTS, n_requests=1, n_gen=16)
    measured = run(cell)
    assert measured.valid, measured.checks
    made = np.array([measured.series[name] for name in ("decoding", "keys", "chunk", "before")]).astype(int)
    fitted = fit(model, observed.Calls(*made, np.array(measured.samples_ns[0]) / 1e9), measured.series["moves"])
    assert fitted.range.decoding == (1, cell.n_seq)
    assert fitted.range.chunk == (1, cell.n_prompt)
    assert fitted.range.held == fitted.range.before == cell.n_prompt + cell.n_gen - 1
    assert {"step", "chunk", "both"} == set(fitted.factors)
    asking = asked(model, "chunked 64")
    served = serve(traffic.drawn(asking), policies.chunked(64), Simulated(fitted), asking.n_seq)
    assert np.isfinite(served.finish).all()


# ------------------------------------------------------------------ recorded rows of other studies


@pytest.mark.parametrize(("study", "scale"), [("03-batch-scaling", "shape"), ("01-phase-asymmetry", "shape"),
                                              ("05-context", "mini"), ("06-chunked", "mini")])  # fmt: skip
def test_calls_of_recorded_rows_are_taken_as_they_were_made(study, scale):
    found = observed.calls(recording.read(study, "recorded", scale).rows)
    assert (found["seconds"] > 0).all()
    assert (found["chunk"] + found["decoding"] > 0).all()
    both = found[(found["chunk"] > 0) & (found["decoding"] > 0)]
    assert (len(both) > 0) == (study == "06-chunked")


def test_an_engine_is_idle_from_the_last_token_of_all_who_came_to_the_next_prompt():
    """The second comes while the first is answered, the third 20 ms after both; its prompt is read in two calls. How
    long nothing was computed before the first, nobody knows."""
    came = [(0, 30), (10, 50), (70, 90)]
    asked = [SimpleNamespace(arrived_ns=begin * 10**6, token_ns=[end * 10**6]) for begin, end in came]
    row = SimpleNamespace(workload="traffic", requests=asked)
    calls = [(0, 0, 64, 0, 0.01), (1, 64, 64, 0, 0.01), (2, 128, 0, 0, 0.01), (0, 0, 64, 0, 0.01), (0, 0, 8, 64, 0.01)]
    assert observed._idle(row, calls) == pytest.approx([np.nan, 0, 0, 0.02, 0], nan_ok=True)


def test_what_waking_takes_is_no_part_of_what_a_chunk_takes(rows):
    found, known_ones = observed.calls(rows), analysis.fitted(rows)
    used = found[(found["rule"] == PARTS) | found["per_second"].isin(plan.LOADS["mini"])]
    used = used[(used["decoding"] == 0) & (used["n_threads"] == found["n_threads"].max())]
    for model, step_model in known_ones.items():
        own = used[used["model"] == model]
        assert len(step_model.waking) == (own["idle"] >= AWAKE_S).sum() > 0
        assert len(step_model.factors["chunk"]) == (own["idle"] < AWAKE_S).sum() > 0
        assert own["idle"].isna().sum() == own[own["rule"] != PARTS].groupby(["rule", "per_second", "block"]).ngroups


def test_a_fit_at_full_size_knows_every_batch_and_refuses_what_is_not_there():
    rows = [recording.read(study, "recorded", "shape").rows for study in ("03-batch-scaling", "01-phase-asymmetry")]
    found = [observed.calls(each) for each in rows]
    assert found[0]["machine"].iloc[0] == found[1]["machine"].iloc[0]
    every = analysis.pd.concat(found)
    model = observed.fitted(every, f"{HYBRID}*", 2, rows[0], "plamo-study measure 06-chunked --scale shape")
    assert model.range.decoding == (1, 32)
    eight, nine = (model.seconds(n, 128 * n, 0, 0) for n in (8, 9))
    assert nine > eight
    with pytest.raises(StudyError, match="33 sequences") as refused:
        model.seconds(33, 33, 0, 0)
    assert refused.value.mend == "plamo-study measure 06-chunked --scale shape"


# ------------------------------------------------------------------ loads and traces


def test_every_policy_and_load_gets_the_same_requests():
    slow, fast = traffic.drawn(asked(per_second=1.0)), traffic.drawn(asked(rule="shared", per_second=2.0))
    assert (slow.prompt, slow.output) == (fast.prompt, fast.output)
    assert np.allclose(slow.arrives, 2 * np.array(fast.arrives))
    assert all(n % traffic.GRAIN == 0 and 0 < n <= 256 for n in slow.prompt)
    assert all(2 <= n <= 8 for n in slow.output)


def written(path, *lines):
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_trace_of_your_own_is_read_in_any_order_of_columns(tmp_path):
    load = traffic.read(written(tmp_path / "a.csv", "prompt, output,arrives,user", "7,2,0.5,x", "", "8,3,1.5,y"))
    assert load == Load([0.5, 1.5], [7, 8], [2, 3])


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ((), "line 1: has no column arrives, prompt, output"),
        (("arrives,prompt,output",), "holds no requests"),
        (("arrives,prompt", "1,2"), "line 1: has no column output"),
        (("arrives,prompt,output", "0,5,5", "1,-5,5"), "line 3: prompt is -5, and must be 1 or more"),
        (("arrives,prompt,output", "0,5,0"), "line 2: output is 0, and must be 1 or more"),
        (("arrives,prompt,output", "-1,5,5"), "line 2: arrives is -1, and must be 0 or more"),
        (("arrives,prompt,output", "nan,5,5"), "line 2: arrives is nan"),
        (("arrives,prompt,output", "inf,5,5"), "line 2: arrives is inf"),
        (("arrives,prompt,output", "2,5,5", "1,5,5"), "line 3: arrives at 1, before the line above it \\(2\\)"),
        (("arrives,prompt,output", "0,many,5"), "line 2: prompt is 'many', not a whole number of tokens"),
        (("arrives,prompt,output", "0,5.5,5"), "line 2: prompt is '5.5', not a whole number"),
        (("arrives,prompt,output", "soon,5,5"), "line 2: arrives is 'soon', not a number of seconds"),
        (("arrives,prompt,output", "0,5"), "line 2: output is ''"),
        (("arrives,prompt,output", *["0,5,5"] * 4), "line 5: is beyond 3 requests"),
    ],
)
def test_a_bad_trace_is_refused_by_the_line(tmp_path, lines, says):
    with pytest.raises(StudyError, match=says):
        traffic.read(written(tmp_path / "bad.csv", *lines), most=3)


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"arrives,prompt,output\n\x00\n"])
def test_bytes_that_are_no_text_are_refused(tmp_path, data):
    (tmp_path / "bad.csv").write_bytes(data)
    with pytest.raises(StudyError, match=r"bad\.csv"):
        traffic.read(tmp_path / "bad.csv")


def test_a_trace_that_is_not_there_is_named(tmp_path):
    with pytest.raises(StudyError, match=r"none\.csv: No such file"):
        traffic.read(tmp_path / "none.csv")


# ------------------------------------------------------------------ plan and arithmetic


@pytest.mark.parametrize(("scale", "highest"), [("mini", 0.99), ("shape", 0.95), ("weights", 0.95)])
def test_every_load_has_the_requests_that_its_percentiles_need_and_every_page_two_policies_at_all_of_them(
    scale, highest
):
    made = plan.scheduling(scale)
    asked = [cell for cell in made.cells if cell.rule not in (PARTS, SERVER)]
    assert min(cell.n_requests for cell in asked) >= stats.NEEDED[highest]
    for model in {cell.model for cell in asked}:
        loads = {rule: {cell.per_second for cell in asked if (cell.model, cell.rule) == (model, rule)}
                 for rule in plan.FIRST}  # fmt: skip
        assert all(each >= set(plan.LOADS[scale]) for each in loads.values()), model
    assert {cell.rule for cell in made.cells[: made.needed]} == {PARTS, *plan.FIRST}
    assert all(policies.named(cell.rule) for cell in asked if cell.rule != SPLIT)
    assert len(set(made.cells)) == len(made.cells)


def test_a_cell_is_read_back_as_it_was_written():
    cell = asked()
    told = msgspec.json.encode(cell)
    assert b'"workload":"traffic"' in told
    assert b'"label":"chunked 64"' in told
    assert msgspec.json.decode(told, type=Traffic) == cell


def test_the_source_s_table_is_held_against_what_one_part_can_do():
    told = published.strategies()
    found = published.checked(told, published.part("H100 SXM")).set_index("name")
    assert found["floor"].iloc[0] == pytest.approx(140e9 / 3.35e12)
    assert found["possible"].sum() == 2
    assert found.loc["Shared (no chunking)", "possible"]
    assert not found.loc["Disaggregated", "possible"]
    assert (found["parts"] >= 3).all()
    assert found["prompt"].max() < 40
    faster = published.part("H100 SXM") | {"bandwidth": 1e15, "memory": 1e15, "peak": {"F16": 1e18}}
    allowed = published.checked(told, faster)
    assert allowed["possible"].all()
    assert (allowed["parts"] == 1).all()
    assert allowed["chunk_cuts"].dropna().all()


def taking(seconds):
    return lambda tokens: seconds


def test_splitting_needs_states_that_can_move():
    cell = asked(n_requests=320, per_second=400.0)
    load, model = traffic.drawn(cell), known(cell)
    free = analysis.disaggregated(load, model, cell.n_seq, (taking(0.0), taking(0.0)))
    slow = analysis.disaggregated(load, model, cell.n_seq, (taking(1.0), taking(0.0)))
    assert slow["ttft_p50"] > free["ttft_p50"] + 0.9
    assert slow["itl_p99"] < free["itl_p99"] + 1e-6, "sending keeps the sender alone"
    loading = analysis.disaggregated(load, model, cell.n_seq, (taking(0.0), taking(1.0)))
    assert loading["itl_p99"] > free["itl_p99"] + 0.9, "loading keeps everybody who is answered"
    woken = analysis.replace(model, waking=np.array([1.0]))
    slept = analysis.disaggregated(load, woken, cell.n_seq, (taking(0.0), taking(0.0)))
    assert slept["itl_p99"] < free["itl_p99"] + 1e-6, "what waking takes was measured of prompts, and it keeps no step"
    assert slept["ttft_p99"] > free["ttft_p99"] + 0.9
    shared = analysis.simulated(load, "prefill first", model, cell.n_seq)
    assert free["itl_p99"] < shared["itl_p99"], "who writes is never kept waiting by who reads"


def test_what_a_shipment_takes_is_known_from_the_other_loads_alone_and_the_split_engine_is_judged_like_a_policy(rows):
    split = rows[rows["label"] == SPLIT]
    light, middle = sorted(split["per_second"].unique())
    ships, loads = analysis.shipping(rows, HYBRID, without=middle)
    there = split[(split["per_second"] == light) & ~split["disturbed"]]
    tokens = there["requests"].iloc[0][0].n_prompt
    for named, told in (("shipped", ships), ("loaded", loads)):
        of = [s for row in there.itertuples() for r, s in zip(row.requests, row.series[named], strict=True)
              if r.n_prompt == tokens]  # fmt: skip
        assert told(tokens) == pytest.approx(np.median(of))
    with pytest.raises(StudyError, match="no state was shipped"):
        analysis.shipping(rows[(rows["label"] != SPLIT) | (rows["per_second"] == light)], HYBRID, without=light)
    judged = analysis.predictions(rows)
    judged = judged[(judged["rule"] == SPLIT) & (judged["way"] == "simulation")]
    assert set(judged["per_second"]) == {light, middle}
    assert set(judged["refused"]) == {""}


# ------------------------------------------------------------------ predictions, and what they are held against


def test_a_percentile_of_too_few_requests_is_not_given():
    """The 99th percentile of 48 requests is the slowest of them."""
    gaps = np.full(400, 1e-3), np.ones(400)
    few, enough = (analysis.waits(np.linspace(0.001, 1, n), gaps) for n in (48, 299))
    assert np.isnan(few["ttft_p99"])
    assert np.isnan(few["ttft_p95"])
    assert few["ttft_p90"] > 0
    assert enough["ttft_p99"] > 0
    assert few["itl_p99"] == enough["itl_p99"] == pytest.approx(1e-3)


def test_every_load_is_predicted_in_every_way_and_only_one_machine_s_capacity_beside_them(rows):
    found = analysis.predictions(rows)
    for (_, _, rule, _), ways in found.groupby([*analysis.LOADED, "metric"])["way"]:
        assert set(ways) == ({*analysis.WAYS[:2]} if rule == SPLIT else {*analysis.WAYS, *analysis.PACED})
    compared = analysis.compared(rows)
    assert set(compared["per_second"]) == set(plan.LOADS["mini"])
    asked = compared[compared["rule"].isin(plan.FIRST)].groupby("per_second")["asked"].unique().map(list)
    assert asked.tolist() == [["beyond"], ["between"], ["beyond"]]
    assert set(found["per_second"]) - set(plan.LOADS["mini"]) == set(plan.ALONE)
    alone = analysis.alone(rows)
    assert set(alone["per_second"]) == set(plan.ALONE)
    assert alone[["pace", "measured", *analysis.WAYS, "paced"]].notna().all(axis=None)


def test_no_way_but_the_paced_ones_knows_the_load_that_it_predicts_and_these_know_nothing_but_its_pace():
    """Every call and token of one load takes ten times as long: what is predicted of it stays what it was."""
    rows = recording.read("10-scheduling", "recorded", "shape").rows
    at = analysis.loads(rows)[-1]
    changed = rows.assign(
        samples_ns=[[[ns * 10 for ns in each] for each in samples] if rate == at else samples
                    for samples, rate in zip(rows["samples_ns"], rows["per_second"], strict=True)],
        series=[series | {"moves": [10.0 for _ in series.get("moves", ())]} if rate == at else series
                for series, rate in zip(rows["series"], rows["per_second"], strict=True)],
        requests=[[msgspec.structs.replace(each, token_ns=[ns * 10 for ns in each.token_ns]) for each in requests]
                  if rate == at else requests
                  for requests, rate in zip(rows["requests"], rows["per_second"], strict=True)],
    )  # fmt: skip
    before, after = (analysis.compared(each) for each in (rows, changed))
    told = before["way"].isin(analysis.PACED)
    same = (before["per_second"] == at) & ~told
    assert before.loc[same, "predicted"].tolist() == pytest.approx(after.loc[same, "predicted"].tolist(), nan_ok=True)
    assert after.loc[same, "measured"].iloc[0].value > 5 * before.loc[same, "measured"].iloc[0].value
    changed_too = (before["per_second"] != at) & (before["way"] == "nearest load") & (before["metric"] == "ttft_p50")
    assert (after.loc[changed_too, "predicted"] > 5 * before.loc[changed_too, "predicted"]).any()
    paces = [analysis.paced(each, at)[1] for each in (rows, changed)]
    of = paces[0].index.get_level_values("per_second") == at
    assert paces[1][of].tolist() == pytest.approx((10 * paces[0][of]).tolist(), rel=0.1), "but for what was idle"
    assert paces[1][~of].tolist() == pytest.approx(paces[0][~of].tolist())


def test_the_nearest_load_is_the_one_that_is_least_far_away():
    others = analysis.pd.DataFrame({"per_second": [75.0, 75.0, 210.0]} | {name: [1.0, 2.0, 5.0] for name in METRICS})
    assert analysis.nearest(others, 150.0)["ttft_p99"].tolist() == [5.0]
    assert analysis.nearest(others, 80.0)["ttft_p99"].tolist() == [1.0, 2.0]
    assert analysis.nearest(others[:0], 80.0) == {}


def test_the_furthest_of_many_predictions_has_an_interval_that_knows_it_was_chosen(rows):
    compared = analysis.compared(rows)
    found = analysis.accuracy(compared)
    assert (found["within"] <= found["answered"]).all()
    for entry in found[found["answered"] > 1].to_dict("records"):
        own = compared[(compared["metric"] == entry["metric"]) & (compared["way"] == entry["way"])]
        known = [ratio for ratio in own["ratio"] if ratio is not None]
        furthest = max(known, key=lambda ratio: abs(np.log(ratio.value)))
        assert entry["worst"].value == furthest.value
        assert entry["worst"].low <= furthest.low < furthest.high <= entry["worst"].high
        assert entry["worst"].among == entry["answered"] == len(known)


def test_recorded_loads_reach_from_light_to_nearly_all_that_the_engine_takes(rows):
    busy = analysis.live(rows)
    busy = busy[busy["rule"] == plan.FIRST[1]].groupby("per_second")["busy"].median()
    light, middle, heavy = (busy[load] for load in plan.LOADS["mini"])
    assert light < 0.6 < middle < heavy < 1
    assert heavy > 0.8


# ------------------------------------------------------------------ fleets


def fleet(**fields):
    base = fleets_plan.fleet("mini").cells[0]
    usual = {"n_machines": 3, "n_requests": 20, "repetitions": 1, "balance": "least work", "pattern": "steady"}
    return change(base, **usual | fields)


def swept(path, cells, elsewhere=None):
    planned = replace(fleets_plan.fleet("mini"), cells=cells)
    summary = runner.sweep(planned, path, elsewhere=elsewhere)
    assert not summary.failed, summary.failed
    return summary


def what_came(summary):
    return [(row.cell, row.series, row.checks["complete"]) for row in summary.rows]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A small sweep of simulations by processes of this machine."""
    path = tmp_path_factory.mktemp("fleet") / "j.jsonl"
    return path, swept(path, (fleet(), fleet(balance="round robin", n_machines=90)))


def test_a_sweep_of_simulations_goes_on_where_it_stopped(here):
    path, first = here
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    second = swept(path, tuple(row.cell for row in first.rows))
    assert (first.measured, second.measured) == (2, 1)
    assert what_came(second) == what_came(first)


def test_workers_of_a_cluster_simulate_the_same_and_one_that_dies_is_replaced(here, tmp_path):
    """A real scheduler and real workers of it, as processes of this machine."""
    distributed = pytest.importorskip("distributed")
    cells = tuple(row.cell for row in here[1].rows)
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as started,
        cluster.connected(started.scheduler_address) as elsewhere,
    ):
        assert elsewhere.at_once == 2
        threading.Timer(2.0, os.kill, (next(iter(started.workers.values())).pid, signal.SIGKILL)).start()
        found = swept(tmp_path / "j.jsonl", cells, elsewhere)
    assert what_came(found) == what_came(here[1])


def test_what_runs_the_engine_is_not_given_away(tmp_path):
    nowhere = runner.Elsewhere(lambda *told: None, 1)
    with pytest.raises(StudyError, match="10-scheduling: runs the engine"):
        runner.sweep(plan.scheduling("mini"), tmp_path / "j.jsonl", elsewhere=nowhere)
    assert not (tmp_path / "j.jsonl").exists()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "nonsense://x"])
def test_a_scheduler_that_is_not_there_is_named(address, monkeypatch):
    pytest.importorskip("distributed")
    monkeypatch.setattr(cluster, "PATIENCE_S", 0.5)
    with pytest.raises(StudyError, match=f"scheduler {address}: is not reached"), cluster.connected(address):
        pass


def test_a_fleet_is_simulated_by_the_rows_that_its_cell_names_or_not_at_all():
    with pytest.raises(StudyError, match="10-scheduling at mini: the rows that this fleet is simulated by are not"):
        fleets.measured_calls(change(fleet(), rows_sha256="0" * 64))
    with pytest.raises(StudyError, match="plamo-study measure 10-scheduling --scale weights"):
        fleets.measured_calls(change(fleets_plan.fleet("weights").cells[0], rows_sha256=""))


def test_the_fewest_machines_are_found_and_too_few_are_told_apart_from_none():
    def needs(least):
        return lambda machines: {"machines": machines, "well": 1.0 if machines >= least else 0.5}

    found = [each for each in fleets.fewest(needs(1.7)) if each["well"] >= fleets_plan.WELL]
    assert 1.7 <= min(each["machines"] for each in found) < 1.7 * fleets.MOST ** (1 / 2**fleets.HALVINGS)
    assert [each["well"] for each in fleets.fewest(needs(100))] == [0.5], "not even the most is enough"


def test_a_sample_of_machines_says_what_all_of_them_do(monkeypatch):
    cell = fleet(n_machines=240, n_requests=40)
    known = known_and_load()
    sampled = fleets.Days(cell, *known, 0).served(1.2)
    monkeypatch.setattr(fleets, "SAMPLE", 240)
    every = fleets.Days(cell, *known, 0).served(1.2)
    n = 40 * 40
    error = (every["well"] * (1 - every["well"]) / n) ** 0.5 + 1 / n
    assert abs(sampled["well"] - every["well"]) < 6 * error
    assert sampled["ttft_p99"] == pytest.approx(every["ttft_p99"], rel=0.25)


def test_machines_that_share_their_luck_need_less_room_the_more_they_are():
    alone, many = (
        min(tried["machines"] for tried in fleets.fewest(days.served) if tried["well"] >= fleets_plan.WELL)
        for days in (fleets.Days(fleet(n_machines=n, n_requests=100), *known_and_load(), 0) for n in (1, 100))
    )
    assert many < alone


def known_and_load():
    rows = fleets.measured_calls(fleet())
    return analysis.fitted(rows)[HYBRID], analysis.typical(rows)
