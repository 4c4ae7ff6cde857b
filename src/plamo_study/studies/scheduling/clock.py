"""A simulated machine: the clock that a step model drives. And how requests are shared out among several.

Deterministic by seed: the same load, policy, model and seed give the same times in every bit.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from plamo_study.studies.scheduling.loop import Load
from plamo_study.studies.scheduling.steps import AWAKE_S, DRAWN, StepModel

STEADY = dict.fromkeys(("step", "chunk", "both"), [1.0] * DRAWN)


class Simulated:
    """A machine whose calls take what a step model says, times a residual drawn from those of its fit, in stretches.

    The first call after idleness takes what the model says and what waking took when it was measured.

    `noisy`: whether any of this is drawn at all. `loads`: seconds to put a state of so many tokens into a sequence, and
    to save one.
    """

    def __init__(
        self, model: StepModel, seed: int = 0, noisy: bool = True, loads: Callable[[int], float] = lambda held: 0.0
    ):
        self.model, self.loads, self.now = model, loads, 0.0
        drawn = model.drawn if noisy else STEADY
        self._step, self._chunk, self._both = (drawn[name] for name in ("step", "chunk", "both"))
        self._wakings, self._slept = model.wakings if noisy else [], False
        self._next = int(np.random.default_rng(seed).integers(DRAWN))  # where in them it begins
        self._chunks: dict[tuple[int, int], float] = {}
        self._low, self._high = model.range.decoding
        self._constants, self._per_key, self._held = model.step, model.per_key, model.range.held

    def wait(self, until: float) -> float:
        """Idle until then; the time."""
        self._slept = bool(self._wakings) and until - self.now >= AWAKE_S
        self.now = until
        return until

    def call(self, decoding: list[int], step: bool, keys: int, reading: int, chunk: int, before: int) -> float:
        """The time after a call; StudyError for one outside of what the model was fitted on."""
        n = self._next = (self._next + 1) & (DRAWN - 1)
        many = len(decoding) if step else 0
        if self._slept:
            self._slept = False
            self.now += self.model.seconds(many, keys, chunk, before) + self._wakings[n]
        elif not chunk:
            if self._low <= many <= self._high and keys <= many * self._held:
                self.now += (self._constants[many - self._low] + self._per_key * keys) * self._step[n]
            else:
                self.model.seconds(many, keys, 0, 0)  # says what is missing
        elif many:
            self.now += self.model.seconds(many, keys, chunk, before) * self._both[n]
        else:
            known = self._chunks.get((chunk, before))
            if known is None:
                known = self._chunks[chunk, before] = self.model.seconds(0, 0, chunk, before)
            self.now += known * self._chunk[n]
        return self.now

    def leave(self, decoding: list[int], slot: int, reading: int) -> float:
        """The time after others moved up: those at the end, and the one being read."""
        self.now += self.model.moving * ((slot < len(decoding) - 1) + (reading >= 0))
        return self.now

    def put_aside(self, request: int, slot: int, held: int) -> float:
        """The time after a state was saved."""
        self.now += self.loads(held)
        return self.now

    def take_back(self, request: int, slot: int, held: int) -> float:
        """The time after a state was loaded."""
        self.now += self.loads(held)
        return self.now


def chosen(load: Load, which: Sequence[int]) -> Load:
    """Some requests of a load."""
    arrives = [load.arrives[n] for n in which]
    return Load(arrives, [load.prompt[n] for n in which], [load.output[n] for n in which], load.within)


def round_robin(load: Load, n: int) -> list[range]:
    """Every n-th request to the same machine: the numbers of the requests of each."""
    return [range(first, len(load), n) for first in range(n)]


def least_work(load: Load, n: int, work: Sequence[float]) -> list[list[int]]:
    """Each request to the machine that is done first with what it has, by the `work` (s) of each request alone.

    The numbers of the requests of each. Where machines serve one request at a time and the work is exact, this is one
    queue before n servers.
    """
    free = [(0.0, machine) for machine in range(n)]
    given: list[list[int]] = [[] for _ in range(n)]
    for number, arrives in enumerate(load.arrives):
        until, machine = free[0]
        given[machine].append(number)
        heapq.heapreplace(free, (max(until, arrives) + work[number], machine))
    return given


def read_elsewhere(load: Load, model: StepModel, ships: Callable[[int], float], seed: int = 0) -> Load:
    """The same requests as they reach the side that answers: read one after the other on another machine, whole, each
    shipped in `ships(tokens)` seconds before the next is read, as notebook 09's sender does.
    """
    machine, now, there = Simulated(model, seed), 0.0, []
    for arrives, prompt in zip(load.arrives, load.prompt, strict=True):
        machine.wait(max(now, arrives))
        now = machine.now = machine.call([], False, 0, 0, prompt, 0) + ships(prompt)
        there.append(now)
    return replace(load, arrives=there)
