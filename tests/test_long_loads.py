"""Notebook 11's two long comparisons: another load generator beside our client, and half an hour of load."""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import misbehaving
import msgspec
import numpy as np
import pytest
from conftest import ATTENTION, mini_file
from documents import upstream
from trials import beside, crowd, soak

from llama_meter import paths
from llama_meter.engine import server_build
from llama_meter.errors import StudyError
from llama_meter.serve import server, traffic
from llama_meter.serve.server import Setup
from plamo_study.laws import serving
from plamo_study.read import results
from plamo_study.read.results import AIPERF, OURS, PATCHED, RELEASED, Beside, Minute, Run, Soak

STAND_IN = """#!{python}
import json, pathlib, sys
if "--version" in sys.argv:
    sys.exit(print("0.13.0"))
told = dict(zip(sys.argv, sys.argv[1:]))
asked = [json.loads(line)["text"] for line in open(told["--input-file"])]
assert len(asked) == int(told["--request-count"]) and json.loads(told["--extra-inputs"])["max_tokens"]
assert (pathlib.Path(told["--tokenizer"]) / "tokenizer.json").exists()
out = pathlib.Path(told["--output-artifact-dir"])
out.mkdir()
times = {{"time_to_first_token": 20.0, "inter_token_latency": 1.5, "request_latency": 35.0}}
metrics = {{name: {{"value": value, "unit": "ms"}} for name, value in times.items()}}
metrics["output_sequence_length"] = {{"value": 11, "unit": "tokens"}}
(out / "profile_export.jsonl").write_text("".join(json.dumps({{"metrics": metrics}}) + "\\n" for _ in asked))
(out / "profile_export_aiperf.json").write_text(json.dumps({{"output_token_throughput": {{"avg": 50.0}}}}))
"""


@pytest.fixture
def stands_in(tmp_path, monkeypatch):
    """A llama-server that misbehaves in a way."""
    return lambda way="": monkeypatch.setenv(server.NAMED, str(misbehaving.as_llama_server(tmp_path, way)))


def program(folder, text):
    path = folder / "aiperf"
    path.write_text(text)
    path.chmod(0o755)
    return path


# ------------------------------------------------------------------ AIPerf


def test_both_clients_are_asked_in_turn_with_the_same_prompts_and_what_they_say_is_kept(
    stands_in, tmp_path, monkeypatch
):
    stands_in()
    monkeypatch.setitem(beside.LOADS, "mini", {1: 2, 4: 6})
    aiperf = program(tmp_path, STAND_IN.format(python=sys.executable))
    found = beside.compare(mini_file(ATTENTION), "mini", aiperf, rounds=2)
    assert found.version == "AIPerf 0.13.0"
    assert [run.tool for run in found.runs] == [OURS, AIPERF, OURS, AIPERF, AIPERF, OURS, AIPERF, OURS]
    assert [run.n_clients for run in found.runs] == [1, 1, 4, 4] * 2
    assert {len(run.ttft) for run in found.runs if run.n_clients == 4} == {6}
    assert all(run.counted == sum(run.n_gen) and run.token > 0 for run in found.runs if run.tool == OURS)
    assert {run.counted for run in found.runs if run.tool == AIPERF} == {0}, "this one asks nothing"
    theirs = found.runs[1]
    assert (theirs.ttft[0], theirs.itl[0], theirs.n_gen[0], theirs.throughput) == (0.02, 0.0015, 11, 50.0)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Beside) == found


def test_a_program_that_is_no_aiperf_or_had_requests_unanswered_is_named_with_what_installs_one(stands_in, tmp_path):
    for text, why in (("#!/bin/sh\nexit 1\n", "failed"), ("", "cannot be run")):
        with pytest.raises(StudyError, match=why) as told:
            beside.version(program(tmp_path, text))
        assert "pip install aiperf" in told.value.mend
    with pytest.raises(StudyError, match="wrote no records"):
        beside.told_by(tmp_path, 1, 1, 0)
    records = [{"metrics": {}}, {"error": {"message": "refused"}}]
    (tmp_path / "profile_export.jsonl").write_text("\n".join(map(json.dumps, records)))
    with pytest.raises(StudyError, match="1 of 2 requests were answered"):
        beside.told_by(tmp_path, 2, 1, 0)


