"""Serving a load by a policy: one loop for the engine's clock and for a simulated one.

An event is a call, not a token: a decode step is one event for any number of sequences, and the step in which a request
finishes is known when its answer begins. The loop knows neither engine nor step model, only a `Machine`. Prompts come
in order of arrival, one per call: several would mix up PLaMo 2's sequences in the stock engine.

Lengths of requests have the shape of the conversations that Microsoft published of its service in 2023
(AzurePublicDataset, CC-BY; Patel et al., Splitwise): lognormal, the logarithms' standard deviations as fitted there,
prompt and answer independent. They are scaled to what a small machine can serve, and cut at the longest that the cell
allows.
"""

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import Protocol

import numpy as np

from llama_meter.cells import NONE, Objectives, Service, Traffic

PROMPT_SPREAD, OUTPUT_SPREAD = 0.99, 0.86  # standard deviations of the logarithms
MEDIAN = 4  # longest over median length
GRAIN = 16  # prompt lengths are multiples of it, so that every chunk size is common


@dataclass(frozen=True)
class Load:
    """Requests in order of arrival: arrival times (s), and tokens of each prompt and answer, at least one each.

    `within`: what a request must meet to count as served well.
    """

    arrives: list[float]
    prompt: list[int]
    output: list[int]
    within: Objectives = NONE

    def __len__(self) -> int:
        return len(self.arrives)

    def chosen(self, which: list[int]) -> "Load":
        """The requests with these indices."""
        arrives = [self.arrives[n] for n in which]
        return Load(arrives, [self.prompt[n] for n in which], [self.output[n] for n in which], self.within)


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


def shaped(load: Load, shape: str) -> Load:
    """The same requests over the same time, with a rate that varies by the shape around the same mean.

    steady: as they are. diurnal: a day over the whole load, from a fifth of the mean rate to nine fifths. bursty: five
    times, half of the time at eight fifths of the mean rate and half at two fifths.
    """
    grid = np.linspace(0, 1, 2001)
    rate = {
        "steady": np.ones_like(grid),
        "diurnal": 1 + 0.8 * np.sin(2 * np.pi * grid),
        "bursty": np.where(grid * 5 % 1 < 0.5, 1.6, 0.4),
    }[shape]
    passed = np.concatenate([[0.0], np.cumsum((rate[1:] + rate[:-1]) / 2)])
    span = load.arrives[-1]
    return replace(load, arrives=(np.interp(np.array(load.arrives) / span, passed / passed[-1], grid) * span).tolist())


# ------------------------------------------------------------------ policies

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


# ------------------------------------------------------------------ the loop


class Machine(Protocol):
    """The engine or its simulation: makes the calls, and keeps the time in seconds since the load began.

    `decoding` holds request numbers; an index in it is a sequence. The prompt being read is the sequence after them.
    """

    def wait(self, until: float) -> float:
        """Idle until the time `until`; the time then."""

    def call(self, decoding: list[int], keys: int, reading: int, chunk: int, before: int) -> float:
        """Decode a token for each of `decoding`, which hold `keys` tokens in all, and read `chunk` tokens of a prompt
        of which `before` were read already; the time afterwards."""

    def steps(self, decoding: list[int], keys: int, most: int, until: float) -> list[float]:
        """Decode a token for each of `decoding`, one to `most` times, no more once the time `until` has come; the time
        after each step."""

    def leave(self, decoding: list[int], slot: int, reading: int) -> float:
        """A sequence ends: the last one moves to its place, the one being read moves up; the time."""


@dataclass
class Served:
    """Outcome of a load: per request `first` and `finish` (s, NaN: never), and gaps between tokens (s) with the number
    of requests that waited each. `written`: tokens."""

    load: Load
    first: np.ndarray
    finish: np.ndarray
    gaps: np.ndarray
    weights: np.ndarray
    written: int

    @property
    def ttft(self) -> np.ndarray:
        """Seconds from arrival to the first token, queueing included, (n,)."""
        return self.first - np.asarray(self.load.arrives)

    @property
    def tpot(self) -> np.ndarray:
        """Mean seconds per token after the first, (n,)."""
        return (self.finish - self.first) / np.maximum(np.array(self.load.output) - 1, 1)


def serve(load: Load, rule: str, machine: Machine, slots: int) -> Served:
    """Serve every request of a load by the policy of this name, and return the outcome."""
    return _Serving(load, policy(rule), machine, slots).run()


