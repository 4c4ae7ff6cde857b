"""Serving a load by a policy: one loop for the engine's clock and for a simulated one.

The loop knows neither engine nor step model, only a `Machine`. Prompts come in order of arrival, one per call: several
would mix up PLaMo 2's sequences in the stock engine.

Lengths of requests have the shape of the conversations that Microsoft published of its service in 2023
(AzurePublicDataset, CC-BY; Patel et al., Splitwise): lognormal, the logarithms' standard deviations as fitted there,
prompt and answer independent. They are scaled to what a small machine can serve, and cut at the longest that the cell
allows.

A simulated call takes the time of its contents. A step costs a constant for its number of sequences, fitted separately
so that kernel switches stay where they are, and a slope by the tokens that these hold. A chunk of a prompt costs a
constant and a slope by the tokens before it, both by chunk size. Both in one call cost, by the law that chapter 7
checked, a step with one sequence more and the chunk without its first token, because the engine makes two
micro-batches of them.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from llama_meter.cells import Service, Traffic
from llama_meter.errors import StudyError

PROMPT_SPREAD, OUTPUT_SPREAD = 0.99, 0.86  # standard deviations of the logarithms
MEDIAN = 4  # longest over median length
GRAIN = 16  # prompt lengths are multiples of it, so that every chunk size is common
DRAWN = 1 << 16  # residuals of each kind that simulations repeat, each starting at its own place
KINDS = ("step", "chunk", "both", "waking")  # of these
AWAKE_S = 0.008  # after this idle time threads may sleep, and the next call waits for them
MORE = "plamo-study measure 07-scheduling"


@dataclass(frozen=True)
class Load:
    """Requests in order of arrival: arrival times (s), and tokens of each prompt and answer, at least one each."""

    arrives: list[float]
    prompt: list[int]
    output: list[int]

    def chosen(self, which: list[int]) -> "Load":
        """The requests with these indices."""
        arrives = [self.arrives[n] for n in which]
        return Load(arrives, [self.prompt[n] for n in which], [self.output[n] for n in which])


def drawn(cell: Traffic | Service) -> Load:
    """Requests of a cell, the same for every policy and load except for the time between arrivals; of a service all of
    one length."""
    lengths = np.random.default_rng([cell.seed, 0])
    n = cell.n_requests
    gaps = np.random.default_rng([cell.seed, 1]).exponential(1 / cell.per_second, n)
    arrives = (np.cumsum(gaps) - gaps[0]).tolist()
    if isinstance(cell, Service):
        return Load(arrives, [cell.n_prompt] * n, [cell.n_gen] * n)
    prompt = _lengths(lengths, n, cell.n_prompt, PROMPT_SPREAD, GRAIN)
    return Load(arrives, prompt, np.maximum(_lengths(lengths, n, cell.n_gen, OUTPUT_SPREAD, 1), 2).tolist())


def _lengths(rng: np.random.Generator, n: int, most: int, spread: float, grain: int) -> list[int]:
    free = most / MEDIAN * np.exp(spread * rng.standard_normal(n))
    return (np.clip(np.round(free / grain), 1, most // grain).astype(int) * grain).tolist()


# ------------------------------------------------------------------ the loop

Policy = Callable[[int, int, int], int]


def policy(name: str) -> Policy:
    """The policy of a name: tokens of the next prompt that a call reads beside a token of each running answer.

    It gets the tokens left of the prompt, the sequences being answered, and those that fit.
    """
    number = name.rpartition(" ")[2]
    size = int(number) if number.isdecimal() else 0
    policies: dict[str, Policy] = {
        "shared": lambda left, decoding, slots: left,
        "one at a time": lambda left, decoding, slots: 0 if decoding else left,
        f"chunked {size}": lambda left, decoding, slots: min(size, left),
        f"decode first {size}": lambda left, decoding, slots: min(size, left) if decoding <= slots // 2 else 0,
    }
    return policies[name]


class Machine(Protocol):
    """The engine or its simulation: makes the calls, and keeps the time in seconds since the load began.

    `decoding` holds request numbers; an index in it is a sequence. The prompt being read is the sequence after them.
    """

    def wait(self, until: float) -> float:
        """Idle until the time `until`; the time then."""

    def call(self, decoding: list[int], keys: int, reading: int, chunk: int, before: int) -> float:
        """Decode a token for each of `decoding`, which hold `keys` tokens in all, and read `chunk` tokens of a prompt
        of which `before` were read already; the time afterwards."""

    def leave(self, decoding: list[int], slot: int, reading: bool) -> float:
        """A sequence ends: the last one moves to its place, the one being read moves up; the time."""


def serve(load: Load, policy: Policy, machine: Machine, slots: int) -> list[np.ndarray]:
    """Serve every request of a load by a policy; when each one's tokens came (s), an array a request."""
    waiting = deque(range(len(load.arrives)))
    tokens: list[list[float]] = [[] for _ in waiting]
    decoding: list[int] = []  # requests by their sequence
    now, keys, reading, before, left = 0.0, 0, 0, 0, 0  # `before`, `left`: tokens of a prompt that were read, or not
    while waiting or left or decoding:
        if waiting and not left and len(decoding) < slots and load.arrives[waiting[0]] <= now:
            reading = waiting.popleft()
            left = load.prompt[reading]
        if not left and not decoding:
            now = machine.wait(load.arrives[waiting[0]])
            continue
        chunk = policy(left, len(decoding), slots) if left else 0
        now = machine.call(decoding, keys, reading, chunk, before)
        keys += len(decoding)
        before, left = before + chunk, left - chunk
        if chunk and not left:  # a prompt that was read to its end has a token, too
            decoding.append(reading)
            keys, before = keys + before, 0
        for number in decoding:
            tokens[number].append(now)
        leaving = [slot for slot, number in enumerate(decoding) if len(tokens[number]) == load.output[number]]
        for slot in reversed(leaving):
            number = decoding[slot]
            keys -= load.prompt[number] + load.output[number] - 1
            now = machine.leave(decoding, slot, before > 0)
            decoding[slot] = decoding[-1]
            decoding.pop()
    return [np.array(times) for times in tokens]


