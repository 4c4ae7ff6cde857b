"""Chapter 7: the simulator's policies drive the real engine, and every answer is right."""

import os
import signal
import threading
import time
from dataclasses import replace
from itertools import count

import misbehaving
import numpy as np
import pandas as pd
import pytest
from conftest import ATTENTION, HYBRID, mini_file
from msgspec.structs import replace as replaced

from llama_meter.cells import PARTS, SERVER, SPLIT, Traffic
from llama_meter.errors import StudyError
from llama_meter.measure import runner
from llama_meter.measure.asked import sweep
from llama_meter.measure.plan import change
from llama_meter.serve import server
from llama_meter.simulate import policies, traffic
from llama_meter.simulate.clock import Simulated
from llama_meter.simulate.loop import Load, serve
from llama_meter.simulate.steps import fit
from plamo_study import measurements
from plamo_study.read import metrics, recording
from plamo_study.run import cluster
from plamo_study.studies.latency import (
    fleets,
    observed,
    plan as fleets_plan,
    plan as plan,
    queueing,
    simulations,
    work as workload,
)
from plamo_study.studies.two_files import sender

ENOUGH = 1e-2  # of the logits: what rounding explains of F16 files; the defects guarded against are 0.4 and more


def asked(model=HYBRID, rule="chunked 64", **fields):
    usual = {"n_prompt": 256, "n_gen": 8, "n_seq": 4, "n_requests": 12, "per_second": 200.0}
    return Traffic(model=model, scale="mini", dtype="F16", rule=rule, **usual | fields)


def run(cell):
    return workload.run(cell, mini_file(cell.model), lambda stage: None)


def answered(measured, load):
    """Whether a valid row holds the load's requests, each with its tokens, one after the other."""
    assert measured.valid, measured.checks
    assert measured.checks["second_path_error"] < ENOUGH
    assert [request.n_prompt for request in measured.requests] == load.prompt
    assert [len(request.token_ns) for request in measured.requests] == load.output
    for request in measured.requests:
        assert request.arrived_ns < request.token_ns[0], "no token before its prompt"
        assert all(np.diff(request.token_ns) > 0)


@pytest.fixture(scope="module")
def rows():
    """Some of what chapter 7 shows of a small model."""
    found = recording.read("07-scheduling", "recorded", "mini").rows
    return found[(found["model"] == HYBRID) & found["rule"].isin((PARTS, *plan.FIRST, SPLIT))]


@pytest.fixture(scope="module")
def seen(rows):
    return observed.of_rows(rows)


# ------------------------------------------------------------------ a server, which has a policy of its own


def test_a_server_gets_the_same_requests_at_the_same_times_and_is_asked_only_where_there_is_one(tmp_path, monkeypatch):
    monkeypatch.setenv(server.NAMED, str(misbehaving.as_llama_server(tmp_path)))
    cell = asked(ATTENTION, SERVER, per_second=50.0)
    measured, load = run(cell), traffic.drawn(cell)
    assert [each.arrived_ns / 1e9 for each in measured.requests] == pytest.approx(load.arrives, abs=1e-6)
    assert all(each.sent_ns >= each.arrived_ns for each in measured.requests)
    assert measured.checks["answered"]
    assert measured.checks["as_alone"]
    made = plan.scheduling("mini")
    assert {cell.model for cell in made.cells if cell.rule == SERVER} == {ATTENTION}
    assert {cell.rule for cell in made.cells[: made.needed]} == {PARTS, *plan.FIRST}, "what a short run begins with"
    monkeypatch.setattr(server, "find", lambda: None)
    assert not [cell for cell in plan.scheduling("mini").cells if cell.rule == SERVER]


# ------------------------------------------------------------------ what a reader asks for


