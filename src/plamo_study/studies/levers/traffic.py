"""Which lever helps your requests most: what each was measured to change, weighed by what a request is made of.

A request reads its prompt and writes its answer. A lever makes each of the two so many times as fast, and the whole as
Amdahl's law says: 1 / (reading / gain of reading + writing / gain of writing), both as shares of the time without it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from plamo_study.analysis import timing
from plamo_study.analysis.stats import Estimate
from plamo_study.errors import StudyError
from plamo_study.measure.recording import Recording
from plamo_study.studies.batch_scaling import analysis as batch_scaling
from plamo_study.studies.batch_scaling.claims import FLAT
from plamo_study.studies.context import analysis as context
from plamo_study.studies.disaggregation import analysis as moving
from plamo_study.studies.levers import gains
from plamo_study.studies.levers.gains import BITS, Recordings
from plamo_study.studies.quantization import analysis as types
from plamo_study.studies.replicas import analysis as processes
from plamo_study.studies.speculative import analysis as drafts

OBJECTIVES = ("tokens", "wait")
FEW = 2  # answers at once up to which a type's gain is that of one answer
NAMED = ["lever", "over", "where", "study"]
SAME = Estimate(1.0, 1.0, 1.0, 0)
HOW_PROBE = "plamo-study probe URL --json > probe.json"


@dataclass(frozen=True)
class Traffic:
    """Requests of so many tokens, so many at once. `shared`: the share of a prompt that was read before; `accepts`: of
    drafted tokens, how many are right; `reading`: the share of time that reads prompts, where it was measured."""

    n_prompt: int
    n_gen: int
    n_users: int
    accepts: float = gains.ACCEPTED
    shared: float = 0.0
    reading: float | None = None

    def __post_init__(self) -> None:
        how = "set the parameters in the first cell"
        for name in ("n_prompt", "n_gen", "n_users"):
            if getattr(self, name) < 1:
                raise StudyError(f"{name} {getattr(self, name)}", "must be at least 1", how)
        for name in ("accepts", "shared"):
            if not 0 <= getattr(self, name) < 1:
                raise StudyError(f"{name} {getattr(self, name)}", "must be at least 0 and less than 1", how)


@dataclass(frozen=True)
class Effect:
    """What a lever does to both phases, times as fast; `over`: what it is compared with; `where`: measured where.

    `tokens`: times as many tokens a second, where that was measured as a whole; `waiting`: times as short as the
    longest wait becomes, where that was measured and does not follow from reading.
    """

    lever: str
    over: str
    where: str
    study: str
    reading: Estimate = SAME
    writing: Estimate = SAME
    tokens: Estimate | None = None
    waiting: Estimate | None = None


def probed(path: str, traffic: Traffic) -> Traffic:
    """The traffic with the share of reading that a probe of a server saw; StudyError for a file that holds none."""
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
        shares = (report.get("traffic") or report["phase"])["shares"]
        read, written = (_value(shares[name]) for name in ("prefill", "decode"))
        return replace(traffic, reading=read / (read + written))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        why = f"is no report of a probe that told the phases apart ({type(error).__name__})"
        raise StudyError(path, why, HOW_PROBE) from None


def _value(share: Any) -> float:
    return float(share["value"] if isinstance(share, dict) else share)


def models(known: Recordings) -> list[str]:
    """The models whose requests can be taken apart: those with ladders of depth and a curve of batches."""
    if not known.keys() >= {"05-context", "03-batch-scaling"}:
        return []
    deep = context.curves(known["05-context"].rows, "prefill", index="at")
    return [model for build, model in _steps(known) if build == batch_scaling.STOCK and model in deep]


def _steps(known: Recordings) -> dict[batch_scaling.Curve, pd.DataFrame]:
    return batch_scaling.curves(known["03-batch-scaling"].rows)


def seconds(known: Recordings, model: str, traffic: Traffic) -> tuple[float, float, float]:
    """Seconds that a request reads, that it writes alone, and that it adds where all write together.

    By the ladders of notebook 05: reading is the sum over its tokens, each at its depth. A step of all takes as many
    times as long as one of one as notebook 03 measured.
    """
    rows = known["05-context"].rows
    read, written = (
        context.curves(rows, phase, index="at")[model].median(axis=1).dropna() for phase in ("prefill", "decode")
    )
    depths = np.arange(traffic.n_prompt) + 0.5
    reading = float(np.interp(depths, read.index, read).sum())
    step = float(np.interp(traffic.n_prompt + traffic.n_gen / 2, written.index, written))
    alone = traffic.n_gen * step
    return reading, alone, alone / together(known, model, traffic.n_users).value


def reading_share(known: Recordings, model: str, traffic: Traffic) -> float:
    """The share of a request's time that reads its prompt, where all write together."""
    if traffic.reading is not None:
        return traffic.reading
    reading, _, writing = seconds(known, model, traffic)
    return reading / (reading + writing)


