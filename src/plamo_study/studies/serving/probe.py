"""A probe of any OpenAI-compatible server: are its answers right under load, and which phase binds its traffic?

Answers: `right` asks the same prompts alone and together. Phase: prompt length, answer length and load are changed one
at a time, in rounds, and the elasticity of a request's time to each is reported with its interval. The cost is known
beforehand and kept to, whatever comes: `Ask.budget` gives the maximum of requests, tokens, seconds and bytes.
"""

import asyncio
import ipaddress
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import httpx2
import msgspec
import numpy as np

from plamo_study.analysis import stats
from plamo_study.analysis.stats import Estimate
from plamo_study.errors import StudyError
from plamo_study.foreign import parsed
from plamo_study.studies.serving import client, load, questions, right
from plamo_study.studies.serving.client import Allowance, Answer, Prompt, Target
from plamo_study.studies.serving.load import Loaded
from plamo_study.studies.serving.right import Rightness
from plamo_study.studies.serving.traffic import Traffic

PHASE_ROUNDS = 5
FACTOR = 2  # by which a length or the load is changed
CHARACTERS = 3.0  # per token, until the server has counted some
WARM = 1
LOOPBACK = ("localhost",)
SERVERS = {"llamacpp": "llama-server", "me": "llama_cpp.server", "vllm": "vLLM"}  # by the `owned_by` of their models
KNOWN = {"llama-server": questions.OURS["llama-server"], "vLLM": {"ignore_eos": True}}
Phase = Literal["prefill", "decode", "queue", "client", "cannot tell"]
LEVERS: Mapping[Phase, str] = {
    "prefill": "keep prefixes cached, shorten prompts; chunk them to protect running answers (notebook 06), or "
    "prefill them elsewhere (09)",
    "decode": "fewer bits (notebook 04), a bigger batch if the aggregate counts (03), shorter answers",
    "queue": "more slots while a step stays cheap (notebook 03), replicas (07), or less load",
    "client": "probe from a machine with idle cores",
    "cannot tell": "probe again when the server is quiet, or for longer lengths",
}
LATE = "it did not end within its time"
GRACE_S = 10.0  # for requests in flight when the time is up; at most half of the time
MET = 2  # requests that find out which API the server has
BYTES = 1 << 16, 1 << 11  # of an answer beside its tokens, and of each token: several times what servers send
Say = Callable[[str], None]
Found = TypeVar("Found")


class Model(msgspec.Struct):
    """A model as a server lists it."""

    id: str = ""
    owned_by: str = ""


class Models(msgspec.Struct):
    """The models that a server lists."""

    data: list[Model]


class Budget(msgspec.Struct, frozen=True):
    """Upper limits of a probe's cost."""

    requests: int
    tokens: int
    seconds: float
    bytes_read: int = 0


@dataclass(frozen=True)
class Ask:
    """What to probe: a server, its usual request in tokens, and how many run at a time or arrive per second.

    `top`: log probabilities asked for at each token; 0: answers are judged by repetition.
    """

    target: Target
    prompt_tokens: int = 256
    output_tokens: int = 32
    concurrency: int = 2
    per_second: float = 0.0
    seconds: float = 120.0
    top: int = right.TOP

    def budget(self) -> Budget:
        """Most requests, tokens, seconds and bytes of answers that the probe takes."""
        judged = right.most_requests(self.concurrency)
        settings = self.settings().values()
        requests = MET + judged + WARM + PHASE_ROUNDS * sum(setting.n for setting in settings)
        written = (
            judged * right.TOKENS + self.output_tokens + PHASE_ROUNDS * sum(s.n * s.output_tokens for s in settings)
        )
        given = judged * right.most_prompt_tokens() + self.prompt_tokens
        given += PHASE_ROUNDS * sum(s.n * s.prompt_tokens for s in settings)
        return Budget(requests, given + written, self.seconds, requests * BYTES[0] + written * BYTES[1])

    def bounded(self) -> "Ask":
        """The same, with requests that keep to the budget, however many are sent and whatever comes."""
        most = self.budget()
        return replace(self, target=replace(self.target, allowance=Allowance(most.requests, most.bytes_read)))

    def settings(self) -> dict[str, "Setting"]:
        """Loads to compare, by the quantity that is changed."""
        n = self.concurrency
        usual = Setting(n, self.prompt_tokens, self.output_tokens, self.per_second)
        return {
            "usual": usual,
            "prompt": replace(usual, prompt_tokens=FACTOR * usual.prompt_tokens),
            "output": replace(usual, output_tokens=FACTOR * usual.output_tokens),
            "load": replace(usual, n=FACTOR * n, per_second=FACTOR * usual.per_second),
            "alone": replace(usual, n=1, per_second=0.0),
        }


