"""A probe of any OpenAI-compatible server: are its answers right under load, and which phase binds its traffic?

`right` asks the same prompts alone and together. For the phase, prompt length, answer length and load are changed one
at a time, in rounds; the elasticity of a request's time to each is reported with its interval.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec
import numpy as np

from llama_meter import stats
from llama_meter.disk import printable
from llama_meter.errors import StudyError
from llama_meter.serve import client, load, right
from llama_meter.serve.client import Answer, Client, Prompt, Target
from llama_meter.serve.load import Loaded
from llama_meter.serve.right import Rightness

KEY = "PROBE_API_KEY"  # environment: sent to the probed server, and never shown
HELLO = Prompt("hello", "Hello", 1)
LATE = "it did not end within its time"
GRACE_S = 10.0  # for requests in flight when the time is up; at most half of the time
CHANGED = {"prompt": "a longer prompt", "output": "a longer answer", "load": "more load"}
Result = TypeVar("Result")
CHARACTERS, MOST_CHARACTERS = 3.0, 8.0  # per token: before the server has counted some, and whatever it counts
ROUNDS = 5
FACTOR = 2  # by which a length or the load is changed
Phase = Literal["prefill", "decode", "queue", "client", "cannot tell"]
LEVERS: Mapping[Phase, str] = {
    "prefill": "keep prefixes cached, shorten prompts; chunk them to protect running answers, or prefill them "
    "elsewhere (chapter 7)",
    "decode": "fewer bits (chapter 5), a bigger batch if the aggregate counts (chapter 3), shorter answers",
    "queue": "more slots while a step stays cheap, or replicas (chapter 3), or less load",
    "client": "probe from a machine with idle cores",
    "cannot tell": "probe again when the server is quiet, or for lengths of which twice as much fits its context",
}


class Model(msgspec.Struct):
    """A model as a server lists it."""

    id: str


class Models(msgspec.Struct):
    """What a server lists."""

    data: list[Model] = []


@dataclass(frozen=True)
class Setting:
    """One load: `n` requests at once or, if `per_second` is not 0, arriving at that rate; tokens of each request."""

    n: int
    prompt_tokens: int
    output_tokens: int
    per_second: float = 0.0

    def changed(self) -> dict[str, "Setting"]:
        """The loads that are compared with this one, by the quantity that is changed."""
        n, prompt, output, rate = self.n, self.prompt_tokens, self.output_tokens, self.per_second
        return {
            "usual": self,
            "prompt": Setting(n, FACTOR * prompt, output, rate),
            "output": Setting(n, prompt, FACTOR * output, rate),
            "load": Setting(FACTOR * n, prompt, output, FACTOR * rate),
            "alone": Setting(1, prompt, output),
        }


class Interval(msgspec.Struct, frozen=True):
    """An estimate in JSON form."""

    value: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        shown = f"{self.value:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"
        return shown if self.value == self.value else "n/a"


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """Which phase binds; `elasticities`: percent more time per request for 1 % more prompt, answer or load.

    `shares` of a request's time under the usual load; `seconds`: to the first token and to the end, alone and under it.
    """

    verdict: Phase
    why: str
    lever: str = LEVERS["cannot tell"]
    elasticities: dict[str, Interval] = {}
    shares: dict[str, Interval] = {}
    seconds: dict[str, float] = {}


@dataclass(frozen=True)
class Seen:
    """Means over the requests of one setting in one round: seconds to the first token and to the end; tokens."""

    ttft: float
    whole: float
    prompt_tokens: float
    output_tokens: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Findings of a probe."""

    url: str
    model: str
    seconds: float
    right: Rightness
    phase: Binding


