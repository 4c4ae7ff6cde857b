"""Time of a call by its contents: fitted on measured calls, without extrapolation beyond them; and a clock by it.

A call is a step of some sequences, a chunk of a prompt, or both. A step costs a constant for its number of sequences,
fitted separately so that kernel switches stay where they are, and a slope by the tokens that these hold. A chunk
costs a constant and a slope by the tokens before it, both by chunk size. Both in one call cost, by the law that
chapter 7 checked, a step with one sequence more and the chunk without its first token, because the engine makes two
micro-batches of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import pandas as pd

from llama_meter.errors import StudyError

CALL = ["decoding", "keys", "chunk", "before"]  # sequences, tokens they hold, a chunk's tokens, and those before it
LEAST = 3  # calls of a kind that a constant is fitted on
DRAWN = 1 << 16  # residuals that simulations repeat, each starting at its own place
STRETCH = 16  # residuals kept in measured order, since slowdowns last for several calls
AWAKE_S = 0.008  # after this idle time threads may sleep, and the next call waits for them
SLOPED = 3  # least number of places in a prompt to fit a slope
MORE = "plamo-study measure 07-scheduling"


@dataclass(frozen=True)
class StepModel:
    """Seconds of a call of one model, engine and machine, with the residuals of the fit.

    `step`: constant by number of sequences, from `least` on; `per_key`: more for each of the tokens held, at most
    `held` of a sequence. `base`, `slope`: a chunk's constant and what each token before it adds, at most `before`, by
    size from `shortest` on. `factors`: measured over fitted, of steps, chunks and calls with both; `waking`: extra
    seconds of the first call after idle time, empty if not measured; `moving`: of a move to another slot.
    """

    least: int
    step: tuple[float, ...]
    per_key: float
    held: int
    shortest: int
    base: tuple[float, ...]
    slope: tuple[float, ...]
    before: int
    factors: dict[str, np.ndarray] = field(repr=False)
    moving: float = 0.0
    waking: np.ndarray = field(default_factory=lambda: np.empty(0), repr=False)

    def seconds(self, decoding: int, keys: int, chunk: int, before: int) -> float:
        """Seconds of one call, without its residual. StudyError for a call outside the measured range."""
        if decoding and chunk:
            decoding, keys, chunk, before = decoding + 1, keys + before, chunk - 1, before + 1
        seconds, many, size = 0.0, decoding - self.least, chunk - self.shortest
        if decoding:
            if not 0 <= many < len(self.step) or keys > decoding * self.held:
                raise StudyError(f"a step of {decoding} sequences with {keys} tokens", "was not measured", MORE)
            seconds += self.step[many] + self.per_key * keys
        if chunk:
            if not 0 <= size < len(self.base) or before > self.before:
                raise StudyError(f"a chunk of {chunk} tokens behind {before}", "was not measured", MORE)
            seconds += self.base[size] + self.slope[size] * before
        return seconds

    def of(self, calls: pd.DataFrame) -> np.ndarray:
        """Seconds of each call as `seconds` gives them, (n,); NaN for a call outside the measured range."""
        decoding, keys, chunk, before = (calls[name].to_numpy() for name in CALL)
        both = (decoding > 0) & (chunk > 0)
        decoding, keys, chunk, before = decoding + both, keys + both * before, chunk - both, before + both
        many, size = decoding - self.least, chunk - self.shortest
        steps = np.take(self.step, many, mode="clip") + self.per_key * keys
        inside = (many >= 0) & (many < len(self.step)) & (keys <= decoding * self.held)
        chunks = np.take(self.base, size, mode="clip") + np.take(self.slope, size, mode="clip") * before
        within = (size >= 0) & (size < len(self.base)) & (before <= self.before)
        seconds = np.where(decoding > 0, np.where(inside, steps, np.nan), 0.0)
        return seconds + np.where(chunk > 0, np.where(within, chunks, np.nan), 0.0)  # type: ignore[no-any-return]

    def untuned(self) -> "StepModel":
        """The two numbers of a usual benchmark: a constant for each token of a prompt, that of the longest one alone,
        and one for a step of any sequences, that of all slots. No residuals, moves or wake-ups."""
        longest = self.shortest + len(self.base) - 1
        return replace(
            self,
            step=(self.step[-1],) * len(self.step),
            per_key=0.0,
            base=tuple(self.base[-1] / longest * size for size in range(self.shortest, longest + 1)),
            slope=(0.0,) * len(self.slope),
            moving=0.0,
            factors=dict.fromkeys(self.factors, np.ones(1)),
            waking=np.empty(0),
        )

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


def fit(calls: pd.DataFrame, moving: Sequence[float] = (), woken: pd.DataFrame | None = None) -> StepModel:
    """Fit a step model on calls, a line each: CALL and `seconds`.

    Steps and chunks alone give constants and slopes; calls with both only give residuals.

    Parameters
    ----------
    moving
        Seconds of each move of a sequence to another slot.
    woken
        Calls after idle time, of which only the extra seconds are kept.

    Raises
    ------
    StudyError
        There are too few steps or chunks among the calls.

    """
    steps, chunks = calls[calls["chunk"] == 0], calls[calls["decoding"] == 0]
    constants, per_key = _steps(steps)
    sizes, base, slope = _chunks(chunks)
    if not constants or not sizes:
        raise StudyError("a step model", f"needs {LEAST} steps and {LEAST} chunks of a kind measured alone", MORE)
    every, lengths = (np.arange(min(each), max(each) + 1) for each in (constants, sizes))
    model = StepModel(
        least=int(every[0]),
        step=tuple(np.interp(every, [*constants], [*constants.values()]).tolist()),
        per_key=per_key,
        held=int(np.ceil((steps["keys"] / steps["decoding"]).max())),
        shortest=sizes[0],
        base=tuple(np.interp(lengths, sizes, base).tolist()),
        slope=tuple(np.interp(lengths, sizes, slope).tolist()),
        before=int(chunks["before"].max()),
        factors={},
        moving=float(np.median(moving)) if len(moving) else 0.0,
    )
    beyond = np.empty(0) if woken is None else woken["seconds"].to_numpy() - model.of(woken)
    waking = np.maximum(beyond[~np.isnan(beyond)], 0.0)
    return replace(model, factors=_residuals(model, calls), waking=waking)


def _residuals(model: StepModel, calls: pd.DataFrame) -> dict[str, np.ndarray]:
    """Measured over fitted by kind of call, or of all calls where a kind has none; calls out of range are left out."""
    over = calls["seconds"].to_numpy() / model.of(calls)
    kinds = np.select([calls["chunk"] == 0, calls["decoding"] == 0], ["step", "chunk"], "both")
    by_kind = {name: over[~np.isnan(over) & (kinds == name)] for name in ("step", "chunk", "both")}
    every = np.concatenate(list(by_kind.values()))
    return {name: values if len(values) else every for name, values in by_kind.items()}


def _steps(steps: pd.DataFrame) -> tuple[dict[int, float], float]:
    """Seconds by number of sequences, and seconds per token held: the same for all numbers, never negative."""
    groups = {int(n): of for n, of in steps.groupby("decoding") if len(of) >= LEAST}
    if not groups:
        return {}, 0.0
    centred = (of[["keys", "seconds"]] - of[["keys", "seconds"]].median() for of in groups.values())
    per_key = _slope(pd.concat(centred), "keys")
    return {n: float((of["seconds"] - per_key * of["keys"]).median()) for n, of in groups.items()}, per_key


def _chunks(chunks: pd.DataFrame) -> tuple[list[int], list[float], list[float]]:
    """Sizes, constants and slopes. A size measured at few places in a prompt gets its neighbours' slope."""
    groups = {int(n): of for n, of in chunks.groupby("chunk") if len(of) >= LEAST}
    slopes = {
        n: _slope(of[["before", "seconds"]] - of[["before", "seconds"]].median(), "before")
        for n, of in groups.items()
        if of["before"].nunique() >= SLOPED
    }
    slope = np.interp([*groups], [*slopes], [*slopes.values()]) if slopes else np.zeros(len(groups))
    base = [
        float((of["seconds"] - rate * of["before"]).median()) for of, rate in zip(groups.values(), slope, strict=True)
    ]
    return [*groups], base, slope.tolist()


