"""Which lever helps your requests most: measured gains of both phases, weighed by a request's share of each.

A request reads its prompt and writes its answer. A lever speeds up each of the two by its own factor, and the whole by
Amdahl's law: 1 / (reading / gain of reading + writing / gain of writing), both as shares of the time without it.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd

from plamo_study.analysis import stats, timing
from plamo_study.analysis.stats import Estimate
from plamo_study.errors import StudyError
from plamo_study.foreign import text
from plamo_study.measure.frame import unstarred
from plamo_study.measure.recording import Recording
from plamo_study.studies.batch_scaling import analysis as batch_scaling
from plamo_study.studies.batch_scaling.builds import CORRECT, FLAT
from plamo_study.studies.context import analysis as context
from plamo_study.studies.disaggregation import analysis as moving
from plamo_study.studies.levers import gains
from plamo_study.studies.levers.gains import Recordings
from plamo_study.studies.quantization import analysis as types
from plamo_study.studies.speculative import analysis as drafts

OBJECTIVES = ("tokens", "reading")
FURTHEST = 1.1  # longest request accepted, over the deepest measured token
FEW = 2  # up to this many answers at once, a type's gain is that of one answer
NAMED = ["lever", "over", "where", "study"]
RANKED = [*NAMED, "tokens", "reading", "writing", "share"]
SAME = Estimate(1.0, 1.0, 1.0, 0)
HOW_PROBE = "plamo-study probe URL --json > probe.json"


@dataclass(frozen=True)
class Traffic:
    """Requests of `n_prompt` and `n_gen` tokens, `n_users` at once. `dtype`: type of the weights in use, "" for that of
    notebook 05's rows; `accepts`: share of drafted tokens that are right; `shared`: share of a prompt that was read
    before; `reading`: measured share of time spent reading prompts, if known."""

    n_prompt: int
    n_gen: int
    n_users: int
    dtype: str = ""
    accepts: float = gains.ACCEPTED
    shared: float = 0.0
    reading: float | None = None

    def __post_init__(self) -> None:
        how = "set the parameters in the first cell"
        for name in ("n_prompt", "n_gen", "n_users"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise StudyError(f"{name} {value!r}", "must be a whole number, at least 1", how)
        for name in ("accepts", "shared", "reading"):
            value = getattr(self, name)
            if value is None and name == "reading":
                continue
            if not isinstance(value, int | float) or not 0 <= value < 1:
                raise StudyError(f"{name} {value!r}", "must be at least 0 and less than 1", how)


class _Share(msgspec.Struct):
    value: float


class _Phases(msgspec.Struct):
    shares: dict[str, _Share] = {}


class _Counted(msgspec.Struct):
    shares: dict[str, float] = {}


class _Seen(msgspec.Struct):
    """Used parts of a probe's report: shares of time, as its requests met them and as the server's counters say."""

    phase: _Phases
    traffic: _Counted | None = None


@dataclass(frozen=True)
class Effect:
    """Speedup of both phases by a lever; `over`: what it is compared with; `where`: how it was measured.

    `alone`: whether answers are written one after another without it.
    """

    lever: str
    over: str
    where: str
    study: str
    reading: Estimate = SAME
    writing: Estimate = SAME
    alone: bool = False


@dataclass(frozen=True)
class Spent:
    """Seconds of a request: to read its prompt, to write its answer alone, and its part of writing with all others."""

    reading: float
    alone: float
    writing: float


def probed(path: str, traffic: Traffic) -> Traffic:
    """The traffic with the share of reading measured by a probe of a server; StudyError for a file without one.

    A probe and a server's counters measure what each request waits for. All answers wait for the same steps, so a
    request's part of the engine's decode time is `n_users` times smaller.
    """
    try:
        report = msgspec.convert(json.loads(text(Path(path))), type=_Seen)  # NaN is not JSON
        shares = {name: share.value for name, share in report.phase.shares.items()}
        if report.traffic and report.traffic.shares:
            shares = report.traffic.shares
        read, written = shares["prefill"], shares["decode"] / traffic.n_users
        if not (read >= 0 and written > 0):
            raise ValueError("no share is negative")
        return replace(traffic, reading=read / (read + written))
    except (ValueError, KeyError, OverflowError, RecursionError) as error:
        why = f"is no report of a probe that told the phases apart ({type(error).__name__})"
        raise StudyError(path, why, HOW_PROBE) from None


def models(known: Recordings) -> list[str]:
    """The models whose requests can be split into phases: those with ladders of depth and a curve of batches."""
    if not known.keys() >= {"05-context", "03-batch-scaling"}:
        return []
    deep = context.curves(known.ladders, "prefill", index="at")
    return [model for build, model in known.steps if build == batch_scaling.STOCK and model in deep]


def spent(known: Recordings, model: str, traffic: Traffic) -> Spent:
    """Seconds of a request with weights of the traffic's type.

    From the ladders of notebook 05: reading is the sum over its tokens, each at its depth. A step of all answers is
    scaled by the ratio that notebook 03 measured, and another type than the ladders' by that of notebook 04.
    StudyError for a request that is too long, or a type that was not measured.
    """
    read, written = (
        context.curves(known.ladders, phase, index="at")[model].median(axis=1).dropna()
        for phase in ("prefill", "decode")
    )
    deepest = float(min(read.index.max(), written.index.max()))
    if traffic.n_prompt + traffic.n_gen > FURTHEST * deepest:
        why = f"is beyond the {deepest:,.0f} tokens up to which {model} was measured"
        raise StudyError(f"n_prompt {traffic.n_prompt:,} and n_gen {traffic.n_gen:,}", why, "ask for less")
    depths = np.arange(traffic.n_prompt) + 0.5
    reading = float(np.interp(depths, read.index, read).sum())
    step = float(np.interp(traffic.n_prompt + traffic.n_gen / 2, written.index, written))
    faster = of_type(known, model, in_use(known, traffic), _of_ladders(known), traffic.n_users)
    alone = traffic.n_gen * step / faster[1].value
    return Spent(reading / faster[0].value, alone, alone / together(known, model, traffic.n_users).value)


def in_use(known: Recordings, traffic: Traffic) -> str:
    """The type of the weights that requests are answered with."""
    return traffic.dtype or _of_ladders(known)


def _of_ladders(known: Recordings) -> str:
    rows = known["05-context"].rows
    return str(rows[rows["model"] != ""]["dtype"].mode().iloc[0])


def of_type(known: Recordings, model: str, dtype: str, over: str, n_users: int) -> tuple[Estimate, Estimate]:
    """Speed of `dtype` over `over` in reading and writing; StudyError if either was not measured."""
    if dtype == over:
        return SAME, SAME
    recording = known.get("04-quantization")
    rows = recording.rows if recording else pd.DataFrame({"model": [], "dtype": []})
    own = _same(recording, model) if recording else ""
    phase = "decode" if n_users <= FEW else "batch"
    pair = [types.ratio(known.types, each, own, dtype, over) for each in ("prefill", phase)] if own else [None]
    if None in pair:
        there = ", ".join(dict.fromkeys(rows[rows["model"] == own]["dtype"])) or "none"
        why = f"was not measured beside {over} in both phases for {model}; there are: {there}"
        raise StudyError(f"type {dtype!r}", why, "plamo-study measure 04-quantization")
    return pair[0], pair[1]  # type: ignore[return-value] # neither is None


def reading_share(known: Recordings, model: str, traffic: Traffic, alone: bool = False) -> float:
    """The share of a request's time that reads its prompt; `alone`: where answers are written one after another."""
    if traffic.reading is not None:
        return traffic.reading
    took = spent(known, model, traffic)
    return took.reading / (took.reading + (took.alone if alone else took.writing))