class _Serving:
    """A load being served. `decoding`: requests by their sequence; `reading`: the one whose prompt is read, -1: none,
    of which `before` tokens were read and `left` are not."""

    def __init__(self, load: Load, policy: Policy, machine: Machine, slots: int):
        self.load, self.policy, self.machine, self.slots = load, policy, machine, slots
        self.now = self.last = 0.0  # `last`: time of the last decode step
        self.upcoming = self.step = self.keys = self.written = 0
        self.waiting: deque[int] = deque()
        self.decoding: list[int] = []
        self.reading, self.before, self.left = -1, 0, 0
        self.due: dict[int, list[int]] = {}  # requests that end, by step
        self.fresh: dict[int, float] = {}  # time of a request's token since the last step
        self.first, self.finish = ([float("nan")] * len(load) for _ in range(2))
        self.gaps, self.weights = array("d"), array("q")

    def run(self) -> Served:
        arrives, decoding = [*self.load.arrives, inf], self.decoding
        while True:
            while arrives[self.upcoming] <= self.now:
                self.waiting.append(self.upcoming)
                self.upcoming += 1
            if self.waiting and self.reading < 0 and len(decoding) < self.slots:
                self.reading, self.before = self.waiting.popleft(), 0
                self.left = self.load.prompt[self.reading]
            if self.reading < 0 and not decoding:
                if self.upcoming == len(self.load):
                    break
                self.now = self.machine.wait(self.load.arrives[self.upcoming])
                continue
            if not self.left:
                self._steps()
                continue
            chunk = self.policy(self.left, len(decoding), self.slots)
            self.now = self.machine.call(decoding, self.keys, self.reading, chunk, self.before)
            leaving = self._stepped([self.now]) if decoding else []
            if chunk:
                leaving += self._read(chunk)
            if leaving:
                self._leave(leaving)
        first, finish, gaps, weights = map(np.array, (self.first, self.finish, self.gaps, self.weights))
        return Served(self.load, first, finish, gaps, weights, self.written)

    def _steps(self) -> None:
        """Decode until a request ends or the next one can be read, and nothing is left to decide."""
        blocked = self.waiting or len(self.decoding) >= self.slots or self.upcoming == len(self.load)
        until = inf if blocked else self.load.arrives[self.upcoming]
        times = self.machine.steps(self.decoding, self.keys, min(self.due) - self.step, until)
        self.now = times[-1]
        if leaving := self._stepped(times):
            self._leave(leaving)

    def _stepped(self, times: list[float]) -> list[int]:
        """Record a token for every decoding request at each of these times; the requests that got their last one."""
        many, now = len(self.decoding), times[0]
        if len(self.fresh) < many:
            self._gap(now - self.last, many - len(self.fresh))
        for at in self.fresh.values():
            self._gap(now - at, 1)
        self.fresh.clear()
        if len(times) > 1:
            self.gaps.extend([later - sooner for sooner, later in pairwise(times)])
            self.weights.extend([many] * (len(times) - 1))
        self.last = times[-1]
        self.step += len(times)
        self.keys += many * len(times)
        self.written += many * len(times)
        return self.due.pop(self.step, [])

    def _read(self, chunk: int) -> list[int]:
        """Record a chunk. After its last chunk a request has a token; the requests that now have all their tokens."""
        self.before, self.left = self.before + chunk, self.left - chunk
        if self.left:
            return []
        number, steps = self.reading, self.load.output[self.reading] - 1
        self.first[number] = self.fresh[number] = self.now
        self.decoding.append(number)
        self.keys += self.before
        self.written += 1
        self.reading, self.before = -1, 0
        if not steps:
            return [number]
        self.due.setdefault(self.step + steps, []).append(number)
        return []

    def _leave(self, leaving: list[int]) -> None:
        """Remove the requests that have all of their tokens: the last sequence moves to the place of each, and the
        prompt being read moves up."""
        for number in leaving:
            self.finish[number] = self.now
            self.fresh.pop(number, None)
            self.keys -= self.load.prompt[number] + self.load.output[number] - 1
        for slot in sorted(map(self.decoding.index, leaving), reverse=True):
            self.now = self.machine.leave(self.decoding, slot, self.reading if self.before else -1)
            self.decoding[slot] = self.decoding[-1]
            self.decoding.pop()

    def _gap(self, seconds: float, waited: int) -> None:
        """Record that so many requests waited so long for a token."""
        self.gaps.append(seconds)
        self.weights.append(waited)