def _slope(centred: pd.DataFrame, name: str) -> float:
    """Least squares through the middle of the data, the slowest and fastest twentieth left out; at least 0."""
    low, high = np.quantile(centred["seconds"], [0.05, 0.95])
    inside = centred[centred["seconds"].between(low, high)]
    spread = float((inside[name] ** 2).sum())
    return max(float((inside[name] * inside["seconds"]).sum()) / spread, 0.0) if spread else 0.0


class Simulated:
    """A machine whose calls take the step model's time, multiplied by residuals drawn from its fit in stretches.

    The first call after an idle time takes the model's time plus a measured wake-up time. Deterministic by seed: the
    same load, policy, model and seed give bit-identical times.
    """

    def __init__(self, model: StepModel, seed: int = 0):
        self.model, self.now, self._slept = model, 0.0, False
        self._step, self._chunk, self._both = (model.drawn[name] for name in ("step", "chunk", "both"))
        self._next = int(np.random.default_rng(seed).integers(DRAWN))  # where in the residuals it begins

    def wait(self, until: float) -> float:
        """Idle until the time `until` (s); the time then."""
        self._slept = bool(self.model.wakings) and until - self.now >= AWAKE_S
        self.now = until
        return until

    def call(self, decoding: list[int], keys: int, reading: int, chunk: int, before: int) -> float:
        """The time after a call (s); StudyError for a call outside the range that the model was fitted on."""
        n = self._next = (self._next + 1) & (DRAWN - 1)
        seconds = self.model.seconds(len(decoding), keys, chunk, before)
        if self._slept:
            self._slept = False
            self.now += seconds + self.model.wakings[n]
        else:
            self.now += seconds * (self._both if decoding and chunk else self._chunk if chunk else self._step)[n]
        return self.now

    def steps(self, decoding: list[int], keys: int, most: int, until: float) -> list[float]:
        """The times after one to `most` steps (s), no more once the time is `until`; StudyError as `call`."""
        model, many = self.model, len(decoding)
        at = many - model.least
        if self._slept or not 0 <= at < len(model.step) or keys + many * (most - 1) > many * model.held:
            return [self.call(decoding, keys, -1, 0, 0)]
        constant, per_key, drawn = model.step[at], model.per_key, self._step
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
