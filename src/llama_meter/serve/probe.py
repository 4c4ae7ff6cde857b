"""A probe of any OpenAI-compatible server: are its answers right under load, and which phase binds its traffic?

Answers: `right` asks the same prompts alone and together. Phase: prompt length, answer length and load are changed one
at a time, in rounds, and the elasticity of a request's time to each is reported with its interval. The cost is known
beforehand and kept to, whatever comes: `Ask.budget` gives the maximum of requests, tokens, seconds and bytes.

A server is met first (`_met`): which of its models may be asked, when it is ready, and what it refuses. A model that it
would have to load is not asked: others may be using the one that would go.
"""

import asyncio
import os
import re
import shlex
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

from llama_meter import http, stats
from llama_meter.disk import parsed
from llama_meter.errors import StudyError, offer
from llama_meter.serve import client, load, questions, right
from llama_meter.serve.client import Allowance, Answer, Prompt, Target
from llama_meter.serve.load import Loaded
from llama_meter.serve.right import Rightness
from llama_meter.serve.traffic import Traffic
from llama_meter.stats import Estimate

KEY = "PROBE_API_KEY"  # environment: sent to the probed server, and never shown
PHASE_ROUNDS = 5
FACTOR = 2  # by which a length or the load is changed
CHARACTERS, MOST_CHARACTERS = 3.0, 8.0  # per token: until the server has counted some, and whatever it counts
WARM = 1
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
DOUBLED = {"prompt": " with twice the prompt", "output": " with twice the answer", "load": " with twice the load"}
ENDS = {  # what did not grow with what was asked for
    "prompt": "a prompt of twice the text has no more tokens: the server cuts prompts; shorten --prompt-tokens",
    "output": "an answer did not grow with what was asked for: it ends by itself",
}
LATE = "it did not end within its time"
GRACE_S = 10.0  # for requests in flight when the time is up; at most half of the time
READY_S, PAUSES_S = (
    120.0,
    (0.5, 1.0, 2.0, 4.0, 8.0),
)  # longest wait for a model to load; between questions whether it is
MET = 32  # most requests that find out whether the server is ready, which API it has, and what it refuses
HELLO = Prompt("hello", "Hello", 1)
UNREADY, BUSY = 503, 429  # HTTP: it cannot answer yet; it has too much to do
SEVERAL = 4  # pieces of an answer from which on it can be seen whether they are streamed
STREAMED = 1 / 8  # share of an answer's pieces that have to be waited for; fewer are held back on their way
UNSTREAMED = "probe the server itself past its proxy, or turn buffering off there (nginx: proxy_buffering off)"
GENERATES_NOT = re.compile(r"embed|rerank|minilm|whisper|(?<![a-z])(bge|gte|e5|tts|clip)(?![a-z])", re.IGNORECASE)
UNLOADED, LOADED = re.compile(r"^un|not|stop|fail|error|down|exit"), re.compile(r"load|run|ready|active|start|sleep")
NAMED = 5  # models that a message names
BYTES = 1 << 16, 1 << 11  # of an answer beside its tokens, and of each token: several times what servers send
Say = Callable[[str], None]
Found = TypeVar("Found")


@dataclass(frozen=True)
class Model:
    """A model as a server lists it; `loaded`: whether it is in memory, None where the server does not say."""

    id: str
    owned_by: str = ""
    loaded: bool | None = None
    generates: bool = True


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
    """Findings of a probe; `ignored`: what the server refused, lacks or sends besides, and what the probe did without.

    `traffic`: the server's own, if it was watched.
    """

    url: str
    server: str
    model: str
    budget: Budget
    requests: int
    seconds: float
    right: Rightness
    phase: Binding
    ignored: list[str] = []
    traffic: Traffic | None = None


def prepared(ask: Ask, yes: bool, say: Say) -> Ask:
    """What a command asks for, with the key of KEY; `say` is told what it may cost, and nobody is asked yet.

    Raises StudyError for what is no address, a key that no header can carry, and another machine without `yes`.
    """
    address = http.check_url(ask.target.url)
    key = os.environ.get(KEY, "")
    if not (key.isascii() and key.isprintable()):
        raise StudyError(KEY, "holds what no header can carry", f"export {KEY}=... in letters, digits and signs")
    ask = replace(ask, target=replace(ask.target, url=address, key=key))
    most = ask.budget()
    cost = f"at most {most.requests} requests, {most.tokens:,} tokens, {most.bytes_read / 2**20:,.0f} MiB read, "
    cost += f"about {most.seconds:.0f} s"
    say(f"{address}: {cost}")
    if not (yes or http.is_loopback(address)):
        raise StudyError(address, f"is not this machine, and it would get {cost}", "the same with --yes, if you may")
    return ask


