"""The simulated clock: queueing theory's closed forms, what must be conserved, and the same times by the same seed."""

import time
from dataclasses import replace

import ciw
import numpy as np
import pytest
import queues

from plamo_study.errors import StudyError
from plamo_study.studies.scheduling import analysis, clock, closed, policies
from plamo_study.studies.scheduling.clock import Simulated
from plamo_study.studies.scheduling.loop import Load, quantile, serve
from plamo_study.studies.scheduling.steps import AWAKE_S, Calls, fit
from plamo_study.studies.scheduling.traffic import shaped

N = 40_000
SIGMAS = 4  # of the sampling error that a mean may be off: one test in some 16,000 fails by chance


class Exact:
    """A machine whose prompts take just the seconds given, and whose steps take one each."""

    def __init__(self, work):
        self.work, self.now = work, 0.0

    def wait(self, until):
        self.now = until
        return until

    def call(self, decoding, step, keys, reading, chunk, before):
        self.now += (self.work[reading] if chunk else 0.0) + (1.0 if step else 0.0)
        return self.now

    def leave(self, decoding, slot, reading):
        return self.now

    put_aside = take_back = lambda self, request, slot, held: self.now


def poisson(rate, n=N, seed=1, output=1):
    rng = np.random.default_rng(seed)
    arrives = np.cumsum(rng.exponential(1 / rate, n)).tolist()
    return Load(arrives, [1] * n, [output] * n)


def waited(load, work):
    """Seconds that each request waits until it is served, by one server at a time."""
    served = serve(load, policies.shared, Exact(work), slots=1)
    return served.ttft - np.asarray(work)


RNG = np.random.default_rng(7)
SERVICES = {
    "M/M/1": (RNG.exponential(1.0, N), queues.mm1(0.7, 1.0)),
    "M/D/1": (np.ones(N), queues.md1(0.7, 1.0)),
    "M/G/1": (RNG.gamma(0.5, 2.0, N), closed.mg1(0.7, 1.0, 0.5 * 4 + 1)),
}


@pytest.mark.parametrize("kind", SERVICES)
def test_one_server_waits_as_theory_says(kind):
    work, expected = SERVICES[kind]
    found = waited(poisson(0.7), work.tolist())
    assert abs(found.mean() - expected) < SIGMAS * queues.standard_error(found)


@pytest.mark.parametrize("n", [2, 5])
def test_least_work_is_one_queue_before_all_servers(n):
    load, work = poisson(0.8 * n), RNG.exponential(1.0, N).tolist()
    of = dict(zip(load.arrives, work, strict=True))
    shares = [clock.chosen(load, share) for share in clock.least_work(load, n, work)]
    found = np.concatenate([waited(share, [of[at] for at in share.arrives]) for share in shares])
    order = np.argsort(np.concatenate([share.arrives for share in shares]))
    assert abs(found.mean() - queues.mmc(0.8 * n, 1.0, n)) < SIGMAS * queues.standard_error(found[order])


def by_ciw(load, seconds, servers):
    """When each request is done by Ciw (Palmer et al., Journal of Simulation 13, 2019): one queue, who came first is
    first, so many servers."""
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


@pytest.mark.parametrize("n", [1, 3])
def test_every_request_is_done_when_a_published_simulator_says(n):
    """Prompts and answers of many lengths at 85 % of the capacity, one at a time on each of n machines."""
    model = machine()
    load = traffic(2000, 1.0)
    seconds = [
        float(serve(Load([0.0], [prompt], [output]), policies.one_at_a_time, Simulated(model), 1).finish[0])
        for prompt, output in zip(load.prompt, load.output, strict=True)
    ]
    load = replace(load, arrives=[at * float(np.mean(seconds)) / 0.85 / n for at in load.arrives])
    expected = by_ciw(load, seconds, n)
    found = np.full(len(load), np.nan)
    for share in clock.least_work(load, n, seconds):
        served = serve(clock.chosen(load, share), policies.one_at_a_time, Simulated(model), 1)
        found[share] = served.finish
    assert (np.array(expected) - load.arrives > 2 * np.array(seconds)).mean() > 0.2, "many had to wait"
    assert found == pytest.approx(expected, rel=1e-9)