def together(known: Recordings, model: str, n_users: int) -> Estimate:
    """How many times the tokens of one answer the nearest measured number of answers writes."""
    curve = _steps(known)[batch_scaling.STOCK, model]
    n = _nearest(curve.index, n_users)
    return timing.paired_ratio(curve.loc[1] * n, curve.loc[n])


def _nearest(measured: Any, wanted: float) -> int:
    return int(min(measured, key=lambda n: abs(np.log((n + 1) / (wanted + 1)))))


def effects(known: Recordings, model: str, traffic: Traffic) -> Iterator[Effect]:
    """Every lever that was measured for this model at the nearest number of answers and the nearest depth."""
    own = {study: _same(recording, model) for study, recording in known.items()}
    n = _nearest(_steps(known)[batch_scaling.STOCK, model].index, traffic.n_users)
    if n > 1:
        gain = together(known, model, n)
        yield Effect("batch", "one after another", f"{n} answers at once", "03-batch-scaling", writing=gain)
    yield from _types(known, own, traffic)
    yield from _drafts(known, own, traffic)
    curves = _steps(known)
    if FLAT in {build for build, name in curves if name == model}:
        flat, stock = curves[FLAT, model], curves[batch_scaling.STOCK, model]
        n = _nearest(flat.index.intersection(stock.index), traffic.n_users)
        gain = timing.paired_ratio(stock.loc[n], flat.loc[n])
        yield Effect("corrected", "the engine as released", f"{n} answers at once", "03-batch-scaling", writing=gain)
    yield from _window(known, own, traffic)
    yield from _arrangements(known, own, traffic)
    yield from _waits(known, own)
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
    return next((name for name in names if types.unstarred(name) == types.unstarred(model)), "")


def _types(known: Recordings, own: dict[str, str], traffic: Traffic) -> Iterator[Effect]:
    """Every type over the usual one, of one answer or of several."""
    model, study = own.get("04-quantization"), "04-quantization"
    if not model:
        return
    rows = known[study].rows
    phase, where = ("decode", "one answer") if traffic.n_users <= FEW else ("batch", f"{gains.TOGETHER} answers")
    for dtype in dict.fromkeys(rows[rows["model"] == model]["dtype"]):
        read, written = (types.ratio(rows, each, model, dtype, BITS) for each in ("prefill", phase))
        if dtype != BITS and read is not None and written is not None:
            yield Effect(f"bits: {dtype}", BITS, where, study, reading=read, writing=written)


def _drafts(known: Recordings, own: dict[str, str], traffic: Traffic) -> Iterator[Effect]:
    """Drafts of an acceptance that is told, as released and on the build that takes tokens back."""
    for study in ("08-speculative", "08-rollback"):
        model = own.get(study)
        if not model:
            continue
        found = drafts.curves(known[study].rows, (traffic.accepts,))
        found = found[(found["model"] == model) & (found["n_draft"] == gains.DRAFTED)]
        found = found[found["how"] != drafts.WORDS["full"]]
        found = found[(found["build"] == batch_scaling.STOCK) == (study == "08-speculative")]
        if len(found):
            n = _nearest(found["n_seq"], traffic.n_users)
            row = found[found["n_seq"] == n].sort_values("n_prompt").iloc[0]
            name = "heads" if study == "08-speculative" else "rollback"
            where = f"{n} answers, {traffic.accepts:.0%} right"
            yield Effect(name, "no drafts", where, study, writing=row["speed"])