def beside_each_other(times_of, n=6, many=4):
    """Runs of both clients in `n` rounds: `times_of(tool, rng)` gives the seconds of a first token, of a further one,
    of a request and of all of them, and of a first token by the server's own count."""
    rng, runs = np.random.default_rng(0), []
    for number in range(n):
        for tool in (OURS, AIPERF):
            ttft, itl, whole, span, own = times_of(tool, rng)
            runs.append(Run(
                tool=tool, n_clients=1, round=number, counted=64, ttft=[ttft] * many, itl=[itl] * many,
                whole=[whole] * many, n_gen=[16] * many, throughput=16 * many / span, prompt=own, token=0.1 * own,
            ))  # fmt: skip
    return Beside(machine={}, model="m", scale="mini", n_prompt=8, n_gen=16, version="v", runs=runs)


@pytest.mark.parametrize(("off", "claim"), [(1.0, "holds"), (1.2, "does not hold")])
def test_a_planted_difference_between_two_clients_is_found_whatever_the_server_s_speed(off, claim):
    """AIPerf sees every time `off` times as long as our client does, on a server that is now fast and now slow."""

    def under(weather):
        def times(tool, rng):
            slow = np.exp(rng.normal(0, weather))
            seen = slow * (off if tool == AIPERF else 1.0) * np.exp(rng.normal(0, 0.01, 3))
            return seen[0], 0.1 * seen[1], 2.5 * seen[2], 10 * slow * (off if tool == AIPERF else 1.0), slow

        return serving.compared(beside_each_other(times))

    calm, changing = under(0.0), under(0.3)
    assert [ratio.within(0.95, 1.05) for ratio in calm["ratio"]] == [claim] * 4
    assert "inconclusive" in {ratio.within(0.95, 1.05) for ratio in changing["ratio"]}
    assert [ratio.within(0.95, 1.05) for ratio in changing["of_own"]] == [claim] * 4


def test_a_client_that_sees_the_first_token_late_is_told_from_one_that_pauses_between_requests():
    """A prompt of 1 s and 15 tokens of 0.1 s: one client sees every token 3 ms late, the other pauses for 0.4 s."""

    def times(tool, rng):
        late, pause = (0.003, 0.0) if tool == OURS else (0.0, 0.4)
        return 1 + late, 0.1, 2.5 + late, 5 * (2.5 + late) + 4 * pause, 1.0  # nobody pauses after the last

    told = serving.later(beside_each_other(times, many=5)).set_index("what")
    first, last, between = serving.LATER
    for what, ours, theirs in ((first, 0.003, 0.0), (last, 0.003, 0.0), (between, 0.0, 0.4)):
        found = [told.loc[what, name].value for name in ("ours", "theirs", "apart")]
        assert found == pytest.approx([ours, theirs, theirs - ours], abs=1e-9)


# ------------------------------------------------------------------ a soak


def soaked(monkeypatch, minutes=2, rate=40.0, held_s=0.0):
    monkeypatch.setattr(soak, "MINUTE_S", 0.5)
    return soak.run(mini_file(ATTENTION), "mini", rate, minutes, held_s)


def test_every_request_of_a_soak_is_accounted_for_also_where_the_server_is_held_up_and_goes_on(stands_in, monkeypatch):
    stands_in()
    monkeypatch.setattr(soak, "HELD_AT", 0.5)
    found = soaked(monkeypatch, held_s=0.4)
    assert (found.held_s, found.ended) == (0.4, "")
    assert found.minutes[0].waiting > 3, "those that came while it was held up"
    ended = "".join("x" if n else " " for minute in found.minutes for n in minute.fine)
    silent = max(map(len, ended.strip().split("x")))
    assert silent >= int(0.4 / (0.5 / soak.FINE)) - 1, "nothing ends until it goes on, and then answers do"
    assert found.sent == found.answered > 10
    assert (found.failed, found.missing, found.twice, found.differ) == (0, 0, 0, 0)
    for minute in found.minutes:
        assert 0 < minute.ttft <= minute.ttft_p90
        assert min(minute.client_bytes, minute.server_bytes) > 1 << 20
        assert len(minute.fine) == soak.FINE
        assert sum(minute.fine) == minute.answered


