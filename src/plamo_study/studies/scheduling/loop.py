"""Serving a load by a policy: one loop, whose clock is the engine's or a simulated one.

An event is a call, not a token: a decode step is one event however many sequences are in it, and who finishes in which
step is known when an answer begins. It knows neither engine nor step model, only a `Machine`.
"""

from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from plamo_study.errors import StudyError
from plamo_study.studies.scheduling.policies import Policy, Queue

UNLIMITED = 1 << 62
Preempt = Literal["", "recompute", "save"]


@dataclass(frozen=True)
class Load:
    """Requests in order of arrival: when they arrive (s), tokens of the prompt and of the answer, at least one each."""

    arrives: list[float]
    prompt: list[int]
    output: list[int]

    def __len__(self) -> int:
        return len(self.arrives)


class Machine(Protocol):
    """What does the calls, and keeps the time in seconds since the load began.

    `decoding` are request numbers, the place in the list is the sequence; the prompt being read is the one after them.
    """

    def wait(self, until: float) -> float:
        """Idle until then; the time."""

    def call(self, decoding: list[int], keys: int, reading: int, chunk: int, before: int) -> float:
        """A token for each of `decoding`, which hold `keys` tokens in all, and `chunk` tokens of a prompt of which
        `before` were read; the time afterwards."""

    def leave(self, decoding: list[int], slot: int, reading: int) -> float:
        """A sequence ends or is put aside: the last one moves to its place, the one being read moves up; the time."""

    def put_aside(self, request: int, slot: int, held: int) -> float:
        """Save the state of a sequence that will leave; the time."""

    def take_back(self, request: int, slot: int, held: int) -> float:
        """Put a saved state of `held` tokens into a sequence; the time."""


@dataclass
class Served:
    """What became of a load: per request `first` and `finish` (s, NaN: never), and gaps between tokens with how many
    requests waited that long. `busy`: seconds in calls; `read`, `written`: tokens; `preempted`: how often."""

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
    def throughput(self) -> float:
        """Answered tokens per second, from the first arrival to the last token."""
        return self.written / (float(np.max(self.finish)) - self.load.arrives[0])

    def itl(self, q: float | list[float]) -> np.ndarray:
        """Quantiles of the gaps between tokens (s), each gap counted once for everybody who waited."""
        return quantile(self.gaps, self.weights, q)


def quantile(values: np.ndarray, weights: np.ndarray, q: float | list[float]) -> np.ndarray:
    """The smallest of `values` that at least a share `q` of the weight lies at or below; NaN where there are none."""
    if not len(values):
        return np.full(np.shape(q), np.nan)
    order = np.argsort(values, kind="stable")
    heavy = np.cumsum(weights[order])
    at = np.searchsorted(heavy, np.asarray(q) * heavy[-1], side="left")
    return values[order][np.minimum(at, len(values) - 1)]


@dataclass
class _Aside:
    """Those preempted: what each holds, steps left to it, and when it got its last token."""

    held: dict[int, int] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    last: dict[int, float] = field(default_factory=dict)