def probe(ask: Ask, say: Say = lambda line: None) -> Report:
    """Probe a server; StudyError where it answers nothing at all."""
    return http.run(_probe(ask.bounded(), say))


def rightness(ask: Ask) -> Rightness:
    """The first half of a probe: are answers right under load? StudyError where the server answers nothing at all."""
    ask = ask.bounded()

    async def asked(web: http.Client) -> Rightness:
        target, _ = await _met(web, ask)
        return await right.ask(web, target, ask.concurrency, time.monotonic() + ask.seconds, ask.top)

    return client.over(ask.target, asked)


async def _probe(ask: Ask, say: Say) -> Report:
    begin = time.monotonic()
    until = begin + ask.seconds
    ignored: set[str] = set()
    async with ask.target.connected() as web:
        target, server = await _met(web, ask, say, ignored)
        ask = replace(ask, target=target)
        say("the same prompts alone and together")
        half = (time.monotonic() + until) / 2
        grace = min(GRACE_S, ask.seconds / 2)
        late = right.unknown(LATE)
        found = await _in_time(right.ask(web, target, ask.concurrency, half, ask.top), half + grace, late)
        say("the prompt, the answer and the load doubled, one at a time")
        phase = await _in_time(_phase(web, ask, until, ignored), until + grace, _cannot(LATE))
    spent = time.monotonic() - begin
    return Report(
        url=target.url, server=server, model=target.model, budget=ask.budget(), seconds=spent, right=found, phase=phase,
        requests=target.allowance.asked if target.allowance else 0, ignored=sorted(ignored),
    )  # fmt: skip


async def _in_time(work: Coroutine[Any, Any, Found], until: float, otherwise: Found) -> Found:
    """Result of `work`, or `otherwise` if it has not ended by `until`."""
    try:
        async with asyncio.timeout(max(until - time.monotonic(), 0.0)):
            return await work
    except TimeoutError:
        return otherwise


async def _met(
    web: http.Client, ask: Ask, say: Say = lambda line: None, ignored: set[str] | None = None
) -> tuple[Target, str]:
    """The target with the server's model and API, and without what it refuses; the kind of server if it is known."""
    try:
        async with asyncio.timeout(ask.seconds / 2):
            return await _greeted(web, ask, say, set() if ignored is None else ignored)
    except TimeoutError:
        why = f"has completed no answer after {ask.seconds / 2:g} s"
        raise StudyError(ask.target.url, why, "give it longer with --seconds") from None


async def _greeted(web: http.Client, ask: Ask, say: Say, ignored: set[str]) -> tuple[Target, str]:
    ready_s = min(READY_S, ask.seconds / 2)
    begun = time.monotonic()
    until = begun + 0.8 * ready_s  # the last answer takes its time too
    for turn, pause in enumerate(chain(PAUSES_S, repeat(PAUSES_S[-1]))):
        listed = await _listed(web, ask.target.url)
        name = _chosen(listed, ask.target)
        server = next((SERVERS.get(each.owned_by, "unknown") for each in listed if each.id == name), "unknown")
        target, first = await _answered(web, replace(ask.target, model=name, usual=KNOWN.get(server, {})))
        if first.status != UNREADY or time.monotonic() + pause > until:
            break
        if not turn:
            say(f"not ready ({first.failure}): waiting for it, at most {ready_s:.0f} s")
        await asyncio.sleep(pause)
    if first.failure:
        waited = f", after {time.monotonic() - begun:.0f} s of waiting" if first.status == UNREADY else ""
        raise StudyError(target.url, f"no answer: {first.failure}{waited}", _mend(first, ask, listed))
    ignored |= first.ignored | {f"{field} (refused)" for field in target.without}
    return target, server


async def _listed(web: http.Client, url: str) -> list[Model]:
    """The models that a server lists; not every server does."""
    where = f"{url}/v1/models"
    status, body = await http.look(web, where, "name the server's own address", READY_S)
    try:
        answer = parsed(body) if status == 200 else {}
    except ValueError:
        return []
    entries = answer.get("data") if isinstance(answer, dict) else answer
    named = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    return [_model(entry) for entry in named if isinstance(entry.get("id"), str) and entry["id"]]


