"""Chapter 9: loads, their times and their faults, against a server that misbehaves and against real ones."""

import re
from dataclasses import replace

import misbehaving
import msgspec
import numpy as np
import pandas as pd
import pytest
from conftest import ATTENTION, HYBRID, mini_file

from llama_meter import stats
from llama_meter.cells import Serving
from llama_meter.errors import StudyError
from llama_meter.measure.tolerance import NEAR_TIE
from llama_meter.rows import Request
from llama_meter.serve import client, load, server
from llama_meter.serve.client import Answer, Prompt, Target
from llama_meter.serve.server import Setup
from plamo_study.measurements import answers_of
from plamo_study.studies.serving import law as analysis, metrics as of_serving, work as serving

MS, NS = 1_000_000, 1e9
needs_llama = pytest.mark.skipif(server.find() is None, reason="no llama-server: plamo-study engine build llama-server")


@pytest.fixture
def misbehaves(monkeypatch):
    """A server that misbehaves in a way, within this process."""
    with misbehaving.standing_in(monkeypatch) as start:
        yield lambda way="": Target(start(way))


def asked(target):
    return client.over(target, lambda web: client.ask(web, target, Prompt("0", "Say", 8)))


def closed(target, prompts, n_clients):
    return client.over(target, lambda web: load.closed(web, target, prompts, n_clients))


def say(n):
    return [Prompt(str(number), f"{number} asks", 8) for number in range(n)]


# ------------------------------------------------------------------ one request


def test_an_answer_has_its_text_its_counts_and_its_times_in_order(misbehaves):
    target = Target(misbehaves().url, key="very-secret")
    answer = asked(target)
    assert answer.text == "one two three four Say"
    assert (answer.n_prompt, answer.n_gen, answer.failure, answer.divided) == (3, 5, "", False)
    stamps = [answer.due_ns, answer.sent_ns, answer.byte_ns, *answer.token_ns, answer.ended_ns]
    assert stamps == sorted(stamps)
    assert len(answer.token_ns) == 5
    assert misbehaving.Handler.keys == ["Bearer very-secret"]
    assert "very-secret" not in repr(target)


@pytest.mark.case(3)
def test_chunks_are_no_tokens(misbehaves):
    pairs = asked(misbehaves("in_pairs"))
    assert pairs.divided
    assert replace(pairs, chunk_ns=[10, 20, 40], n_gen=6).token_ns == [10, 10, 15, 20, 30, 40]
    assert pairs.chunk_ns[0] - pairs.byte_ns > 10 * MS, "the empty chunk came before"


def taken(*events):
    """The answer that a stream of these events makes."""
    answer = Answer(Prompt("0", "", 8), 0)
    for number, event in enumerate(events):
        client._take(answer, msgspec.json.decode(msgspec.json.encode(event), type=client.Event), number)
    return answer


WRITTEN = {  # what one choice of an event holds -> the words in it
    "reasoning under two names": ({"delta": {"reasoning_content": "a", "reasoning": "a", "content": None}}, "a"),
    "a role": ({"delta": {"role": "assistant", "content": ""}}, ""),
}


@pytest.mark.case(3)
@pytest.mark.parametrize("what", WRITTEN)
def test_whatever_a_model_writes_is_counted_and_timed(what):
    choice, words = WRITTEN[what]
    answer = taken({"choices": [choice]})
    assert (answer.text, answer.tokens, len(answer.chunk_ns)) == (words, [words] if words else [], bool(words))
    assert np.isnan(answer.gaps).all()


def test_leads_are_read_from_both_forms_of_log_probabilities():
    newer = {"content": [{"token": "b", "top_logprobs": [{"logprob": -0.1}, {"logprob": -2.1}]}]}
    older = {"tokens": ["b"], "top_logprobs": [{"b": -0.1, "c": -2.1}]}
    for event in ({"delta": {"content": "b"}, "logprobs": newer}, {"text": "b", "logprobs": older}):
        assert taken({"choices": [event]}).gaps == [pytest.approx(2.0)]