def test_a_file_is_asked_for_as_many_requests_as_its_size_suggests_and_every_value_of_a_reader_s_own_is_used():
    asked_for = sweep(files=str(mini_file()), n_chunk="32,16", n_seq=4, n_threads=1)
    made = plan.scheduling("shape", sweep=asked_for)
    loads = [cell for cell in made.cells if cell.rule != PARTS]
    assert {cell.files[0] for cell in made.cells} == set(asked_for.files)
    assert {cell.rule for cell in loads} == {"shared", "chunked 32", "chunked 16", "one at a time"}
    assert {(cell.n_seq, cell.n_threads) for cell in made.cells} == {(4, 1)}
    size, usual = mini_file().stat().st_size, plan.LOADS["shape"]
    assert sorted({cell.per_second for cell in loads}) == pytest.approx([n * plan.SIZE / size for n in usual], rel=0.05)
    assert {cell.rule for cell in made.cells[: made.needed]} == {PARTS, "shared", "chunked 32", "chunked 16"}
    made = plan.scheduling("mini", sweep=sweep(rates="7,0.5"))
    assert {cell.per_second for cell in made.cells if cell.rule != PARTS} == {0.5, 7.0}
    with pytest.raises(StudyError, match="n_seq 2,4: 2 values, and this study is measured at one"):
        plan.scheduling("mini", sweep=sweep(n_seq="2,4"))
    for bad in ("0", "-1", "nan", "x"):
        with pytest.raises(StudyError, match=f"rates {bad}"):
            sweep(rates=bad)


# ------------------------------------------------------------------ the engine, driven by policies


@pytest.mark.parametrize(
    ("model", "rule"),
    [*((HYBRID, rule) for rule in ("chunked 64", "decode first 32", "one at a time")), (ATTENTION, "shared")],
)
def test_every_answer_is_the_one_its_tokens_give_alone(model, rule):
    """Slots are left and filled, prompts ride along in pieces, sequences move: no answer notices."""
    cell = asked(model, rule)
    measured, load = run(cell), traffic.drawn(cell)
    answered(measured, load)
    series = measured.series
    assert sum(series["chunk"]) == sum(load.prompt)
    assert sum(series["decoding"]) == sum(load.output) - len(load)
    assert max(series["decoding"]) <= cell.n_seq
    assert len(series["chunk"]) == len(measured.samples_ns[0])
    if rule == "chunked 64":
        assert max(series["chunk"]) <= 64
    if rule == "one at a time":
        assert not any(many and chunk for many, chunk in zip(series["decoding"], series["chunk"], strict=True))


def test_two_processes_that_share_the_work_answer_the_same_requests_at_the_same_times():
    cell = asked(HYBRID, SPLIT, n_threads=2)
    measured, load = run(cell), traffic.drawn(cell)
    answered(measured, load)
    assert [half(cell).n_threads for half in (sender.sending, sender.receiving)] == [1, 1], "of two threads in all"
    assert [request.arrived_ns / 1e9 for request in measured.requests] == pytest.approx(load.arrives, abs=1e-6)
    moved = zip(measured.requests, measured.series["shipped"], measured.series["loaded"], strict=True)
    for request, shipped, loaded in moved:
        assert min(shipped, loaded) > 0
        assert shipped + loaded < (request.token_ns[0] - request.arrived_ns) / 1e9, "a part of its first token's time"


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


def test_parts_hold_every_kind_of_call_that_traffic_makes():
    cell = asked(HYBRID, PARTS, n_requests=1, n_gen=16, n_prompt=128)
    measured = run(cell)
    assert measured.valid, measured.checks
    made = np.array([measured.series[name] for name in ("decoding", "keys", "chunk", "before")]).astype(int)
    fitted = fit(HYBRID, observed.Calls(*made, np.array(measured.samples_ns[0]) / 1e9), measured.series["moves"])
    assert fitted.range.decoding == (1, cell.n_seq)
    assert fitted.range.chunk == (1, cell.n_prompt)
    assert fitted.range.held == fitted.range.before == cell.n_prompt + cell.n_gen - 1
    assert {"step", "chunk", "both"} == set(fitted.factors)
    asking = asked(n_prompt=128)
    served = serve(traffic.drawn(asking), policies.chunked(64), Simulated(fitted), asking.n_seq)
    assert np.isfinite(served.finish).all()


# ------------------------------------------------------------------ predictions, and what they are held against


def test_a_percentile_of_too_few_requests_is_not_given():
    """The 99th percentile of 48 requests is the slowest of them."""
    gaps = np.full(400, 1e-3), np.ones(400)
    few, enough = (metrics.percentiles(np.linspace(0.001, 1, n), gaps) for n in (48, 299))
    assert [name for name in few if np.isnan(few[name])] == ["ttft_p95", "ttft_p99"]
    assert not [name for name in enough if np.isnan(enough[name])]
    assert few["itl_p99"] == enough["itl_p99"] == pytest.approx(1e-3)


