"""Serving a load by a policy: one loop for the engine's clock and for a simulated one.

An event is a call, not a token: a decode step is one event for any number of sequences, and the step in which a request
finishes is known when its answer begins. The loop knows neither engine nor step model, only a `Machine`.
"""

from array import array
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Literal, Protocol

import numpy as np

from plamo_study.errors import StudyError
from plamo_study.studies.scheduling.policies import Policy, Queue

UNLIMITED = 1 << 62
Preempt = Literal["", "recompute", "save"]


@dataclass(frozen=True)
class Load:
    """Requests in order of arrival: arrival times (s), and tokens of each prompt and answer, at least one each.

    `within`: limits in seconds on the first token and on the mean gap, for a request to count as served well.
    """

    arrives: list[float]
    prompt: list[int]
    output: list[int]
    within: tuple[float, float] = (inf, inf)

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
        """A sequence ends or is put aside: the last one moves to its place, the one being read moves up; the time."""

    def put_aside(self, request: int, slot: int, held: int) -> float:
        """Save the state of a sequence that will leave; the time."""

    def take_back(self, request: int, slot: int, held: int) -> float:
        """Put a saved state of `held` tokens into a sequence; the time."""


@dataclass
class Served:
    """Outcome of a load: per request `first` and `finish` (s, NaN: never), and gaps between tokens (s) with the number
    of requests that waited each. `busy`: seconds in calls; `read`, `written`: tokens; `preempted`: number of times."""

    load: Load
    first: np.ndarray
    finish: np.ndarray
    gaps: np.ndarray
    weights: np.ndarray
    busy: float
    calls: int
    read: int
    written: int
    preempted: int

    @property
    def ttft(self) -> np.ndarray:
        """Seconds from arrival to the first token, queueing included, (n,)."""
        return self.first - np.asarray(self.load.arrives)

    @property
    def tpot(self) -> np.ndarray:
        """Mean seconds per token after the first, (n,)."""
        return (self.finish - self.first) / np.maximum(np.array(self.load.output) - 1, 1)

    @property
    def throughput(self) -> float:
        """Answered tokens per second, from the first arrival to the last token."""
        return self.written / (float(np.max(self.finish)) - self.load.arrives[0])

    def itl(self, q: float | list[float]) -> np.ndarray:
        """Quantiles of the gaps between tokens (s), each gap counted once per waiting request."""
        return quantile(self.gaps, self.weights, q)


def quantile(values: np.ndarray, weights: np.ndarray, q: float | list[float]) -> np.ndarray:
    """The smallest of `values` that at least a share `q` of the weight lies at or below; NaN where there are none."""
    if not len(values):
        return np.full(np.shape(q), np.nan)
    order = np.argsort(values, kind="stable")
    heavy = np.cumsum(weights[order])
    at = np.searchsorted(heavy, np.asarray(q) * heavy[-1], side="left")
    return values[order][np.minimum(at, len(values) - 1)]


def serve(
    load: Load, policy: Policy, machine: Machine, slots: int, room: int = UNLIMITED, preempt: Preempt = ""
) -> Served:
    """Serve every request of a load and return the outcome.

    `room`: tokens that the memory holds in all. Without `preempt` a request waits until there is room for its prompt
    and its whole answer. With it, room for the prompt is enough; when memory runs out, the last sequence is put
    aside, to be recomputed or to be loaded from a saved state.

    Raises
    ------
    StudyError
        A request can never fit, or the policy leaves every request waiting.

    """
    for number, (n_prompt, n_output) in enumerate(zip(load.prompt, load.output, strict=True)):
        if n_prompt + n_output > room:
            why = f"needs {n_prompt} + {n_output} tokens, and there is room for {room:,}"
            raise StudyError(f"request {number}", why, "shorten it or give more room")
    return _Serving(load, policy, machine, slots, room, preempt).run()