def together(known: Recordings, model: str, n_users: int) -> Estimate:
    """Throughput of the nearest measured number of answers at once, over that of one answer."""
    curve = known.steps[batch_scaling.STOCK, model]
    n = _nearest(curve.index, n_users)
    if n_users > 2 * curve.index.max():
        why = f"is far beyond the {curve.index.max()} answers up to which {model} was measured"
        raise StudyError(f"n_users {n_users:,}", why, "ask for fewer")
    return batch_scaling.factor(curve, n)


def _nearest(measured: Any, wanted: float) -> int:
    return int(min(measured, key=lambda n: abs(np.log((n + 1) / (wanted + 1)))))


def effects(known: Recordings, model: str, traffic: Traffic) -> Iterator[Effect]:
    """Levers on either phase that were measured for this model, at the nearest number of answers and the nearest depth.

    Excludes levers on how requests share an engine, and those measured at one length of prompt only.
    """
    own = {study: _same(recording, model) for study, recording in known.items()}
    n = _nearest(known.steps[batch_scaling.STOCK, model].index, traffic.n_users)
    if n > 1 and traffic.reading is None:  # a probed server batches already
        gain = together(known, model, n)
        yield Effect("batch", "one after another", f"{n} answers at once", "03-batch-scaling", writing=gain, alone=True)
    yield from _types(known, own, model, traffic)
    yield from _drafts(known, own, traffic)
    curves = known.steps
    if {(FLAT, model), (CORRECT, model)} <= curves.keys():
        flat, other = curves[FLAT, model], curves[CORRECT, model]
        n = _nearest(flat.index.intersection(other.index), traffic.n_users)
        gain = timing.paired_ratio(other.loc[n], flat.loc[n])
        yield Effect("corrected", "the build `corrected`", f"{n} answers at once", "03-batch-scaling", writing=gain)
    yield from _window(known, own, traffic)
    if traffic.shared and own.get("09-disaggregation"):
        found = moving.shares(known["09-disaggregation"].rows, (gains.AT_ONCE,))
        found = found[found["model"] == own["09-disaggregation"]]
        if len(found):
            nearest = _nearest(found["n_prompt"], traffic.n_prompt * traffic.shared)
            left = found.set_index("n_prompt").loc[nearest, "ratio"]
            bounds = [1 / (1 - traffic.shared + traffic.shared * each) for each in (left.value, left.high, left.low)]
            gain = Estimate(bounds[0], bounds[1], bounds[2], left.n)
            where = f"{nearest:,} tokens put back"
            yield Effect("reuse", "reading all of a prompt", where, "09-disaggregation", reading=gain)


