"""The probe of anybody's server: contamination is found where it is, the binding phase named, the key kept."""

import json
import re
import signal
import subprocess
import sys
from dataclasses import replace

import misbehaving
import numpy as np
import pytest
from conftest import ATTENTION, HYBRID, mini_file
from test_cli import in_one_process
from trials import trial
from typer.testing import CliRunner

from plamo_study import paths
from plamo_study.cli import main, server as cli_server
from plamo_study.engine import server_build
from plamo_study.errors import StudyError
from plamo_study.measure import server
from plamo_study.measure.server import Setup
from plamo_study.studies.serving import client, page, probe, results, traffic
from plamo_study.studies.serving.client import Target
from plamo_study.studies.serving.probe import Ask, Seen

needs_llama = pytest.mark.skipif(server.find() is None, reason="no llama-server: plamo-study server build")


@pytest.fixture
def stands_in(monkeypatch):
    with misbehaving.standing_in(monkeypatch) as start:
        yield start


async def met(ask):
    async with client.client(ask.target) as web:
        return await probe._met(web, ask)


def probed(url, seconds=20.0, **given):
    return probe.probe(Ask(Target(url), 16, 4, 2, seconds=seconds, **given))


# ------------------------------------------------------------------ right under load


def test_answers_that_depend_on_neighbours_are_found_with_the_prompts_and_the_token(stands_in, monkeypatch):
    monkeypatch.setattr(probe, "RIGHT_ROUNDS", 2)
    right = probe.rightness(Ask(Target(stands_in("mixes")), 16, 4, 2, seconds=20.0))
    assert right.verdict == "they do"
    assert right.other > 2
    assert set(right.prompts.values()) == {0}
    assert "from token 0" in right.why


def test_a_server_that_drips_is_left_when_the_time_is_over(stands_in, monkeypatch):
    monkeypatch.setattr(probe, "GRACE_S", 0.2)
    found = probed(stands_in("drips_later"), seconds=1.0)
    assert (found.right.verdict, found.phase.verdict) == ("cannot tell", "cannot tell")
    assert found.right.why == found.phase.why == probe.LATE


@needs_llama
@pytest.mark.parametrize(
    ("model", "verdict"), [(HYBRID, "they do"), (ATTENTION, "answers do not depend on neighbours")]
)
def test_the_probe_finds_a_stock_servers_mixed_up_answers_and_none_with_attention_only(model, verdict):
    setup = Setup("llama-server", mini_file(model), 4, 1536, libraries=server_build.libraries())
    with server.started(setup) as running:
        asked = Ask(Target(running.url), 16, 4, 2, seconds=12.0)
        assert client.run(met(asked))[1] == "llama-server"
        right = probe.rightness(asked)
        assert right.verdict == verdict, right
        assert right.log_probabilities
        if verdict != "they do":
            assert not right.failed
            assert running.ended() == ""


@needs_llama
def test_a_trial_counts_verdicts_and_deaths_and_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "MEASURED", tmp_path)
    said = []
    found = trial.run(HYBRID, mini_file(HYBRID), "stock", 1, said.append)
    assert found.verdicts == {"they do": 1}
    assert found.other or found.died
    assert said == [f"{HYBRID}, stock, 1 of 1: they do"]
    trial.keep("local", [found])
    assert results.trials("local") == [found]
    assert results.trials("reference") == []


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
        found, server = client.run(met(ask))
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
    found = probe._bound(rounds(prefill, decode, queue), [])
    assert (found.verdict, found.lever) == (verdict, probe.LEVERS[verdict]), found
    if not queue:
        told, expected = found.elasticities["prompt"], np.log(1 + prefill / (prefill + decode)) / np.log(2)
        assert told.low <= expected + 0.02
        assert told.value == pytest.approx(expected, abs=0.05)


def test_too_few_rounds_and_answers_that_end_by_themselves_are_no_verdict():
    enough = rounds(1.0, 0.1, 0.0)
    short = [{name: replace(seen, output_tokens=4.0) for name, seen in each.items()} for each in enough]
    for given, why in ((enough[:2], "no time for three rounds"), (short, "ends by itself")):
        found = probe._bound(given, [])
        assert found.verdict == "cannot tell"
        assert why in found.why


BEFORE = """# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
llamacpp:prompt_tokens_total 100
llamacpp:prompt_seconds_total 1.5
llamacpp:tokens_predicted_total 10
llamacpp:tokens_predicted_seconds_total 0.5
"""
VLLM = """vllm:prompt_tokens_total{model_name="a b"} 10.0
vllm:generation_tokens_total{model_name="a b"} 5.0
vllm:request_queue_time_seconds_sum{model_name="a b"} 0.5
vllm:request_prefill_time_seconds_sum{model_name="a b"} 0.25
vllm:request_decode_time_seconds_sum{model_name="a b"} 0.25
"""


