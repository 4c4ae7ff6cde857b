"""A probe of any OpenAI-compatible server: are its answers right under load, and which phase binds its traffic?

`right` asks the same prompts alone and together, `phase` changes prompt, answer and load.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from llama_meter.disk import printable
from llama_meter.errors import StudyError
from llama_meter.serve import client, phase, right
from llama_meter.serve.client import Answer, Client, Prompt, Target
from llama_meter.serve.phase import Binding, Interval, Setting
from llama_meter.serve.right import Rightness

KEY = "PROBE_API_KEY"  # environment: sent to the probed server, and never shown
HELLO = Prompt("hello", "Hello", 1)
LATE = "it did not end within its time"
GRACE_S = 10.0  # for requests in flight when the time is up; at most half of the time
CHANGED = {"prompt": "a longer prompt", "output": "a longer answer", "load": "more load"}
Result = TypeVar("Result")


class Model(msgspec.Struct):
    """A model as a server lists it."""

    id: str


class Models(msgspec.Struct):
    """What a server lists."""

    data: list[Model] = []


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Findings of a probe."""

    url: str
    model: str
    seconds: float
    right: Rightness
    phase: Binding


def address(url: str) -> str:
    """The server's address without a path; StudyError for anything that is not one."""
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


def cost(usual: Setting) -> str:
    """Most requests that a probe takes, and tokens of its prompts and answers, in words."""
    judges, settings = right.most_requests(usual.n), usual.changed().values()
    longest = (right.CHARACTERS[0] + right.PROMPTS * right.CHARACTERS[1]) // 2  # tokens, if one has two characters
    tokens = judges * (right.TOKENS + longest) + usual.prompt_tokens + usual.output_tokens
    tokens += phase.ROUNDS * sum(setting.n * (setting.prompt_tokens + setting.output_tokens) for setting in settings)
    requests = 3 + judges + phase.ROUNDS * sum(setting.n for setting in settings)
    return f"at most {requests} requests and {tokens:,} tokens"


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
    binding = await _in_time(phase.binding(web, target, usual, end), end + grace, phase.cannot(LATE))
    spent = time.monotonic() - begin
    return Report(url=target.url, model=target.model, seconds=spent, right=rightness, phase=binding)


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
        raise StudyError(target.url, f"no answer: {first.failure}", mend(first, target.url))
    return target


async def _listed(web: Client, target: Target) -> list[str]:
    """The models that a server lists; not every server does."""
    try:
        reply = await web.get(f"{target.url}/v1/models")
        return [model.id for model in msgspec.json.decode(reply.content, type=Models).data]
    except (client.httpx2.TransportError, ValueError):
        return []


def mend(answer: Answer, url: str) -> str:
    """What helps against a failure: a certificate, or the other scheme, does not mean that there is no server."""
    failure, (scheme, _, rest) = answer.failure, url.partition("://")
    if "CERTIFICATE_VERIFY_FAILED" in failure:
        return "its certificate is not trusted: export SSL_CERT_FILE=ITS-CERTIFICATE.pem, if the server is yours"
    if scheme == "https" and "[SSL" in failure:
        return f"it does not speak https: try http://{rest}"
    if failure.startswith("ConnectError"):
        return "start the server first"
    if scheme == "http" and failure.startswith(("RemoteProtocolError", "ReadError")):
        return f"try https://{rest}, or look at the server's log"
    if answer.status in (401, 403):
        return f"export {KEY}=... with a key of this server"
    return "look at the server's log, or name its own address, and a model that it knows with --model"


def text(report: Report) -> str:
    """The report as one page for a terminal; the key that was used is not in it."""
    rightness, binding = report.right, report.phase
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
    lines += ["", f"Which phase binds? {binding.verdict}.", f"  why: {binding.why}", f"  what helps: {binding.lever}"]
    lines += [f"  1 % {CHANGED[name]}: {_shown(value)} % longer" for name, value in binding.elasticities.items()]
    lines += [f"  share of a request, {name}: {_shown(value, '.0%')}" for name, value in binding.shares.items()]
    return "\n".join([*lines, *(f"  {name}: {value * 1e3:.1f} ms" for name, value in binding.seconds.items())])


def _shown(value: Interval, spec: str = ".2f") -> str:
    return format(value, spec) if value.value == value.value else "n/a"