@dataclass(frozen=True)
class Setting:
    """One load: `n` requests at once or, if `per_second` is not 0, arriving at that rate; tokens of each request."""

    n: int
    prompt_tokens: int
    output_tokens: int
    per_second: float


class Interval(msgspec.Struct, frozen=True):
    """An estimate in JSON form."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, estimate: Estimate) -> "Interval":
        """Interval of an estimate."""
        return cls(estimate.value, estimate.low, estimate.high)

    def __format__(self, spec: str) -> str:
        return f"{self.value:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """Which phase binds; `elasticities`: percent more time per request for 1 % more prompt, answer or load.

    `shares` of a request's time under the usual load; `seconds`: to the first token and to the end, alone and under it;
    `late_s`: 95th percentile of the client's lag.
    """

    verdict: Phase
    why: str
    lever: str = ""
    elasticities: dict[str, Interval] = {}
    shares: dict[str, Interval] = {}
    seconds: dict[str, float] = {}
    late_s: float = 0.0


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Findings of a probe; `traffic`: the server's own traffic, if it was watched."""

    url: str
    server: str
    model: str
    budget: Budget
    requests: int
    seconds: float
    right: Rightness
    phase: Binding
    traffic: Traffic | None = None


def is_loopback(url: str) -> bool:
    """Whether a URL can only lead to this machine, however names resolve."""
    try:
        host = urlsplit(url).hostname or ""
        return host in LOOPBACK or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_url(url: str) -> str:
    """The server's address without a path; StudyError for anything that is not one."""
    try:
        parts = urlsplit(url)
        httpx2.URL(url)
        right = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except (ValueError, httpx2.InvalidURL):
        right = False
    if not right:
        raise StudyError(f"URL {url!r}", "is no http or https address", "plamo-study probe http://127.0.0.1:8080")
    if parts.username or parts.password:
        raise StudyError("URL", "carries a password, which would appear in the report", "give the key by environment")
    return url.rstrip("/").removesuffix("/v1")


def probe(ask: Ask, say: Say = lambda line: None) -> Report:
    """Probe a server; StudyError where it answers nothing at all."""
    return client.run(_probe(ask.bounded(), say))


def rightness(ask: Ask) -> Rightness:
    """The first half of a probe: are answers right under load? StudyError where the server answers nothing at all."""
    ask = ask.bounded()

    async def asked(web: httpx2.AsyncClient) -> Rightness:
        target, _ = await _met(web, ask)
        return await right.ask(web, target, ask.concurrency, time.monotonic() + ask.seconds, ask.top)

    return client.over(ask.target, asked)


async def _probe(ask: Ask, say: Say) -> Report:
    begin = time.monotonic()
    until = begin + ask.seconds
    async with client.client(ask.target) as web:
        target, server = await _met(web, ask)
        ask = replace(ask, target=target)
        say("the same prompts alone and together")
        half = begin + ask.seconds / 2
        grace = min(GRACE_S, ask.seconds / 2)
        late = right.unknown(LATE)
        found = await _in_time(right.ask(web, target, ask.concurrency, half, ask.top), half + grace, late)
        say("prompt, answer and load changed one at a time")
        bound = Binding(verdict="cannot tell", why=LATE, lever=LEVERS["cannot tell"])
        phase = await _in_time(_phase(web, ask, until), until + grace, bound)
    spent = time.monotonic() - begin
    return Report(
        url=target.url, server=server, model=target.model, budget=ask.budget(), seconds=spent, right=found, phase=phase,
        requests=target.allowance.asked if target.allowance else 0,
    )  # fmt: skip


