"""Time of a call by its contents: fitted on measured calls, without extrapolation beyond them.

A call is a step of some sequences, a chunk of a prompt, or both. A step costs a constant for its number of sequences,
fitted separately so that kernel switches stay where they are, and a slope by the tokens that these hold. A chunk
costs a constant and a slope by the tokens before it, both by chunk size. Both in one call cost, by the law that
chapter 7 checked, a step with one sequence more and the chunk without its first token, because the engine makes two
micro-batches of them.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from llama_meter.errors import StudyError

LEAST = 3  # calls of a kind that a constant is fitted on
DRAWN = 1 << 16  # residuals that simulations repeat, each starting at its own place
STRETCH = 16  # residuals kept in measured order, since slowdowns last for several calls
AWAKE_S = 0.008  # after this idle time threads may sleep, and the next call waits for them
BITS = 30  # of a mantissa: nine decimal digits
SLOPED = 3  # least number of places in a prompt to fit a slope


@dataclass(frozen=True)
class Calls:
    """Measured calls, arrays (n,): sequences decoding and the tokens these hold, the chunk's tokens and those before
    it, and `seconds`."""

    decoding: np.ndarray
    keys: np.ndarray
    chunk: np.ndarray
    before: np.ndarray
    seconds: np.ndarray

    def where(self, chosen: np.ndarray) -> "Calls":
        """The calls selected by a mask or index (n,)."""
        return Calls(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))

    @property
    def kinds(self) -> np.ndarray:
        """Kind of each call, (n,): "step", "chunk" or "both"."""
        return np.select([self.chunk == 0, self.decoding == 0], ["step", "chunk"], "both")

    def __len__(self) -> int:
        return len(self.seconds)


@dataclass(frozen=True)
class Range:
    """Measured range: least and most sequences, most tokens per sequence, chunk sizes, most tokens before a chunk."""

    decoding: tuple[int, int]
    held: int
    chunk: tuple[int, int]
    before: int


@dataclass(frozen=True)
class StepModel:
    """Seconds of a call of one model, engine and machine, with the residuals of the fit.

    `step`: constant by number of sequences, from index `range.decoding[0]`; `per_key`: more for each token held.
    `sizes`, `base`, `slope`: a chunk's constant and what each token before it adds, by its size. `factors`: measured
    over fitted, of steps, chunks and calls with both; `waking`: extra seconds of the first call after idle time, empty
    if not measured. `missing`: the command that measures more.
    """

    name: str
    range: Range
    step: tuple[float, ...]
    per_key: float
    sizes: tuple[int, ...]
    base: tuple[float, ...]
    slope: tuple[float, ...]
    factors: dict[str, np.ndarray] = field(repr=False)
    moving: float = 0.0
    missing: str = "plamo-study measure 07-scheduling"
    waking: np.ndarray = field(default_factory=lambda: np.empty(0), repr=False)

    def seconds(self, decoding: int, keys: int, chunk: int, before: int) -> float:
        """Seconds of one call, without its residual. StudyError for a call outside the measured range."""
        if decoding and chunk > 1:
            return self._step(decoding + 1, keys + before) + self._chunk(chunk - 1, before + 1)
        if decoding and chunk:
            return self._step(decoding + 1, keys + before)
        return self._step(decoding, keys) if decoding else self._chunk(chunk, before)

    def _step(self, decoding: int, keys: int) -> float:
        low, high = self.range.decoding
        if not low <= decoding <= high or keys > decoding * self.range.held:
            what = f"a step of {decoding} sequences with {keys} tokens"
            raise self._outside(what, f"{low} to {high} sequences of at most {self.range.held} tokens each")
        return self.step[decoding - low] + self.per_key * keys

    def _chunk(self, chunk: int, before: int) -> float:
        low, high = self.range.chunk
        if not low <= chunk <= high or before > self.range.before:
            what = f"a chunk of {chunk} tokens behind {before}"
            raise self._outside(what, f"{low} to {high} tokens behind at most {self.range.before}")
        at = bisect_left(self.sizes, chunk)
        if self.sizes[at] == chunk:
            return self.base[at] + self.slope[at] * before
        left, right = self.sizes[at - 1], self.sizes[at]
        share = (chunk - left) / (right - left)
        base, slope = (values[at - 1] * (1 - share) + values[at] * share for values in (self.base, self.slope))
        return base + slope * before

    def of(self, calls: Calls) -> np.ndarray:
        """Seconds of each call as `seconds` gives them, (n,); NaN for a call outside the measured range."""
        both = (calls.decoding > 0) & (calls.chunk > 0)
        many, held = calls.decoding + both, calls.keys + both * calls.before
        size, before = calls.chunk - both, calls.before + both
        steps, chunks = self._steps(many, held), self._chunks(size, before)
        return np.where(many > 0, steps, 0.0) + np.where((size > 0) | (many == 0), chunks, 0.0)  # type: ignore[no-any-return]

    def _steps(self, many: np.ndarray, keys: np.ndarray) -> np.ndarray:
        low, high = self.range.decoding
        inside = (low <= many) & (many <= high) & (keys <= many * self.range.held)
        return np.where(inside, np.take(self.step, many - low, mode="clip") + self.per_key * keys, np.nan)  # type: ignore[no-any-return]

    def _chunks(self, size: np.ndarray, before: np.ndarray) -> np.ndarray:
        low, high = self.range.chunk
        sizes, at = np.array(self.sizes), np.searchsorted(self.sizes, size).clip(0, len(self.sizes) - 1)
        share = (size - sizes[at - 1]) / np.maximum(sizes[at] - sizes[at - 1], 1)
        base, slope = (
            np.where(sizes[at] == size, values[at], values[at - 1] * (1 - share) + values[at] * share)
            for values in map(np.array, (self.base, self.slope))
        )
        inside = (low <= size) & (size <= high) & (before <= self.range.before)
        return np.where(inside, base + slope * before, np.nan)  # type: ignore[no-any-return]

    def _outside(self, what: str, measured: str) -> StudyError:
        return StudyError(f"{self.name}: {what}", f"was not measured; measured were {measured}", self.missing)

    def untuned(self) -> "StepModel":
        """The two numbers of a usual benchmark: a constant for each token of a prompt, that of the longest one alone,
        and one for a step of any sequences, that of all slots. No residuals, moves or wake-ups."""
        token = self.base[-1] / self.sizes[-1]
        sizes = (self.sizes[0], self.sizes[-1])
        return replace(
            self,
            step=(self.step[-1],) * len(self.step),
            per_key=0.0,
            sizes=sizes,
            slope=(0.0, 0.0),
            moving=0.0,
            base=(token * sizes[0], token * sizes[1]),
            factors=dict.fromkeys(self.factors, np.ones(1)),
            waking=np.empty(0),
        )

    @cached_property
    def content(self) -> bytes:
        """All that a simulation by this model depends on, as `told`."""
        of = self.range
        counts = [*of.decoding, of.held, *of.chunk, of.before, *self.sizes]
        fitted = [self.step, [self.per_key, self.moving], self.base, self.slope, self.waking]
        return told(counts, *fitted, *(self.factors[kind] for kind in sorted(self.factors)))

    @cached_property
    def drawn(self) -> dict[str, list[float]]:
        """Residuals for a simulation, by kind (DRAWN each): stretches of successive calls, in an order drawn once."""
        rng, series = np.random.default_rng(0), {}
        for name, factors in self.factors.items():
            starts = rng.integers(0, len(factors), DRAWN // STRETCH)
            series[name] = factors[(starts[:, None] + np.arange(STRETCH)) % len(factors)].ravel().tolist()
        return series

    @cached_property
    def wakings(self) -> list[float]:
        """Wake-up times for a simulation (DRAWN), in an order drawn once; empty if none were measured."""
        many = DRAWN if len(self.waking) else 0
        return np.random.default_rng(1).choice(self.waking, many).tolist() if many else []


def told(*numbers: Any) -> bytes:
    """Sequences or arrays of numbers, to nine digits, in bytes: a fit differs between processors in its last digits."""
    parts = []
    for values in numbers:
        mantissa, exponent = np.frexp(np.asarray(values, float))
        parts += [np.rint(np.ldexp(mantissa, BITS)).tobytes(), exponent.tobytes(), b";"]
    return b"".join(parts)


def fit(
    name: str,
    calls: Calls,
    moving: Sequence[float] = (),
    missing: str = StepModel.missing,
    woken: Calls | None = None,
) -> StepModel:
    """Fit a step model. `moving`: seconds of each move of a sequence to another slot; `woken`: calls after
    idle time, of which only the extra seconds are kept.

    Steps and chunks alone give constants and slopes; calls with both only give residuals.

    Raises
    ------
    StudyError
        There are no steps or no chunks among the calls.

    """
    steps, chunks = calls.where(calls.chunk == 0), calls.where(calls.decoding == 0)
    if not len(steps) or not len(chunks):
        why = f"{len(steps)} steps and {len(chunks)} chunks were measured alone"
        raise StudyError(name, f"no step model: {why}", missing)
    constants, per_key = _steps(steps)
    sizes, base, slope = _chunks(chunks)
    if not constants or not sizes:
        why = f"fewer than {LEAST} steps of any number of sequences, or chunks of any size, were measured alone"
        raise StudyError(name, f"no step model: {why}", missing)
    counts = sorted(constants)
    every = range(counts[0], counts[-1] + 1)
    measured = Range(
        decoding=(counts[0], counts[-1]),
        held=int(np.ceil((steps.keys / steps.decoding).max())),
        chunk=(sizes[0], sizes[-1]),
        before=int(chunks.before.max()),
    )
    model = StepModel(
        name,
        measured,
        tuple(np.interp(every, counts, [constants[n] for n in counts]).tolist()),
        per_key,
        sizes,
        base,
        slope,
        {},
        float(np.median(moving)) if len(moving) else 0.0,
        missing,
    )
    waking = _waking(model, woken) if woken else np.empty(0)
    return replace(model, factors=residuals(model, calls), waking=waking)


def _waking(model: StepModel, woken: Calls) -> np.ndarray:
    """Seconds of calls beyond the model's, at least 0; calls out of range are left out."""
    beyond = woken.seconds - model.of(woken)
    return np.maximum(beyond[~np.isnan(beyond)], 0.0)