def serve(
    load: Load, policy: Policy, machine: Machine, slots: int, room: int = UNLIMITED, preempt: Preempt = ""
) -> Served:
    """Serve every request of a load; what became of it.

    `room`: tokens that the memory holds in all. Without `preempt` a request waits until there is room for its prompt
    and its whole answer. With it there need only be room for the prompt; when memory runs out the last sequence is put
    aside, to be recomputed or to be loaded from a saved state.

    Raises
    ------
    StudyError
        A request that can never fit, or a policy that leaves everybody waiting.

    """
    arrives, prompt, output, n = load.arrives, load.prompt, load.output, len(load)
    _check(load, room)
    first, finish = [float("nan")] * n, [float("nan")] * n
    gaps, weights = array("d"), array("q")
    waiting: deque[int] = deque()
    decoding: list[int] = []
    due: dict[int, list[int]] = {}  # who gets the last token in which step
    ends: dict[int, int] = {}  # the same by request
    fresh: dict[int, float] = {}  # who got a token since the last step, and when
    aside = _Aside()
    queue = Queue(slots=slots)
    upcoming, step, keys, reserved, preempted = 0, 0, 0, 0, 0
    reading, before, left = -1, 0, 0
    now = last = busy = 0.0
    calls = read = written = 0
    while True:
        while upcoming < n and arrives[upcoming] <= now:
            waiting.append(upcoming)
            upcoming += 1
        if reading < 0 and waiting and len(decoding) < slots:
            number = waiting[0]
            held = aside.held.get(number, 0)
            needs = held + 1 if preempt else 0
            needs = max(needs, prompt[number]) if preempt else prompt[number] + output[number]
            if (keys + len(decoding) + needs if preempt else reserved + needs) <= room:
                waiting.popleft()
                reserved += 0 if preempt else needs
                if held and preempt == "save":
                    now = machine.take_back(number, len(decoding), held)
                    decoding.append(number)
                    keys += aside.held.pop(number)
                    ends[number] = step + aside.steps.pop(number)
                    due.setdefault(ends[number], []).append(number)
                    fresh[number] = aside.last.pop(number)
                    continue
                reading, before, left = number, 0, needs if held else prompt[number]
        if reading < 0 and not decoding:
            if upcoming == n:
                break
            now = machine.wait(arrives[upcoming])
            continue
        queue.left, queue.decoding = left, len(decoding)
        decode, chunk = policy(queue)
        if decode and decoding and keys + len(decoding) + before + chunk > room and len(decoding) + (reading >= 0) > 1:
            now = _put_aside(machine, decoding, reading, due, ends, fresh, aside, load, step, last, preempt == "save")
            preempted += 1
            number = next(reversed(aside.held))
            keys -= aside.held[number]
            waiting.appendleft(number)
            continue
        if not chunk and not (decode and decoding):
            raise StudyError("the policy", "leaves everybody waiting", "let it decode or read where somebody waits")
        began, with_step = now, decode and bool(decoding)
        now = machine.call(decoding if with_step else [], keys, reading, chunk, before)
        busy += now - began
        calls += 1
        queue.last, queue.chunk = now - began, chunk
        leaving: list[int] | tuple[int, ...] = ()
        if with_step:
            if len(fresh) < len(decoding):
                gaps.append(now - last)
                weights.append(len(decoding) - len(fresh))
            for at in fresh.values():
                gaps.append(now - at)
                weights.append(1)
            fresh.clear()
            last = now
            step += 1
            keys += len(decoding)
            written += len(decoding)
            leaving = due.pop(step, ())
        if chunk:
            before, left, read = before + chunk, left - chunk, read + chunk
            if not left:
                number, reading = reading, -1
                steps = aside.steps.pop(number, output[number]) - 1
                if aside.held.pop(number, 0):
                    gaps.append(now - aside.last.pop(number))
                    weights.append(1)
                else:
                    first[number] = now
                decoding.append(number)
                keys, before = keys + before, 0
                fresh[number] = now
                written += 1
                ends[number] = step + steps
                if steps:
                    due.setdefault(ends[number], []).append(number)
                else:
                    leaving = [*leaving, number]
        for number in leaving:
            finish[number] = now
            fresh.pop(number, None)
            del ends[number]
            keys -= prompt[number] + output[number] - 1
            reserved -= 0 if preempt else prompt[number] + output[number]
        for slot in sorted((decoding.index(number) for number in leaving), reverse=True):
            now = machine.leave(decoding, slot, reading)
            decoding[slot] = decoding[-1]
            decoding.pop()
    return Served(
        load, np.array(first), np.array(finish), np.array(gaps), np.array(weights), busy, calls, read, written,
        preempted,
    )  # fmt: skip


def _put_aside(
    machine: Machine, decoding: list[int], reading: int, due: dict[int, list[int]], ends: dict[int, int],
    fresh: dict[int, float], aside: _Aside, load: Load, step: int, last: float, save: bool,
) -> float:  # fmt: skip
    """Put the last sequence aside: its state is saved, or forgotten; the time."""
    number, slot = decoding[-1], len(decoding) - 1
    end = ends.pop(number)
    due[end].remove(number)
    aside.steps[number] = end - step
    aside.held[number] = load.prompt[number] + load.output[number] - 1 - (end - step)
    aside.last[number] = fresh.pop(number, last)
    if save:
        machine.put_aside(number, slot, aside.held[number])
    now = machine.leave(decoding, slot, reading)
    decoding.pop()
    return now


def _check(load: Load, room: int) -> None:
    for number, (n_prompt, n_output) in enumerate(zip(load.prompt, load.output, strict=True)):
        if n_prompt + n_output > room:
            why = f"needs {n_prompt} + {n_output} tokens, and there is room for {room:,}"
            raise StudyError(f"request {number}", why, "shorten it or give more room")
