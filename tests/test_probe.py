"""The probe of anybody's server: contamination is found where it is, the binding phase named, the key kept."""

import json
import re
import sys
import time
from dataclasses import replace

import misbehaving
import numpy as np
import pytest
from conftest import ATTENTION, HYBRID, mini_file
from test_cli import in_one_process
from typer.testing import CliRunner

from llama_meter import http, paths
from llama_meter.engine import builds
from llama_meter.errors import StudyError
from llama_meter.measure.tolerance import NEAR_TIE
from llama_meter.serve import client, meeting, phase, probe, right, server
from llama_meter.serve.client import Target
from llama_meter.serve.meeting import Ask
from llama_meter.serve.phase import Seen
from llama_meter.serve.server import Setup
from plamo_study.cli import main

needs_llama = pytest.mark.skipif(server.find() is None, reason="no llama-server: plamo-study engine build llama-server")


@pytest.fixture
def stands_in(monkeypatch):
    with misbehaving.standing_in(monkeypatch) as start:
        yield start


async def met(ask):
    async with ask.target.connected() as web:
        return await meeting.met(web, ask)


def probed(url, seconds=20.0, **given):
    return probe.probe(Ask(Target(url), 16, 4, 2, seconds=seconds, **given))


# ------------------------------------------------------------------ right under load


NEIGHBOURS = {  # way -> verdict, what it says of why
    "": ("right", "are those given alone"),
    "mixes": ("wrong", "from token 0"),
    "mixes_equals": ("wrong", "prompt 1 and 2, from token 2"),
    "mixes_others": ("wrong", "from token 2"),
    "rounds": ("right", "but for a near-tie"),
    "rounds_untold": ("cannot tell", "2 of 8 prompts differ, which rounding may do; the server gives no log probab"),
    "rounds_everything": ("cannot tell", "more than rounding should turn"),
    "samples": ("cannot tell", "it samples, or has other users"),
    "limits": ("cannot tell", "failed: HTTP 429: slow down"),
    "repeats": ("cannot tell", "the same answer alone"),
    "floods": ("cannot tell", "the answers together have more than"),
}


@pytest.mark.long
@pytest.mark.parametrize(("way", "expected"), NEIGHBOURS.items())
def test_servers_that_are_right_wrong_or_neither_are_told_apart(way, expected, stands_in, monkeypatch):
    monkeypatch.setattr(right, "ROUNDS", 3)
    monkeypatch.setattr(right, "COPIED", 2)
    ask = Ask(Target(stands_in(way)), 16, 4, 2, seconds=60.0)
    found = probe.rightness(ask)
    assert (found.verdict, expected[1] in found.why) == (expected[0], True), found
    assert found.misses
    assert found.distinct == {"": 1, "mixes_equals": 2, "mixes_others": 1}.get(way, found.distinct)
    assert found.gap == pytest.approx(0.05 if way in ("rounds", "rounds_everything") else 0.0)


def test_a_server_that_is_gone_after_a_load_is_wrong_and_one_that_comes_back_is_not_judged(tmp_path, monkeypatch):
    program = misbehaving.as_llama_server(tmp_path, "dies_together")
    with server.started(Setup("llama-server", mini_file(HYBRID), binary=program)) as running:
        found = probe.rightness(Ask(Target(running.url), seconds=30.0))
    assert (found.verdict, found.failed) == ("wrong", right.TOGETHER[0]), found
    assert "it was gone" in found.why
    monkeypatch.setattr(http, "UNREACHED", "another failure")
    monkeypatch.setattr(right, "DYING", 2)
    with server.started(Setup("llama-server", mini_file(HYBRID), binary=program)) as running:
        assert probe.rightness(Ask(Target(running.url), seconds=30.0)).verdict == "cannot tell"


def answered(text, gaps=()):
    """An answer of one token a letter."""
    said = client.Answer(client.Prompt("0", "", 4), 0)
    said.texts = said.tokens = list(text)
    said.gaps = list(gaps) or [float("nan")] * len(text)
    return said