@pytest.mark.long
def test_every_load_of_the_page_is_simulated_already_and_some_simulated_again_give_the_same(monkeypatch):
    rows = recording.read("07-scheduling", "recorded", "mini").rows
    looked_up, asked, made = simulations.looked_up, count(), []

    def sometimes_again(what, load, model, simulate):
        found = looked_up(what, load, model, lambda: made.append(what) or simulate())
        assert next(asked) % 30 or simulate() == pytest.approx(found, rel=1e-6, nan_ok=True)
        return found

    monkeypatch.setattr(simulations, "used", {})
    monkeypatch.setattr(simulations, "looked_up", sometimes_again)
    seen = observed.of_rows(rows)
    queueing.predictions(seen, taken("mini"))
    assert next(asked) > 80
    assert made == []


def test_a_simulation_of_anything_else_is_made_anew(seen, monkeypatch):
    model = next(iter(observed.fitted(seen).values()))
    load, monkey = simulations.at_rate(observed.typical(seen), 20.0, 50), {}
    monkeypatch.setattr(simulations, "used", monkey)
    for changed in (load, replace(load, output=[*load.output[:-1], load.output[-1] + 1])):
        for own in (model, replace(model, waking=model.waking + 1e-3)):
            for rule, slots in (("shared", 4), ("shared", 5), ("one at a time", 4)):
                simulations.simulated(changed, rule, own, slots, 1)
    assert len(monkey) == 12


def taken(scale):
    """The measured waits of each process, as the notebook has them."""
    found = measurements.measurements("07-scheduling", "recorded", scale)
    return found[found["usable"]]


@pytest.fixture
def seldom(monkeypatch):
    """One simulation of a load: which predictions there are, and what they know, is the same."""
    for module, name in ((simulations, "ASKED"), (simulations, "SEEDS")):
        monkeypatch.setattr(module, name, 1)


def test_no_way_knows_the_load_that_it_predicts(seldom, monkeypatch):
    """Every call and token of one load takes ten times as long: what is predicted of it stays what it was."""
    recorded = recording.read("07-scheduling", "recorded", "shape")
    rows = recorded.rows
    usual = observed.of_rows(rows)
    at = usual.loads[-1]
    slower = rows["per_second"] == at
    late = {
        "samples_ns": lambda samples: [[10 * ns for ns in each] for each in samples],
        "series": lambda series: series | {"moves": [10.0 for _ in series.get("moves", ())]},
        "requests": lambda told: [replaced(each, token_ns=[10 * ns for ns in each.token_ns]) for each in told],
    }
    changed = rows.assign(**{name: rows[name].mask(slower, rows[name].map(as_late)) for name, as_late in late.items()})
    both = (usual, observed.of_rows(changed))
    monkeypatch.setattr(measurements, "recorded", lambda *asked: replace(recorded, rows=rows))
    before = queueing.predictions(usual, taken("shape"))
    measurements.recording.cache_clear()
    monkeypatch.setattr(measurements, "recorded", lambda *asked: replace(recorded, rows=changed))
    after = queueing.predictions(both[1], taken("shape"))
    measurements.recording.cache_clear()
    same = before["per_second"] == at
    assert before.loc[same, "predicted"].tolist() == pytest.approx(after.loc[same, "predicted"].tolist(), nan_ok=True)
    assert after.loc[same, "measured"].iloc[0].value > 5 * before.loc[same, "measured"].iloc[0].value


def test_a_replay_is_tuned_to_the_constants_with_which_the_other_loads_were_served():
    seen = observed.of_rows(recording.read("07-scheduling", "recorded", "shape").rows)
    ((model, own),) = observed.fitted(seen).items()
    plain = own.untuned()
    served = replace(plain, base=tuple(1.2 * s for s in plain.base), step=tuple(0.7 * s for s in plain.step))
    used = seen.traffic[seen.traffic["per_second"].isin(seen.loads)].drop_duplicates(["per_second", "rule"])
    rows = {(model, row.per_second, row.rule): row for row in used.itertuples()}
    waits = [simulations.simulated(metrics.load_of(row), row.rule, served, int(row.n_seq), 1) for row in rows.values()]
    known = pd.DataFrame(
        [dict(zip(queueing.LOADED, key, strict=True)) | of for key, of in zip(rows, waits, strict=True)]
    )
    found = queueing.tuned(plain, known, rows)
    assert (*found.base, *found.step) == pytest.approx((*served.base, *served.step))


