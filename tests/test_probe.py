"""The probe of anybody's server: contamination is found where it is, the binding phase named, the key kept."""

import json
import time
from dataclasses import replace

import misbehaving
import numpy as np
import pytest
from conftest import ATTENTION, HYBRID, mini_file
from typer.testing import CliRunner

from llama_meter.engine import builds
from llama_meter.errors import StudyError
from llama_meter.measure.tolerance import NEAR_TIE
from llama_meter.serve import client, probe, right, server
from llama_meter.serve.client import Target
from llama_meter.serve.probe import Seen, Setting
from llama_meter.serve.server import Setup
from plamo_study.cli import main

USUAL = Setting(2, 16, 4)
needs_llama = pytest.mark.skipif(server.find() is None, reason="no llama-server: plamo-study engine build llama-server")


@pytest.fixture
def stands_in(monkeypatch):
    monkeypatch.setattr(probe, "ROUNDS", 3)
    with misbehaving.standing_in(monkeypatch) as start:
        yield start


def meets(url, model=""):
    """The target that a probe of a server asks."""
    target = Target(url, model)
    return client.over(target, lambda web: probe.met(web, target))


def rightness(url, n=2, seconds=60.0):
    target = meets(url)
    return client.over(target, lambda web: right.ask(web, target, n, time.monotonic() + seconds))


# ------------------------------------------------------------------ which server


def test_of_several_models_one_has_to_be_named(stands_in):
    url = stands_in("several")
    with pytest.raises(StudyError, match=r"lists 2 models: one, two(\n|.)*--model"):
        meets(url)
    assert meets(url, model="two").model == "two"


def test_a_server_without_completions_is_asked_by_chat(stands_in):
    assert meets(stands_in("chats")).api == "chat/completions"


@pytest.mark.case(7)
@pytest.mark.parametrize(("way", "mend"), [("wants_a_key", probe.KEY), ("refuses", "log")])
def test_the_mend_follows_the_status(way, mend, stands_in):
    with pytest.raises(StudyError) as refused:
        meets(stands_in(way))
    assert mend in refused.value.mend


@pytest.mark.parametrize(
    ("failure", "mend"),
    [
        ("ConnectError: [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed", "SSL_CERT_FILE"),
        ("ConnectError: [SSL: WRONG_VERSION_NUMBER] wrong version number", "http or https"),
        ("RemoteProtocolError: illegal status line", "http or https"),
        ("ConnectError: All connection attempts failed", "start the server"),
    ],
)
def test_a_server_of_the_other_kind_or_with_a_strange_certificate_is_no_server_that_is_off(failure, mend):
    answer = client.Answer(probe.HELLO, 0, failure=failure)
    assert mend in probe.mend(answer)


# ------------------------------------------------------------------ right under load


NEIGHBOURS = {  # way -> verdict, what it says of why
    "": ("right", "are those given alone"),
    "mixes_equals": ("wrong", "prompt 1 and 2, from token 2"),
    "mixes_others": ("wrong", "from token 2"),
    "rounds": ("right", "but for a near-tie"),
}


@pytest.mark.long
@pytest.mark.parametrize(("way", "expected"), NEIGHBOURS.items())
def test_servers_that_are_right_wrong_or_neither_are_told_apart(way, expected, stands_in, monkeypatch):
    monkeypatch.setattr(right, "ROUNDS", 3)
    monkeypatch.setattr(right, "COPIED", 2)
    found = rightness(stands_in(way))
    assert (found.verdict, expected[1] in found.why) == (expected[0], True), found
    assert found.distinct == {"": 1, "mixes_equals": 2, "mixes_others": 1}.get(way, found.distinct)
    assert found.gap == pytest.approx(0.05 if way == "rounds" else 0.0)


def test_a_server_that_is_gone_after_a_load_is_wrong(tmp_path, monkeypatch):
    monkeypatch.setenv(server.NAMED, str(misbehaving.as_llama_server(tmp_path, "dies_together")))
    with server.started(Setup(mini_file(HYBRID))) as running:
        found = rightness(running.url)
    assert (found.verdict, found.failed) == ("wrong", right.TOGETHER[0]), found
    assert "it was gone" in found.why


def answered(text, gaps=()):
    """An answer of one token a letter."""
    said = client.Answer(client.Prompt("0", "", 4), 0)
    said.texts = said.tokens = list(text)
    said.gaps = list(gaps) or [float("nan")] * len(text)
    return said


def judged(*beside, gaps=(), alone=()):
    """The verdict on answers to eight prompts, `beside` for the first of them in turn, alone "abcd" with a number."""
    every = [[answered(f"abcd{n}", gaps)] * 2 for n in range(right.PROMPTS)]
    every[: len(alone)] = [[answers[0], answered(text, gaps)] for text, answers in zip(alone, every, strict=False)]
    asked = right.Sample(every, copies=[(0, [answered("abcd0")] * 4)])
    asked.beside = [(n, answered(text)) for n, texts in enumerate(beside) for text in texts.split()]
    return right.judged(asked)


TIED = [3.0, 3.0, NEAR_TIE - 0.01, 3.0, 3.0]