def judged(*beside, gaps=()):
    """The verdict on answers to eight prompts, `beside` for the first of them in turn, alone "abcd" with a number."""
    alone = [[answered(f"abcd{n}", gaps)] * 2 for n in range(right.PROMPTS)]
    asked = right.Asked(alone, 4, copies=[(0, [answered("abcd0")] * 4)])
    asked.beside = [(n, answered(text)) for n, texts in enumerate(beside) for text in texts.split()]
    return right.judged(asked)


@pytest.mark.parametrize(
    ("beside", "verdict"),
    [
        (["abcd0"], "right"),
        (["abXd0 abXd0", "abXd1"], "cannot tell"),  # one way each: two near-ties would do it
        (["abXd0 aXcd0", "abXd1"], "cannot tell"),
        (["abXd0 aXcd0", "abXd1 abYd1"], "wrong"),
        (["abX"] * 4, "cannot tell"),
        (["abX"] * 5, "wrong"),
    ],
)
def test_without_log_probabilities_repetition_decides(beside, verdict):
    assert judged(*beside).verdict == verdict


def test_the_lead_at_the_first_differing_token_says_whether_rounding_may_have_done_it():
    for lead, verdict in ((NEAR_TIE - 0.01, "right"), (NEAR_TIE, "wrong")):
        found = judged("abXd0", gaps=[3.0, 3.0, lead, 0.0, 0.0])
        assert (found.verdict, found.prompts) == (verdict, {} if verdict == "right" else {"1": 2})


def test_an_answer_alone_that_a_near_tie_turns_is_one_of_two_right_ones():
    gaps = [3.0, 3.0, 0.1, 3.0, 3.0]
    alone = [[answered(f"abcd{n}", gaps)] * 2 for n in range(right.PROMPTS)]
    alone[0] = [alone[0][0], answered("abXd0", gaps)]
    asked = right.Asked(alone, 2, [(0, answered("abXd0"))], [(0, [answered("abcd0")])])
    assert (right.judged(asked).verdict, right.judged(asked).near_ties) == ("right", 0)
    alone[0][1] = answered("aXcd0", gaps)
    asked.beside = []
    assert "1 of 8 prompts get another answer alone" in right.judged(asked).why


def test_a_server_that_drips_is_left_when_the_time_is_over(stands_in, monkeypatch):
    monkeypatch.setattr(probe, "GRACE_S", 0.2)
    found = probed(stands_in("drips_later"), seconds=1.0)
    assert (found.right.verdict, found.phase.verdict) == ("cannot tell", "cannot tell")
    assert found.right.why == found.phase.why == probe.LATE


@needs_llama
@pytest.mark.parametrize(("model", "verdict"), [(HYBRID, "wrong"), (ATTENTION, "right")])
def test_the_probe_finds_a_stock_servers_mixed_up_answers_and_none_with_attention_only(model, verdict):
    setup = Setup("llama-server", mini_file(model), 4, 1536, libraries=builds.installed_libraries())
    with server.started(setup) as running:
        asked = Ask(Target(running.url), 16, 4, 2, seconds=60.0)
        assert http.run(met(asked))[1] == "llama-server"
        found = probe.rightness(asked)
        assert found.verdict == verdict, found
        assert found.log_probabilities
        if verdict == "right":
            assert not found.failed
            assert running.ended() == ""


@pytest.mark.case(14)
@needs_llama
def test_a_real_server_s_slot_is_said_to_be_too_small_for_twice_the_prompt_with_a_length_that_fits(monkeypatch):
    monkeypatch.setattr(meeting, "PHASE_ROUNDS", 3)
    setup = Setup("llama-server", mini_file(ATTENTION), 2, 512, libraries=builds.installed_libraries())
    with server.started(setup) as running:

        def phase(prompt_tokens):
            ask = Ask(Target(running.url), prompt_tokens, 8, 2, seconds=60.0)

            async def asked(web):
                target, _ = await meeting.met(web, ask)
                return await phase.binding(web, replace(ask, target=target), time.monotonic() + 60)

            return client.over(ask.target, asked)

        small = phase(400)
        assert "twice the prompt" in small.why, small
        shorter = int(re.search(r"--prompt-tokens (\d+)", small.lever)[1])
        assert "twice the prompt" not in phase(shorter).why


