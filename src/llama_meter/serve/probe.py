"""A probe of any OpenAI-compatible server: are its answers right under load, and which phase binds its traffic?

`meeting` finds out what may be asked, `right` asks the same prompts alone and together, `phase` changes prompt, answer
and load.
"""

import asyncio
import os
import time
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import msgspec

from llama_meter import http
from llama_meter.errors import StudyError
from llama_meter.serve import client, phase, right
from llama_meter.serve.meeting import KEY, Ask, Budget, Say, met
from llama_meter.serve.phase import Binding
from llama_meter.serve.right import Rightness

LATE = "it did not end within its time"
GRACE_S = 10.0  # for requests in flight when the time is up; at most half of the time
Found = TypeVar("Found")


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Findings of a probe."""

    url: str
    server: str
    model: str
    budget: Budget
    requests: int
    seconds: float
    right: Rightness
    phase: Binding


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
        target, _ = await met(web, ask)
        return await right.ask(web, target, ask.concurrency, time.monotonic() + ask.seconds, ask.top)

    return client.over(ask.target, asked)


async def _probe(ask: Ask, say: Say) -> Report:
    begin = time.monotonic()
    until = begin + ask.seconds
    async with ask.target.connected() as web:
        target, server = await met(web, ask)
        ask = replace(ask, target=target)
        say("the same prompts alone and together")
        half = (time.monotonic() + until) / 2
        grace = min(GRACE_S, ask.seconds / 2)
        late = right.unknown(LATE)
        judgement = await _in_time(right.ask(web, target, ask.concurrency, half, ask.top), half + grace, late)
        say("the prompt, the answer and the load doubled, one at a time")
        binds = await _in_time(phase.binding(web, ask, until), until + grace, phase.cannot(LATE))
    spent = time.monotonic() - begin
    return Report(
        url=target.url,
        server=server,
        model=target.model,
        budget=ask.budget(),
        seconds=spent,
        right=judgement,
        phase=binds,
        requests=target.allowance.asked if target.allowance else 0,
    )


async def _in_time(work: Coroutine[Any, Any, Found], until: float, otherwise: Found) -> Found:
    """Result of `work`, or `otherwise` if it has not ended by `until`."""
    try:
        async with asyncio.timeout(max(until - time.monotonic(), 0.0)):
            return await work
    except TimeoutError:
        return otherwise