def test_a_servers_own_traffic_is_read_from_two_looks_at_its_metrics():
    after = BEFORE.replace(" 100", " 400").replace("1.5", "4.5").replace("total 10", "total 70").replace("0.5", "1.5")
    found = traffic.between(traffic.parsed(BEFORE), traffic.parsed(after), 10.0)
    assert (found.prompt_tokens, found.output_tokens) == (300, 60)
    assert found.shares == {"prefill": 0.75, "decode": 0.25}
    nothing = {name: 0.0 for name in traffic.parsed(VLLM)}
    assert traffic.between(nothing, traffic.parsed(VLLM), 1.0).shares["queue"] == 0.5
    for before, after, why in ((BEFORE, BEFORE, "nothing was answered"), (BEFORE, BEFORE.replace("1.5", "0"), "anew"),
                               ("", "", "counts nothing")):  # fmt: skip
        with pytest.raises(StudyError, match=why):
            traffic.between(traffic.parsed(before), traffic.parsed(after), 1.0)


# ------------------------------------------------------------------ command


def test_the_cost_is_said_first_and_another_machine_is_not_asked_without_leave(monkeypatch):
    monkeypatch.setattr(probe, "probe", lambda *_: pytest.fail("it was asked"))
    with pytest.raises(StudyError, match=r"not this machine.*at most \d+ requests"):
        main.app(["probe", "http://192.0.2.1:8080"], standalone_mode=False)


def test_what_is_no_address_is_refused_and_a_password_is_not_repeated():
    for url in ("ftp://127.0.0.1", "nowhere", "http://", "http://127.0.0.1:x", "http://[::1", "http://\x00", "http://1℀.com",
                "http://me:hidden@127.0.0.1"):  # fmt: skip
        with pytest.raises(StudyError, match=r"no http or https address|a password") as refused:
            probe.check_url(url)
        assert "hidden" not in str(refused.value)


def test_loopback_is_told_by_the_address_alone():
    assert all(map(probe.is_loopback, ("http://127.0.0.1:80", "http://localhost/v1", "http://[::1]:8080")))
    assert not any(map(probe.is_loopback, ("http://127.0.0.1.example.org", "http://10.0.0.1", "http://[::1")))


def test_the_report_is_json_text_and_a_page_and_the_key_is_in_none(stands_in, monkeypatch, tmp_path):
    monkeypatch.setenv(cli_server.KEY, "very-secret")
    monkeypatch.setattr(probe, "RIGHT_ROUNDS", 2)
    out = tmp_path / "report.html"
    lengths = ["--prompt-tokens", "16", "--output-tokens", "4", "--seconds", "20"]
    done = CliRunner().invoke(main.app, ["probe", stands_in(), *lengths, "--json", "--html", str(out)])
    assert done.exit_code == 0, done.output
    assert set(misbehaving.Handler.keys) == {"Bearer very-secret"}
    told = json.loads(done.stdout)
    assert told["right"]["verdict"] == "answers do not depend on neighbours"
    assert told["right"]["compared"] == probe.RIGHT_ROUNDS * sum(probe.TOGETHER)
    assert told["requests"] <= told["budget"]["requests"]
    assert (told["model"], told["server"], told["right"]["log_probabilities"]) == ("stand-in", "unknown", False)
    written = out.read_text()
    assert "Which phase binds?" in written
    assert "very-secret" not in written + done.output
    assert "http" not in written.replace(told["url"], "")  # nothing is loaded from elsewhere


def test_a_page_escapes_what_a_server_says():
    told = {"url": "http://x", "server": "unknown", "model": "<script>alert(1)</script>", "requests": 1, "seconds": 1.0}
    right = probe.Rightness(verdict="cannot tell", why="")
    phase = probe.Binding(verdict="cannot tell", why="")
    shown = page.html(probe.Report(**told, budget=probe.Budget(1, 1, 1.0), right=right, phase=phase))
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown


@needs_llama
@pytest.mark.parametrize("told", [signal.SIGINT, signal.SIGTERM])
def test_the_command_that_starts_a_server_ends_it_when_it_is_told_to_end(told):
    child = subprocess.Popen(
        [sys.executable, "-m", "plamo_study.cli.main", "server", "start", str(mini_file(HYBRID))],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    url = child.stdout.readline().strip()
    assert probe.is_loopback(url)
    child.send_signal(told)
    child.communicate(timeout=15)
    with pytest.raises(StudyError, match="does not answer"):
        probed(url)
