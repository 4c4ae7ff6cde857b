"""Notebook 11: loads, their times and their faults, against a server that misbehaves and against real ones."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from functools import cache
from itertools import pairwise
from pathlib import Path

import misbehaving
import msgspec
import numpy as np
import psutil
import pytest
from conftest import ATTENTION, HYBRID, mini_file

from plamo_study.analysis import stats
from plamo_study.engine import builds, server_build
from plamo_study.errors import StudyError
from plamo_study.measure import server
from plamo_study.measure.cells import Serving
from plamo_study.measure.process import work
from plamo_study.measure.rows import Request
from plamo_study.measure.server import Setup
from plamo_study.measure.worker import Job
from plamo_study.studies.collect import collect
from plamo_study.studies.serving import analysis, client, judge, knee, load, metrics, plan
from plamo_study.studies.serving.client import Answer, Prompt, Target

MS = 1_000_000
RECORDED = cache(lambda: collect("11-serving", "recorded", "mini"))
WORKLOAD = "plamo_study.studies.serving.workload"
needs_llama = pytest.mark.skipif(server.find() is None, reason="no llama-server: plamo-study server build")
needs_python = pytest.mark.skipif(not server.has_python_server(), reason="the extra [server] is not installed")


@pytest.fixture
def misbehaves(monkeypatch):
    """A server that misbehaves in a way, within this process."""
    with misbehaving.standing_in(monkeypatch) as start:
        yield lambda way="": Target(start(way))


def asked(target, **given):
    async def ask():
        async with client.client(target) as web:
            return await client.ask(web, target, Prompt("0", "Say", 8), **given)

    return client.run(ask())


def loaded(target, prompts, n_clients=0, arrivals=()):
    async def run():
        async with client.client(target) as web:
            if n_clients:
                return await load.closed(web, target, prompts, n_clients)
            return await load.opened(web, target, prompts, arrivals)

    return client.run(run())


# ------------------------------------------------------------------ one request


def test_an_answer_has_its_text_its_counts_and_its_times_in_order(misbehaves):
    answer = asked(misbehaves())
    assert answer.text == "one two three four Say"
    assert (answer.n_prompt, answer.n_gen, answer.failure, answer.divided) == (3, 5, "", False)
    stamps = [answer.due_ns, answer.sent_ns, answer.byte_ns, *answer.token_ns, answer.ended_ns]
    assert stamps == sorted(stamps)
    assert len(answer.token_ns) == 5


def test_chunks_of_two_tokens_are_divided_and_marked_and_an_empty_one_is_no_token(misbehaves):
    answer = asked(misbehaves("in_pairs"))
    assert answer.divided
    assert len(answer.chunk_ns) == 2
    first, second, third, fourth = answer.token_ns
    assert first == second == answer.chunk_ns[0]
    assert first < third < fourth == answer.chunk_ns[1]
    assert answer.chunk_ns[0] - answer.byte_ns > 10 * MS  # the empty chunk came before


def test_reasoning_is_counted_apart(misbehaves):
    answer = asked(misbehaves("thinks"))
    assert (answer.text, answer.thought, len(answer.chunk_ns)) == ("yes", 1, 1)


@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("refuses", "HTTP 503: all slots are busy"),
        ("truncated", "ended before its end"),
        ("cut", "RemoteProtocolError|ReadError"),
        ("malformed", "malformed answer"),
        ("wrong_kind", "malformed answer"),
        ("says_error", "the server says: out of memory"),
        ("redirects", "a redirect elsewhere, refused"),
        ("one_line", "an event of more than"),
        ("gigabyte", "a body of more than"),
    ],
)
def test_a_fault_is_told_in_the_answer_and_the_load_goes_on(misbehaves, monkeypatch, way, why):
    monkeypatch.setattr(client, "MOST_BYTES", 1 << 20)
    target = misbehaves(way)
    found = loaded(target, [Prompt(str(n), "Say", 8) for n in range(3)], n_clients=2)
    assert [answer.prompt.id for answer in found.answers] == ["0", "1", "2"]
    for answer in found.answers:
        assert any(part in answer.failure for part in why.split("|")), answer.failure
        assert answer.ended_ns >= answer.sent_ns


def test_ten_thousand_chunks_of_one_byte_are_one_answer(misbehaves):
    answer = asked(misbehaves("by_bytes"))
    assert (answer.failure, len(answer.text), len(answer.chunk_ns)) == ("", 9_900, 1)


def test_a_server_that_hangs_is_given_up_on(misbehaves):
    answer = asked(misbehaves("hangs"), quiet_s=0.2)
    assert answer.failure == "nothing came for 0.2 s"
    assert answer.text == "one "


def test_a_clock_that_goes_backwards_moves_no_time(misbehaves, monkeypatch):
    backwards = iter(range(10**6, 0, -1))
    monkeypatch.setattr(time, "time", lambda: float(next(backwards)))
    answer = asked(misbehaves())
    assert answer.due_ns <= answer.byte_ns <= answer.ended_ns


def test_a_key_is_sent_and_shown_nowhere(misbehaves):
    target = misbehaves()
    with_key = Target(target.url, key="very-secret")
    asked(with_key)
    assert misbehaving.Handler.keys == ["Bearer very-secret"]
    assert "very-secret" not in repr(with_key)


# ------------------------------------------------------------------ loads


def test_every_request_of_a_closed_load_is_answered_once_and_no_more_at_a_time_than_asked(misbehaves):
    prompts = [Prompt(str(n), f"{n} asks", 8) for n in range(9)]
    found = loaded(misbehaves(), prompts, n_clients=3)
    assert [answer.prompt for answer in found.answers] == prompts
    assert all(answer.text.endswith(answer.prompt.text[:8]) for answer in found.answers)
    events = sorted([(a.sent_ns, 1) for a in found.answers] + [(a.ended_ns, -1) for a in found.answers])
    assert max(np.cumsum([change for _, change in events])) == 3
    assert found.lag_ns


def test_a_late_request_counts_from_when_it_was_due(misbehaves):
    prompts = [Prompt(str(n), "Say", 8) for n in range(3)]
    found = loaded(misbehaves(), prompts, arrivals=[0.0, 0.05, 0.05])
    first, *others = found.answers
    assert all(answer.due_ns - first.due_ns == 50 * MS for answer in others)
    assert all(answer.sent_ns >= answer.due_ns for answer in found.answers)


def test_a_client_that_is_kept_from_its_loop_is_said_to_bind(misbehaves):
    async def hog():
        while True:
            time.sleep(0.02)
            await asyncio.sleep(0.001)

    async def begin(_):  # with the first request: how late an idle loop is was looked at before it
        if not hogging:
            hogging.append(asyncio.create_task(hog()))

    async def run():
        async with client.client(target) as web:
            web.event_hooks = {"request": [begin]}
            found = await load.closed(web, target, [Prompt(str(n), "Say", 8) for n in range(4)], 1)
            hogging[0].cancel()
            return found

    hogging, target = [], misbehaves()
    assert client.run(run()).client_binds()


@pytest.mark.parametrize(("kind", "cv"), [("poisson", 1.0), ("gamma", load.GAMMA_CV)])
def test_arrivals_have_the_rate_and_the_spread_they_are_drawn_with(kind, cv):
    gaps = np.diff(load.arrivals(kind, 20_000, 5.0, seed=1))
    assert 1 / gaps.mean() == pytest.approx(5.0, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)
    assert load.arrivals(kind, 9, 5.0, seed=1) == load.arrivals(kind, 9, 5.0, seed=1)


def test_recorded_arrivals_are_read_and_bad_ones_named(tmp_path):
    path = tmp_path / "times"
    path.write_text("10.0\n10.5\n12\n")
    assert load.arrivals(str(path), 3, 0, 0) == [0.0, 0.5, 2.0]
    with pytest.raises(StudyError, match="3 times for 4"):
        load.arrivals(str(path), 4, 0, 0)
    path.write_text("10.0\nsoon\n")
    with pytest.raises(StudyError, match="soon"):
        load.arrivals(str(path), 1, 0, 0)


def test_more_connections_than_select_can_watch_are_watched_and_a_sleep_stays_exact():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096 if hard == resource.RLIM_INFINITY else min(hard, 4096), hard))
    slept = []

    async def hold(n):
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0, backlog=n)
        port = server.sockets[0].getsockname()[1]
        open_ones = [await asyncio.open_connection("127.0.0.1", port) for _ in range(n)]
        for _ in range(20):
            begin = time.perf_counter()
            await asyncio.sleep(0.0002)
            slept.append(time.perf_counter() - begin)
        highest = max(writer.get_extra_info("socket").fileno() for _, writer in open_ones)
        for _, writer in open_ones:
            writer.close()
        server.close()
        return highest

    assert client.run(hold(600)) > 1023  # two files a connection
    assert min(slept) < 0.001  # what epoll alone rounds up to


def test_lengths_follow_the_published_tables():
    drawn = np.array(load.lengths("conversation", 20_000, 1.0, seed=0))
    assert np.median(drawn, axis=0) == pytest.approx([1020, 129], rel=0.05)
    assert np.quantile(drawn, 0.9, axis=0) == pytest.approx([2734, 424], rel=0.05)
    assert np.median(load.lengths("code", 20_000, 0.1, seed=0), axis=0)[0] == pytest.approx(147, rel=0.06)
    with pytest.raises(StudyError, match="unknown"):
        load.lengths("poems", 1, 1.0, 0)


# ------------------------------------------------------------------ metrics


def request(first_ms, gap_ms, n=5, due_ms=0.0, sent_ms=None, failure=""):
    stamps = [int((due_ms + first_ms + gap_ms * i) * MS) for i in range(n)]
    sent = due_ms if sent_ms is None else sent_ms
    return Request(
        id="0", n_prompt=3, arrived_ns=int(due_ms * MS), token_ns=[] if failure else stamps, failure=failure,
        sent_ns=int(sent * MS), ended_ns=0 if failure else stamps[-1],
    )  # fmt: skip


def test_metrics_are_what_they_are_defined_as():
    told = metrics.of_load([request(100, 10), request(200, 20, due_ms=50), request(0, 0, failure="HTTP 503: busy")])
    assert told["ttft"] == pytest.approx(0.150)
    assert told["tpot"] == pytest.approx(0.015)
    assert told["largest"] == pytest.approx(0.020)
    assert (told["answered"], told["failed"], told["n_tokens"]) == (2, 1, 10)
    assert told["throughput"] == pytest.approx(10 / 0.330)
    assert told["ttft_p90"] != told["ttft_p90"]  # two requests are too few for a percentile


def test_other_tools_leave_out_what_a_request_waited_before_it_was_sent():
    told = metrics.by_tool([request(100, 10, sent_ms=40)])
    assert told["ours"]["ttft"] == told["MLPerf"]["ttft"] == pytest.approx(0.100)
    assert told["vLLM"]["ttft"] == told["AIPerf"]["ttft"] == pytest.approx(0.060)
    assert told["AIPerf"]["itl"] == told["ours"]["tpot"] == pytest.approx(0.010)


def crowded(n_clients, token_ms, wakes):
    """A row of four slots and so many requests at a time, whose tokens take so long by the server's own clock.

    Half of the requests end while others take their places; the rest is answered in no time.
    """
    n, took = 2 * n_clients, [4 * token_ms] * n_clients + [0.4] * n_clients
    series = {"n_prompt": [8.0] * n, "n_gen": [5.0] * n, "prompt_ms": [9.0] * n, "answer_ms": took}
    series |= {"lag": [0.0, token_ms / 2e3, 0.0]} | ({"switches": [5.0 * n * wakes]} if wakes else {})
    requests = [request(9, token_ms, due_ms=100 * i) for i in range(n)]
    told = {"server": "llama-server", "n_clients": n_clients, "checks": {"client_binds": 1.0}}
    return told | {"series": series, "requests": requests}


def test_a_row_s_metrics_are_those_of_its_requests_and_of_the_server_s_own_clock():
    told = {name: (unit, value) for name, unit, value, _ in metrics.measured(crowded(4, 2.0, 20))}
    assert told["ttft"] == ("s", pytest.approx(0.009))
    assert told["own_ttft"] == ("s", pytest.approx(0.009))
    assert told["itl"] == ("s", pytest.approx(0.002))
    assert told["own_tpot_full"] == ("s", pytest.approx(0.002)), "of those that ended while others came"
    assert told["own_tpot"] == ("s", pytest.approx((0.002 + 0.0001) / 2))
    assert told["wakes"] == ("", pytest.approx(20))
    assert (told["late"][1], told["binds"][1]) == (pytest.approx(0.5), 1.0)
    assert "wakes" not in {name for name, *_ in metrics.measured(crowded(4, 2.0, 0))}


def test_a_server_that_answered_nothing_has_no_times():
    row = crowded(4, 2.0, 0)
    row["requests"] = [request(0, 0, failure="ConnectError") for _ in row["requests"]]
    row["series"] |= {"n_gen": [0.0] * 8, "prompt_ms": [0.0] * 8, "answer_ms": [0.0] * 8}
    assert {name for name, *_ in metrics.measured(row)} == {"binds"}


def test_goodput_counts_requests_that_keep_to_both_objectives():
    wanted = knee.Objectives(0.15, 0.015)
    requests = [request(100, 10), request(200, 10), request(100, 20)]
    assert metrics.goodput(requests, wanted) == pytest.approx(1 / metrics.span(requests))


def test_the_knee_lies_between_the_last_rate_that_met_and_the_first_that_did_not():
    assert knee.bracket([4, 8, 6, 7], [1.0, 0.2, 0.95, 0.5]) == (6, 7)
    assert knee.bracket([4.0], [0.0])[0] != knee.bracket([4.0], [0.0])[0]


def test_no_recorded_search_ends_with_a_bracket_that_is_turned_round():
    found = analysis.knees(RECORDED().rows).dropna(subset=["met", "failed"])
    assert len(found) > 10
    assert (found["met"] < found["failed"]).all()


def queue(rng, rate, speed, slots=4, n=16):
    """The share of requests that a queue takes up in half of the time that it takes for each."""
    free, due, kept = np.zeros(slots), np.cumsum(rng.exponential(1 / rate, n)), 0
    for at in due:
        first = free.argmin()
        begins = max(at, free[first])
        free[first] = begins + speed * rng.lognormal(0, 0.2)
        kept += begins - at <= 0.5 * speed
    return kept / n


def searched(rng, speed):
    """Rates and shares of a search by halves, as `knee.sought` makes it."""
    low, high = 0.5 / speed, 8 / speed
    for _ in range(knee.STEPS):
        rate = (low * high) ** 0.5
        share = queue(rng, rate, speed)
        low, high = (rate, high) if share >= knee.ENOUGH else (low, rate)
        yield rate, share


def test_the_knee_s_interval_holds_the_true_knee_of_a_queue_as_often_as_it_says():
    rng, rates = np.random.default_rng(1), np.geomspace(0.5, 8, 25)
    shares = [np.mean([queue(rng, rate, 1.0) for _ in range(400)]) for rate in rates]
    truth = float(np.exp(np.interp(-knee.ENOUGH, -np.array(shares), np.log(rates))))
    found = []
    for _ in range(150):
        speeds = np.exp(0.03 * rng.standard_normal(8))
        tried = [(*step, server) for server, speed in enumerate(speeds) for step in searched(rng, speed)]
        found.append(stats.threshold(*map(list, zip(*tried, strict=True)), knee.ENOUGH, 16))
    assert np.mean([one.low <= truth <= one.high for one in found]) > 0.9
    assert np.median([one.value for one in found]) == pytest.approx(truth, rel=0.05)


def test_answers_of_requests_are_counted_as_rows_count_them():
    rows = RECORDED().rows
    loads = rows[(rows["workload"] == "serving") & (rows["status"] == "ok") & ~rows["anchor"]]
    told = analysis.answers(rows)
    for name in ("differ", "near_ties"):
        assert told[name].sum() == sum(check[name] for check in loads["checks"])
    assert told["runs"].sum() == len(loads)


# ------------------------------------------------------------------ judging


def answer(*texts, gaps=(), failure=""):
    return Answer(Prompt("0", "", 8), 0, texts=list(texts), tokens=list(texts), gaps=list(gaps), failure=failure)


def test_answers_part_at_a_token_and_a_near_tie_is_told_by_the_gap_there():
    alone = answer("a ", "b ", "c ", gaps=(2.0, 0.05, 3.0))
    assert judge.difference(alone, answer("a ", "b ", "c ")) is None
    tie = judge.difference(alone, answer("a ", "x ", "y "))
    assert (tie.token, tie.gap, tie.is_near_tie) == (1, 0.05, True)
    assert not judge.difference(alone, answer("z ", "b ", "c ")).is_near_tie
    assert judge.difference(alone, answer("a ", "b ")).token == 2


def test_an_answer_that_broke_off_is_judged_as_far_as_it_came():
    alone = answer("a ", "b ", "c ")
    assert judge.difference(alone, answer("a ", failure="cut")) is None
    assert judge.difference(alone, answer(failure="refused")) is None
    assert judge.difference(alone, answer("x ", failure="cut")).token == 0


# ------------------------------------------------------------------ servers


def stand_in(tmp_path, monkeypatch, way="", before=""):
    monkeypatch.setenv(server.NAMED, str(misbehaving.as_llama_server(tmp_path, way, before)))
    return Setup("llama-server", mini_file(HYBRID))


def test_a_server_is_gone_when_it_is_left_also_by_an_error(tmp_path, monkeypatch):
    setup = stand_in(tmp_path, monkeypatch)
    seen = []

    def fails():
        with server.started(setup) as running:
            seen.append((running.process, running.ended()))
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    process, ended = seen[0]
    assert ended == ""
    assert process.poll() is not None


def test_a_server_that_ends_before_it_listens_says_its_last_words(tmp_path, monkeypatch):
    setup = stand_in(tmp_path, monkeypatch, before="echo no memory is left; exit 3")
    with pytest.raises(StudyError, match=r"exit code 3.*no memory is left"), server.started(setup):
        pass


def test_a_server_that_is_slow_to_start_is_waited_for_and_not_for_ever(tmp_path, monkeypatch):
    setup = stand_in(tmp_path, monkeypatch, before="sleep 0.5")
    with server.started(setup) as running:
        assert running.ended() == ""
    with pytest.raises(StudyError, match="does not listen"), server.started(setup, start_s=0.1):
        pass


def test_a_death_in_mid_stream_is_noticed_with_its_signal(tmp_path, monkeypatch):
    with server.started(stand_in(tmp_path, monkeypatch, "killed")) as running:
        found = asked(Target(running.url))
        assert found.failure
        assert running.ended(5.0) == "the server ended: SIGKILL"


def test_a_server_named_that_is_none_is_refused(monkeypatch):
    monkeypatch.setenv(server.NAMED, "/nowhere/llama-server")
    with pytest.raises(StudyError, match="is no program"):
        server.find()


def cell(model=HYBRID, **fields):
    usual = {
        "scale": "mini",
        "dtype": "F16",
        "n_threads": 1,
        "n_prompt": 64,
        "n_gen": 8,
        "n_seq": 4,
        "n_requests": 4,
        "n_clients": 2,
    }
    return Serving(model=model, **usual | fields)


def run(which, **given):
    outcome = work(Job(cell=which, path=str(mini_file(which.model))), 60.0, workload=WORKLOAD, **given)
    assert outcome.status == "ok", outcome.failure
    return outcome.measured


def test_a_server_that_dies_under_load_is_a_row_with_signal_assertion_and_what_was_in_flight(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, "dies_together")
    measured = run(cell(n_requests=3))
    assert measured.valid is False
    assert measured.checks["alive"] is False
    assert [bool(each.failure) for each in measured.requests] == [True, True, True]
    for each in measured.requests:
        assert "the server ended: SIGABRT, GGML_ASSERT(fits) failed" in each.failure


def test_a_killed_worker_leaves_no_server_behind(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, "hangs")
    lifeline, ours = os.pipe()
    command = [sys.executable, "-m", "plamo_study.measure.worker", str(lifeline), WORKLOAD]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, pass_fds=[lifeline], start_new_session=True, **quiet
    )  # fmt: skip
    os.close(lifeline)
    child.stdin.write(msgspec.json.encode(Job(cell=cell(), path=str(mini_file(HYBRID)))) + b"\n")
    child.stdin.flush()
    end, servers = time.monotonic() + 20, []
    while not servers and time.monotonic() < end:
        servers = [
            p for p in psutil.Process(child.pid).children(recursive=True) if "misbehaving.py" in str(p.cmdline())
        ]
        time.sleep(0.02)
    assert servers
    os.close(ours)  # as when the runner is killed
    assert not psutil.wait_procs(servers, timeout=10)[1]
    child.wait(10)


def test_an_interrupted_client_leaves_no_server_behind(tmp_path, monkeypatch):
    setup = stand_in(tmp_path, monkeypatch)
    told = (
        "import signal; from pathlib import Path; from plamo_study.measure import server\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs begin deaf to it
        f"with server.started(server.Setup('llama-server', Path({str(setup.model)!r}))) as s:\n"
        "    print(s.process.pid, flush=True); s.process.wait()\n"
    )
    child = subprocess.Popen([sys.executable, "-c", told], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    pid = int(child.stdout.readline())
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=15)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@needs_llama
def test_the_real_server_answers_prompts_of_the_length_asked_for():
    measured = run(cell(n_clients=1, n_requests=2, n_gen=6))
    assert measured.valid, measured.checks
    assert measured.series["n_gen"] == [6.0, 6.0]
    assert all(n == pytest.approx(64, abs=2) for n in measured.series["n_prompt"])
    for each in measured.requests:
        stamps = [each.arrived_ns, each.sent_ns, each.byte_ns, *each.token_ns, each.ended_ns]
        assert stamps == sorted(stamps)
        assert len(each.token_ns) == 6


@needs_llama
def test_concurrent_requests_are_mixed_up_by_the_server_as_released_and_not_with_attention_only():
    wrong = run(cell(n_prompt=256, n_gen=16, n_requests=8, n_clients=4))
    assert wrong.valid is False
    assert wrong.checks["differ"] or not wrong.checks["alive"]
    right = run(cell(ATTENTION, n_prompt=256, n_gen=16, n_requests=8, n_clients=4))
    assert right.checks["differ"] == right.checks["near_ties"]
    assert right.checks["alive"]


@needs_python
def test_the_server_in_python_answers_one_request_at_a_time_and_counts_where_it_does_not_stream():
    measured = run(cell(server="llama_cpp.server", n_seq=1, n_requests=3, n_clients=3))
    assert measured.valid, measured.checks
    assert all(n > 0 for n in measured.series["n_gen"])
    spans = sorted((each.token_ns[0], each.token_ns[-1]) for each in measured.requests)
    assert all(last < first for (_, last), (first, _) in pairwise(spans))


# ------------------------------------------------------------------ plan and build


def test_the_plan_asks_the_servers_that_are_here_and_the_one_in_python_where_there_is_none(monkeypatch):
    monkeypatch.setattr(server, "find", lambda: Path("/x"))
    monkeypatch.setattr(server, "has_python_server", lambda: True)
    whole = plan.serving("mini")
    asked = [each for each in whole.cells if isinstance(each, Serving)]
    shapes = {(each.n_prompt, each.n_gen) for each in asked if each.n_clients == 1 and each.server == plan.LLAMA}
    assert shapes >= {(p, g) for p in plan.PROMPTS for g in plan.ANSWERS}
    assert {each.n_clients for each in asked if each.n_seq == 16} == set(plan.AT_ONCE)
    assert all(each.server == plan.LLAMA and each.model == HYBRID for each in whole.compared)
    monkeypatch.setattr(server, "find", lambda: None)
    assert {each.server for each in plan.serving("mini").cells if isinstance(each, Serving)} == {plan.PYTHON}
    monkeypatch.setattr(server, "has_python_server", lambda: False)
    assert {each.server for each in plan.serving("mini").cells if isinstance(each, Serving)} == {plan.PYTHON}
    setup = Setup("llama_cpp.server", mini_file(HYBRID))
    with pytest.raises(StudyError, match=r"framework is not installed"), server.started(setup):
        pass


def test_where_compiling_took_its_time_is_read_from_ninjas_log():
    log = "# ninja log v5\n0\t2000\t1\tsrc/llama.o\tx\n0\t500\t1\ttools/server/a.o\tx\n0\t100\t1\tbin/llama-server\tx\n"
    assert server_build.spent_by_part(log) == {"libllama": 2.0, "server and tools": 0.5, "linking": 0.1}


def test_a_server_of_a_build_that_is_not_here_is_refused():
    with pytest.raises(StudyError):
        server_build.libraries("no-such-build")
    assert server_build.libraries() == builds.installed_libraries()
