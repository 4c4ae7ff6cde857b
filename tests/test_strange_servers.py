"""Servers as people have them: none is misjudged, none is harmed, and what helps is said."""

import time
from dataclasses import replace

import misbehaving
import pytest
from conftest import HYBRID, mini_file
from typer.testing import CliRunner

from llama_meter import http
from llama_meter.errors import StudyError
from llama_meter.serve import client, meeting, phase, server, traffic
from llama_meter.serve.client import Target
from llama_meter.serve.meeting import Ask
from llama_meter.serve.server import Setup
from plamo_study.cli import main


@pytest.fixture
def stands_in(monkeypatch):
    monkeypatch.setattr(meeting, "PHASE_ROUNDS", 3)
    with misbehaving.standing_in(monkeypatch) as start:
        yield start


def meets(url, say=lambda line: None, model="", seconds=6.0):
    """The target that a probe of a server asks, and what it ignores."""
    ignored = set()
    ask = Ask(Target(url, model), seconds=seconds)

    async def met():
        async with ask.target.connected() as web:
            return await meeting.met(web, ask, say, ignored)

    return http.run(met())[0], ignored


@pytest.mark.case(8)
@pytest.mark.parametrize(
    "way",
    ["router", "router_by_state", "adapters", "named_by_number"]
    + [pytest.param(way, marks=pytest.mark.case(9)) for way in ("embedding_first", "embedding_by_type")],
)
def test_the_model_that_is_asked_is_loaded_and_generates(way, stands_in):
    assert meets(stands_in(way))[0].model == "small"
    assert misbehaving.Handler.models == {"small"}


@pytest.mark.case(8)
@pytest.mark.parametrize(
    ("way", "model", "said"),
    [
        ("router", "big", "--model small"),
        ("router_idle", "", "not loaded"),
        ("router_idle", "small", "not loaded"),
        ("several", "", "one, two"),
    ],
)
def test_a_model_that_asking_might_load_is_not_asked(way, model, said, stands_in):
    with pytest.raises(StudyError, match=said):
        meets(stands_in(way), model=model)
    assert misbehaving.Handler.models == set()
    if way == "several":
        assert meets(stands_in(way), model="two")[0].model == "two"


@pytest.mark.case(9)
def test_a_server_that_is_loading_is_waited_for_with_a_limit_that_is_said(stands_in, monkeypatch):
    monkeypatch.setattr(meeting, "PAUSES_S", (0.05, 0.1))
    said = []
    assert meets(stands_in("loading"), said.append)[0].model == "stand-in"
    assert len(said) == 1
    assert "at most 3 s" in said[0]
    with pytest.raises(StudyError, match="HTTP 503") as late:
        meets(stands_in("refuses"), seconds=6.0)
    assert "--seconds" in late.value.mend


@pytest.mark.case(7)
@pytest.mark.parametrize(
    ("way", "without"),
    [
        ("refuses_stream_options", {"stream_options"}),
        ("refuses_silently", {"stream_options"}),
        ("refuses_max_tokens", {"max_tokens"}),
        ("", set()),
    ],
)
def test_a_field_that_a_server_refuses_is_left_out_and_named(way, without, stands_in):
    target, ignored = meets(stands_in(way))
    assert target.without == without
    assert ignored == {f"{field} (refused)" for field in without}


MENDS = {  # way -> what helps
    "wants_a_key": meeting.KEY,
    "knows_no_such_model": "it lists stand-in",
    "is_busy": "wait",
    "is_down": "server's log",
    "redirects": "address",
    "is_a_page": "address",
}


@pytest.mark.case(7)
@pytest.mark.parametrize("way", MENDS)
def test_the_mend_follows_the_status(way, stands_in):
    with pytest.raises(StudyError) as refused:
        meets(stands_in(way))
    assert MENDS[way] in refused.value.mend


