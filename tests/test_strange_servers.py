"""Servers as people have them: none is misjudged, none is harmed, and what helps is said."""

import time
from dataclasses import replace

import misbehaving
import pytest
from conftest import HYBRID, mini_file

from llama_meter.errors import StudyError
from llama_meter.serve import client, meeting, phase, server
from llama_meter.serve.client import Target
from llama_meter.serve.meeting import Ask
from llama_meter.serve.server import Setup


@pytest.fixture
def stands_in(monkeypatch):
    monkeypatch.setattr(meeting, "PHASE_ROUNDS", 3)
    with misbehaving.standing_in(monkeypatch) as start:
        yield start


def meets(url, model="", seconds=6.0):
    """The target that a probe of a server asks."""
    ask = Ask(Target(url, model), seconds=seconds)
    return client.over(ask.target, lambda web: meeting.met(web, ask))[0]


def test_of_several_models_one_has_to_be_named(stands_in):
    url = stands_in("several")
    with pytest.raises(StudyError, match="lists 2 models: one, two") as refused:
        meets(url)
    assert "--model" in refused.value.mend
    assert misbehaving.Handler.models == set(), "none is asked, which might make the server load it"
    assert meets(url, model="two").model == "two"


def test_a_server_without_completions_is_asked_by_chat(stands_in):
    assert meets(stands_in("chats")).api == "chat/completions"


MENDS = {  # way -> what helps
    "wants_a_key": meeting.KEY,
    "knows_no_such_model": "it lists stand-in",
    "is_busy": "wait",
    "refuses": "until the server is ready",
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
    """Which phase binds, of a server that is asked for some tokens."""
    ask = Ask(Target(url), prompt_tokens, output_tokens, 2, seconds=60.0)

    async def asked(web):
        target, _ = await meeting.met(web, ask)
        return await phase.binding(web, replace(ask, target=target), time.monotonic() + 30)

    return client.over(ask.target, asked)


def test_no_phase_is_named_of_a_server_that_counts_no_tokens(stands_in):
    assert "counts no tokens" in binds(stands_in("counts_nothing")).why


@pytest.mark.case(4)
@pytest.mark.parametrize("way", ["holds_back", "holds_back_some"])
def test_a_stream_that_is_held_back_is_named_and_no_phase(way, stands_in):
    held = binds(stands_in(way), output_tokens=32)
    assert (held.verdict, held.shares) == ("cannot tell", {})
    assert "buffered" in held.why
    assert "first token alone" not in held.seconds


@pytest.mark.case(3)
def test_reasoning_takes_the_time_of_decode_and_not_of_prefill(stands_in):
    thinks = binds(stands_in("thinks_at_length"))
    assert thinks.shares["decode"].value > thinks.shares["prefill"].value
    assert thinks.elasticities["output"].value > 0


@pytest.mark.case(14)
@pytest.mark.parametrize("way", ["small_slot", "small_slot_by_field", "small_slot_in_words"])
def test_a_prompt_that_does_not_fit_twice_is_said_with_the_length_that_does(way, stands_in):
    """150 tokens of three characters fit a slot of 200, and 300 do not."""
    small = binds(stands_in(way), prompt_tokens=150, output_tokens=4)
    assert "twice the prompt" in small.why
    assert "--prompt-tokens 88 " in small.lever
    assert meeting._shorter(Ask(Target(""), 100, 32), 0).startswith("--prompt-tokens 50 ")
    assert meeting._shorter(Ask(Target(""), 100, 256), 200).startswith("--prompt-tokens 45 --output-tokens 22")


@pytest.mark.case(5)
def test_a_server_that_is_started_here_takes_no_key_and_no_option_from_who_starts_it(tmp_path, monkeypatch):
    for name in ("LLAMA_API_KEY", "LLAMA_ARG_CTX_SIZE"):
        monkeypatch.setenv(name, "64")
    binary = misbehaving.as_llama_server(tmp_path, before="env | grep -e ^LLAMA_A && exit 9")
    with server.started(Setup("llama-server", mini_file(HYBRID), binary=binary)) as running:
        assert running.ended() == ""