# ------------------------------------------------------------------ a simulated machine


@dataclass(frozen=True)
class StepModel:
    """Seconds of a call of one model, engine and machine, with the residuals of the fit.

    `step`: constant by number of sequences, from 1 on; `per_key`: more for each of the tokens held, at most `held` of a
    sequence. `base`, `slope`: a chunk's constant and what each token before it adds, at most `before`, by size from 1
    on. `moving`: of a move to another slot. `drawn`: in the order of a simulation, measured over fitted of "step",
    "chunk" and "both" (DRAWN each), and extra seconds after idle time as "waking", empty if not measured.
    """

    step: tuple[float, ...]
    per_key: float
    held: int
    base: tuple[float, ...]
    slope: tuple[float, ...]
    before: int
    moving: float
    drawn: dict[str, list[float]] = field(repr=False)

    def seconds(self, decoding: int, keys: int, chunk: int, before: int) -> float:
        """Seconds of one call, without its residual. StudyError for a call outside the measured range."""
        if decoding and chunk:
            decoding, keys, chunk, before = decoding + 1, keys + before, chunk - 1, before + 1
        if decoding > len(self.step) or keys > decoding * self.held:
            raise StudyError(f"a step of {decoding} sequences with {keys} tokens", "was not measured", MORE)
        if chunk and (chunk > len(self.base) or before > self.before):
            raise StudyError(f"a chunk of {chunk} tokens behind {before}", "was not measured", MORE)
        step = self.step[decoding - 1] + self.per_key * keys if decoding else 0.0
        return step + (self.base[chunk - 1] + self.slope[chunk - 1] * before if chunk else 0.0)

    def replay(self, token: float, step: float) -> "StepModel":
        """The two numbers of a usual benchmark, times these factors: a constant for each token of a prompt, that of the
        longest one alone, and one for a step of any sequences, that of all slots. No residuals, moves or wake-ups."""
        longest = len(self.base)
        return replace(
            self,
            step=(self.step[-1] * step,) * len(self.step),
            per_key=0.0,
            base=tuple(self.base[-1] / longest * size * token for size in range(1, longest + 1)),
            slope=(0.0,) * longest,
            moving=0.0,
            drawn=dict.fromkeys(self.drawn, [1.0] * DRAWN) | {"waking": []},
        )


class Simulated:
    """A machine whose calls take the step model's time, multiplied by residuals drawn from its fit in stretches.

    The first call after an idle time takes the model's time plus a measured wake-up time. Deterministic by seed: the
    same load, policy, model and seed give bit-identical times.
    """

    def __init__(self, model: StepModel, seed: int = 0):
        self.model, self.now, self._slept = model, 0.0, False
        self._step, self._chunk, self._both, self._waking = (model.drawn[name] for name in KINDS)
        self._next = int(np.random.default_rng(seed).integers(DRAWN))  # where in the residuals it begins

    def wait(self, until: float) -> float:
        """Idle until the time `until` (s); the time then."""
        self._slept = bool(self._waking) and until - self.now >= AWAKE_S
        self.now = until
        return until

    def call(self, decoding: list[int], keys: int, reading: int, chunk: int, before: int) -> float:
        """The time after a call (s); StudyError for a call outside the range that the model was fitted on."""
        n = self._next = (self._next + 1) & (DRAWN - 1)
        seconds = self.model.seconds(len(decoding), keys, chunk, before)
        if self._slept:
            self._slept = False
            self.now += seconds + self._waking[n]
        else:
            self.now += seconds * (self._both if decoding and chunk else self._chunk if chunk else self._step)[n]
        return self.now

    def leave(self, decoding: list[int], slot: int, reading: bool) -> float:
        """The time after a sequence left and others moved up: the last one, and the one being read."""
        self.now += self.model.moving * ((slot < len(decoding) - 1) + reading)
        return self.now