def residuals(model: StepModel, calls: Calls) -> dict[str, np.ndarray]:
    """Measured over fitted by kind of call, or of all calls where a kind has none; calls out of range are left out."""
    over, kinds = calls.seconds / model.of(calls), calls.kinds
    inside = ~np.isnan(over)
    by_kind = {name: over[inside & (kinds == name)] for name in ("step", "chunk", "both")}
    every = np.concatenate(list(by_kind.values()))
    return {name: values if len(values) else every for name, values in by_kind.items()}


def _steps(steps: Calls) -> tuple[dict[int, float], float]:
    """Seconds by number of sequences, and seconds per token held: the same for all numbers, never negative."""
    counts = [n for n in np.unique(steps.decoding).tolist() if (steps.decoding == n).sum() >= LEAST]
    centred_keys, centred_seconds = [], []
    for n in counts:
        of = steps.decoding == n
        centred_keys.append(steps.keys[of] - np.median(steps.keys[of]))
        centred_seconds.append(steps.seconds[of] - np.median(steps.seconds[of]))
    per_key = _slope(np.concatenate(centred_keys), np.concatenate(centred_seconds)) if counts else 0.0
    return {
        n: float(np.median(steps.seconds[steps.decoding == n] - per_key * steps.keys[steps.decoding == n]))
        for n in counts
    }, per_key