@pytest.mark.parametrize(
    ("beside", "gaps", "alone", "verdict", "near_ties"),
    [
        (["abcd0"], (), (), "right", 0),
        (["abX"] * 4, (), (), "cannot tell", 0),  # rounding may turn so many prompts
        (["abX"] * 5, (), (), "wrong", 0),
        (["abXd0"], TIED, (), "right", 1),
        (["abXd0"], TIED, ["abXd0"], "right", 0),  # what a near-tie turns alone is one of two right answers
        ([], TIED, ["aXcd0"], "cannot tell", 0),  # another one alone: it samples
    ],
)
def test_leads_tell_rounding_from_neighbours_and_without_them_the_number_of_prompts(
    beside, gaps, alone, verdict, near_ties
):
    found = judged(*beside, gaps=gaps, alone=alone)
    assert (found.verdict, found.near_ties) == (verdict, near_ties), found


def spoken(text, seconds):
    """An answer whose tokens come one at a time within some seconds."""
    stamps = np.linspace(1e6, 1e6 + seconds * 1e9, 24).astype(int).tolist()
    answer = answered(text, [9.0] * len(text))
    answer.sent_ns, answer.chunk_ns, answer.ended_ns = 1, stamps, stamps[-1]
    return answer


@pytest.mark.parametrize(("repeat", "is_cached"), [(0.5, False), (0.05, True)])
def test_answers_that_nobody_can_have_written_so_fast_come_from_a_cache(repeat, is_cached):
    alone = [[spoken(f"{n}abc", 0.2), spoken(f"{n}abc", 0.2 * repeat)] for n in range(right.PROMPTS)]
    verdict = right.judged(right.Sample(alone, [(0, alone[0][0])], [(0, [alone[0][0]])])).verdict
    assert verdict == ("cannot tell" if is_cached else "right")


def test_a_server_that_hangs_is_left_when_the_time_is_over(stands_in, monkeypatch):
    monkeypatch.setattr(probe, "GRACE_S", 0.2)
    found = probe.probe(Target(stands_in("hangs")), USUAL, 1.0)
    assert found.right.why == found.phase.why == probe.LATE


@needs_llama
@pytest.mark.parametrize(("model", "verdict"), [(HYBRID, "wrong"), (ATTENTION, "right")])
def test_the_probe_finds_a_stock_servers_mixed_up_answers_and_none_with_attention_only(model, verdict, monkeypatch):
    for name, value in (("LLAMA_API_KEY", "x"), ("LLAMA_ARG_CTX_SIZE", "64")):  # it takes none from who starts it
        monkeypatch.setenv(name, value)
    with server.started(Setup(mini_file(model), 4, 1536, libraries=builds.installed_libraries())) as running:
        found = rightness(running.url)
    assert (found.verdict, found.log_probabilities) == (verdict, True), found


# ------------------------------------------------------------------ which phase


def rounds(prefill, decode, queue, noise=0.01, n=5):
    """Rounds of a server whose time is linear in prompt and answer, and in how many ask."""
    rng = np.random.default_rng(0)
    settings = Setting(2, 100, 10).changed()

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
    found = probe._bound(rounds(prefill, decode, queue), [])
    assert (found.verdict, found.lever) == (verdict, probe.LEVERS[verdict]), found
    if not queue:
        told, expected = found.elasticities["prompt"], np.log(1 + prefill / (prefill + decode)) / np.log(2)
        assert told.low <= expected + 0.02
        assert told.value == pytest.approx(expected, abs=0.05)


ENOUGH = rounds(1.0, 0.1, 0.0)
DOUBTED = {  # rounds that decide nothing -> what is said
    "no time for three rounds": ENOUGH[:2],
    "twice the output": [{name: replace(seen, output_tokens=4.0) for name, seen in turn.items()} for turn in ENOUGH],
}


@pytest.mark.case(3)
@pytest.mark.parametrize("why", DOUBTED)
def test_no_phase_is_named_on_too_little_or_against_the_elasticities(why):
    found = probe._bound(DOUBTED[why], [])
    assert found.verdict == "cannot tell"
    assert why in found.why


# ------------------------------------------------------------------ command


@pytest.mark.parametrize("url", ["ftp://127.0.0.1", "http://[::1"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(StudyError, match="no http or https address"):
        probe.address(url)


@pytest.mark.parametrize("name", ["a\nIs it right under load? right.", "\x1b[2J" + "x" * 5000])
def test_a_model_s_name_is_one_short_line_of_what_can_be_printed(name):
    found = probe.Report(url="u", model=name, seconds=1.0, right=right.unknown(""), phase=probe.cannot(""))
    first, blank = probe.text(found).split("\n")[:2]
    assert (first.isprintable(), blank) == (True, "")
    assert len(first) < 100


def test_the_report_is_json_or_text_and_the_key_is_in_neither(stands_in, monkeypatch):
    monkeypatch.setenv(probe.KEY, "very-secret")
    monkeypatch.setattr(right, "ROUNDS", 2)
    command = ["probe", stands_in(), "--prompt-tokens", "16", "--output-tokens", "4", "--seconds", "20"]
    done = CliRunner().invoke(main.app, [*command, "--json"])
    assert done.exit_code == 0, done.output
    assert set(misbehaving.Handler.keys) == {"Bearer very-secret"}
    begun = [prompt[:40] for n_gen, prompt in misbehaving.Handler.asked if n_gen in (4, 8)]
    assert len(set(begun)) == len(begun) > 30, "a server that keeps prefixes has kept none of these"
    told = json.loads(done.stdout)
    assert told["right"]["verdict"] == "right"
    assert told["right"]["compared"] == right.ROUNDS * (sum(right.TOGETHER) + right.TOGETHER[0])
    assert (told["model"], told["right"]["log_probabilities"]) == ("stand-in", False)
    text = CliRunner().invoke(main.app, command).output
    assert "Which phase binds?" in text
    assert "very-secret" not in text + done.output