def test_a_soak_whose_server_dies_loses_no_request_and_is_written_read_back_and_told(stands_in, monkeypatch, tmp_path):
    stands_in("dies_together")
    found = soaked(monkeypatch, minutes=3, rate=60.0)
    assert "SIGABRT" in found.ended
    assert found.failed == sum(found.failures.values()) > 0
    assert (found.sent, found.missing) == (found.answered + found.failed, 0), "no request is lost"
    assert (found.minutes[-1].ttft, found.minutes[-1].server_bytes) == (None, 0)
    monkeypatch.setattr(paths, "MEASURED", tmp_path)
    soak.write(found, "reference")
    assert results.soaks("reference", "mini") == [found]
    told = serving.minutes(results.soaks("reference", "mini"))
    assert told["ttft"].isna().iloc[-1]
    assert (told["sent"].iloc[0], told["lost"].iloc[0]) == (found.sent, found.failed)


def held(waiting, **fields):
    """A soak whose server was stopped after two minutes, and had so many requests at the end of each minute."""
    usual = {"ttft": 0.02, "ttft_p90": 0.03, "tpot": 0.001, "late": 0.0}
    usual |= {"client_bytes": 1 << 20, "server_bytes": 1 << 20}
    minutes = [Minute(answered=9, failed=0, waiting=n, **usual) for n in waiting]
    counts = {"sent": 90, "answered": 88, "failed": 2, "missing": 0, "twice": 0, "differ": 0, "near_ties": 0}
    told = {"machine": {"chip": "c"}, "model": "m", "scale": "mini", "n_prompt": 8, "n_gen": 8, "rate": 16.0}
    told |= {"held_s": 30.0, "failures": {"nothing came for 60 s": 2}, "tokens": 700, "counted": 704, "ended": ""}
    return Soak(**{**told, **counts, "minutes": minutes, **fields})


GONE, LEFT = [1, 6, 400, 90, 5, 2], [1, 2, 400, 3, 300, 90]


def test_a_file_of_one_run_is_read_and_a_new_run_is_kept_beside_it(monkeypatch, tmp_path):
    monkeypatch.setattr(paths, "MEASURED", tmp_path)
    assert results.soaks("reference", "mini", held=True) == []
    before = msgspec.to_builtins(held(GONE))
    for minute in before["minutes"]:
        del minute["fine"]  # as recorded before answers were counted by five seconds
    kept = tmp_path / "reference" / "11-held.mini.json"
    kept.parent.mkdir()
    kept.write_bytes(msgspec.json.encode(before))
    assert results.soaks("reference", "mini", held=True) == [held(GONE)]
    soak.write(held(LEFT), "reference")
    assert results.soaks("reference", "mini", held=True) == [held(GONE), held(LEFT)]
    soak.write(held(GONE, patched=True), "reference")
    assert len(results.soaks("reference", "mini", held=True)) == 2, "the patched one is of another kind"
    told = serving.held("reference", "mini").drop_duplicates(["server", "run"])
    assert told[["server", "run"]].to_numpy().tolist() == [[RELEASED, 1], [RELEASED, 2], [PATCHED, 1]]
    kept.write_text("[{}]")
    with pytest.raises(StudyError, match="is damaged") as damaged:
        results.soaks("reference", "mini", held=True)
    assert damaged.value.mend == "python tools/servers.py soak"


def side_by_side():
    return upstream.side_by_side(serving.alike(serving.held("reference", "mini")))


@pytest.mark.parametrize(
    ("runs", "gone"),
    [([LEFT], "not in 4"), ([GONE, [1, 6, 9, 3, 2, 1]], "2 to 3"), ([GONE, LEFT], "not in every run")],
)  # fmt: skip
def test_a_held_server_has_recovered_when_its_queue_stays_what_it_was(monkeypatch, tmp_path, runs, gone):
    monkeypatch.setattr(paths, "MEASURED", tmp_path)
    assert "not tried here" in side_by_side().frame
    for waiting in runs:
        soak.write(held(waiting), "reference")
    told = side_by_side().frame
    assert told["queue gone by minute"].tolist() == [gone]
    assert told["failed, of sent"].tolist() == ["2 of 90"]
    soak.write(held(runs[0], patched=True), "reference")
    soak.write(held(runs[0], patched=True, machine={"chip": "d"}), "reference")
    assert side_by_side().frame["llama-server"].tolist() == [RELEASED, PATCHED]