def _same(recording: Recording, model: str) -> str:
    """The name that a recording gives a model: with a star or without."""
    names = (str(name) for name in recording.rows["model"].unique())
    return next((name for name in names if unstarred(name) == unstarred(model)), "")


def _types(known: Recordings, own: dict[str, str], model: str, traffic: Traffic) -> Iterator[Effect]:
    """Every type over the one in use, of one answer or of several."""
    if not own.get("04-quantization"):
        return
    rows = known["04-quantization"].rows
    where = "one answer" if traffic.n_users <= FEW else f"{gains.TOGETHER} answers"
    over = in_use(known, traffic)
    for dtype in dict.fromkeys(rows[rows["model"] == own["04-quantization"]]["dtype"]):
        with suppress(StudyError):
            if dtype != over:
                read, written = of_type(known, model, dtype, over, traffic.n_users)
                yield Effect(f"bits: {dtype}", over, where, "04-quantization", reading=read, writing=written)


def _drafts(known: Recordings, own: dict[str, str], traffic: Traffic) -> Iterator[Effect]:
    """The best measured draft length at the nearest number of answers and the given acceptance, on both builds."""
    found = gains.drafted(known)
    if found is None or not own.get(found[0]):
        return
    study, ups = found
    for lever, build in gains.BUILDS.items():
        free = drafts.free(ups, build, traffic.accepts)
        by_n = free[free["model"] == own[study]].set_index("n_seq")
        if len(by_n):
            best = by_n.loc[_nearest(by_n.index, traffic.n_users)]
            where = f"{best.name} answers, {best['n_draft']} drafted, {traffic.accepts:.0%} right"
            yield Effect(lever, "no drafts", where, study, writing=best["speed"])