async def _in_time(work: Coroutine[Any, Any, Found], until: float, otherwise: Found) -> Found:
    """Result of `work`, or `otherwise` if it has not ended by `until`."""
    try:
        async with asyncio.timeout(max(until - time.monotonic(), 0.0)):
            return await work
    except TimeoutError:
        return otherwise


async def _met(web: httpx2.AsyncClient, ask: Ask) -> tuple[Target, str]:
    """The target with the server's model and API, and the kind of server if it is known."""
    try:
        async with asyncio.timeout(ask.seconds / 2):
            return await _greeted(web, ask.target)
    except TimeoutError:
        why = f"has completed no answer after {ask.seconds / 2:g} s"
        raise StudyError(ask.target.url, why, "give it longer with --seconds") from None


async def _greeted(web: httpx2.AsyncClient, target: Target) -> tuple[Target, str]:
    where = f"{target.url}/v1/models"
    try:
        status, body = await client.look(web, where)
    except httpx2.TransportError as error:
        raise StudyError(target.url, f"does not answer ({type(error).__name__})", "start the server first") from None
    except ValueError as error:
        raise StudyError(where, f"gives {error}", "name the server's own address") from None
    found = Model()
    with suppress(ValueError):  # not every server lists its models
        listed: Models = parsed(body, Models)
        found = listed.data[0] if status == 200 and listed.data else found
    server = SERVERS.get(found.owned_by, "unknown")
    target = replace(target, model=target.model or found.id, usual=KNOWN.get(server, {}))
    tried = Prompt("hello", "Hello", 1)
    for api in ("completions", "chat/completions"):
        candidate = replace(target, api=api)  # type: ignore[arg-type] # one of the two
        first = await client.ask(web, candidate, tried)
        if not first.failure.startswith("HTTP 40"):
            break
    if first.failure:
        raise StudyError(target.url, f"no answer: {first.failure}", "give --model, or a key in PROBE_API_KEY")
    return candidate, server


# ------------------------------------------------------------------ which phase binds


@dataclass(frozen=True)
class Seen:
    """Means over the requests of one setting in one round: seconds to the first token and to the end; tokens."""

    ttft: float
    whole: float
    prompt_tokens: float
    output_tokens: float


async def _phase(web: httpx2.AsyncClient, ask: Ask, until: float) -> Binding:
    warm = questions.of_characters(WARM, int(CHARACTERS * ask.prompt_tokens), ask.output_tokens, seed=2)[0]
    first = await client.ask(web, ask.target, warm)
    if first.failure:
        return Binding(verdict="cannot tell", why=f"a request failed: {first.failure}", lever=LEVERS["cannot tell"])
    per_token = len(warm.text) / first.n_prompt if first.n_prompt else CHARACTERS
    rounds: list[dict[str, Seen]] = []
    loads: list[Loaded] = []
    for turn in range(PHASE_ROUNDS):
        if time.monotonic() > until:
            break
        seen: dict[str, Seen] = {}
        for name, setting in ask.settings().items():
            seed = 10 + PHASE_ROUNDS * len(seen) + turn
            characters = int(per_token * setting.prompt_tokens)
            prompts = questions.of_characters(setting.n, characters, setting.output_tokens, seed)
            if setting.per_second:
                due = load.arrivals("poisson", setting.n, setting.per_second, turn)
                loaded = await load.opened(web, ask.target, prompts, due)
            else:
                loaded = await load.closed(web, ask.target, prompts, setting.n)
            if failed := [answer.failure for answer in loaded.answers if answer.failure]:
                why = f"{len(failed)} of {setting.n} requests failed: {failed[0]}"
                return Binding(verdict="cannot tell", why=why, lever=LEVERS["cannot tell"])
            loads.append(loaded)
            seen[name] = _seen(loaded.answers, setting)
        rounds.append(seen)
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
    if len(rounds) < stats.NEEDED[0.5] + 2:
        return Binding(verdict="cannot tell", why="there was no time for three rounds", lever=LEVERS["cannot tell"])
    changed: dict[str, Callable[[Seen], float]] = {
        "prompt": lambda seen: seen.prompt_tokens, "output": lambda seen: seen.output_tokens
    }  # fmt: skip
    logs: dict[str, np.ndarray] = {}
    for name in ("prompt", "output", "load"):
        grown = [
            np.log(changed[name](each[name]) / changed[name](each["usual"])) if name in changed else np.log(FACTOR)
            for each in rounds
        ]
        taken = [np.log(each[name].whole / each["usual"].whole) for each in rounds]
        logs[name] = np.array(taken) / np.where(np.array(grown) > 0, grown, np.nan)
    elasticities = {name: _interval(values) for name, values in logs.items()}
    shares = {name: _interval(np.array(values)) for name, values in _shares(rounds).items()}
    seconds = {
        f"{part} {how}": float(np.median([getattr(each[name], attribute) for each in rounds]))
        for name, how in (("alone", "alone"), ("usual", "under load"))
        for attribute, part in (("ttft", "first token"), ("whole", "whole answer"))
    }
    late = float(np.median([loaded.late_ns for loaded in loads] or [0.0])) / 1e9
    verdict, why = _verdict(logs, rounds, loads)
    return Binding(
        verdict=verdict, why=why, lever=LEVERS[verdict], elasticities=elasticities, shares=shares, seconds=seconds,
        late_s=late,
    )  # fmt: skip