# ------------------------------------------------------------------ fleets


def fleet(**fields):
    base = fleets_plan.fleet("mini").cells[0]
    usual = {"n_machines": 3, "n_requests": 20, "repetitions": 1, "balance": "least work", "pattern": "steady"}
    return change(base, **usual | fields)


@pytest.mark.whole
def test_a_worker_of_a_cluster_simulates_what_is_simulated_here_and_one_that_dies_is_replaced(tmp_path):
    """A real scheduler and a real worker of it, killed while it simulates."""
    dask, distributed = (pytest.importorskip(name) for name in ("dask", "distributed"))
    cell = fleet()
    planned = replace(fleets_plan.fleet("mini"), cells=(cell,))
    with (
        dask.config.set({"distributed.nanny.pre-spawn-environ": {}}),  # it would be left in this process
        distributed.LocalCluster(n_workers=1, threads_per_worker=2, dashboard_address=None) as started,
        cluster.connected(started.scheduler_address) as elsewhere,
    ):
        assert elsewhere.at_once == 2
        killed = started.workers[0].pid

        def kill():
            while not any(each.processing for each in started.scheduler.workers.values()):
                time.sleep(0.02)
            os.kill(killed, signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()
        (row,) = runner.sweep(planned, tmp_path / "there.jsonl", elsewhere=elsewhere).rows
        assert started.workers[0].pid != killed
    expected = fleets.run(cell, tmp_path, lambda stage: None)
    assert (row.cell, row.series, row.checks["complete"]) == (cell, expected.series, True)


def test_what_runs_the_engine_is_not_given_away(tmp_path):
    nowhere = runner.Elsewhere(lambda *told: None, 1)
    with pytest.raises(StudyError, match="07-scheduling: runs the engine"):
        runner.sweep(plan.scheduling("mini"), tmp_path / "j.jsonl", elsewhere=nowhere)
    assert not (tmp_path / "j.jsonl").exists()


def test_a_scheduler_or_rows_that_are_not_there_are_named(monkeypatch):
    pytest.importorskip("distributed")
    monkeypatch.setattr(cluster, "PATIENCE_S", 0.5)
    for address in ("tcp://127.0.0.1:1", "nonsense://x"):
        with pytest.raises(StudyError, match=f"scheduler {address}: is not reached"), cluster.connected(address):
            pass
    with pytest.raises(StudyError, match="07-scheduling at mini: the rows that this fleet is simulated by are not"):
        fleets.measured_calls(change(fleet(), rows_sha256="0" * 64))


def test_the_fewest_machines_are_found_and_too_few_are_told_apart_from_none():
    def needs(least):
        return lambda machines: {"machines": machines, "well": 1.0 if machines >= least else 0.5}

    found = [each for each in fleets.fewest(needs(1.7)) if each["well"] >= fleets_plan.WELL]
    assert 1.7 <= min(each["machines"] for each in found) < 1.7 * fleets.MOST ** (1 / 2**fleets.HALVINGS)
    assert [each["well"] for each in fleets.fewest(needs(100))] == [0.5], "not even the most is enough"


def test_a_sample_of_machines_says_what_all_of_them_do(seen, monkeypatch):
    cell, known = fleet(n_machines=160, n_requests=60), (observed.fitted(seen)[HYBRID], observed.typical(seen))
    sampled = fleets.Days(cell, *known, 0).served(1.2)
    monkeypatch.setattr(fleets, "SAMPLE", 160)
    every = fleets.Days(cell, *known, 0).served(1.2)
    n = 40 * 60
    error = (every["well"] * (1 - every["well"]) / n) ** 0.5 + 1 / n
    assert abs(sampled["well"] - every["well"]) < 6 * error
    assert sampled["ttft_p99"] == pytest.approx(every["ttft_p99"], rel=0.25)