FAULTS = {
    "refuses": "HTTP 503: .*all slots are busy",
    "truncated": "ended before its end",
    "says_error": "the server says: .*out of memory",
    "hangs": "ReadTimeout",
}


@pytest.mark.parametrize("way", FAULTS)
def test_a_fault_is_told_in_the_answer_and_the_load_goes_on(misbehaves, monkeypatch, way):
    monkeypatch.setattr(client, "QUIET_S", 0.3)
    answers = closed(misbehaves(way), say(3), n_clients=2).answers
    assert [answer.prompt.id for answer in answers] == ["0", "1", "2"]
    for answer in answers:
        assert re.search(FAULTS[way], answer.failure)
        assert answer.ended_ns >= answer.sent_ns


# ------------------------------------------------------------------ loads


def test_a_closed_load_answers_everybody_once_and_an_open_one_counts_from_when_each_was_due(misbehaves):
    target, prompts = misbehaves(), say(9)
    found = closed(target, prompts, n_clients=3)
    assert [answer.prompt for answer in found.answers] == prompts
    assert all(answer.text.endswith(answer.prompt.text[:8]) for answer in found.answers)
    events = sorted([(a.sent_ns, 1) for a in found.answers] + [(a.ended_ns, -1) for a in found.answers])
    assert max(np.cumsum([change for _, change in events])) == 3
    assert found.lag_ns
    first, *others = client.over(target, lambda web: load.opened(web, target, say(3), [0.0, 0.05, 0.05])).answers
    assert all(answer.due_ns - first.due_ns == 50 * MS for answer in others)
    assert all(answer.sent_ns >= answer.due_ns for answer in others)


@pytest.mark.parametrize(("lag_ms", "binds"), [(0.4, False), (0.6, True)])
def test_a_client_binds_that_is_late_by_more_than_a_twentieth_of_a_gap(lag_ms, binds):
    answers = [Answer(say(1)[0], 0, chunk_ns=[10 * MS * n for n in range(4)])]
    assert load.Loaded(answers, 0, [int(lag_ms * MS)] * 3).client_binds() is binds


# ------------------------------------------------------------------ metrics


def request(first_ms, gap_ms, n=5, due_ms=0.0, sent_ms=None, failure=""):
    stamps = [int((due_ms + first_ms + gap_ms * i) * MS) for i in range(n)]
    sent = due_ms if sent_ms is None else sent_ms
    return Request(
        id="0",
        n_prompt=3,
        arrived_ns=int(due_ms * MS),
        token_ns=[] if failure else stamps,
        failure=failure,
        sent_ns=int(sent * MS),
        ended_ns=0 if failure else stamps[-1],
    )


def test_a_row_s_metrics_are_those_of_its_requests_and_of_the_server_s_own_clock():
    """Four slots, four clients: half of the requests end while others take their places, the rest in no time."""
    series = {"n_prompt": [8.0] * 8, "n_gen": [5.0] * 8, "prompt_ms": [9.0] * 8, "answer_ms": [8.0] * 4 + [0.4] * 4}
    series |= {"lag": [0.0, 1e-3, 0.0]}
    row = {"server": "llama-server", "n_clients": 4, "checks": {"client_binds": 1.0}, "series": series}
    row["requests"] = [request(9, 2.0, due_ms=100 * i) for i in range(8)]
    told = {name: (unit, value) for name, unit, value, _ in of_serving.serving(row)}
    assert [told[name] for name in ("ttft", "own_ttft")] == [("s", pytest.approx(0.009))] * 2
    assert told["itl"] == ("s", pytest.approx(0.002))
    assert told["own_tpot"] == ("s", pytest.approx((0.002 + 0.0001) / 2))
    assert (told["late"][1], told["binds"][1]) == (pytest.approx(0.5), 1.0)
    row["requests"] = [request(0, 0, failure="ConnectError") for _ in row["requests"]]
    row["series"] |= {"n_gen": [0.0] * 8, "prompt_ms": [0.0] * 8, "answer_ms": [0.0] * 8}
    assert {name for name, *_ in of_serving.serving(row)} == {"binds"}, "who answered nothing has no times"


