"""Concurrent requests against a stand-in for llama-server: same answers, a neighbour's answers, a death."""

import sys
import textwrap

import pytest
from conftest import HYBRID, mini_file

from plamo_study.errors import StudyError
from plamo_study.measure import serving

STAND_IN = """\
    #!{python}
    # Answers with the length of the prompt; MIXES: together with those asked at the same time; DIES: 14 times
    import json, os, sys, threading, time
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    if "--version" in sys.argv:
        sys.exit(print("version: 1 (stand-in)"))
    busy, served, lock = [0], [0], threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply({{}})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                busy[0] += 1
                served[0] += 1
                dies = os.environ.get("DIES") and served[0] > 14
            while dies and busy[0] > 1:
                time.sleep(0.01)  # the others have their answers first
            if dies:
                print("x.cpp:1: GGML_ASSERT(fits) failed", flush=True)
                os._exit(134)
            time.sleep(0.02)
            others = busy[0] - 1 if os.environ.get("MIXES") else 0
            tokens = [len(body["prompt"]), others]
            top = [{{"logprob": -0.1}}, {{"logprob": -2.0}}]
            self.reply({{"tokens": tokens, "completion_probabilities": [{{"top_logprobs": top}}] * 2}})
            with lock:
                busy[0] -= 1

        def reply(self, what):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(what).encode())

        def log_message(self, *arguments):
            pass

    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def stand_in(tmp_path):
    path = tmp_path / "llama-server"
    path.write_text(textwrap.dedent(STAND_IN).format(python=sys.executable))
    path.chmod(0o755)
    return path


def served(binary, **given):
    return serving.serve(binary, mini_file(HYBRID), "stock", None, slots=4, at_once=3, rounds=2, **given)


def test_a_server_that_keeps_requests_apart_lives_and_answers_alike_and_its_run_is_kept_once(
    stand_in, tmp_path, monkeypatch
):
    run = served(stand_in)
    assert (run.differ, run.answers, run.rounds_done, run.exit, run.said) == (0, 6, 2, None, "")
    assert run.version == "version: 1 (stand-in)"
    monkeypatch.setattr(serving, "RECORD", tmp_path / "runs.json")
    assert serving.recorded() == []
    serving.record([run])
    serving.record([run])
    assert serving.recorded() == [run]


def test_answers_that_depend_on_neighbours_are_counted_with_their_gaps(stand_in, monkeypatch):
    monkeypatch.setenv("MIXES", "1")
    run = served(stand_in)
    assert run.differ == len(run.gaps) > 0
    assert run.gaps[0] == pytest.approx(1.9)
    assert run.near_ties == 0


def test_a_death_is_recorded_with_its_assertion_and_the_round(stand_in, monkeypatch):
    monkeypatch.setenv("DIES", "1")
    run = served(stand_in)
    assert (run.exit, run.rounds_done, run.said) == (134, 0, "GGML_ASSERT(fits) failed")
    assert run.answers == 2


def test_what_is_no_server_is_refused(tmp_path):
    with pytest.raises(StudyError, match="cannot be run"):
        served(tmp_path / "nothing")
