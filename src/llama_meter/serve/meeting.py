"""A server, met before it is asked: which model it has, and whether it answers.

What a probe costs is known beforehand and kept to, whatever comes: `Ask.budget` gives the maximum of requests, tokens,
seconds and bytes.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

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
MET = 2  # most requests that find out which API a server has
HELLO = Prompt("hello", "Hello", 1)
UNREADY, BUSY = 503, 429  # HTTP: it cannot answer yet; it has too much to do
NAMED = 5  # models that a message names
BYTES = 1 << 16, 1 << 11  # of an answer beside its tokens, and of each token: several times what servers send
Say = Callable[[str], None]


class Model(msgspec.Struct):
    """A model as a server lists it."""

    id: str
    owned_by: str | None = None


class Models(msgspec.Struct):
    """What a server lists."""

    data: list[Model] = []


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


async def met(web: http.Client, ask: Ask) -> tuple[Target, str]:
    """The target with the server's model and API; the kind of server if it is known.

    Raises StudyError where it lists several models and none was named, and where it answers nothing.
    """
    try:
        async with asyncio.timeout(ask.seconds / 2):
            return await _greeted(web, ask)
    except TimeoutError:
        why = f"has completed no answer after {ask.seconds / 2:g} s"
        raise StudyError(ask.target.url, why, "give it longer with --seconds") from None


async def _greeted(web: http.Client, ask: Ask) -> tuple[Target, str]:
    listed, name = await _listed(web, ask.target.url), ask.target.model
    if len(listed) > 1 and not name:
        why = f"lists {len(listed)} models: {_names(listed)}"
        raise StudyError(ask.target.url, why, "name one that is loaded with --model")
    name = name or next((model.id for model in listed), "")
    owner = next((model.owned_by or "" for model in listed if model.id == name), "")
    server = SERVERS.get(owner, "unknown")
    target, first = await _answered(web, replace(ask.target, model=name, usual=KNOWN.get(server, {})))
    if first.failure:
        raise StudyError(target.url, f"no answer: {first.failure}", mend(first, ask, listed))
    return target, server


async def _listed(web: http.Client, url: str) -> list[Model]:
    """The models that a server lists; not every server does."""
    status, body = await http.look(web, f"{url}/v1/models", "name the server's own address")
    try:
        models: Models = parsed(body, Models) if status == 200 else Models()
    except ValueError:
        return []
    return models.data


def _names(models: list[Model]) -> str:
    return ", ".join(printable(model.id) for model in models[:NAMED]) + (", …" if len(models) > NAMED else "")


async def _answered(web: http.Client, target: Target) -> tuple[Target, Answer]:
    """The first answer of a server, and the target with the API that it has: completions, or else chat."""
    target = replace(target, api="completions")
    first = await client.ask(web, target, HELLO)
    if first.status in (400, 404, 405, 422, 501):
        chat = replace(target, api="chat/completions")
        second = await client.ask(web, chat, HELLO)
        if second.status not in (404, 405):
            return chat, second
    return target, first


def mend(answer: Answer, ask: Ask, listed: list[Model] | None = None) -> str:
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
        UNREADY: "wait until the server is ready, then probe again",
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