def _model(entry: Mapping[str, Any]) -> Model:
    state = next((entry[name] for name in ("status", "state", "loaded") if entry.get(name) is not None), None)
    state = state.get("value") if isinstance(state, dict) else state
    loaded = state if isinstance(state, bool) else None
    if isinstance(state, str):
        loaded = False if UNLOADED.search(state.lower()) else bool(LOADED.search(state.lower())) or None
    kinds = " ".join(str(entry.get(name, "")) for name in ("id", "type", "task"))
    return Model(entry["id"], str(entry.get("owned_by", "")), loaded, not GENERATES_NOT.search(kinds))


def _chosen(listed: Sequence[Model], target: Target) -> str:
    """The name of the model to ask: the one that was named, or one that is loaded and generates; "" for no list.

    Raises StudyError where asking might make the server load a model, and perhaps drop another for it.
    """
    idle = {model.id for model in listed if model.loaded is False}
    ready = [model for model in listed if model.loaded] or [model for model in listed if model.id not in idle]
    able = [model for model in ready if model.generates] or ready
    if target.model in idle or (listed and not ready and not target.model):
        why = f"{target.model or _names(listed)}: not loaded, and a probe would make the server load it"
        raise StudyError(target.url, why, _with_model(target, able) if able else "load a model, then probe again")
    if target.model or not able:
        return target.model
    if len(able) > 1 and not all(model.loaded or SERVERS.get(model.owned_by) == "vLLM" for model in able):
        why = f"lists {len(able)} models and does not say which are loaded: {_names(able)}"
        raise StudyError(target.url, why, _with_model(target, able))
    return able[0].id


def _names(models: Sequence[Model]) -> str:
    return ", ".join(model.id for model in models[:NAMED]) + (", …" if len(models) > NAMED else "")


def _with_model(target: Target, models: Sequence[Model]) -> str:
    return offer(command := f"probe {target.url} --model {shlex.quote(models[0].id)}", command)


async def _answered(web: http.Client, target: Target) -> tuple[Target, Answer]:
    """The first answer of a server, and the target with the API that it has and without the fields that it refuses."""
    met = []
    for api in ("completions", "chat/completions"):
        candidate = replace(target, api=api)  # type: ignore[arg-type] # one of the two
        first = await client.ask(web, candidate, HELLO, closely=True)
        while refused := _refused_fields(candidate, first):
            candidate = replace(candidate, without=candidate.without | refused)
            first = await client.ask(web, candidate, HELLO, closely=True)
        met.append((candidate, first))
        if first.status not in (400, 404, 405, 422, 501):
            break
    return next((each for each in met if each[1].status not in (404, 405)), met[-1])


def _refused_fields(target: Target, answer: Answer) -> set[str]:
    """The optional fields that a refusal names; where it names none, those whose absence changes no answer's length."""
    if answer.status not in (400, 422):
        return set()
    named = {name for name in target.optional if name in answer.failure}
    return named or {*target.optional} - {"temperature", "max_tokens"}


def _mend(answer: Answer, ask: Ask, listed: Sequence[Model] = ()) -> str:
    """What helps against a failure, by its HTTP status."""
    status, names = answer.status, f" (it lists {_names(listed)})" if listed else ""
    if status in (400, 413, 422) and (answer.room or "context" in answer.failure or status == 413):
        return _shorter(ask, answer.room)
    mends = {
        0: "start the server" if answer.failure.startswith(http.UNREACHED) else "look at the server's log",
        401: f"export {KEY}=… with a key of this server",
        404: f"--model with a name that it knows{names}, or the address of the API",
        422: f"--model with one that takes these requests{names}, or start the server with other options",
        BUSY: "wait until the server is free, then probe again",
        UNREADY: "wait until the server is ready, then probe again, with more --seconds if it takes long to load",
    }
    alike = {403: 401, 405: 404, 501: 404, 400: 422}
    if 300 <= status < 400:
        return "name the address that it leads to"
    return mends.get(alike.get(status, status), "look at the server's log")


