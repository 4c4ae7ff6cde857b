"""Serving a load by a policy: one loop for the engine's clock and for a simulated one.

An event is a call, not a token: a decode step is one event for any number of sequences, and the step in which a request
finishes is known when its answer begins. The loop knows neither engine nor step model, only a `Machine`.
"""

from array import array
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Protocol

import numpy as np

from llama_meter.errors import StudyError
from llama_meter.serve.objectives import NONE, Objectives
from llama_meter.simulate.policies import Policy, Queue


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


class Machine(Protocol):
    """The engine or its simulation: makes the calls, and keeps the time in seconds since the load began.

    `decoding` holds request numbers; an index in it is a sequence. The prompt being read is the sequence after them.
    """

    def wait(self, until: float) -> float:
        """Idle until the time `until`; the time then."""

    def call(self, decoding: list[int], step: bool, keys: int, reading: int, chunk: int, before: int) -> float:
        """With `step` decode a token for each of `decoding`, which hold `keys` tokens in all; read `chunk` tokens of a
        prompt of which `before` were read already; the time afterwards."""

    def steps(self, decoding: list[int], keys: int, most: int, until: float) -> list[float]:
        """Decode a token for each of `decoding`, one to `most` times, no more once the time `until` has come; the time
        after each step."""

    def leave(self, decoding: list[int], slot: int, reading: int) -> float:
        """A sequence ends: the last one moves to its place, the one being read moves up; the time."""


@dataclass
class Served:
    """Outcome of a load: per request `first` and `finish` (s, NaN: never), and gaps between tokens (s) with the number
    of requests that waited each. `busy`: seconds in calls; `read`, `written`: tokens."""

    load: Load
    first: np.ndarray
    finish: np.ndarray
    gaps: np.ndarray
    weights: np.ndarray
    busy: float
    calls: int
    read: int
    written: int

    @property
    def ttft(self) -> np.ndarray:
        """Seconds from arrival to the first token, queueing included, (n,)."""
        return self.first - np.asarray(self.load.arrives)

    @property
    def tpot(self) -> np.ndarray:
        """Mean seconds per token after the first, (n,)."""
        return (self.finish - self.first) / np.maximum(np.array(self.load.output) - 1, 1)


def quantile(values: np.ndarray, weights: np.ndarray, q: float | list[float]) -> np.ndarray:
    """The smallest of `values` that at least a share `q` of the weight lies at or below; NaN where there are none."""
    if not len(values):
        return np.full(np.shape(q), np.nan)
    order = np.argsort(values, kind="stable")
    heavy = np.cumsum(weights[order])
    at = np.searchsorted(heavy, np.asarray(q) * heavy[-1], side="left")
    return values[order][np.minimum(at, len(values) - 1)]


def serve(load: Load, policy: Policy, machine: Machine, slots: int) -> Served:
    """Serve every request of a load and return the outcome; StudyError if the policy leaves every request waiting."""
    return _Serving(load, policy, machine, slots).run()


class _Serving:
    """A load being served. `decoding`: requests by their sequence; `reading`: the one whose prompt is read, -1: none,
    of which `before` tokens were read and `left` are not."""

    def __init__(self, load: Load, policy: Policy, machine: Machine, slots: int):
        self.load, self.policy, self.machine, self.slots = load, policy, machine, slots
        self.now = self.last = self.busy = 0.0  # `last`: time of the last decode step
        self.upcoming = self.step = self.keys = 0
        self.calls = self.read = self.written = 0
        self.waiting: deque[int] = deque()
        self.decoding: list[int] = []
        self.reading, self.before, self.left = -1, 0, 0
        self.due: dict[int, list[int]] = {}  # requests that end, by step
        self.ends: dict[int, int] = {}  # the same by request
        self.fresh: dict[int, float] = {}  # time of a request's token since the last step
        self.first, self.finish = ([float("nan")] * len(load) for _ in range(2))
        self.gaps, self.weights = array("d"), array("q")

    def run(self) -> Served:
        queue, arrives, decoding = Queue(slots=self.slots), [*self.load.arrives, inf], self.decoding
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
            queue.left, queue.decoding = self.left, len(decoding)
            decode, chunk = self.policy(queue)
            step = decode and bool(decoding)
            if not chunk and not step:
                raise StudyError("the policy", "leaves everybody waiting", "let it decode or read where somebody waits")
            if not queue.left:
                self._steps()
                continue
            began = self.now
            self.now = self.machine.call(decoding, step, self.keys, self.reading, chunk, self.before)
            self.busy += self.now - began
            self.calls += 1
            leaving = self._stepped([self.now]) if step else []
            if chunk:
                leaving += self._read(chunk)
            if leaving:
                self._leave(leaving)
        return Served(
            load=self.load,
            first=np.array(self.first),
            finish=np.array(self.finish),
            gaps=np.array(self.gaps),
            weights=np.array(self.weights),
            busy=self.busy,
            calls=self.calls,
            read=self.read,
            written=self.written,
        )

    def _steps(self) -> None:
        """Decode until a request ends or the next one can be read, and nothing is left to decide."""
        blocked = self.waiting or len(self.decoding) >= self.slots or self.upcoming == len(self.load)
        until = inf if blocked else self.load.arrives[self.upcoming]
        times = self.machine.steps(self.decoding, self.keys, min(self.due) - self.step, until)
        self.busy += times[-1] - self.now
        self.now = times[-1]
        self.calls += len(times)
        if leaving := self._stepped(times):
            self._leave(leaving)

    def _stepped(self, times: list[float]) -> list[int]:
        """Record a token for every decoding request at each of these times; the requests that got their last one."""
        many, now = len(self.decoding), times[0]
        if len(self.fresh) < many:
            self.gaps.append(now - self.last)
            self.weights.append(many - len(self.fresh))
        if self.fresh:
            for at in self.fresh.values():
                self._gap(now - at)
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
        self.before, self.left, self.read = self.before + chunk, self.left - chunk, self.read + chunk
        if self.left:
            return []
        number, steps = self.reading, self.load.output[self.reading] - 1
        self.first[number] = self.now
        self.decoding.append(number)
        self.keys += self.before
        self.ends[number] = self.step + steps
        if steps:
            self.due.setdefault(self.step + steps, []).append(number)
        self.fresh[number] = self.now
        self.written += 1
        self.reading, self.before = -1, 0
        return [] if self.ends[number] > self.step else [number]

    def _leave(self, leaving: list[int]) -> None:
        """Remove the requests that have all of their tokens."""
        for number in leaving:
            self.finish[number] = self.now
            self.fresh.pop(number, None)
            del self.ends[number]
            self.keys -= self.load.prompt[number] + self.load.output[number] - 1
        for slot in sorted(map(self.decoding.index, leaving), reverse=True):
            self._vacate(slot)

    def _vacate(self, slot: int) -> None:
        """Free a sequence: the last one moves to its place, and the prompt being read moves up."""
        self.now = self.machine.leave(self.decoding, slot, self.reading if self.before else -1)
        self.decoding[slot] = self.decoding[-1]
        self.decoding.pop()

    def _gap(self, seconds: float) -> None:
        """Record that one request waited so long for a token."""
        self.gaps.append(seconds)
        self.weights.append(1)