OF_ROW = {"workload": "serving", "status": "ok", "anchor": False, "model": "m", "dtype": "F16", "build": "stock"}
OF_ROW |= {"server": "s", "n_seq": 4, "n_clients": 2, "key": "k"}


def test_an_answer_is_counted_once_by_what_became_of_it_and_a_prompt_once_however_often_it_was_asked():
    """Two prompts of eight: the first changed twice and once cut off as alone, the second parts at a near-tie."""
    differs, gap = [3, 0, -1, -1, -1, -1, -1, -1, 2, 1], [1.0] + [0.1] * 9
    died = "the server ended: SIGABRT, GGML_ASSERT(x) failed"
    requests = [request(1, 1) for _ in range(8)] + [request(1, 1), request(1, 1)]
    requests[2] = msgspec.structs.replace(requests[2], failure=died)
    requests[3] = request(0, 0, failure="ConnectError")
    gap[8] = 2.0
    row = OF_ROW | {"n_prompt": 8, "n_gen": 5, "requests": requests, "series": {"differs": differs, "gap": gap}}
    told = answers_of(pd.DataFrame([row]))
    assert told.answer.tolist() == ["changed", "near-tie", "lost", "lost", *["as alone"] * 4, "changed", "near-tie"]
    assert told.prompt.tolist() == [*range(8), 0, 1]
    assert told.reached.tolist() == [n != 3 for n in range(10)]
    [one] = analysis.under_load(told).itertuples()
    assert (one.prompts, one.prompts_changed, one.answers, one.changed, one.near_ties) == (7, 1, 9, 2, 2)
    assert (one.servers, one.died) == (1, 1)
    assert analysis.under_load(told.assign(n_clients=0)).empty, "nobody else asked"
    none = answers_of(pd.DataFrame([row | {"status": "failed"}]))
    assert list(none[none.reached]) == list(told), "a frame without lines has its columns, also when it is filtered"


def test_every_rate_that_came_at_random_times_has_its_share_of_requests_that_met_the_objectives():
    series = {"n_prompt": [8.0] * 4, "n_gen": [5.0] * 4, "prompt_ms": [9.0] * 4, "answer_ms": [8.0] * 4}
    series |= {"lag": [0.0, 1e-3, 0.0]}
    row = {"server": "llama-server", "n_clients": 0, "checks": {"client_binds": 0.0}, "series": series, "scale": "mini"}
    row |= {"per_second": 2.0, "requests": [request(9, 2), request(9, 2), request(9, 11), request(251, 2)]}
    told = {name: samples.tolist() for name, _, _, samples in of_serving.serving(row)}
    assert (told["rate"], told["met"]) == ([2.0], [0.5]), "one came late, and one was slow"
    row["series"] = series | {"rates": [1.0, 4.0], "met": [1.0, 0.25]}
    told = {name: samples.tolist() for name, _, _, samples in of_serving.serving(row)}
    assert (told["rate"], told["met"]) == ([1.0, 4.0], [1.0, 0.25])


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
    """Rates and shares of a search by halves, as `load.sought` makes it."""
    low, high = 0.5 / speed, 8 / speed
    for _ in range(load.STEPS):
        rate = (low * high) ** 0.5
        share = queue(rng, rate, speed)
        low, high = (rate, high) if share >= load.ENOUGH else (low, rate)
        yield rate, share


def test_the_knee_is_that_of_a_queue():
    rng, rates = np.random.default_rng(1), np.geomspace(0.5, 8, 25)
    shares = [np.mean([queue(rng, rate, 1.0) for _ in range(100)]) for rate in rates]
    truth = float(np.exp(np.interp(-load.ENOUGH, -np.array(shares), np.log(rates))))
    found = []
    for _ in range(50):
        tried = [step for _ in range(8) for step in searched(rng, np.exp(0.03 * rng.standard_normal()))]
        found.append(stats.threshold(*map(list, zip(*tried, strict=True)), load.ENOUGH, 16))
    assert np.median(found) == pytest.approx(truth, rel=0.05)


def answer(*texts, gaps=(), failure=""):
    return Answer(Prompt("0", "", 8), 0, texts=list(texts), tokens=list(texts), gaps=list(gaps), failure=failure)