@pytest.mark.case(5)
@needs_llama
def test_a_real_server_takes_no_key_and_no_option_from_who_starts_it(monkeypatch):
    for name, value in (("LLAMA_API_KEY", "x"), ("LLAMA_ARG_CTX_SIZE", "64"), ("LLAMA_ARG_CACHE_TYPE_K", "none")):
        monkeypatch.setenv(name, value)
    setup = Setup("llama-server", mini_file(ATTENTION), 1, 1024, libraries=builds.installed_libraries())
    with server.started(setup) as running:
        prompt, target = client.Prompt("0", "word " * 200, 4), Target(running.url)
        answer = client.over(target, lambda web: client.ask(web, target, prompt))
    assert (answer.failure, answer.n_gen) == ("", 4)


# ------------------------------------------------------------------ answers that no server gives

STRANGE = {  # way -> what is said of it; those of single answers are the client's, in test_serving
    "refuses": "no answer: HTTP 503",
    "without_end": "more than",
    "a_bomb": "compressed",
    "no_gzip": "compressed",
    "in_drops": "after 1 s",
    "says_deeply": "nested too deeply",
    "drips": "after 1 s",
    "refuses_with_escapes": "HTTP 404",
}
LIMIT = 3 << 30  # bytes of the probing process: what it loads takes less than one


def test_an_answer_that_no_server_gives_is_one_message():
    """The probe of each of these servers, in one process of limited memory."""
    with pytest.MonkeyPatch.context() as patch, misbehaving.standing_in(patch) as start:
        asked = [("probe", start(way), "--seconds", "2") for way in STRANGE]
        told = in_one_process(paths.ROOT, *asked, limit=LIMIT)
    for (way, why), (code, said) in zip(STRANGE.items(), told, strict=True):
        assert code == 2, (way, said)
        assert why in said, way
        assert "Traceback" not in said


def test_a_list_of_models_that_is_none_is_done_without(stands_in):
    for way in ("deeply", "infinity"):
        ask = Ask(Target(stands_in(way)), seconds=2.0)
        found, server = http.run(met(ask))
        assert (found.model, server) == ("", "unknown")


def test_a_terminal_is_shown_the_control_characters_of_a_server_and_obeys_none(stands_in, capfd, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "argv", ["plamo-study", "probe", stands_in("refuses_with_escapes"), "--seconds", "2"])
    with pytest.raises(SystemExit):
        main.main()
    said = "".join(capfd.readouterr())
    assert "owned" in said
    assert "[/red]" in said
    assert all(letter.isprintable() or letter == "\n" for letter in re.sub(r"\x1b\[[0-9;]*m", "", said))
    assert "\x1b[31m" not in said.split("owned")[1].split("red")[0]


# ------------------------------------------------------------------ which phase


def rounds(prefill, decode, queue, noise=0.01, n=5):
    """Rounds of a server whose time is linear in prompt and answer, and in how many ask."""
    rng = np.random.default_rng(0)
    settings = Ask(Target(""), 100, 10, 2).settings()

    def seen(name):
        setting = settings[name]
        others = queue * (setting.n - 1)
        first = prefill * setting.prompt_tokens / 100 + others
        whole = first + decode * setting.output_tokens / 10
        first, whole = (value * np.exp(rng.normal(0, noise)) for value in (first, whole))
        return Seen(first, max(whole, first), setting.prompt_tokens, setting.output_tokens)

    return [{name: seen(name) for name in settings} for _ in range(n)]


@pytest.mark.parametrize(
    ("prefill", "decode", "queue", "verdict"),
    [(1.0, 0.1, 0.0, "prefill"), (0.1, 1.0, 0.0, "decode"), (0.1, 0.2, 1.0, "queue"), (1.0, 1.0, 0.0, "cannot tell")],
)
def test_the_phase_that_a_request_spends_its_time_in_is_named_where_it_can_be_told(prefill, decode, queue, verdict):
    found = phase._bound(rounds(prefill, decode, queue), [])
    assert (found.verdict, found.lever) == (verdict, phase.LEVERS[verdict]), found
    if not queue:
        told, expected = found.elasticities["prompt"], np.log(1 + prefill / (prefill + decode)) / np.log(2)
        assert told.low <= expected + 0.02
        assert told.value == pytest.approx(expected, abs=0.05)