def _window(known: Recordings, own: dict[str, str], traffic: Traffic) -> Iterator[Effect]:
    if not (model := own.get("05-beside")):
        return
    found = known.window[known.window["model"] == model]
    if len(found):
        known_at = found.set_index(["phase", "depth"])["estimate"]
        read = _nearest(found["depth"], traffic.n_prompt / 2)
        written = _nearest(found["depth"], traffic.n_prompt + traffic.n_gen / 2)
        gain = {"reading": known_at["prefill", read].per(1), "writing": known_at["decode", written].per(1)}
        where = f"read at {read:,} and written at {written:,} tokens"
        yield Effect("window", "the engine as released", where, "05-beside", **gain)


def ranked(known: Recordings, model: str, traffic: Traffic, objective: str = OBJECTIVES[0]) -> pd.DataFrame:
    """Levers by predicted gain: RANKED. `tokens`: times the tokens a second of all requests, by Amdahl's law from
    `reading` and `writing` (times as fast, as measured) and the `share` of time that reads; all estimates but this.

    `objective`: the column to sort by. StudyError for another word or an unknown model.
    """
    if objective not in OBJECTIVES:
        raise StudyError(f"objective {objective!r}", "unknown", f"one of: {', '.join(OBJECTIVES)}")
    model = named(known, model)
    shares = {alone: reading_share(known, model, traffic, alone) for alone in (False, True)}
    entries = []
    for effect in effects(known, model, traffic):
        share = shares[effect.alone]
        entry = {name: getattr(effect, name) for name in (*NAMED, "reading", "writing")}
        entries.append(entry | {"tokens": whole(effect, share), "share": share})
    found = pd.DataFrame(entries, columns=RANKED)
    return found.sort_values(objective, key=lambda gained: -gained.map(lambda each: each.value), ignore_index=True)


def best(known: Recordings, model: str, traffic: Traffic) -> dict[str, Any] | None:
    """The lever with the largest lower bound of `tokens`, a line of `ranked`; None if no gain is certain.

    Its intervals are widened to hold for all levers it was chosen from.
    """
    found = ranked(known, model, traffic)
    lines = found.to_dict("records")
    for line in lines:
        for phase in ("reading", "writing"):
            if line[phase].units:
                line[phase] = stats.selected(line[phase], 2 * len(lines))
        line["tokens"] = whole(Effect("", "", "", "", line["reading"], line["writing"]), line["share"])
    line = max(lines, key=lambda line: float(line["tokens"].low), default=None)
    return line if line and line["tokens"].above(1.0) == "holds" else None


def named(known: Recordings, model: str) -> str:
    """A model's name as the rows have it, with a star or without; StudyError for one without the rows needed."""
    names = {unstarred(name): name for name in models(known)}
    if unstarred(model) not in names:
        how = f"one of: {', '.join(names)}" if names else "plamo-study measure 05-context, then 03-batch-scaling"
        raise StudyError(f"model {model!r}", "has no rows to split its requests into phases by", how)
    return names[unstarred(model)]


def whole(effect: Effect, share: float) -> Estimate:
    """The gain of a whole request by Amdahl's law, its interval from both phases' bounds at once."""

    def of(bound: str) -> float:
        read, written = getattr(effect.reading, bound), getattr(effect.writing, bound)
        return 1 / (share / read + (1 - share) / written)

    return Estimate(of("value"), of("low"), of("high"), max(effect.reading.n, effect.writing.n))