ALONE = answer("a ", "b ", "c ", gaps=(2.0, NEAR_TIE - 0.01, NEAR_TIE))


@pytest.mark.parametrize(
    ("together", "token", "verdict"),
    [
        (answer("a b ", "c "), -1, "same"),  # other chunks
        (answer("a ", "x ", "y "), 1, "near-tie"),
        (answer("a ", "b "), 2, "other"),
        (answer("a ", failure="cut"), -1, "same"),  # compared as far as it got
    ],
)
def test_an_answer_is_the_one_alone_or_parts_where_rounding_may_decide_or_is_another(together, token, verdict):
    found = client.parted(ALONE, together)
    assert (found.token, found.verdict) == (token, verdict)


# ------------------------------------------------------------------ servers


def stand_in(tmp_path, monkeypatch, way="", before=""):
    monkeypatch.setenv(server.NAMED, str(misbehaving.as_llama_server(tmp_path, way, before)))
    return Setup(mini_file(HYBRID))


@pytest.mark.parametrize(
    ("before", "why"), [("echo no memory is left; exit 3", "exit code 3.*no memory is left"), ("sleep 5", "listen")]
)
def test_a_server_that_does_not_start_says_its_last_words_and_a_slow_one_is_not_waited_for_for_ever(
    before, why, tmp_path, monkeypatch
):
    setup = stand_in(tmp_path, monkeypatch, before=before)
    with pytest.raises(StudyError, match=why), server.started(setup, start_s=0.5):
        pass
    monkeypatch.setenv(server.NAMED, "/nowhere/llama-server")
    with pytest.raises(StudyError, match="is no program"):
        server.find()


def cell(model=HYBRID, **fields):
    usual = {"scale": "mini", "dtype": "F16", "n_threads": 1, "n_prompt": 64, "n_gen": 8, "n_seq": 4}
    return Serving(model=model, **usual | {"n_requests": 4, "n_clients": 2} | fields)


def run(which):
    return serving.run(which, mini_file(which.model), lambda stage: None)


@pytest.mark.parametrize("load", [{"n_clients": 2}, {"n_clients": 0, "pattern": "poisson", "per_second": 20.0}])
def test_a_row_has_every_answer_beside_the_one_alone(load, tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch)
    measured = run(cell(n_requests=10, **load))
    assert measured.valid, measured.checks
    assert measured.series["differs"] == [-1.0] * 10
    assert bool(measured.series.get("seed")) == (not load["n_clients"])
    for each in measured.requests:
        stamps = [each.arrived_ns, each.sent_ns, each.byte_ns, *each.token_ns, each.ended_ns]
        assert stamps == sorted(stamps)


def test_a_server_that_dies_under_load_is_a_row_with_signal_assertion_and_what_was_in_flight(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, "dies_together")
    measured = run(cell(n_requests=3))
    assert measured.valid is False
    assert measured.checks["alive"] is False
    assert len(measured.requests) == 3
    for each in measured.requests:
        assert "the server ended: SIGABRT, GGML_ASSERT(fits) failed" in each.failure


@pytest.mark.case(5)
def test_a_refused_request_is_refused_and_not_computed_wrong(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, "wants_a_key")
    with pytest.raises(StudyError, match=r"refused \d+ requests: HTTP 401: "):
        run(cell())


@needs_llama
def test_concurrent_requests_are_mixed_up_by_the_server_as_released_and_not_with_attention_only():
    wrong = run(cell(n_prompt=256, n_gen=16, n_requests=8, n_clients=4))
    assert wrong.valid is False
    assert wrong.checks["differ"] or not wrong.checks["alive"]
    right = run(cell(ATTENTION, n_prompt=256, n_gen=16, n_requests=8, n_clients=4))
    assert right.checks["differ"] == right.checks["near_ties"]
    assert right.checks["alive"]
    assert right.series["n_gen"] == [16.0] * 8
    assert all(n == pytest.approx(256, abs=2) for n in right.series["n_prompt"])
    assert all(len(each.token_ns) == 16 for each in right.requests)