def test_too_few_rounds_and_answers_that_end_by_themselves_are_no_verdict():
    enough = rounds(1.0, 0.1, 0.0)
    short = [{name: replace(seen, output_tokens=4.0) for name, seen in each.items()} for each in enough]
    for given, why in ((enough[:2], "no time for three rounds"), (short, "ends by itself")):
        found = phase._bound(given, [])
        assert found.verdict == "cannot tell"
        assert why in found.why


@pytest.mark.case(3)
@pytest.mark.parametrize(("prefill", "decode", "says"), [(1.0, 0.05, "prefill"), (0.05, 1.0, "decode")])
def test_no_phase_is_named_that_the_elasticities_contradict(prefill, decode, says):
    """As where first tokens are not shown, or come before what took their time."""
    swapped = [
        each
        | {
            "prompt": replace(each["output"], prompt_tokens=200, output_tokens=10),
            "output": replace(each["prompt"], prompt_tokens=100, output_tokens=20),
        }
        for each in rounds(prefill, decode, 0.0)
    ]
    assert phase._bound(rounds(prefill, decode, 0.0), []).verdict == says
    found = phase._bound(swapped, [])
    assert found.verdict == "cannot tell"
    assert says in found.why


def test_a_server_that_cuts_prompts_is_not_said_to_end_its_answers():
    cut = [each | {"prompt": replace(each["prompt"], prompt_tokens=100.0)} for each in rounds(1.0, 0.1, 0.0)]
    assert "--prompt-tokens" in phase._bound(cut, []).why


# ------------------------------------------------------------------ command


def test_the_cost_is_said_first_and_another_machine_is_not_asked_without_leave(monkeypatch):
    monkeypatch.setattr(probe, "probe", lambda *_: pytest.fail("it was asked"))
    with pytest.raises(StudyError, match=r"not this machine.*at most \d+ requests"):
        main.app(["probe", "http://192.0.2.1:8080"], standalone_mode=False)


def test_what_is_no_address_is_refused_and_a_password_is_not_repeated():
    for url in (
        "ftp://127.0.0.1",
        "nowhere",
        "http://",
        "http://127.0.0.1:x",
        "http://[::1",
        "http://\x00",
        "http://1℀.com",
        "http://me:hidden@127.0.0.1",
    ):
        with pytest.raises(StudyError, match=r"no http or https address|a password") as refused:
            http.check_url(url)
        assert "hidden" not in str(refused.value)


def test_loopback_is_told_by_the_address_alone():
    assert all(map(http.is_loopback, ("http://127.0.0.1:80", "http://localhost/v1", "http://[::1]:8080")))
    assert not any(map(http.is_loopback, ("http://127.0.0.1.example.org", "http://10.0.0.1", "http://[::1")))


def test_the_report_is_json_or_text_and_the_key_is_in_neither(stands_in, monkeypatch):
    monkeypatch.setenv(meeting.KEY, "very-secret")
    monkeypatch.setattr(right, "ROUNDS", 2)
    command = ["probe", stands_in(), "--prompt-tokens", "16", "--output-tokens", "4", "--seconds", "20"]
    done = CliRunner().invoke(main.app, [*command, "--json"])
    assert done.exit_code == 0, done.output
    assert set(misbehaving.Handler.keys) == {"Bearer very-secret"}
    told = json.loads(done.stdout)
    assert told["right"]["verdict"] == "right"
    assert told["right"]["compared"] == right.ROUNDS * (sum(right.TOGETHER) + right.TOGETHER[0])
    assert told["requests"] <= told["budget"]["requests"]
    assert (told["model"], told["server"], told["right"]["log_probabilities"]) == ("stand-in", "unknown", False)
    text = CliRunner().invoke(main.app, command).output
    assert "Which phase binds?" in text
    assert "very-secret" not in text + done.output