def address(url: str) -> str:
    """The server's address without /v1 at its end; StudyError for anything that is not one."""
    try:
        parts = urlsplit(url)
        client.httpx2.URL(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not parts.username
    except (ValueError, client.httpx2.InvalidURL):
        good = False
    if not good:
        why, mend = "is no http or https address, or holds a password", "name one such as http://127.0.0.1:8080"
        raise StudyError(f"URL {url.rpartition('@')[2]!r}", why, f"{mend}; a key goes into {KEY}")
    return url.rstrip("/").removesuffix("/v1")


def probe(target: Target, usual: Setting, seconds: float, say: Callable[[str], None] = lambda line: None) -> Report:
    """Probe a server with its usual requests, for some seconds; StudyError where it answers nothing at all."""
    if not (target.key.isascii() and target.key.isprintable() and target.key == target.key.strip()):
        raise StudyError(KEY, "holds what no header can carry", f"export {KEY}=... in letters, digits and signs")
    return client.over(target, lambda web: _probe(web, target, usual, seconds, say))


async def _probe(web: Client, target: Target, usual: Setting, seconds: float, say: Callable[[str], None]) -> Report:
    begin = time.monotonic()
    target = await met(web, target)
    say("the same prompts alone and together")
    half, end, grace = begin + seconds / 2, begin + seconds, min(GRACE_S, seconds / 2)
    rightness = await _in_time(right.ask(web, target, usual.n, half), half + grace, right.unknown(LATE))
    say("the prompt, the answer and the load doubled, one at a time")
    bound = await _in_time(binding(web, target, usual, end), end + grace, cannot(LATE))
    spent = time.monotonic() - begin
    return Report(url=target.url, model=target.model, seconds=spent, right=rightness, phase=bound)


async def _in_time(work: Coroutine[Any, Any, Result], until: float, otherwise: Result) -> Result:
    """Result of `work`, or `otherwise` if it has not ended by `until`."""
    try:
        async with asyncio.timeout(max(until - time.monotonic(), 0.0)):
            return await work
    except TimeoutError:
        return otherwise


async def met(web: Client, target: Target) -> Target:
    """The target with the server's model and API: completions, or else chat.

    Raises StudyError where it lists several models and none was named, and where it answers nothing.
    """
    listed = await _listed(web, target)
    if len(listed) > 1 and not target.model:
        names = ", ".join(map(printable, listed))
        raise StudyError(target.url, f"lists {len(listed)} models: {names}", "name one of them with --model")
    target = replace(target, model=target.model or next(iter(listed), ""))
    first = await client.ask(web, target, HELLO)
    if first.status in (400, 404, 405, 422):
        chat = replace(target, api="chat/completions")
        second = await client.ask(web, chat, HELLO)
        if not second.failure:
            return chat
    if first.failure:
        raise StudyError(target.url, f"no answer: {first.failure}", mend(first))
    return target


async def _listed(web: Client, target: Target) -> list[str]:
    """The models that a server lists; not every server does."""
    try:
        reply = await web.get(f"{target.url}/v1/models")
        return [model.id for model in msgspec.json.decode(reply.content, type=Models).data]
    except (client.httpx2.TransportError, ValueError):
        return []


def mend(answer: Answer) -> str:
    """What helps against a failure: a certificate, or the other scheme, does not mean that there is no server."""
    if "CERTIFICATE_VERIFY_FAILED" in answer.failure:
        return "its certificate is not trusted: export SSL_CERT_FILE=ITS-CERTIFICATE.pem, if the server is yours"
    if "[SSL" in answer.failure or answer.failure.startswith(("RemoteProtocolError", "ReadError")):
        return "does it speak http or https? Try the other, or look at the server's log"
    if answer.failure.startswith("ConnectError"):
        return "start the server first"
    if answer.status in (401, 403):
        return f"export {KEY}=... with a key of this server"
    return "look at the server's log, or name its own address, and a model that it knows with --model"


def text(report: Report) -> str:
    """The report as one page for a terminal; the key that was used is not in it."""
    rightness, bound = report.right, report.phase
    counts = f"{rightness.compared} compared, {rightness.other} other, {rightness.near_ties} near-ties, "
    counts += f"{rightness.failed} failed; copies of a prompt at once: at most {rightness.distinct} distinct"
    lines = [
        f"{report.url}, {printable(report.model)}: {report.seconds:.0f} s",
        "",
        f"Is it right under load? {rightness.verdict}.",
        f"  why: {rightness.why}",
        f"  answers: {counts}",
        f"  judged {'by' if rightness.log_probabilities else 'without'} log probabilities",
    ]
    if rightness.verdict == "right":  # none of n answers wrong bounds their share by 3 / n with 95 %
        lines += [f"  would miss: what happens to fewer than one answer in {max(rightness.compared // 3, 1)}"]
    lines += ["", f"Which phase binds? {bound.verdict}.", f"  why: {bound.why}", f"  what helps: {bound.lever}"]
    lines += [f"  1 % {CHANGED[name]}: {value:.2f} % longer" for name, value in bound.elasticities.items()]
    lines += [f"  share of a request, {name}: {value:.0%}" for name, value in bound.shares.items()]
    return "\n".join([*lines, *(f"  {name}: {value * 1e3:.1f} ms" for name, value in bound.seconds.items())])


# ------------------------------------------------------------------ which phase binds


def cannot(why: str) -> Binding:
    """No verdict, and why."""
    return Binding(verdict="cannot tell", why=why)


async def binding(web: Client, target: Target, usual: Setting, until: float) -> Binding:
    """Load a server in rounds that should end by `until` (time.monotonic), no two prompts beginning alike; judge."""
    warm = load.of_characters(1, int(CHARACTERS * usual.prompt_tokens), usual.output_tokens, seed=2)[0]
    first = await client.ask(web, target, warm)
    if first.failure:
        return cannot(f"a request failed: {first.failure}")
    if not first.n_prompt:
        return cannot("the server counts no tokens in what it streams")
    per_token = min(len(warm.text) / first.n_prompt, MOST_CHARACTERS)
    rounds: list[dict[str, Seen]] = []
    loads: list[Loaded] = []
    spent = 0.0
    for turn in range(ROUNDS):
        begin = time.monotonic()
        if begin + spent > until:
            break
        seen: dict[str, Seen] = {}
        for name, setting in usual.changed().items():
            seed = 10 + ROUNDS * len(seen) + turn
            characters = int(per_token * setting.prompt_tokens)
            prompts = load.of_characters(FACTOR * usual.n, characters, setting.output_tokens, seed)[: setting.n]
            if setting.per_second:
                due = load.arrivals(setting.n, setting.per_second, turn)
                loaded = await load.opened(web, target, prompts, due)
            else:
                loaded = await load.closed(web, target, prompts, setting.n)
            if failures := [answer.failure for answer in loaded.answers if answer.failure]:
                twice = f" with twice the {name}" if name in ("prompt", "output", "load") else ""
                return cannot(f"{len(failures)} of {setting.n} requests failed{twice}: {failures[0]}")
            loads.append(loaded)
            seen[name] = _seen(loaded.answers, setting)
        rounds.append(seen)
        spent = time.monotonic() - begin
    return _bound(rounds, loads)


def _seen(answers: list[Answer], setting: Setting) -> Seen:
    firsts = [(a.token_ns[0] if a.token_ns else a.ended_ns) - a.due_ns for a in answers]
    return Seen(
        float(np.mean(firsts)) / 1e9,
        float(np.mean([a.ended_ns - a.due_ns for a in answers])) / 1e9,
        float(np.mean([a.n_prompt or setting.prompt_tokens for a in answers])),
        float(np.mean([a.n_gen or len(a.chunk_ns) or 1 for a in answers])),
    )


def _bound(rounds: list[dict[str, Seen]], loads: list[Loaded]) -> Binding:
    if len(rounds) < stats.FEW:
        return cannot("there was no time for three rounds")

    def grown(name: str, what: str) -> np.ndarray:
        """Logarithms of what a changed setting has more than the usual one, by round."""
        return np.log([getattr(turn[name], what) / getattr(turn["usual"], what) for turn in rounds])

    more = {
        "prompt": grown("prompt", "prompt_tokens"),
        "output": grown("output", "output_tokens"),
        "load": np.log(np.full(len(rounds), FACTOR)),
    }
    logs = {name: grown(name, "whole") / np.where(grows > 0, grows, np.nan) for name, grows in more.items()}
    shares = _shares(rounds)
    verdict, why = _verdict(logs, shares, loads)
    return Binding(
        verdict=verdict,
        why=why,
        lever=LEVERS[verdict],
        elasticities={name: _interval(values) for name, values in logs.items()},
        shares={name: _interval(values) for name, values in shares.items()},
        seconds={
            f"{part} {how}": float(np.median([getattr(turn[name], attribute) for turn in rounds]))
            for name, how in (("alone", "alone"), ("usual", "under load"))
            for attribute, part in (("ttft", "first token"), ("whole", "whole answer"))
        },
    )


def _shares(rounds: list[dict[str, Seen]]) -> dict[str, np.ndarray]:
    """Shares of a request's time under the usual load, by round: queue, prefill and decode."""
    first, whole, alone = (
        np.array([getattr(turn[name], what) for turn in rounds])
        for name, what in (("usual", "ttft"), ("usual", "whole"), ("alone", "ttft"))
    )
    return {
        "queue": np.maximum(first - alone, 0) / whole,
        "prefill": np.minimum(first, alone) / whole,
        "decode": (whole - first) / whole,
    }


def _interval(values: np.ndarray) -> Interval:
    """The median with the interval of paired values; NaN where any is missing."""
    low, high = stats.paired_bounds(values)
    return Interval(float(np.median(values)), float(low), float(high))


def _verdict(logs: dict[str, np.ndarray], shares: dict[str, np.ndarray], loads: list[Loaded]) -> tuple[Phase, str]:
    late = sum(loaded.client_binds() for loaded in loads)
    if 2 * late > len(loads):
        return "client", f"the client was late in {late} of {len(loads)} loads"
    for name in ("prompt", "output"):
        if np.isnan(logs[name]).any():
            return "cannot tell", f"with twice the {name} requested, the server counts no more tokens of it"
    ordered = sorted(shares, key=lambda name: -float(np.median(shares[name])))
    first, second = (shares[name] for name in ordered[:2])
    low, _ = stats.paired_bounds(first - second)
    share = _interval(first)
    if low <= 0:
        return "cannot tell", f"{ordered[0]} and {ordered[1]} take about as much of a request"
    verdict: Phase = ordered[0]  # type: ignore[assignment] # a key of `shares`
    by = {"prefill": "prompt", "decode": "output", "queue": "load"}[verdict]
    grows, takes = _interval(logs[by]), f"{verdict} takes {share:.0%} of a request, yet"
    if grows.low <= 0 or grows.high < share.low / 2:
        return "cannot tell", f"{takes} 1 % more {by} takes {grows:.2f} % longer"
    other = {"prompt": "output", "output": "prompt"}.get(by, by)
    if stats.paired_bounds(logs[other] - logs[by])[0] > 0:
        return "cannot tell", f"{takes} its time follows the {other} more than the {by}"
    return verdict, f"{share:.0%} of a request; 1 % more {by} takes {grows:.2f} % longer"
