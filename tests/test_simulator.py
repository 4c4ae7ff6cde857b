"""The simulated clock: queueing theory's closed forms, what must be conserved, and the same times by the same seed."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from llama_meter.errors import StudyError
from llama_meter.simulate import clock, policies
from llama_meter.simulate.clock import Simulated
from llama_meter.simulate.loop import Load, quantile, serve
from llama_meter.simulate.steps import AWAKE_S, Calls, fit
from llama_meter.simulate.traffic import shaped

N = 10_000
SIGMAS = 4  # of the sampling error that a mean may be off: one test in some 16,000 fails by chance


def standard_error(values: np.ndarray, batches: int = 50) -> float:
    """Standard error of the mean of correlated values, from the means of `batches` stretches (batch means)."""
    means = [part.mean() for part in np.array_split(values, batches)]
    return float(np.std(means, ddof=1) / batches**0.5)


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


@pytest.mark.parametrize("kind", ["M/M/1", "M/D/1", "M/G/1"])
def test_one_server_waits_as_theory_says(kind):
    rng = np.random.default_rng(7)
    work, second_moment = {
        "M/M/1": (rng.exponential(1.0, N), 2),
        "M/D/1": (np.ones(N), 1),
        "M/G/1": (rng.gamma(0.5, 2.0, N), 0.5 * 4 + 1),
    }[kind]
    load = Load(np.cumsum(rng.exponential(1 / 0.7, N)).tolist(), [1] * N, [1] * N)
    waited = serve(load, policies.shared, Exact(work.tolist()), slots=1).ttft - work
    theory = 0.7 * second_moment / (2 * (1 - 0.7))  # Pollaczek and Khinchine
    assert abs(waited.mean() - theory) < SIGMAS * standard_error(waited)


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
    model, n, load = machine(), 3, traffic(600, 1.0)
    seconds = [
        float(serve(Load([0.0], [prompt], [output]), policies.one_at_a_time, Simulated(model), 1).finish[0])
        for prompt, output in zip(load.prompt, load.output, strict=True)
    ]
    load = replace(load, arrives=[at * float(np.mean(seconds)) / 0.85 / n for at in load.arrives])
    expected, found = by_ciw(load, seconds, n), np.full(len(load), np.nan)
    for share in clock.least_work(load, n, seconds):
        found[share] = serve(clock.chosen(load, share), policies.one_at_a_time, Simulated(model), 1).finish
    assert (np.array(expected) - load.arrives > 2 * np.array(seconds)).mean() > 0.1, "many had to wait"
    assert found == pytest.approx(expected, rel=1e-9)


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


@pytest.mark.parametrize("name", [*policies.PLAIN, *(f"{name} 64" for name in policies.SIZED)])
def test_what_comes_in_goes_out_whatever_the_policy_and_little_s_law_holds(name):
    load = traffic(250)
    served = serve(load, policies.named(name), Simulated(machine(0.1)), slots=8)
    assert served.written == sum(load.output)
    assert served.read == sum(load.prompt)
    assert (served.ttft > 0).all(), "no token before its prompt"
    assert (served.finish >= served.first).all()
    assert served.weights.sum() == sum(load.output) - len(load), "a gap for every token but the first"
    assert served.busy <= served.finish.max() - load.arrives[0] + 1e-9
    spent = (served.gaps * served.weights).sum()
    assert spent == pytest.approx((served.finish - served.first).sum(), rel=1e-9)
    events = sorted([(at, 1) for at in load.arrives] + [(at, -1) for at in served.finish])
    times, inside = np.array([at for at, _ in events]), np.cumsum([change for _, change in events])
    assert inside.min() >= 0
    assert (np.diff(times) * inside[:-1]).sum() == pytest.approx((served.finish - load.arrives).sum(), rel=1e-9)


def test_round_robin_deals_everybody_to_one_machine_in_turn():
    assert [list(share) for share in clock.round_robin(traffic(7), 3)] == [[0, 3, 6], [1, 4], [2, 5]]


def test_a_shape_moves_requests_and_keeps_their_mean():
    load = traffic(5000, 100.0)
    for shape in ("steady", "diurnal", "bursty"):
        made = shaped(load, shape)
        assert (made.prompt, made.output) == (load.prompt, load.output)
        assert made.arrives == sorted(made.arrives)
        assert made.arrives[-1] == pytest.approx(load.arrives[-1])
        rates = np.histogram(made.arrives, 10, (0, load.arrives[-1]))[0] / 500
        assert (np.ptp(rates) > 0.5) == (shape != "steady")


def test_the_same_seed_gives_the_same_times_and_a_policy_that_serves_nobody_is_refused():
    run = lambda seed: serve(traffic(), policies.chunked(64), Simulated(machine(0.1), seed), 8).finish  # noqa: E731
    assert (run(1) == run(1)).all()
    assert (run(1) != run(2)).any()
    with pytest.raises(StudyError, match="leaves everybody waiting"):
        serve(traffic(), lambda queue: (False, 0), Simulated(machine()), 8)
    for name in ("", "chunked", "chunked 0", "chunked -1", "chunked x", "shared 4", "fastest"):
        with pytest.raises(StudyError, match="unknown; known: one at a time"):
            policies.named(name)


# ------------------------------------------------------------------ the step model


def test_a_fit_gives_back_what_the_calls_were_made_of():
    model = machine()
    assert model.seconds(8, 8 * 500, 0, 0) == pytest.approx(2e-3 + 8 * 2e-4 + 1e-8 * 4000, rel=1e-3)
    assert model.seconds(0, 0, 64, 1024) == pytest.approx(1e-3 + 64e-4 + 1e-8 * 1024, rel=1e-3)
    both = model.seconds(4, 400, 65, 0)
    assert both == pytest.approx(model.seconds(5, 400, 0, 0) + model.seconds(0, 0, 64, 1), rel=1e-9)
    # twice as slow from 9 sequences on: no slope smears it over its neighbours
    calls = [(n, n * held, 0, 0, 1e-3 * (1 + (n > 8))) for n in range(1, 13) for held in (100, 200, 300)]
    table = np.array(calls + [(0, 0, 16, 0, 1e-3)] * 3)
    switch = fit("switch", Calls(*(column.astype(int) for column in table.T[:4]), table[:, 4]))
    assert switch.seconds(9, 900, 0, 0) == pytest.approx(2 * switch.seconds(8, 800, 0, 0))


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


def test_what_was_not_measured_is_refused_with_the_command_that_measures_it():
    refusals = {
        (18, 18, 0, 0): "18 sequences",
        (0, 0, 513, 0): "513 tokens",
        (2, 9000, 0, 0): "9000 tokens",
        (0, 0, 64, 5000): "behind 5000",
        (17, 17, 16, 0): "18 sequences",
    }
    for call, what in refusals.items():
        with pytest.raises(StudyError, match=what) as refused:
            machine().seconds(*call)
        assert refused.value.mend == "plamo-study measure 07-scheduling"


def test_many_calls_at_once_take_what_each_takes_alone():
    model = machine(noise=0.1)
    grid = product((0, 1, 2, 16, 17, 18), (0, 100, 9000), (0, 1, 16, 17, 40, 512, 513), (0, 64, 5000))
    asked = [call for call in grid if call[0] or call[2]]

    def alone(call):
        try:
            return model.seconds(*call)
        except StudyError:
            return np.nan

    together = model.of(Calls(*np.array(asked).T, np.ones(len(asked))))
    assert together == pytest.approx([alone(call) for call in asked], rel=1e-12, nan_ok=True)
    assert 0 < np.isnan(together).sum() < len(asked)


def test_an_untuned_replay_knows_two_constants():
    model = machine(0.1, woken=Calls(*np.array([[0], [0], [16], [0]]), np.array([1.0]))).untuned()
    token, step = model.seconds(0, 0, 512, 0) / 512, model.seconds(17, 17 * 500, 0, 0)
    assert token == pytest.approx(1e-3 / 512 + 1e-4, rel=0.3)
    for size, before in ((1, 0), (64, 64), (511, 4096)):
        assert model.seconds(0, 0, size, before) == pytest.approx(size * token)
    assert {model.seconds(n, n * held, 0, 0) for n in (1, 8, 17) for held in (1, 4096)} == {step}
    assert (model.moving, len(model.waking), {*np.concatenate(list(model.factors.values()))}) == (0.0, 0, {1.0})


def test_a_quantile_counts_everybody_who_waited():
    values, weights = np.array([3.0, 1.0, 2.0]), np.array([1, 8, 1])
    assert quantile(values, weights, [0.5, 0.8, 0.9, 0.99]).tolist() == [1.0, 1.0, 2.0, 3.0]
    assert np.isnan(quantile(np.array([]), np.array([]), 0.5))
