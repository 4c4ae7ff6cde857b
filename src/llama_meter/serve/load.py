"""Load: a closed loop of a given number of clients, or an open loop of requests at their due times.

A request's time counts from when it was due, so a waiting client cannot hide a slow server. Every load records the
client's own lag: a clock that ticks in the same event loop measures how long the loop was blocked.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from llama_meter.cells import ENOUGH, OBJECTIVES, Serving
from llama_meter.engine.session import Tokenizer
from llama_meter.measure import texts
from llama_meter.serve import client
from llama_meter.serve.client import Answer, Client, Prompt, Target, clock

TICK_S = 0.002
IDLE_TICKS = 16  # of an idle loop, for the system's own lag
STEPS = 5  # bisections in search of a knee: the bracket is a 32nd root of the first one
LOWEST, HIGHEST = 0.5, 2.0  # times the rate of one request at a time, and of all slots without mutual slowdown
TEXT = "python-heldout"
STRIDE = 613  # characters between prompts; no line of the text repeats with this period
LATE = 0.05  # share of the measured interval beyond which the client is the bottleneck


@dataclass
class Loaded:
    """A load's answers in prompt order, and `lag_ns`: how much later than in an idle loop the client's clock ticked."""

    answers: list[Answer]
    began_ns: int
    lag_ns: list[int] = field(default_factory=list)

    @property
    def late_ns(self) -> float:
        """95th percentile of the client's lag in ns."""
        return float(np.quantile(self.lag_ns, 0.95)) if self.lag_ns else 0.0

    @property
    def gaps_ns(self) -> list[int]:
        """Gaps between consecutive chunks of each answer in ns."""
        return [b - a for answer in self.answers for a, b in pairwise(answer.chunk_ns)]

    def client_binds(self) -> bool:
        """Whether the client's median lag exceeds LATE of the median chunk gap, or of a request without gaps."""
        gaps = self.gaps_ns
        if not gaps:
            gaps = [answer.ended_ns - answer.sent_ns for answer in self.answers if not answer.failure]
        return bool(gaps) and float(np.median(self.lag_ns or [0])) > LATE * float(np.median(gaps))


async def closed(web: Client, target: Target, prompts: Sequence[Prompt], n_clients: int) -> Loaded:
    """Closed loop: `n_clients` clients, each sending the next prompt when its answer is complete."""
    answers: dict[int, Answer] = {}
    left = iter(enumerate(prompts))

    async def one() -> None:
        for number, prompt in left:
            answers[number] = await client.ask(web, target, prompt)

    async with _Ticking() as ticking:
        begin = clock()
        await asyncio.gather(*(one() for _ in range(n_clients)))
    return Loaded([answers[number] for number in sorted(answers)], begin, ticking.lag_ns())


async def opened(web: Client, target: Target, prompts: Sequence[Prompt], arrivals_s: Sequence[float]) -> Loaded:
    """Open loop: each prompt at its arrival time (ascending seconds from the start), whatever became of the others."""
    answers: list[asyncio.Task[Answer]] = []
    async with _Ticking() as ticking, asyncio.TaskGroup() as group:
        begin = clock()
        for prompt, at_s in zip(prompts, arrivals_s, strict=True):
            due = begin + int(at_s * 1e9)
            while (left := due - clock()) > 0:
                await asyncio.sleep(left / 1e9)
            answers.append(group.create_task(client.ask(web, target, prompt, due)))
    return Loaded([answer.result() for answer in answers], begin, ticking.lag_ns())


async def sought(
    web: Client, target: Target, prompts: Sequence[Prompt], cell: Serving, alone_s: float, seed: int
) -> tuple[Loaded, list[tuple[float, float]]]:
    """Search for the knee, the highest rate of arrivals at which a server meets its objectives, by bisection.

    A rate meets them when ENOUGH of its requests do. The logarithm of the rate is bisected, so the steps hold a
    bracket: one rate that met and one that did not. Returns the load at the highest rate that met (if none did, the
    first one tried), and of every step the rate and the share of requests that met.
    The arrivals' `seed` must differ between servers; otherwise all get the same lucky or unlucky loads.
    """
    low, high = LOWEST / alone_s, HIGHEST * cell.n_seq / alone_s
    best: Loaded | None = None
    steps = []
    for number in range(STEPS):
        rate = (low * high) ** 0.5
        due = arrivals(len(prompts), rate, seed + number)
        loaded = await opened(web, target, prompts, due)
        met = [
            OBJECTIVES[cell.scale].met_by(answer.due_ns, answer.token_ns, answer.failure) for answer in loaded.answers
        ]
        share = sum(met) / len(prompts)
        steps.append((rate, share))
        if share >= ENOUGH:
            low, best = rate, loaded
        else:
            high, best = rate, best or loaded
    assert best is not None
    return best, steps


class _Ticking:
    """A clock in the event loop that measures its lag, first while idle and then under load."""

    def __init__(self) -> None:
        self._late: list[int] = []
        self._idle = 0.0

    async def __aenter__(self) -> "_Ticking":
        for _ in range(IDLE_TICKS):
            await self._tick()
        self._idle, self._late = float(np.median(self._late)), []
        self._ticker = asyncio.create_task(self._on())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._ticker.cancel()

    def lag_ns(self) -> list[int]:
        return [max(late - int(self._idle), 0) for late in self._late]

    async def _on(self) -> None:
        while True:
            await self._tick()

    async def _tick(self) -> None:
        due = clock() + int(TICK_S * 1e9)
        await asyncio.sleep(TICK_S)
        self._late.append(max(clock() - due, 0))


def arrivals(n: int, per_second: float, seed: int) -> list[float]:
    """Random arrival times (Poisson) in seconds from the first."""
    gaps = np.random.default_rng([seed, n]).exponential(1 / per_second, n)
    return (np.cumsum(gaps) - gaps[0]).tolist()


# ------------------------------------------------------------------ prompts: distinct pieces of a text


def of_lengths(model: Path, n_prompts: Sequence[int], n_gens: Sequence[int], seed: int = 0) -> list[Prompt]:
    """Prompts with the given prompt and answer lengths in tokens of the model's own; all prompts begin differently."""
    text, n = texts.read(TEXT).decode(), len(n_prompts)
    with Tokenizer(model) as tokenizer:
        return [
            Prompt(str(i), _piece(tokenizer, text, (seed * n + i) * STRIDE, n_prompt), n_gen)
            for i, (n_prompt, n_gen) in enumerate(zip(n_prompts, n_gens, strict=True))
        ]


def _piece(tokenizer: Tokenizer, text: str, start: int, n_tokens: int) -> str:
    at = start % (len(text) // 2)
    ids = tokenizer.encode(text[at : at + 12 * n_tokens + 64])
    return tokenizer.decode(ids[:n_tokens]).decode(errors="ignore")


def of_characters(n: int, n_characters: int, n_gen: int, seed: int = 0) -> list[Prompt]:
    """`n` prompts of `n_characters` characters, for a server with an unknown tokenizer."""
    text = texts.read(TEXT).decode()
    places = [(seed * n + i) * STRIDE % (len(text) // 2) for i in range(n)]
    repeated = text * (1 + n_characters // (len(text) // 2))
    return [Prompt(str(i), repeated[at : at + n_characters], n_gen) for i, at in enumerate(places)]