def _shares(rounds: list[dict[str, Seen]]) -> dict[str, list[float]]:
    """Shares of a request's time under the usual load, by round: queue, prefill and decode."""
    found: dict[str, list[float]] = {"queue": [], "prefill": [], "decode": []}
    for each in rounds:
        usual, alone = each["usual"], each["alone"]
        found["queue"].append(max(usual.ttft - alone.ttft, 0.0) / usual.whole)
        found["prefill"].append(min(alone.ttft, usual.ttft) / usual.whole)
        found["decode"].append((usual.whole - usual.ttft) / usual.whole)
    return found


def _interval(values: np.ndarray) -> Interval:
    """The median with the interval of paired values; NaN where any is missing."""
    if np.isnan(values).any():
        return Interval(float("nan"), float("nan"), float("nan"))
    low, high = stats.paired_bounds(values)
    middle = float(np.median(values))
    return Interval(middle, min(float(low), middle), max(float(high), middle))


def _verdict(logs: dict[str, np.ndarray], rounds: list[dict[str, Seen]], loads: list[Loaded]) -> tuple[Phase, str]:
    late = sum(loaded.client_binds() for loaded in loads)
    if 2 * late > len(loads) and _late_of_request(loads) > load.LATE:
        return "client", f"the client was late in {late} of {len(loads)} loads"
    if any(np.isnan(values).any() for values in logs.values()):
        return "cannot tell", "an answer did not grow with what was asked for: it ends by itself"
    shares = _shares(rounds)
    ordered = sorted(shares, key=lambda name: -float(np.median(shares[name])))
    first, second = (np.array(shares[name]) for name in ordered[:2])
    low, _ = stats.paired_bounds(first - second)
    share = _interval(first)
    if low <= 0:
        return "cannot tell", f"{ordered[0]} and {ordered[1]} take about as much of a request"
    verdict: Phase = ordered[0]  # type: ignore[assignment] # a key of `shares`
    by = {"prefill": "prompt", "decode": "output", "queue": "load"}[verdict]
    grows = _interval(logs[by])
    if grows.low <= 0:
        return "cannot tell", f"{verdict} takes {share:.0%} of a request, yet its time does not follow the {by}"
    return verdict, f"{share:.0%} of a request; 1 % more {by} takes {grows:.2f} % longer"


def _late_of_request(loads: Iterable[Loaded]) -> float:
    """Client lag (95th percentile) as a share of the median chunk gap, median over loads."""
    found = []
    for loaded in loads:
        if gaps := loaded.gaps_ns:
            found.append(loaded.late_ns / max(float(np.median(gaps)), 1.0))
    return float(np.median(found)) if found else 0.0
