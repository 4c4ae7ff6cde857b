"""A server, met before it is asked: which of its models may be asked, when it is ready, and what it refuses.

A model that it would have to load is not asked: others may be using the one that would go. What a probe costs is known
beforehand and kept to, whatever comes: `Ask.budget` gives the maximum of requests, tokens, seconds and bytes.
"""

import asyncio
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any

import msgspec

from llama_meter import http
from llama_meter.disk import parsed
from llama_meter.errors import StudyError
from llama_meter.models.finding import printable
from llama_meter.serve import client, questions, right
from llama_meter.serve.client import Allowance, Answer, Prompt, Target

KEY = "PROBE_API_KEY"  # environment: sent to the probed server, and never shown
PHASE_ROUNDS = 5
FACTOR = 2  # by which a length or the load is changed
WARM = 1
SERVERS = {"llamacpp": "llama-server", "me": "llama_cpp.server", "vllm": "vLLM"}  # by the `owned_by` of their models
KNOWN = {"llama-server": questions.OURS["llama-server"], "vLLM": {"ignore_eos": True}}
READY_S, PAUSES_S = (
    120.0,
    (0.5, 1.0, 2.0, 4.0, 8.0),
)  # longest wait for a model to load; between questions whether it is
MET = 32  # most requests that find out whether the server is ready, which API it has, and what it refuses
HELLO = Prompt("hello", "Hello", 1)
UNREADY, BUSY = 503, 429  # HTTP: it cannot answer yet; it has too much to do
GENERATES_NOT = re.compile(r"embed|rerank|minilm|whisper|(?<![a-z])(bge|gte|e5|tts|clip)(?![a-z])", re.IGNORECASE)
UNLOADED, LOADED = re.compile(r"^un|not|stop|fail|error|down|exit"), re.compile(r"load|run|ready|active|start|sleep")
NAMED = 5  # models that a message names
BYTES = 1 << 16, 1 << 11  # of an answer beside its tokens, and of each token: several times what servers send
Say = Callable[[str], None]


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


async def met(
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
        server = next((SERVERS.get(model.owned_by, "unknown") for model in listed if model.id == name), "unknown")
        target, first = await _answered(web, replace(ask.target, model=name, usual=KNOWN.get(server, {})))
        if first.status != UNREADY or time.monotonic() + pause > until:
            break
        if not turn:
            say(f"not ready ({first.failure}): waiting for it, at most {ready_s:.0f} s")
        await asyncio.sleep(pause)
    if first.failure:
        waited = f", after {time.monotonic() - begun:.0f} s of waiting" if first.status == UNREADY else ""
        raise StudyError(target.url, f"no answer: {first.failure}{waited}", mend(first, ask, listed))
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
        why = f"{printable(target.model) or _names(listed)}: not loaded, and a probe would make the server load it"
        raise StudyError(target.url, why, _with_model(target, able) if able else "load a model, then probe again")
    if target.model or not able:
        return target.model
    if len(able) > 1 and not all(model.loaded or SERVERS.get(model.owned_by) == "vLLM" for model in able):
        why = f"lists {len(able)} models and does not say which are loaded: {_names(able)}"
        raise StudyError(target.url, why, _with_model(target, able))
    return able[0].id


def _names(models: Sequence[Model]) -> str:
    return ", ".join(printable(model.id) for model in models[:NAMED]) + (", …" if len(models) > NAMED else "")


def _with_model(target: Target, models: Sequence[Model]) -> str:
    return f"plamo-study probe {target.url} --model {shlex.quote(printable(models[0].id))}"


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
    return next((attempt for attempt in met if attempt[1].status not in (404, 405)), met[-1])


def _refused_fields(target: Target, answer: Answer) -> set[str]:
    """The optional fields that a refusal names; where it names none, those whose absence changes no answer's length."""
    if answer.status not in (400, 422):
        return set()
    named = {name for name in target.optional if name in answer.failure}
    return named or {*target.optional} - {"temperature", "max_tokens"}


def mend(answer: Answer, ask: Ask, listed: Sequence[Model] = ()) -> str:
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