def _chunks(chunks: Calls) -> tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...]]:
    """Sizes, constants and slopes. A size measured at few places in a prompt gets its neighbours' slope."""
    sizes = [n for n in np.unique(chunks.chunk).tolist() if (chunks.chunk == n).sum() >= LEAST]
    slopes = {}
    for n in sizes:
        of = chunks.chunk == n
        if len(np.unique(chunks.before[of])) >= SLOPED:
            centred = chunks.seconds[of] - np.median(chunks.seconds[of])
            slopes[n] = _slope(chunks.before[of] - np.median(chunks.before[of]), centred)
    anchors = sorted(slopes)
    slope = np.interp(sizes, anchors, [slopes[n] for n in anchors]) if anchors else np.zeros(len(sizes))
    base = [
        float(np.median((chunks.seconds - rate * chunks.before)[chunks.chunk == n]))
        for n, rate in zip(sizes, slope, strict=True)
    ]
    return tuple(sizes), tuple(base), tuple(slope.tolist())


def _slope(x: np.ndarray, y: np.ndarray) -> float:
    """Least squares through the middle of the data, the slowest and fastest twentieth left out; at least 0."""
    low, high = np.quantile(y, [0.05, 0.95])
    inside = (low <= y) & (y <= high)
    spread = float((x[inside] ** 2).sum())
    return max(float((x[inside] * y[inside]).sum()) / spread, 0.0) if spread else 0.0