class _Serving:
    """A load being served. `decoding`: requests by their sequence; `reading`: the one whose prompt is read, -1: none,
    of which `before` tokens were read and `left` are not."""

    def __init__(self, load: Load, policy: Policy, machine: Machine, slots: int, room: int, preempt: Preempt):
        self.load, self.policy, self.machine, self.slots = load, policy, machine, slots
        self.room, self.preempt = room, preempt
        self.now = self.last = self.busy = 0.0  # `last`: time of the last decode step
        self.upcoming = self.step = self.keys = self.reserved = 0
        self.calls = self.read = self.written = self.preempted = 0
        self.waiting: deque[int] = deque()
        self.decoding: list[int] = []
        self.reading, self.before, self.left = -1, 0, 0
        self.due: dict[int, list[int]] = {}  # requests that end, by step
        self.ends: dict[int, int] = {}  # the same by request
        self.fresh: dict[int, float] = {}  # time of a request's token since the last step
        self.aside: dict[int, _Aside] = {}
        self.first, self.finish = ([float("nan")] * len(load) for _ in range(2))
        self.gaps, self.weights = array("d"), array("q")

    def run(self) -> Served:
        queue, arrives, decoding = Queue(slots=self.slots), [*self.load.arrives, inf], self.decoding
        while True:
            while arrives[self.upcoming] <= self.now:
                self.waiting.append(self.upcoming)
                self.upcoming += 1
            if self.waiting and self._admit():
                continue
            if self.reading < 0 and not decoding:
                if self.upcoming == len(self.load):
                    break
                self.now = self.machine.wait(self.load.arrives[self.upcoming])
                continue
            queue.left, queue.decoding = self.left, len(decoding)
            decode, chunk = self.policy(queue)
            step = decode and bool(decoding)
            if self.preempt and step and self._overflows(chunk):
                self._put_aside()
                continue
            if not chunk and not step:
                raise StudyError("the policy", "leaves everybody waiting", "let it decode or read where somebody waits")
            if not queue.left and not self.preempt:
                queue.last, queue.chunk = self._steps(), 0
                continue
            began = self.now
            self.now = self.machine.call(decoding, step, self.keys, self.reading, chunk, self.before)
            queue.last, queue.chunk = self.now - began, chunk
            self.busy += queue.last
            self.calls += 1
            leaving = self._stepped([self.now]) if step else []
            if chunk:
                leaving += self._read(chunk)
            if leaving:
                self._leave(leaving)
        return Served(
            load=self.load, first=np.array(self.first), finish=np.array(self.finish), gaps=np.array(self.gaps),
            weights=np.array(self.weights), busy=self.busy, calls=self.calls, read=self.read, written=self.written,
            preempted=self.preempted,
        )  # fmt: skip

    def _admit(self) -> bool:
        """Begin to read the longest-waiting prompt if there is room; True if a saved request came back instead."""
        if self.reading >= 0 or len(self.decoding) >= self.slots:
            return False
        number = self.waiting[0]
        prompt, output, aside = self.load.prompt[number], self.load.output[number], self.aside.get(number)
        tokens = aside.held + 1 if aside else prompt
        taken = self.keys + len(self.decoding) + tokens if self.preempt else self.reserved + prompt + output
        if taken > self.room:
            return False
        self.waiting.popleft()
        self.reserved += prompt + output
        if aside and self.preempt == "save":
            self.now = self.machine.take_back(number, len(self.decoding), aside.held)
            self._begin(number, aside.held, aside.steps)
            self.fresh[number] = self.aside.pop(number).last
            return True
        self.reading, self.before, self.left = number, 0, tokens
        return False

    def _overflows(self, chunk: int) -> bool:
        """Whether the next call needs more memory than there is, and a sequence can be put aside for it."""
        needed = self.keys + len(self.decoding) + self.before + chunk
        return needed > self.room and len(self.decoding) + (self.reading >= 0) > 1

    def _put_aside(self) -> None:
        """Put the last sequence aside, its state saved or dropped; it is the next to come back."""
        number = self.decoding[-1]
        end = self.ends.pop(number)
        self.due[end].remove(number)
        held = self.load.prompt[number] + self.load.output[number] - 1 - (end - self.step)
        self.aside[number] = _Aside(held, end - self.step, self.fresh.pop(number, self.last))
        if self.preempt == "save":
            self.now = self.machine.put_aside(number, len(self.decoding) - 1, held)
        self._vacate(len(self.decoding) - 1)
        self.keys -= held
        self.reserved -= self.load.prompt[number] + self.load.output[number]
        self.waiting.appendleft(number)
        self.preempted += 1

    def _steps(self) -> float:
        """Decode until a request ends or the next one can be read, and nothing is left to decide; seconds of the last
        step."""
        blocked = self.waiting or len(self.decoding) >= self.slots or self.upcoming == len(self.load)
        until = inf if blocked else self.load.arrives[self.upcoming]
        times = self.machine.steps(self.decoding, self.keys, min(self.due) - self.step, until)
        took = 0.0
        for now in times:
            took, self.now = now - self.now, now
            self.busy += took
        self.calls += len(times)
        if leaving := self._stepped(times):
            self._leave(leaving)
        return took

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
        number, aside = self.reading, self.aside.pop(self.reading, None)
        if aside:
            self._gap(self.now - aside.last)
        else:
            self.first[number] = self.now
        self._begin(number, self.before, (aside.steps if aside else self.load.output[number]) - 1)
        self.fresh[number] = self.now
        self.written += 1
        self.reading, self.before = -1, 0
        return [] if self.ends[number] > self.step else [number]

    def _begin(self, number: int, held: int, steps: int) -> None:
        """Start decoding a request that holds `held` tokens and needs `steps` more steps."""
        self.decoding.append(number)
        self.keys += held
        self.ends[number] = self.step + steps
        if steps:
            self.due.setdefault(self.step + steps, []).append(number)

    def _leave(self, leaving: list[int]) -> None:
        """Remove the requests that have all of their tokens."""
        for number in leaving:
            self.finish[number] = self.now
            self.fresh.pop(number, None)
            del self.ends[number]
            self.keys -= self.load.prompt[number] + self.load.output[number] - 1
            self.reserved -= self.load.prompt[number] + self.load.output[number]
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


@dataclass(frozen=True, slots=True)
class _Aside:
    """A request put aside: tokens held, steps left, and the time of its last token (s)."""

    held: int
    steps: int
    last: float