def test_both_servers_are_crowded_in_turn_and_their_own_seconds_are_kept(tmp_path, monkeypatch):
    servers = {}
    for patched in (False, True):
        (tmp_path / str(patched)).mkdir()
        servers[patched] = misbehaving.as_llama_server(tmp_path / str(patched))
    asked = []
    monkeypatch.setattr(server_build, "built", lambda patched=False: asked.append(patched) or servers[patched])
    monkeypatch.setattr(crowd, "LOADS", {2: 6, 6: 12})
    found = crowd.compare(mini_file(ATTENTION), rounds=2)
    assert asked == [False, True]
    first = [(RELEASED, 2), (RELEASED, 6), (PATCHED, 2), (PATCHED, 6)]
    assert [(each.server, each.n_clients) for each in found.loads] == [*first, *first[2:], *first[:2]]
    assert [len(each.token) for each in found.loads[:2]] == [4, 6], "those after whom nobody came are left out"
    assert all(min(each.token) > 0 for each in found.loads)
    monkeypatch.setattr(paths, "MEASURED", tmp_path)
    crowd.write(found, "reference")
    assert upstream.crowds(results.crowds("reference")).frame["waiting"].tolist() == ["0", "2"]


def left_waiting(binary):
    """Seconds from the moment a client leaves a request that waits until the server gives it up, and until the long
    answer is over that it waits for; the server has one slot."""
    setup = Setup("llama-server", mini_file(ATTENTION), 1, 8192, libraries=server_build.libraries(), binary=binary)
    with (
        server.started(setup) as running,
        httpx2.Client(base_url=running.url, trust_env=False, timeout=100) as web,
        ThreadPoolExecutor() as pool,
    ):
        asked = {"temperature": 0, "ignore_eos": True, "stream": True}
        long = pool.submit(web.post, "/completion", json=asked | {"prompt": "def f", "n_predict": 8000})
        while "processing task" not in running.log():
            time.sleep(0.02)
        other = pool.submit(web.post, "/completion", json=asked | {"prompt": "other", "n_predict": 4}, timeout=0.5)
        while traffic.parsed(web.get("/metrics").text)["llamacpp:requests_deferred"] < 1:
            assert not other.done(), "it never waited for a slot"
        with pytest.raises(httpx2.ReadTimeout):
            other.result()
        begin, given_up = time.monotonic(), None
        while not long.done():
            if given_up is None and "cancel task" in running.log():
                given_up = time.monotonic() - begin
            time.sleep(0.02)
        return given_up, time.monotonic() - begin


@pytest.mark.skipif(
    not (server_build.built() and server_build.built(patched=True)),
    reason="no released and patched server: server build, server build --patched",
)
def test_a_request_that_nobody_waits_for_is_given_up_by_the_patched_server_and_kept_by_the_released_one():
    """Whoever waits looks once a second whether its client is still there. As released, every token of anybody puts
    that second off, so it never looks while another one is answered."""
    given_up, over = left_waiting(server_build.built())
    assert given_up is None or over - given_up < 0.2, "as released: only when the long answer is over"
    given_up, over = left_waiting(server_build.built(patched=True))
    assert given_up < over - 0.2


def test_a_soak_that_cannot_be_is_refused_with_the_command_that_mends_it(monkeypatch, tmp_path):
    monkeypatch.setattr(server_build, "built", lambda patched=False: None)
    with pytest.raises(StudyError, match="is not here") as told:
        soak.run(mini_file(ATTENTION), "mini", 10.0, 1, patched=True)
    assert told.value.mend == "plamo-study server build --patched"
    monkeypatch.setattr(paths, "MEASURED", tmp_path)
    with pytest.raises(StudyError, match="was not sought here") as told:
        soak.sustained("mini", "local")
    assert told.value.mend == "plamo-study run 11 --scale mini"