def test_round_robin_waits_longer_and_as_theory_says():
    load, work = poisson(1.6), RNG.exponential(1.0, N).tolist()
    shares = [clock.chosen(load, share) for share in clock.round_robin(load, 2)]
    found = np.concatenate([waited(share, work[n::2]) for n, share in enumerate(shares)])
    assert abs(found.mean() - queues.em1(1.6, 1.0, 2)) < SIGMAS * queues.standard_error(found)
    assert queues.mmc(1.6, 1.0, 2) < queues.em1(1.6, 1.0, 2) < queues.mm1(0.8, 1.0)


def test_waits_are_exponential_where_services_are():
    found = waited(poisson(0.7), SERVICES["M/M/1"][0].tolist())
    wait = queues.mm1(0.7, 1.0)
    for seconds in (0.0, 1.0, 5.0):
        expected = closed.exponential_wait(np.array([seconds]), wait, 0.7)[0]
        within = found <= seconds + 1e-9
        assert abs(within.mean() - expected) < SIGMAS * queues.standard_error(within.astype(float))


# ------------------------------------------------------------------ a machine with steps and chunks


def machine(noise=0.0, held=4096, woken=None):
    """A step model fitted on calls of a made-up machine: 2 ms and 0.2 ms a sequence, a prompt token 0.1 ms."""
    rng = np.random.default_rng(3)
    steps = [(n, n * held, 0, 0, 2e-3 + 2e-4 * n + 1e-8 * n * held) for n in range(1, 18) for _ in range(5)]
    steps += [(n, n, 0, 0, 2e-3 + 2e-4 * n + 1e-8 * n) for n in range(1, 18) for _ in range(5)]
    chunks = [
        (0, 0, n, before, 1e-3 + 1e-4 * n + 1e-8 * before) for n in (1, 16, 64, 512) for before in (0, 64, 1024, 4096)
    ]
    table = np.array(steps + chunks * 2)
    table[:, 4] *= np.exp(noise * rng.standard_normal(len(table)))
    return fit("made-up", Calls(*(column.astype(int) for column in table.T[:4]), table[:, 4]), woken=woken)


def traffic(n=400, rate=20.0, seed=5):
    rng = np.random.default_rng(seed)
    arrives = np.cumsum(rng.exponential(1 / rate, n)).tolist()
    return Load(arrives, rng.integers(16, 400, n).tolist(), rng.integers(1, 40, n).tolist())


def test_first_tokens_served_one_at_a_time_come_as_theory_says():
    """Prompts and answers of many lengths at 60 % of the capacity: the mean is exact, the tail an approximation."""
    model, rule = machine(), "one at a time"
    load = traffic(8000, 20.0)
    seconds = [
        model.seconds(0, 0, prompt, 0) + sum(model.seconds(1, prompt + n, 0, 0) for n in range(output - 1))
        for prompt, output in zip(load.prompt, load.output, strict=True)
    ]
    rate = 0.6 / float(np.mean(seconds))
    load = replace(load, arrives=[at * 20.0 / rate for at in load.arrives])
    found = serve(load, policies.named(rule), Simulated(model, noisy=False), 8).ttft
    said = analysis.theory(load, rate, rule, model, 8)
    assert abs(found.mean() - said["ttft_mean"]) < SIGMAS * queues.standard_error(found)
    assert said["ttft_p90"] == pytest.approx(np.quantile(found, 0.9), rel=0.15)
    assert analysis.theory(load, rate / 0.59, rule, model, 8) == {}, "nothing is steady at the capacity"


def test_theory_reads_a_prompt_in_the_policy_s_chunks():
    model, load = machine(), traffic(400, 1.0)
    means = [analysis.theory(load, 1.0, rule, model, 8)["ttft_mean"] for rule in ("shared", "chunked 16", "apart 16")]
    assert means[0] < means[1] == means[2]


