"""A server under load for half an hour: is every request accounted for, every answer right, and memory constant?

Requests arrive at random times (Poisson) at a rate that the server sustains. An answer is kept only in the summary of
its minute, so growing memory belongs to the client or the server, not to the results.
"""

import asyncio
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from llama_meter import http, journal, progress
from llama_meter.errors import StudyError
from llama_meter.measure import machine, result_file
from llama_meter.measure.plan import MODELS
from llama_meter.serve import client, load, objectives, questions, server, traffic
from llama_meter.serve.client import Answer, Prompt, Target, clock
from llama_meter.serve.difference import difference
from llama_meter.serve.objectives import DISTINCT, ENOUGH
from llama_meter.serve.server import Server
from llama_meter.workloads import serving
from llama_meter.workloads.serving import stock
from plamo_study.read import recording, results
from plamo_study.read.results import HELD_AT, Minute, Soak
from plamo_study.read.usable import usable
from plamo_study.stats.estimates import NS

SHARE = 0.8  # of the knee
MINUTE_S = 60.0
FINE = 12  # counts of answers in a minute: one each five seconds


@dataclass
class _Counted:
    """Outcome of all requests so far, and of those in the current minute."""

    alone: list[Answer]
    sent: int = 0
    ends: Counter[int] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    differ: int = 0
    near_ties: int = 0
    tokens: int = 0
    counted: int | None = None
    minutes: list[Minute] = field(default_factory=list)
    _ended: list[tuple[float, float, float]] = field(default_factory=list)
    _at: list[int] = field(default_factory=list)  # when each of them ended (ns)
    _failed: int = 0
    _begun: int = field(default_factory=clock)

    def take(self, number: int, answer: Answer) -> None:
        self.ends[number] += 1
        if answer.failure or not answer.token_ns:
            self._failed += 1
            self.failures[answer.failure or "no token"] += 1
            return
        self.tokens += answer.n_gen
        first, last, n = answer.token_ns[0], answer.token_ns[-1], len(answer.token_ns)
        late = (answer.sent_ns - answer.due_ns) / NS
        self._ended.append(((first - answer.due_ns) / NS, (last - first) / max(n - 1, 1) / NS, late))
        self._at.append(answer.ended_ns)
        if parted := difference(self.alone[number % len(self.alone)], answer):
            self.differ += 1
            self.near_ties += parted.is_near_tie

    def minute(self, running: Server) -> None:
        ttft, tpot, late = zip(*self._ended, strict=True) if self._ended else ((), (), ())
        width = MINUTE_S * NS / FINE
        places = [min(max(int((at - self._begun) // width), 0), FINE - 1) for at in self._at]
        here, there = (_memory(pid) for pid in (None, running.process.pid))
        self.minutes.append(
            Minute(
                answered=len(self._ended),
                failed=self._failed,
                ttft=_quantile(ttft, 0.5),
                ttft_p90=_quantile(ttft, 0.9),
                tpot=_quantile(tpot, 0.5),
                late=_quantile(late, 0.95),
                waiting=self.sent - len(self.ends),
                client_bytes=here,
                server_bytes=there,
                fine=tuple(places.count(n) for n in range(FINE)),
            )
        )
        self._ended, self._at, self._failed, self._begun = [], [], 0, clock()


def run(path: Path, scale: str, rate: float, minutes: int, held_s: float = 0.0, patched: bool = False) -> Soak:
    """Run a new llama-server (attention model) under `rate` requests a second for `minutes` minutes.

    `held_s`: seconds for which the server is suspended after HELD_AT minutes, as by another program.
    Raises StudyError where it does not start or does not answer.
    """
    if held_s and minutes * MINUTE_S <= HELD_AT * MINUTE_S + held_s:
        why = f"would be held up for {held_s:g} s after {HELD_AT} minutes of {minutes}"
        raise StudyError("a server", why, "give more --minutes, or a shorter --hold")
    n_prompt, n_gen = objectives.SHORT[scale]
    prompts = questions.prompts(path, DISTINCT, n_prompt, n_gen)
    with server.started(serving.built(stock(path, scale), patched=True) if patched else stock(path, scale)) as running:
        target = Target(running.url, usual=questions.OURS["llama-server"])
        found = http.run(_loaded(running, target, prompts, rate, minutes, held_s))
        ended = running.ended(1.0 if found.failures else 0.0)
    return Soak(
        machine=machine.facts(),
        model=MODELS[1],
        scale=scale,
        n_prompt=n_prompt,
        n_gen=n_gen,
        rate=rate,
        held_s=held_s,
        patched=patched,
        sent=found.sent,
        answered=found.ends.total() - found.failures.total(),
        failed=found.failures.total(),
        missing=found.sent - len(found.ends),
        twice=sum(n > 1 for n in found.ends.values()),
        differ=found.differ,
        near_ties=found.near_ties,
        failures=dict(found.failures),
        tokens=found.tokens,
        counted=found.counted,
        ended=ended,
        minutes=found.minutes,
    )


async def _loaded(
    running: Server, target: Target, prompts: list[Prompt], rate: float, minutes: int, held_s: float
) -> _Counted:
    async with target.connected() as web:
        found = _Counted([await client.ask(web, target, prompt, top=2) for prompt in prompts])
        if failed := next((answer.failure for answer in found.alone if answer.failure), ""):
            raise StudyError(target.url, f"does not answer a prompt alone ({failed})", "look at the server's log")
        before = await _written(web, target)
        watching = asyncio.gather(_watched(found, running, minutes), _held(running, held_s))
        await load.each_at(web, target, _timed(found, prompts, rate, minutes * MINUTE_S), clock(), found.take)
        await watching
        after = await _written(web, target)
        found.counted = None if before is None or after is None else after - before
    return found


async def _written(web: http.Client, target: Target) -> int | None:
    """Answer tokens by the server's count so far; None if it reports none."""
    try:
        found = (await traffic.look(web, target)).get(traffic.TOKENS["llama-server"][1])
    except StudyError:
        return None
    return None if found is None else int(found)


def _timed(found: _Counted, prompts: list[Prompt], rate: float, seconds: float) -> Iterator[tuple[Prompt, float]]:
    """Prompts in turn with their random due times in seconds, up to `seconds`."""
    rng, at_s = np.random.default_rng(0), 0.0
    while (at_s := at_s + float(rng.exponential(1 / rate))) < seconds:
        yield prompts[found.sent % len(prompts)], at_s
        found.sent += 1


async def _watched(found: _Counted, running: Server, minutes: int) -> None:
    for _ in progress.counted(range(minutes), "minutes of load"):
        await asyncio.sleep(MINUTE_S)
        found.minute(running)


async def _held(running: Server, seconds: float) -> None:
    if seconds:
        await asyncio.sleep(HELD_AT * MINUTE_S)
        running.process.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            running.process.send_signal(signal.SIGCONT)


def _quantile(values: Sequence[float], q: float) -> float | None:
    return float(np.quantile(values, q)) if values else None


def _memory(pid: int | None) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def sustained(scale: str, place: str) -> float:
    """SHARE of the lowest knee measured here with the attention model, in requests a second.

    Raises StudyError where none was sought on this machine.
    """
    found = recording.read("11-serving", {journal.REFERENCE: "recorded"}.get(place, "live"), scale)
    rows = usable(found.rows) if found else None
    sought = rows[(rows["pattern"] == "knee") & (rows["model"] == MODELS[1])]["series"] if rows is not None else []
    tried = [[rate for rate, share in zip(of["rates"], of["met"], strict=True) if share >= ENOUGH] for of in sought]
    met = [max(rates) for rates in tried if rates]
    if not met:
        raise StudyError("the knee", f"was not sought here at scale {scale}", f"plamo-study run 11 --scale {scale}")
    return SHARE * min(met)


def write(found: Soak, place: str) -> Path:
    """Keep a soak beside those of its kind that ran before it."""
    name = results.soak_name(found.scale, bool(found.held_s), found.patched)
    every = [*results.soaks(place, found.scale, bool(found.held_s), found.patched), found]
    return result_file.keep(every, place, name)