def _window(known: Recordings, own: dict[str, str], traffic: Traffic) -> Iterator[Effect]:
    model = own.get("05-beside")
    found = context.explained(known["05-beside"].rows) if model else pd.DataFrame(columns=["model"])
    found = found[found["model"].str.replace(context.WITH_WINDOW, "", regex=False) == model]
    if len(found):
        known_at = found.set_index(["phase", "depth"])["ratio"]
        read = _nearest(found["depth"], traffic.n_prompt / 2)
        written = _nearest(found["depth"], traffic.n_prompt + traffic.n_gen / 2)
        gain = {"reading": known_at["prefill", read].per(1), "writing": known_at["decode", written].per(1)}
        where = f"read at {read:,} and written at {written:,} tokens"
        yield Effect("window", "the engine as released", where, "05-beside", **gain)


def _arrangements(known: Recordings, own: dict[str, str], traffic: Traffic) -> Iterator[Effect]:
    model, study = own.get("07-replicas"), "07-replicas"
    found = processes.table(known[study].rows) if model else pd.DataFrame(columns=["model"])
    found = found[found["model"] == model].dropna(subset=["against_one"]) if len(found) else found
    found = found[found["use_mmap"] & (found["n_processes"] == gains.SPLIT[0])] if len(found) else found
    if len(found) and traffic.n_users > 1:
        row = found[found["total"] == _nearest(found["total"], traffic.n_users)].iloc[0]
        gain, where = row["against_one"], f"{row['n_processes']} × {row['n_seq']} answers, short prompts"
        yield Effect("replicas", "one process", where, study, tokens=gain)


def _waits(known: Recordings, own: dict[str, str]) -> Iterator[Effect]:
    """Levers that are about how long others wait."""
    named = {"chunked": ("06-chunked", "a prompt at once"), "split": ("09-disaggregation", "one engine")}
    for lever, (study, over) in named.items():
        if own.get(study):
            for line in gains.LEVERS[lever][1](known[study]):
                if line.model == own[study]:
                    yield Effect(lever, over, line.what, study, waiting=line.gain)


def ranked(known: Recordings, model: str, traffic: Traffic, objective: str) -> pd.DataFrame:
    """Levers by predicted gain: `lever`, `over`, `gain` (estimate), `where`, `study`.

    `objective`: "tokens" a second of all requests, or the longest "wait" of those being answered while somebody's
    prompt is read, which as many times shorter as reading is faster. StudyError for another word or an unknown model.
    """
    if objective not in OBJECTIVES:
        raise StudyError(f"objective {objective!r}", "unknown", f"one of: {', '.join(OBJECTIVES)}")
    names = {types.unstarred(name): name for name in models(known)}
    if types.unstarred(model) not in names:
        how = f"one of: {', '.join(names)}" if names else "plamo-study measure 05-context, then 03-batch-scaling"
        raise StudyError(f"model {model!r}", "has no rows that its requests could be taken apart by", how)
    model = names[types.unstarred(model)]
    entries = []
    for effect in effects(known, model, traffic):
        share = _share(known, model, traffic, effect)
        gain = effect.waiting or effect.reading if objective == "wait" else effect.tokens or whole(effect, share)
        if gain != SAME:
            entries.append({name: getattr(effect, name) for name in NAMED} | {"gain": gain})
    found = pd.DataFrame(entries, columns=[*NAMED, "gain"])
    return found.sort_values("gain", key=lambda gained: -gained.map(lambda each: each.value), ignore_index=True)


def _share(known: Recordings, model: str, traffic: Traffic, effect: Effect) -> float:
    """Of the time without a lever, what reads: those who write one after another write longer."""
    if effect.lever != "batch" or traffic.reading is not None:
        return reading_share(known, model, traffic)
    reading, alone, _ = seconds(known, model, traffic)
    return reading / (reading + alone)


def whole(effect: Effect, share: float) -> Estimate:
    """The gain of a whole request by Amdahl's law, its interval from both phases' bounds at once."""

    def of(bound: str) -> float:
        read, written = getattr(effect.reading, bound), getattr(effect.writing, bound)
        return 1 / (share / read + (1 - share) / written)

    return Estimate(of("value"), of("low"), of("high"), max(effect.reading.n, effect.writing.n))