def _shorter(ask: Ask, room: int) -> str:
    """By how much to shorten a request of which prompt and answer are doubled; `room`: tokens of a slot, 0 if unknown.

    A part is left for the template, and because prompts are cut by characters.
    """
    doubled = f"the probe doubles prompt and answer, one at a time, to {FACTOR * ask.prompt_tokens:,} tokens of prompt"
    usable, prompt, output = int(0.9 * room), ask.prompt_tokens, ask.output_tokens
    if not room:
        return f"--prompt-tokens {max(prompt // FACTOR, 1)} or less: {doubled}"
    if (most := min((usable - output) // FACTOR, usable - FACTOR * output)) > 0:
        return f"--prompt-tokens {min(most, prompt - 1) or 1} or less: {doubled}, and a slot has {room:,}"
    shorter = f"--prompt-tokens {max(usable // 4, 1)} --output-tokens {max(usable // 8, 2)}"
    return f"{shorter}: {doubled}, and a slot has {room:,}"


# ------------------------------------------------------------------ which phase binds


@dataclass(frozen=True)
class Seen:
    """Means over the requests of one setting in one round: seconds to the first token and to the end; tokens.

    `pieces` of an answer's stream, and how often they came in `bursts` that had to be waited for.
    """

    ttft: float
    whole: float
    prompt_tokens: float
    output_tokens: float
    pieces: float = 0.0
    bursts: float = 0.0


def _cannot(why: str, lever: str = LEVERS["cannot tell"]) -> Binding:
    return Binding(verdict="cannot tell", why=why, lever=lever)


async def _phase(web: http.Client, ask: Ask, until: float, ignored: set[str]) -> Binding:
    warm = questions.of_characters(WARM, int(CHARACTERS * ask.prompt_tokens), ask.output_tokens, seed=2)[0]
    first = await client.ask(web, ask.target, warm, closely=True)
    if first.failure:
        return _cannot(f"a request failed: {first.failure}", _mend(first, ask))
    ignored |= first.ignored
    if not first.n_prompt:
        ignored.add(f"no count of tokens: a piece of the stream is one, and {CHARACTERS:g} characters of a prompt")
    per_token = min(len(warm.text) / first.n_prompt, MOST_CHARACTERS) if first.n_prompt else CHARACTERS
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
            if failed := [answer for answer in loaded.answers if answer.failure]:
                why = f"{len(failed)} of {setting.n} requests failed{DOUBLED.get(name, '')}: {failed[0].failure}"
                return _cannot(why, _mend(failed[0], ask))
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
        float(np.mean([len(a.chunk_ns) for a in answers])),
        float(np.mean([a.bursts for a in answers])),
    )


def _bound(rounds: list[dict[str, Seen]], loads: list[Loaded]) -> Binding:
    if len(rounds) < stats.NEEDED[0.5] + 2:
        return _cannot("there was no time for three rounds")
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
    if held_back := _held_back(rounds):  # when a first token came is not known
        seconds = {name: value for name, value in seconds.items() if name.startswith("whole")}
        unstreamed = _cannot(held_back, UNSTREAMED)
        return msgspec.structs.replace(unstreamed, elasticities=elasticities, seconds=seconds, late_s=late)
    verdict, why = _verdict(logs, rounds, loads)
    return Binding(
        verdict=verdict, why=why, lever=LEVERS[verdict], elasticities=elasticities, shares=shares, seconds=seconds,
        late_s=late,
    )  # fmt: skip


def _held_back(rounds: list[dict[str, Seen]]) -> str:
    """How answers arrive that something holds back on their way; empty where they are streamed.

    Judged by one request at a time: a client that is late finds several pieces waiting too.
    """
    alone = [each["alone"] for each in rounds]
    tokens, pieces, bursts = (
        float(np.median([getattr(seen, name) for seen in alone])) for name in ("output_tokens", "pieces", "bursts")
    )
    if tokens < SEVERAL or not pieces or bursts > max(STREAMED * pieces, 1):
        return ""
    if bursts <= 1:
        return "the stream arrives at once: buffered"
    return f"the stream arrives in bursts of {pieces / bursts:.0f} pieces: buffered"


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
    for name in ("prompt", "output"):
        if np.isnan(logs[name]).any():
            return "cannot tell", ENDS[name]
    shares = _shares(rounds)
    ordered = sorted(shares, key=lambda name: -float(np.median(shares[name])))
    first, second = (np.array(shares[name]) for name in ordered[:2])
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


def _late_of_request(loads: Iterable[Loaded]) -> float:
    """Client lag (95th percentile) as a share of the median chunk gap, median over loads."""
    found = []
    for loaded in loads:
        if gaps := loaded.gaps_ns:
            found.append(loaded.late_ns / max(float(np.median(gaps)), 1.0))
    return float(np.median(found)) if found else 0.0
