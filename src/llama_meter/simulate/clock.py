"""A simulated machine, whose clock a step model drives, and methods to share requests out among several machines.

The engine's own clock is `Live` in the study of scheduling.

Deterministic by seed: the same load, policy, model and seed give bit-identical times.
"""

import heapq
from collections.abc import Sequence

import numpy as np

from llama_meter.simulate.loop import Load
from llama_meter.simulate.steps import AWAKE_S, DRAWN, StepModel

STEADY = dict.fromkeys(("step", "chunk", "both"), [1.0] * DRAWN)


class Simulated:
    """A machine whose calls take the step model's time, multiplied by residuals drawn from its fit in stretches.

    The first call after an idle time takes the model's time plus a measured wake-up time.

    `noisy`: whether residuals and wake-ups are drawn at all.
    """

    def __init__(self, model: StepModel, seed: int = 0, noisy: bool = True):
        self.model, self.now = model, 0.0
        drawn = model.drawn if noisy else STEADY
        self._step, self._chunk, self._both = (drawn[name] for name in ("step", "chunk", "both"))
        self._wakings, self._slept = model.wakings if noisy else [], False
        self._next = int(np.random.default_rng(seed).integers(DRAWN))  # where in the residuals it begins
        self._chunks: dict[tuple[int, int], float] = {}
        self._low, self._high = model.range.decoding
        self._constants, self._per_key, self._held = model.step, model.per_key, model.range.held

    def wait(self, until: float) -> float:
        """Idle until the time `until` (s); the time then."""
        self._slept = bool(self._wakings) and until - self.now >= AWAKE_S
        self.now = until
        return until

    def call(self, decoding: list[int], step: bool, keys: int, reading: int, chunk: int, before: int) -> float:
        """The time after a call (s); StudyError for a call outside the range that the model was fitted on."""
        n = self._next = (self._next + 1) & (DRAWN - 1)
        many = len(decoding) if step else 0
        if self._slept:
            self._slept = False
            self.now += self.model.seconds(many, keys, chunk, before) + self._wakings[n]
        elif not chunk:
            self.now += self.model.seconds(many, keys, 0, 0) * self._step[n]
        elif many:
            self.now += self.model.seconds(many, keys, chunk, before) * self._both[n]
        else:
            seconds = self._chunks.get((chunk, before))
            if seconds is None:
                seconds = self._chunks[chunk, before] = self.model.seconds(0, 0, chunk, before)
            self.now += seconds * self._chunk[n]
        return self.now

    def steps(self, decoding: list[int], keys: int, most: int, until: float) -> list[float]:
        """The times after one to `most` steps (s), no more once the time is `until`; StudyError as `call`."""
        many = len(decoding)
        if self._slept or not self._low <= many <= self._high or keys + many * (most - 1) > many * self._held:
            return [self.call(decoding, True, keys, -1, 0, 0)]
        constant, per_key, drawn = self._constants[many - self._low], self._per_key, self._step
        now, n, times = self.now, self._next, []
        for held in range(keys, keys + many * most, many):
            n = (n + 1) & (DRAWN - 1)
            now += (constant + per_key * held) * drawn[n]
            times.append(now)
            if now >= until:
                break
        self.now, self._next = now, n
        return times

    def leave(self, decoding: list[int], slot: int, reading: int) -> float:
        """The time after a sequence left and others moved up: the last one, and the one being read."""
        self.now += self.model.moving * ((slot < len(decoding) - 1) + (reading >= 0))
        return self.now


def chosen(load: Load, which: Sequence[int]) -> Load:
    """The requests of a load with the given indices."""
    arrives = [load.arrives[n] for n in which]
    return Load(arrives, [load.prompt[n] for n in which], [load.output[n] for n in which], load.within)


def round_robin(load: Load, n: int) -> list[range]:
    """Indices of each machine's requests if every n-th request goes to the same machine."""
    return [range(first, len(load), n) for first in range(n)]


def least_work(load: Load, n: int, work: Sequence[float]) -> list[list[int]]:
    """Indices of each machine's requests if each goes to the one that finishes its queue first, by `work` (s).

    `work`: of each request alone. Where machines serve one request at a time and the work is exact, this is one
    queue before n servers.
    """
    free = [(0.0, machine) for machine in range(n)]
    given: list[list[int]] = [[] for _ in range(n)]
    for number, arrives in enumerate(load.arrives):
        until, machine = free[0]
        given[machine].append(number)
        heapq.heapreplace(free, (max(until, arrives) + work[number], machine))
    return given