def binds(url, prompt_tokens=16, output_tokens=16):
    """Which phase binds, of a server that is asked for some tokens, and what the probe did without."""
    ask, ignored = Ask(Target(url), prompt_tokens, output_tokens, 2, seconds=60.0), set()

    async def asked(web):
        target, _ = await meeting.met(web, ask)
        return await phase.binding(web, replace(ask, target=target), time.monotonic() + 30, ignored)

    return client.over(ask.target, asked), ignored


@pytest.mark.case(4)
@pytest.mark.parametrize("way", ["holds_back", "holds_back_some"])
def test_a_stream_that_is_held_back_is_named_and_no_phase(way, stands_in):
    held, _ = binds(stands_in(way), output_tokens=32)
    assert (held.verdict, held.shares) == ("cannot tell", {})
    assert "buffered" in held.why
    assert "first token alone" not in held.seconds


@pytest.mark.case(3)
def test_reasoning_takes_the_time_of_decode_and_not_of_prefill(stands_in):
    thinks, _ = binds(stands_in("thinks_at_length"))
    assert thinks.shares["decode"].value > thinks.shares["prefill"].value
    assert thinks.elasticities["output"].value > 0


@pytest.mark.case(14)
@pytest.mark.parametrize("way", ["small_slot", "small_slot_by_field", "small_slot_in_words"])
def test_a_prompt_that_does_not_fit_twice_is_said_with_the_length_that_does(way, stands_in):
    """150 tokens of three characters fit a slot of 200, and 300 do not."""
    small, _ = binds(stands_in(way), prompt_tokens=150, output_tokens=4)
    assert "twice the prompt" in small.why
    assert "--prompt-tokens 88 " in small.lever
    assert meeting._shorter(Ask(Target(""), 100, 32), 0).startswith("--prompt-tokens 50 ")
    assert meeting._shorter(Ask(Target(""), 100, 256), 200).startswith("--prompt-tokens 45 --output-tokens 22")


@pytest.mark.case(7)
def test_what_the_probe_did_without_is_one_line(stands_in):
    done = CliRunner().invoke(
        main.app, ["probe", stands_in("refuses_stream_options"), "--output-tokens", "4", "--seconds", "20"]
    )
    assert done.exit_code == 0, done.output
    lines = [line for line in done.output.splitlines() if "ignored" in line]
    assert len(lines) == 1
    assert "stream_options" in lines[0]
    assert "no count of tokens" in lines[0]


@pytest.mark.case(5)
def test_a_server_that_is_started_here_takes_no_key_and_no_option_from_who_starts_it(tmp_path, monkeypatch):
    for name in ("LLAMA_API_KEY", "LLAMA_ARG_CTX_SIZE"):
        monkeypatch.setenv(name, "64")
    binary = misbehaving.as_llama_server(tmp_path, before="env | grep -e ^LLAMA_A && exit 9")
    with server.started(Setup("llama-server", mini_file(HYBRID), binary=binary)) as running:
        assert running.ended() == ""


# ------------------------------------------------------------------ their counters


ODD = {  # a line of counters -> its number
    'x{a="b c"} 5': 5.0,
    'x{a="}{",b="\\"} 9"} 5 1700000000000': 5.0,
    'x 5e0 # {trace="y"} 7': 5.0,
    "x NaN": None,
    "x 1e999": 0.0,
    "x five": None,
    "x": None,
}


@pytest.mark.parametrize("line", ODD)
def test_counters_are_read_whatever_stands_beside_them(line):
    assert traffic.parsed(line).get("x") == ODD[line]


@pytest.mark.parametrize("way", ["in_drops", "late", "without_end", "redirects"])
def test_counters_that_do_not_come_are_given_up_on_in_time(way, stands_in, monkeypatch):
    monkeypatch.setattr(http, "LOOK_S", 0.3)
    begin = time.monotonic()
    with pytest.raises(StudyError, match=r"no end within 0.3 s|more than|HTTP 307"):
        traffic.watched(Target(stands_in(way)), 1.0)
    assert time.monotonic() - begin < 10 * http.LOOK_S