NAMES = [*policies.PLAIN, *(f"{name} 64" for name in policies.SIZED)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("room", "preempt"), [(1 << 40, ""), (1200, ""), (600, "recompute"), (600, "save")])
def test_what_comes_in_goes_out_whatever_the_policy(name, room, preempt):
    load = traffic()
    served = serve(load, policies.named(name), Simulated(machine(0.1)), slots=8, room=room, preempt=preempt)
    assert served.written == sum(load.output)
    assert served.read >= sum(load.prompt)
    assert (served.read == sum(load.prompt)) == (preempt != "recompute" or not served.preempted)
    assert (served.ttft > 0).all(), "no token before its prompt"
    assert (served.finish >= served.first).all()
    assert served.weights.sum() == sum(load.output) - len(load), "a gap for every token but the first"
    assert served.busy <= served.finish.max() - load.arrives[0] + 1e-9
    spent = (served.gaps * served.weights).sum()
    assert spent == pytest.approx((served.finish - served.first).sum(), rel=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_little_s_law_holds(name):
    """Time-averaged requests in the system are arrivals a second times the mean time each is there."""
    load = traffic()
    served = serve(load, policies.named(name), Simulated(machine(0.1)), slots=8)
    events = sorted([(at, 1) for at in load.arrives] + [(at, -1) for at in served.finish])
    times, inside = np.array([at for at, _ in events]), np.cumsum([change for _, change in events])
    assert inside.min() >= 0
    area, span = (np.diff(times) * inside[:-1]).sum(), times[-1] - times[0]
    assert area / span == pytest.approx(len(load) / span * (served.finish - load.arrives).mean(), rel=1e-9)


def test_the_same_seed_gives_the_same_times_and_another_others():
    run = lambda seed: serve(traffic(), policies.chunked(64), Simulated(machine(0.1), seed), 8).finish  # noqa: E731
    assert (run(1) == run(1)).all()
    assert (run(1) != run(2)).any()


def test_memory_that_preempts_really_does_and_memory_that_waits_never_overflows():
    served = serve(traffic(), policies.shared, Simulated(machine()), 8, room=600, preempt="recompute")
    assert served.preempted > 0
    waiting = serve(traffic(), policies.shared, Simulated(machine()), 8, room=600)
    assert waiting.preempted == 0
    assert waiting.ttft.mean() > serve(traffic(), policies.shared, Simulated(machine()), 8).ttft.mean()


def test_a_saved_state_spares_the_reading_and_costs_its_loading():
    slow = Simulated(machine(), loads=lambda held: 0.5)
    free = Simulated(machine())
    times = [serve(traffic(), policies.shared, each, 8, room=600, preempt="save").finish.max() for each in (slow, free)]
    assert times[0] > times[1]


def test_continuous_batching_beats_static_batches_and_these_beat_one_at_a_time():
    """With everybody there at once: an answer of 40 tokens holds its batch, and one at a time nothing is shared."""
    load = traffic(rate=1e6)
    made = [serve(load, policies.named(name), Simulated(machine()), 8).throughput
            for name in ("shared", "static batches", "one at a time")]  # fmt: skip
    assert made[0] > made[1] > made[2]


def test_a_chunk_is_no_larger_than_asked_and_a_budget_finds_its_size():
    seen = []

    class Watched(Simulated):
        def call(self, decoding, step, keys, reading, chunk, before):
            seen.append((len(decoding), chunk, -self.now))
            now = super().call(decoding, step, keys, reading, chunk, before)
            seen[-1] = (*seen[-1][:2], seen[-1][2] + now)
            return now

    serve(traffic(rate=200.0), policies.chunked(48), Watched(machine()), 8)
    assert max(chunk for _, chunk, _ in seen) == 48
    seen.clear()
    serve(traffic(rate=200.0), policies.budget(20), Watched(machine()), 8)
    late = [seconds for _, chunk, seconds in seen[50:] if chunk]
    assert np.median(late) <= 20e-3
    assert max(chunk for _, chunk, _ in seen) > 64


def test_a_fleet_serves_everybody_once_however_they_are_shared_out():
    load = traffic(600, 100.0)
    work = [1e-4 * prompt + 3e-3 * output for prompt, output in zip(load.prompt, load.output, strict=True)]
    for shares in (clock.round_robin(load, 6), clock.least_work(load, 6, work)):
        assert sorted(number for share in shares for number in share) == list(range(len(load)))
        served = [serve(clock.chosen(load, share), policies.chunked(64), Simulated(machine()), 4) for share in shares]
        assert sum(each.written for each in served) == sum(load.output)


@pytest.mark.parametrize("shape", ["steady", "diurnal", "bursty"])
def test_a_shape_moves_requests_and_keeps_their_mean(shape):
    load = traffic(5000, 100.0)
    made = shaped(load, shape)
    assert (made.prompt, made.output) == (load.prompt, load.output)
    assert made.arrives == sorted(made.arrives)
    assert made.arrives[-1] == pytest.approx(load.arrives[-1])
    early = np.histogram(made.arrives, 10, (0, load.arrives[-1]))[0] / 500
    assert (np.ptp(early) > 0.5) == (shape != "steady")


def test_a_policy_that_leaves_everybody_waiting_is_told_so():
    with pytest.raises(StudyError, match="leaves everybody waiting"):
        serve(traffic(), lambda queue: (False, 0), Simulated(machine()), 8)


def test_a_request_that_never_fits_is_refused():
    with pytest.raises(StudyError, match="request 0: needs 900"):
        serve(Load([0.0], [900], [10]), policies.shared, Simulated(machine()), 8, room=600)


@pytest.mark.parametrize("name", ["", "chunked", "chunked 0", "chunked -1", "chunked x", "shared 4", "fastest"])
def test_a_policy_nobody_knows_is_refused(name):
    with pytest.raises(StudyError, match="unknown; known: one at a time"):
        policies.named(name)


# ------------------------------------------------------------------ somebody else's simulator


def elsewhere(load, model, slots):
    """First and last token of every request by sched-sim, its own loop and queue, with our times of a call.

    It counts a decode step for every token of the answer, the first one included, so it is asked for one fewer.
    """
    from sched_sim.core.event_engine import Simulator
    from sched_sim.core.request import Request
    from sched_sim.hardware.latency_model import RooflineLatencyModel
    from sched_sim.hardware.presets import PRESETS
    from sched_sim.memory.block_manager import BlockManager
    from sched_sim.memory.preemption import PreemptionHandler
    from sched_sim.schedulers.fcfs import FCFSScheduler

    class Ours(RooflineLatencyModel):
        def compute_prefill_step_time(self, n):
            return model.seconds(0, 0, n, 0)

        def compute_decode_step_time(self, n, held):
            return model.seconds(n, held, 0, 0)

        def compute_mixed_step_time(self, n, many, held):
            return model.seconds(many, held, n, 0)

    hardware = PRESETS["t4"]
    blocks = BlockManager(hardware)
    ours = Ours(hardware)
    scheduler = FCFSScheduler(blocks, ours, PreemptionHandler(blocks, ours), max_batch_size=slots)
    asked = [
        Request(request_id=str(n), arrived_at=at, prompt_tokens=prompt, output_tokens=output - 1)
        for n, (at, prompt, output) in enumerate(zip(load.arrives, load.prompt, load.output, strict=True))
    ]
    simulator = Simulator(hardware, scheduler)
    simulator.submit_workload(asked)
    simulator.run()
    return np.array([[each.first_token_at, each.completed_at] for each in asked]).T


@pytest.mark.parametrize(("slots", "rate"), [(1, 12.0), (8, 1.0)])
def test_a_published_simulator_gives_the_same_times(slots, rate):
    """One slot under load; and several where two prompts hardly ever wait at once, which that one reads in one call."""
    pytest.importorskip("sched_sim", reason="pip install sched-sim==0.2.1")
    load = traffic(300, rate)
    load = Load(load.arrives, load.prompt, [max(n, 2) for n in load.output])
    served = serve(load, policies.shared, Simulated(machine(), noisy=False), slots)
    first, finish = elsewhere(load, machine(), slots)
    if slots == 1:
        assert served.ttft.max() > 5 * np.median(np.diff(load.arrives)), "somebody waited"
        assert np.allclose(served.first, first, rtol=1e-9)
        assert np.allclose(served.finish, finish, rtol=1e-9)
    else:
        assert np.median(np.abs(served.finish - finish)) < 1e-9
        assert np.quantile(served.finish, 0.99) == pytest.approx(np.quantile(finish, 0.99), rel=1e-3)


# ------------------------------------------------------------------ the step model


def test_a_fit_gives_back_what_the_calls_were_made_of():
    model = machine()
    assert model.seconds(8, 8 * 500, 0, 0) == pytest.approx(2e-3 + 8 * 2e-4 + 1e-8 * 4000, rel=1e-3)
    assert model.seconds(0, 0, 64, 1024) == pytest.approx(1e-3 + 64e-4 + 1e-8 * 1024, rel=1e-3)
    both = model.seconds(4, 400, 65, 0)
    assert both == pytest.approx(model.seconds(5, 400, 0, 0) + model.seconds(0, 0, 64, 1), rel=1e-9)


def test_a_switch_of_kernels_stays_where_it_is():
    """Twice as slow from 9 sequences on, and no slope smears it over its neighbours."""
    calls = [(n, n * held, 0, 0, 1e-3 * (1 + (n > 8))) for n in range(1, 13) for held in (100, 200, 300)]
    table = np.array(calls + [(0, 0, 16, 0, 1e-3)] * 3)
    model = fit("switch", Calls(*(column.astype(int) for column in table.T[:4]), table[:, 4]))
    assert model.seconds(9, 900, 0, 0) == pytest.approx(2 * model.seconds(8, 800, 0, 0))


def test_residuals_are_a_distribution_and_are_drawn_from():
    model = machine(0.2)
    assert 0.1 < np.log(model.factors["step"]).std() < 0.3
    steady, noisy = (serve(traffic(), policies.prefill_first, Simulated(model, noisy=n), 8) for n in (False, True))
    assert noisy.itl(0.1) < steady.itl(0.1)


def test_only_the_first_call_after_idleness_takes_what_waking_took():
    """Prompts of 16 tokens took 10 ms more behind idleness; before the third request there is just too little of it."""
    none = np.zeros(4, int)
    woken = Calls(none, none, np.full(4, 16), none, np.full(4, 1e-3 + 16e-4 + 10e-3))
    model = machine(woken=woken)
    assert model.waking == pytest.approx(10e-3, rel=1e-3)
    plain = serve(Load([0.0, 1.0], [16, 16], [4, 4]), policies.shared, Simulated(machine()), 8)
    done = 1.0 + 10e-3 + plain.finish[0]
    load = Load([0.0, 1.0, done + 0.9 * AWAKE_S], [16] * 3, [4] * 3)
    late = serve(load, policies.shared, Simulated(model), 8)
    assert late.ttft - plain.ttft[0] == pytest.approx([0.0, 10e-3, 0.0], abs=1e-5)
    just_asleep = Load([0.0, 1.0, done + 1.1 * AWAKE_S], [16] * 3, [4] * 3)
    assert serve(just_asleep, policies.shared, Simulated(model), 8).ttft[2] == pytest.approx(late.ttft[1])
    assert late.tpot == pytest.approx(np.full(3, plain.tpot[0]))
    assert serve(load, policies.shared, Simulated(model, noisy=False), 8).ttft == pytest.approx(plain.ttft[0], abs=1e-9)


@pytest.mark.parametrize(
    ("call", "what"),
    [((18, 18, 0, 0), "18 sequences"), ((0, 0, 513, 0), "513 tokens"), ((2, 9000, 0, 0), "9000 tokens"),
     ((0, 0, 64, 5000), "behind 5000"), ((17, 17, 16, 0), "18 sequences")],
)  # fmt: skip
def test_what_was_not_measured_is_refused_with_the_command_that_measures_it(call, what):
    with pytest.raises(StudyError, match=what) as refused:
        machine().seconds(*call)
    assert refused.value.mend == "plamo-study measure 10-scheduling"


def test_nothing_is_fitted_on_steps_alone():
    of = machine()
    with pytest.raises(StudyError, match="0 chunks were measured alone"):
        fit("steps", Calls(*(np.ones(5, int) for _ in range(2)), *(np.zeros(5, int) for _ in range(2)), np.ones(5)))
    assert of.range.decoding == (1, 17)


def test_a_quantile_counts_everybody_who_waited():
    values, weights = np.array([3.0, 1.0, 2.0]), np.array([1, 8, 1])
    assert quantile(values, weights, [0.5, 0.8, 0.9, 0.99]).tolist() == [1.0, 1.0, 2.0, 3.0]
    assert np.isnan(quantile(np.array([]), np.array([]), 0.5))


def test_a_million_requests_are_all_served():
    """How long it takes is recorded, not asserted; here a tenth of them."""
    n = 100_000
    rng = np.random.default_rng(0)
    load = Load(np.cumsum(rng.exponential(1 / 60, n)).tolist(), (16 * rng.integers(1, 17, n)).tolist(),
                rng.integers(1, 33, n).tolist())  # fmt: skip
    began = time.perf_counter()
    served = serve(load, policies.shared, Simulated(machine(0.1)), slots=16)
    assert np.isfinite(served.finish).all()
    print(f"{n:,} requests, {served.calls:,} calls in {time.perf_counter() - began:.1f} s")
