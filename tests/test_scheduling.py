"""Chapter 7: policies drive a simulated clock and the real engine, and every answer is right."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from conftest import ATTENTION, HYBRID, mini_file
from msgspec.structs import replace as replaced

from llama_meter.cells import PARTS, SPLIT, Traffic
from llama_meter.errors import StudyError
from llama_meter.measure import runner
from llama_meter.measure.plan import change
from plamo_study import measurements
from plamo_study.cli import cluster
from plamo_study.read import recording
from plamo_study.studies.latency import law, loop, metrics, plan, service, work
from plamo_study.studies.latency.law import CALL, fit
from plamo_study.studies.latency.loop import Load, Simulated, policy, serve

ENOUGH = 1e-2  # of the logits: what rounding explains of F16 files; the defects guarded against are 0.4 and more
RULES = ("shared", "one at a time", "chunked 64", "decode first 64")

# ------------------------------------------------------------------ the loop on a simulated clock


def calls(table):
    """Calls as `fit` takes them: (decoding, keys, chunk, before, seconds) each."""
    made = pd.DataFrame(np.array(table, float), columns=[*CALL, "seconds"])
    return made.astype(dict.fromkeys(CALL, int)).assign(idle=0.0)


def machine(noise=0.0):
    """A step model fitted on calls of a made-up machine: 2 ms and 0.2 ms a sequence, a prompt token 0.1 ms."""
    steps = [
        (n, n * held, 0, 0, 2e-3 + 2e-4 * n + 1e-8 * n * held)
        for n in range(1, 18)
        for held in (4096, 1)
        for _ in range(5)
    ]
    chunks = [
        (0, 0, n, before, 1e-3 + 1e-4 * n + 1e-8 * before) for n in (1, 16, 64, 512) for before in (0, 64, 1024, 4096)
    ]
    table = calls(steps + chunks * 2)
    table["seconds"] *= np.exp(noise * np.random.default_rng(3).standard_normal(len(table)))
    return fit(table)


def traffic(n=400, rate=20.0):
    rng = np.random.default_rng(5)
    arrives = np.cumsum(rng.exponential(1 / rate, n)).tolist()
    return Load(arrives, rng.integers(16, 400, n).tolist(), rng.integers(1, 40, n).tolist())


def by_ciw(load, seconds, servers):
    """When each request is done by Ciw (Palmer et al., Journal of Simulation 13, 2019): one queue, who came first is
    first, so many servers."""
    import ciw  # a third of a second, for one test

    gaps = [*np.diff([0.0, *load.arrives]).tolist(), 1e9]  # and nobody else
    network = ciw.create_network(
        arrival_distributions=[ciw.dists.Sequential(gaps)],
        service_distributions=[ciw.dists.Sequential(seconds)],
        number_of_servers=[servers],
    )
    simulation = ciw.Simulation(network)
    simulation.simulate_until_max_time(1e8)
    records = sorted(simulation.get_all_records(), key=lambda record: record.id_number)
    assert [record.arrival_date for record in records] == pytest.approx(load.arrives)
    return [record.service_end_date for record in records]


def test_every_request_is_done_when_a_published_simulator_says():
    """Prompts and answers of many lengths at 85 % of the capacity, one at a time on each of three machines."""
    model, n, load, rule = machine(), 3, traffic(600, 1.0), policy("one at a time")
    seconds = [
        float(serve(Load([0.0], [prompt], [output]), rule, Simulated(model), 1)[0][-1])
        for prompt, output in zip(load.prompt, load.output, strict=True)
    ]
    load = replace(load, arrives=[at * float(np.mean(seconds)) / 0.85 / n for at in load.arrives])
    expected, ends = by_ciw(load, seconds, n), np.full(len(seconds), np.nan)
    for share in law.least_work(load, n, seconds):
        ends[share] = [times[-1] for times in serve(load.chosen(share), rule, Simulated(model), 1)]
    assert (np.array(expected) - load.arrives > 2 * np.array(seconds)).mean() > 0.1, "many had to wait"
    assert ends == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("rule", RULES)
def test_what_comes_in_goes_out_whatever_the_policy_and_little_s_law_holds(rule):
    load, model = traffic(250), machine(0.1)
    served, again, other = (serve(load, policy(rule), Simulated(model, seed), slots=8) for seed in (1, 1, 2))
    first, finish = (np.array([times[at] for times in served]) for at in (0, -1))
    assert (finish == [times[-1] for times in again]).all(), "the same seed, the same times"
    assert (finish != [times[-1] for times in other]).any()
    assert [*map(len, served)] == load.output
    assert (first > load.arrives).all(), "no token before its prompt"
    assert all((np.diff(times) > 0).all() for times in served)
    events = sorted([(at, 1) for at in load.arrives] + [(at, -1) for at in finish])
    times, inside = np.array([at for at, _ in events]), np.cumsum([change for _, change in events])
    assert inside.min() >= 0
    assert (np.diff(times) * inside[:-1]).sum() == pytest.approx((finish - load.arrives).sum(), rel=1e-9)


# ------------------------------------------------------------------ the step model


def test_a_fit_gives_back_what_the_calls_were_made_of():
    model = machine()
    assert model.seconds(8, 8 * 500, 0, 0) == pytest.approx(2e-3 + 8 * 2e-4 + 1e-8 * 4000, rel=1e-3)
    assert model.seconds(0, 0, 64, 1024) == pytest.approx(1e-3 + 64e-4 + 1e-8 * 1024, rel=1e-3)
    both = model.seconds(4, 400, 65, 0)
    assert both == pytest.approx(model.seconds(5, 400, 0, 0) + model.seconds(0, 0, 64, 1), rel=1e-9)
    # twice as slow from 9 sequences on: no slope smears it over its neighbours
    steps = [(n, n * held, 0, 0, 1e-3 * (1 + (n > 8))) for n in range(1, 13) for held in (100, 200, 300)]
    switch = fit(calls(steps + [(0, 0, 1, 0, 1e-3)] * 3))
    assert switch.seconds(9, 900, 0, 0) == pytest.approx(2 * switch.seconds(8, 800, 0, 0))
    for call in ((18, 18, 0, 0), (1, 9000, 0, 0), (0, 0, 513, 0), (0, 0, 16, 5000)):
        with pytest.raises(StudyError, match="was not measured"):
            model.seconds(*call)


# ------------------------------------------------------------------ the engine, driven by policies


def cell_of(model=HYBRID, rule="chunked 64", **fields):
    usual = {"n_prompt": 256, "n_gen": 8, "n_seq": 4, "n_requests": 12, "per_second": 200.0}
    return Traffic(model=model, scale="mini", dtype="F16", rule=rule, **usual | fields)


def run(cell):
    return work.run(cell, mini_file(cell.model), lambda stage: None)


@pytest.mark.parametrize(
    ("model", "rule"),
    [(HYBRID, "chunked 64"), (HYBRID, "decode first 32"), (HYBRID, SPLIT), (ATTENTION, "shared")],
)
def test_every_answer_is_the_one_its_tokens_give_alone(model, rule):
    """Slots are left and filled, prompts ride along in pieces, sequences move: no answer notices."""
    cell = cell_of(model, rule, n_threads=2 if rule == SPLIT else 1)
    measured, load = run(cell), loop.drawn(cell)
    assert measured.valid, measured.checks
    assert measured.checks["second_path_error"] < ENOUGH
    assert [request.n_prompt for request in measured.requests] == load.prompt
    assert [len(request.token_ns) for request in measured.requests] == load.output
    assert [request.arrived_ns / 1e9 for request in measured.requests] == pytest.approx(load.arrives, abs=1e-6)
    for request in measured.requests:
        assert request.arrived_ns < request.token_ns[0], "no token before its prompt"
        assert all(np.diff(request.token_ns) > 0)
    if rule == SPLIT:
        assert service.reading_threads(cell) == 1, "of two in all"
    series = measured.series
    assert sum(series["chunk"]) == sum(load.prompt)
    assert sum(series["decoding"]) == sum(load.output) - cell.n_requests
    assert max(series["decoding"]) <= cell.n_seq
    assert len(series["chunk"]) == len(measured.samples_ns[0])


def test_the_engine_makes_the_calls_that_the_simulation_makes():
    """All are there at once, so no clock decides: both sides have to do the same, call by call."""
    cell = cell_of(per_second=1e9)
    series, made = run(cell).series, []

    class Watched(Simulated):
        def call(self, decoding, keys, reading, chunk, before):
            made.append((len(decoding), keys, chunk, before))
            return super().call(decoding, keys, reading, chunk, before)

    load = replace(loop.drawn(cell), arrives=[0.0] * 12)
    steps = [(n, n * held, 0, 0, 1e-3) for n in range(1, 5) for held in (1, 512) for _ in range(3)]
    even = fit(calls(steps + [(0, 0, n, at, 1e-3) for n in (1, 256) for at in (0, 64, 256)]))
    serve(load, policy(cell.rule), Watched(even), cell.n_seq)
    first = next(n for n, many in enumerate(series["decoding"]) if many)  # the first request may come a call earlier
    live = list(zip(*(map(int, series[name]) for name in CALL), strict=True))
    assert live[first:] == made[first:]


def test_parts_hold_every_kind_of_call_that_traffic_makes():
    cell = cell_of(HYBRID, PARTS, n_requests=1, n_gen=16, n_prompt=128)
    measured = run(cell)
    assert measured.valid, measured.checks
    columns = [measured.series[name] for name in CALL]
    fitted = fit(calls(np.array([*columns, np.array(measured.samples_ns[0]) / 1e9]).T))
    assert (len(fitted.step), len(fitted.base)) == (cell.n_seq, cell.n_prompt)
    assert fitted.held == fitted.before == cell.n_prompt + cell.n_gen - 1
    loaded = cell_of(n_prompt=128)
    served = serve(loop.drawn(loaded), policy("chunked 64"), Simulated(fitted), loaded.n_seq)
    assert [*map(len, served)] == loop.drawn(loaded).output


# ------------------------------------------------------------------ predictions


def test_a_percentile_counts_gaps_and_one_of_too_few_requests_is_not_given():
    """The 99th percentile of 48 requests is the slowest of them."""
    ends = np.cumsum([0.0, *[1e-3] * 390, *[3e-3] * 10])
    few, enough = (metrics.waits(np.zeros(n), [ends + 1, *np.linspace(0.001, 1, n - 1)[:, None]]) for n in (48, 299))
    assert [name for name in few if np.isnan(few[name])] == ["ttft_p95", "ttft_p99"]
    assert not [name for name in enough if np.isnan(enough[name])]
    assert [few["itl_p95"], few["itl_p99"]] == pytest.approx([1e-3, 3e-3])


@pytest.fixture(scope="module")
def seen():
    """What chapter 7 shows of a file of full size."""
    return law.of_rows(recording.read("07-scheduling", "recorded", "shape").rows)


def test_no_way_knows_the_load_that_it_predicts(seen, monkeypatch):
    """Every call and token of one load takes ten times as long: what is predicted of it stays what it was."""
    monkeypatch.setattr(law, "SIMULATED", 1)  # simulation of a load: what they know is the same
    monkeypatch.setattr(law, "TUNED", law.TUNED[:2])
    recorded = recording.read("07-scheduling", "recorded", "shape")
    rows, at = recorded.rows, seen.loads[-1]
    late = {
        "samples_ns": lambda samples: [[10 * ns for ns in each] for each in samples],
        "series": lambda series: series | {"moves": [10.0 for _ in series.get("moves", ())]},
        "requests": lambda came: [replaced(each, token_ns=[10 * ns for ns in each.token_ns]) for each in came],
    }
    slower = {
        name: rows[name].mask(rows["per_second"] == at, rows[name].map(as_late)) for name, as_late in late.items()
    }
    before, after = (
        law.predictions(law.of_rows(part.rows), measured[measured["usable"] & (measured["rule"] != PARTS)])
        for part in (recorded, replace(recorded, rows=rows.assign(**slower)))
        for measured in (measurements.tidy(part),)
    )
    before, after = (lines[lines["per_second"] == at].reset_index() for lines in (before, after))
    assert before["predicted"].tolist() == pytest.approx(after["predicted"].tolist(), nan_ok=True)
    assert after["ratio"][0].value < before["ratio"][0].value / 5


# ------------------------------------------------------------------ fleets


def fleet(**fields):
    base = plan.fleet("mini").cells[0]
    return change(base, **{"n_machines": 3, "n_requests": 20, "repetitions": 1, "pattern": "steady"} | fields)


@pytest.mark.whole
def test_a_worker_of_a_cluster_simulates_what_is_simulated_here(tmp_path):
    dask, distributed = (pytest.importorskip(name) for name in ("dask", "distributed"))
    cell = fleet()
    with (
        dask.config.set({"distributed.nanny.pre-spawn-environ": {}}),  # it would be left in this process
        distributed.LocalCluster(n_workers=1, threads_per_worker=2, dashboard_address=None) as started,
        cluster.connected(started.scheduler_address) as elsewhere,
    ):
        planned = replace(plan.fleet("mini"), cells=(cell,))
        (row,) = runner.sweep(planned, tmp_path / "there.jsonl", elsewhere=elsewhere).rows
    expected = law.run(cell, tmp_path, lambda stage: None)
    assert (row.cell, row.series, row.checks["complete"]) == (cell, expected.series, True)


def test_the_fewest_machines_are_found_and_too_few_are_told_apart_from_none():
    enough = [machines for machines, well in law.fewest(lambda n: 1.0 if n >= 1.7 else 0.5) if well >= plan.WELL]
    assert 1.7 <= min(enough) < 1.7 * law.MOST ** (1 / 2**law.HALVINGS)
    assert [*law.fewest(lambda n: 0.5)] == [(law.MOST, 0.5)], "not even the most is enough"
