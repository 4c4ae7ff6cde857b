"""Notebook 10's sentences and tables: the words around numbers that come from rows, never the other way round."""

from collections.abc import Iterable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from IPython.display import Markdown

from plamo_study.analysis import stats, timing
from plamo_study.analysis.stats import Estimate
from plamo_study.analysis.usable import usable
from plamo_study.errors import StudyError
from plamo_study.measure import recording as recordings
from plamo_study.measure.recording import Recording
from plamo_study.present import evidence, sentences
from plamo_study.present.evidence import condition, escaped
from plamo_study.present.tables import Columns, Table, scaled, significant, table
from plamo_study.studies.scheduling import analysis, published, traffic
from plamo_study.studies.scheduling.analysis import LIMIT, METRICS, PACED
from plamo_study.studies.scheduling.fleets_plan import CALLS, DAY, DAYS, WELL
from plamo_study.studies.scheduling.loop import Load
from plamo_study.studies.scheduling.plan import MANY, POLICIES, SLOTS, SPLIT, WITHIN

MS = 1e3
AGAINST = (  # a policy, what it is held against, and in words
    ("chunked 64", "shared", "prompts in chunks of 64 instead of whole"),
    (
        SPLIT,
        "shared",
        "two processes with half of the threads each, one for prompts and one for answers, instead of one",
    ),
    (SPLIT, "one at a time", "the same two processes instead of one that answers one request at a time"),
)
SHOWN = ("shared", "chunked 64", "decode first 64", "one at a time", SPLIT)  # in the figure over load
RULES = ("shared", "chunked 32", "chunked 64", "chunked 128")
DESIGNS = (*RULES, "decode first 64", "prefill first", "apart 64", "budget 10", "one at a time")
BUSY = 0.7  # of the capacity, where one load stands for all
WORDS = {"ttft": "first token", "itl": "gap"}
LONG = {"ttft": "the first token", "itl": "the gap between two tokens"}
HEADED = {"simulation": "simulation", "nearest load": "nearest load", "theory": "Pollaczek–Khinchine"}
HEADED |= {paced: f"{HEADED[way]}, pace told" for paced, way in PACED.items()}


def finding(recording: Recording) -> Markdown:
    """Where a baseline is as good as the simulation, how wrong each is, what policies do, and the source's table."""
    rows = recording.rows
    lines = [*_accuracy(rows), *_policies(rows), _printed()]
    text = evidence.disturbed(rows) + "\n".join(f"- {line}" for line in lines) + f"\n\n({condition(recording)})"
    return Markdown(text)


def _accuracy(rows: pd.DataFrame) -> list[str]:
    found = analysis.compared(rows)
    if found.empty:
        return ["**The simulation** was asked nothing that it was fitted for."]
    judged = found[found["metric"].isin(_judged(rows))]
    said = [
        ", ".join(f"{_within(judged[judged['way'] == own])} by {BY[way]}" for own, way in ways.items())
        for ways in ({way: way for way in analysis.WAYS}, PACED)
    ]
    picks = {way: group for way, group in analysis.picks(rows).groupby("way")}
    confirmed = [
        f"{int(picks[way]['confirmed'].sum())} of {len(picks[way])} by {BY[way]}" for way in BY if way in picks
    ]
    lots = picks["simulation"]["chance"].sum() if picks else 0.0
    return [
        f"**Where a baseline is as good as the simulation:** {'; '.join(as_good(rows)) or 'nowhere'}.",
        f"**Each load predicted from the others**, within {LIMIT:.0%} of the engine: {said[0]}.",
        f"**Told how fast the machine was in each process:** {said[1]}.",
        f"**The policy picked**, confirmed by the engine: {', '.join(confirmed)}; drawing lots, {lots:.1f}.",
    ]


BY = {"simulation": "the simulation", "nearest load": "the nearest load", "theory": "Pollaczek–Khinchine"}


def _judged(rows: pd.DataFrame) -> list[str]:
    """What a sentence counts: a usual percentile of first tokens, and the highest of both."""
    return list(dict.fromkeys([analysis.aims(rows)[0], *analysis.tails(rows).values()]))


def _within(group: pd.DataFrame) -> str:
    """How many are within LIMIT, of the quantities that a way speaks of at all."""
    speaks = group.groupby("metric")["ratio"].transform("count") > 0
    within = [ratio is not None and abs(np.log(ratio.value)) <= np.log(1 + LIMIT) for ratio in group[speaks]["ratio"]]
    return f"{sum(within)} of {len(within)}"


def as_good(rows: pd.DataFrame) -> list[str]:
    """The quantities, between known loads or beyond them, of which a baseline predicts as many within LIMIT as the
    simulation, both without the processes' pace or both told it."""
    found = analysis.accuracy(analysis.compared(rows), ("metric", "asked", "way"))
    said = []
    for (metric, asked), group in found[found["metric"].isin(_judged(rows))].groupby(["metric", "asked"], sort=False):
        within = group.set_index("way")["within"]
        for ways in (analysis.WAYS, tuple(PACED)):
            own, *others = [way for way in ways if way in within]
            best = max(others, key=lambda way: within[way], default=own)
            if best != own and within[best] >= within[own]:
                counts = f"{within[best]} against {within[own]}"
                said.append(f"{_named(metric)}, {WHERE[asked]} ({HEADED[best]}, {counts})")
    return said


WHERE = {"between": "between known loads", "beyond": "beyond known loads", "none known": "with no other load known"}


def _named(metric: str) -> str:
    """A quantity in words: first token, P90."""
    what, _, q = metric.partition("_")
    return f"{WORDS[what]}, {q.upper() if q[0] == 'p' else q}" if what in WORDS else metric


def _policies(rows: pd.DataFrame) -> list[str]:
    lines, taken = [], analysis.live(rows)
    for (model, group), (rule, than, words) in product(taken.groupby("model"), AGAINST):
        at = _busiest(group, rule, than)
        whole, other = (group[(group["rule"] == each) & (group["per_second"] == at)] for each in (than, rule))
        if whole.empty or other.empty:
            continue
        said = []
        for name in reversed(analysis.aims(rows)):
            what, _, q = name.partition("_")
            one, two = (each.groupby("block")[name].last() for each in (whole, other))
            ratio = timing.paired_ratio(two, one)
            first, second = (stats.median(each.tolist()).scaled(MS) for each in (two, one))
            times, both = sentences.quotient(ratio, first, second, "ms")
            said.append(f"{LONG[what]} takes {times} as long {both}, {q.upper()}{sentences.unless(ratio)}")
        lines.append(f"**{escaped(str(model))}, {words}**, {at:g} requests a second: {'; '.join(said)}.")
    return lines


def _busiest(group: pd.DataFrame, rule: str, than: str) -> float:
    """The highest load at which both policies were measured; 0 where there is none."""
    both = [group[group["rule"] == each]["per_second"] for each in (than, rule)]
    return max({*both[0]} & {*both[1]}, default=0.0)


def _printed() -> str:
    told = published.strategies()
    found = published.checked(told, published.part(told["table"]["part"]))
    named = found["chunk_cuts"].dropna()
    low, high = found["prompt"].min(), found["prompt"].max()
    return (
        f"**The source's table of five strategies** (70B, one H100, {told['table']['per_second']} requests a second) "
        f"does not add up. {(~found['possible']).sum()} of {len(found)} rows print a median gap shorter than one H100 "
        f"takes to read the weights ({found['floor'].iloc[0] * MS:.0f} ms). So many requests leave time for prompts of "
        f"{low:.0f} to {high:.0f} tokens, which {len(named) - int(named.sum())} of the {len(named)} chunks named never "
        "cut."
    )


# ------------------------------------------------------------------ figures' data


def over_load(recording: Recording) -> pd.DataFrame:
    """What the first figure draws: model, per_second, rule, what, measured (estimates), simulated."""
    found = _of(recording, analysis.aims(recording.rows))
    found = found[(found["way"] == "simulation") & found["rule"].isin(SHOWN)]
    return found.assign(
        what=[f"{_named(name)} (ms)" for name in found["metric"]],
        measured=[estimate.scaled(MS) for estimate in found["measured"]],
        simulated=found["predicted"] * MS,
    )[["model", "per_second", "rule", "what", "measured", "simulated"]]


def ratios(recording: Recording) -> pd.DataFrame:
    """Predicted over measured, the highest percentiles: model, rule, what, ratio, way."""
    found = _of(recording, analysis.tails(recording.rows).values())
    found = found[found["ratio"].notna() & found["way"].isin([*analysis.WAYS, *tuple(PACED)[:1]])]
    return found.assign(what=[_named(name) for name in found["metric"]], way=found["way"].map(HEADED))[
        ["model", "rule", "what", "ratio", "way"]
    ]


def _of(recording: Recording, metrics: Iterable[str]) -> pd.DataFrame:
    """The predictions of some quantities."""
    found = analysis.compared(recording.rows)
    return found[found["metric"].isin(set(metrics))]


def by_chunk(recording: Recording, model: str) -> tuple[pd.DataFrame, dict[str, float]]:
    """Policies by size of chunk over load, simulated, and where the machine's capacity ends."""
    load, known = analysis.typical(recording.rows), analysis.fitted(recording.rows)[model]
    end = analysis.capacity(load, known, SLOTS)
    found = analysis.over_loads(load, RULES, known, [SLOTS], _rates(end))
    return found, {"capacity with whole prompts": end}


def by_slots(recording: Recording, model: str) -> tuple[pd.DataFrame, dict[str, float]]:
    """Chunks of 64 by number of slots over load, simulated."""
    load, known = analysis.typical(recording.rows), analysis.fitted(recording.rows)[model]
    end = analysis.capacity(load, known, SLOTS)
    slots = [n for n in (1, 2, 4, 8) if n <= SLOTS]
    found = analysis.over_loads(load, ["chunked 64"], known, slots, _rates(end))
    return found, {"capacity with 8 slots": end}


def _rates(end: float) -> list[float]:
    """Loads from light to the end of capacity, round numbers of them."""
    return [float(f"{share * end:.2g}") for share in (0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 1.0)]


def by_arrangement(recording: Recording, model: str) -> tuple[pd.DataFrame, dict[str, float]]:
    """One engine against one that reads and one that answers, over load, simulated; that where shipments are known."""
    load, known = analysis.typical(recording.rows), analysis.fitted(recording.rows)[model]
    halves, ships = analysis.half(recording.rows), _shipping(recording, model)
    end = analysis.capacity(load, known, SLOTS)
    rates = _rates(end)
    found = analysis.over_loads(load, ("shared", "chunked 64"), known, [SLOTS], rates).rename(columns={"rule": "how"})
    machines = {"split, half of the threads each": halves.get(model), "split, a second machine": known}
    entries = [
        {"how": how, "per_second": rate}
        | analysis.disaggregated(analysis.at_rate(load, rate), own, SLOTS, ships, simulations=1)
        for how, own in machines.items()
        for rate in rates
        if own and ships
    ]
    return pd.concat([found, pd.DataFrame(entries)], ignore_index=True), {"capacity of one engine": end}


def _shipping(recording: Recording, model: str) -> tuple[analysis.Seconds, analysis.Seconds] | None:
    try:
        return analysis.shipping(recording.rows, model)
    except StudyError:
        return None


# ------------------------------------------------------------------ tables


def steps(recording: Recording) -> Table:
    """The step models: what some calls take, and how far calls lie from the fit."""
    entries = []
    for model, known in analysis.fitted(recording.rows).items():
        longest = known.range.chunk[1]
        entry: dict[str, Any] = {"model": model, "one": known.seconds(1, 64, 0, 0)}
        most = known.range.decoding[1]
        entry |= {"all": known.seconds(most, most * 64, 0, 0), "most": most, "longest": longest}
        entry |= {"short": known.seconds(0, 0, 63, 0), "tile": known.seconds(0, 0, 64, 0)}
        entry |= {"whole": known.seconds(0, 0, longest, 0)}
        for name in known.factors:
            low, high = (known.residual(name, q) for q in (0.05, 0.95))
            entry[name] = f"{low:.2f} to {high:.2f} ({len(known.factors[name]):,})"
        waking = np.quantile(known.waking, [0.5, 0.95]) * MS if len(known.waking) else []
        entry["waking"] = " to ".join(f"{each:.2g}" for each in waking) or "not measured"
        entries.append(entry)
    time = significant(2, MS)
    columns: Columns = {
        "model": ("model", ""), "one": ("step of 1 (ms)", time), "all": (f"step of {SLOTS} (ms)", time),
        "short": ("chunk of 63 (ms)", time), "tile": ("chunk of 64 (ms)", time), "whole": ("longest prompt (ms)", time),
        "step": ("steps, measured / fitted", ""), "chunk": ("chunks", ""), "both": ("calls with both", ""),
        "waking": ("after idleness (ms more)", ""),
    }  # fmt: skip
    return table(
        pd.DataFrame(entries),
        columns,
        "Measured over fitted: 5th to 95th percentile, and calls. After idleness: the middle and the 95th percentile.",
    )


def after_idle(recording: Recording) -> Table:
    """What a prompt that comes to an idle engine takes more, by how long it was idle."""
    found = analysis.after_idle(recording.rows)
    ends = dict(zip(analysis.IDLE, [*analysis.IDLE[1:], None], strict=True))
    found["since"] = [_between(since, ends[since]) for since in found["idle"]]
    time = significant(2, MS)
    columns: Columns = {
        "model": ("model", ""), "since": ("idle before", ""), "calls": ("calls", ","),
        "more": ("beyond the fit, P50 (ms)", time), "more_p90": ("P90 (ms)", time),
    }  # fmt: skip
    return table(found, columns, "First calls of prompts that came when nobody was being answered, all loads.")


def _between(low: float, high: float | None) -> str:
    return f"{low * MS:g} ms and more" if high is None else f"{low * MS:g} to {high * MS:g} ms"


def elsewhere(recording: Recording) -> Table:
    """What notebook 06's rows alone say of the calls of traffic."""
    machine = str(recording.rows["machine"].iloc[0])
    other = recordings.read("06-chunked", recording.source, recording.scale, machine)
    found = analysis.elsewhere(recording.rows, other.rows) if other else pd.DataFrame()
    columns: Columns = {
        "model": ("model", ""),
        "kind": ("call", ""),
        "calls": ("calls", ","),
        "refused": ("outside of what 06 measured", ","),
        "ratio": ("measured / said by 06", ".2f"),
    }
    return table(found, columns)


def loads(recording: Recording) -> Table:
    """How heavy each load is: as a share of what full slots leave time for, and how long the engine computed."""
    rows = recording.rows
    taken, load, pace = analysis.live(rows), analysis.typical(rows), analysis.paced(rows)[1].reset_index()
    ends = {model: analysis.capacity(load, known, SLOTS) for model, known in analysis.fitted(rows).items()}
    entries = []
    for (model, per_second), group in taken.groupby(["model", "per_second"]):
        entry: dict[str, Any] = {"model": model, "per_second": per_second, "share": per_second / ends[str(model)]}
        for rule, own in group.groupby("rule"):
            entry[str(rule)] = stats.median(own["busy"].tolist())
        own = pace[(pace["model"] == model) & (pace["per_second"] == per_second)]["pace"]
        entries.append(entry | {"pace": f"{own.min():.2f} to {own.max():.2f}" if len(own) else "n/a"})
    shown = [rule for rule in POLICIES if rule in set(taken["rule"])]
    columns: Columns = {
        "model": ("model", ""), "per_second": ("requests/s", "g"), "share": ("of the capacity", ".0%"),
        "pace": ("pace of the processes", ""), **{rule: (f"busy, {rule}", ".0%") for rule in shown},
    }  # fmt: skip
    note = (
        "Capacity: whole prompts and full slots. Pace: seconds of a process's calls over what the fit says of them. "
        "Busy: the share of the time in which the engine computed, measured. Few slots are full at light loads, so an "
        "engine is busy for longer than the share says."
    )
    return table(pd.DataFrame(entries).reindex(columns=list(columns)), columns, note)


def accuracy(recording: Recording) -> Table:
    """How often each way is within LIMIT, by quantity, over all models, loads and policies; not told the pace, and
    told."""
    found = _of(recording, SAID)
    by = analysis.accuracy(found).set_index(["metric", "way"])
    entries = []
    for metric, told in product([name for name in SAID if by.loc[name, "answered"].any()], (False, True)):
        entry: dict[str, Any] = {"what": _named(metric), "told": "told" if told else "unknown"}
        for own, way in (PACED if told else {way: way for way in analysis.WAYS}).items():
            entry[way] = _counted(by.loc[(metric, own)]) if (metric, own) in by.index else None
        entries.append(entry)
    columns: Columns = {
        "what": ("quantity", ""), "told": ("pace", ""), **{way: (HEADED[way], "") for way in analysis.WAYS},
    }  # fmt: skip
    note = (
        f"Within {LIMIT:.0%} of the engine, and the median miss of those that were answered. Pollaczek–Khinchine has "
        "no answer where a load is more than one server takes, which counts as a miss; nothing to say of gaps; and is "
        "not asked about two engines."
    )
    return table(pd.DataFrame(entries), columns, note)


SAID = ("ttft_mean", "ttft_p50", "ttft_p90", "ttft_p95", "ttft_p99", "itl_p50", "itl_p95", "itl_p99")


def _counted(entry: pd.Series) -> str | None:
    answered = f"{entry['within']} of {entry['asked_of']} ({entry['middle']:.0%})"
    return answered if entry["answered"] else None


def furthest(recording: Recording) -> Table:
    """The same of the highest percentiles, between known loads and beyond them, with the one that is furthest off."""
    found = analysis.accuracy(_of(recording, _judged(recording.rows)), ("metric", "asked", "way"))
    found = found[found["answered"] > 0].sort_values(["metric", "asked"], kind="stable")
    found = found.assign(
        what=[_named(name) for name in found["metric"]],
        by=found["way"].map(HEADED),
        counted=[_counted(entry) for _, entry in found.iterrows()],
    )
    columns: Columns = {
        "what": ("quantity", ""), "asked": ("known loads", ""), "by": ("predicted by", ""),
        "counted": (f"within {LIMIT:.0%} (median miss)", ""), "worst": ("furthest", spread),
    }  # fmt: skip
    note = (
        "Between: a load with a lighter and a heavier one known; beyond: the lightest or the heaviest. Furthest: "
        "predicted / measured, with an interval that holds for all of them at once, because it was chosen."
    )
    return table(found, columns, note)


WIDE = 100.0  # times: an interval beyond says nothing


def spread(ratio: Estimate) -> str:
    """A ratio with its interval, or in words that this is too wide to say anything."""
    return f"{ratio.value:.2f} [over {WIDE:g} times wide]" if ratio.high > WIDE * ratio.low else f"{ratio:.2f}"


def validation(recording: Recording) -> Table:
    """Predicted over measured, every quantity of every load and policy, by each way."""
    found = _of(recording, analysis.PREDICTED)
    keys = ["model", "per_second", "asked", "rule", "way"]
    wide = found.set_index([*keys, "metric"])["ratio"].unstack("metric").reset_index()
    shown = [name for name in analysis.PREDICTED if name in wide and wide[name].notna().any()]
    columns: Columns = {
        "model": ("model", ""), "per_second": ("requests/s", "g"), "asked": ("known loads", ""), "rule": ("policy", ""),
        "way": ("predicted by", ""), **{name: (_named(name), spread) for name in shown},
    }  # fmt: skip
    return table(wide.where(wide.notna(), None), columns)


def residuals(recording: Recording) -> Table:
    """The furthest that each way was off by policy, and whether it may be used."""
    found = analysis.residuals(recording.rows)
    wide = found.set_index(["model", "rule", "metric", "way"])[["worst", "verdict"]].unstack("way")
    wide.columns = [f"{name}_{way}" for name, way in wide.columns]
    wide = wide.reset_index()
    wide["what"] = [_named(name) for name in wide["metric"]]
    columns: Columns = {
        "model": ("model", ""), "rule": ("policy", ""), "what": ("quantity", ""),
        **{f"worst_{way}": (HEADED[way], spread) for way in (*analysis.WAYS, *tuple(PACED)[:1])},
        "verdict_simulation, paced": ("the simulation, pace told", ""),
    }  # fmt: skip
    note = (
        f"Predicted / measured at the load furthest off. Usable: within {LIMIT:.0%} with its whole interval, which "
        "knows that the furthest was chosen."
    )
    return table(wide, columns, note)


def refused(recording: Recording) -> Markdown:
    """What the simulation would not say, and why; and what it was not held against."""
    said = analysis.refused(recording.rows) or ["It refused none of the loads that were measured."]
    said += [
        f"{escaped(model)}, {rule} at {per_second:g} requests a second is not judged: other programs disturbed every "
        "process of it."
        for model, per_second, rule in analysis.unjudged(recording.rows)
    ]
    return Markdown("\n".join(f"- {why}" for why in said))


@cache
def _large(study: str) -> Recording | None:
    return recordings.read(study, "recorded", "shape")


def full_size(recording: Recording) -> Markdown:
    """What the same policies and the simulation of them came to on full-size models, where that is recorded."""
    large = _large(recording.study)
    if large is None:
        return Markdown("Not measured yet: `plamo-study measure 10-scheduling --scale shape --minutes 60`.")
    lines = "\n".join(f"- {line}" for line in [*_policies(large.rows), *_accuracy(large.rows)])
    return Markdown(f"{evidence.disturbed(large.rows)}{lines}\n\n({condition(large)})")


def full_size_residuals(recording: Recording) -> Table:
    """Every quantity of every load and policy on full-size models, simulated over measured."""
    large = _large(recording.study)
    return validation(large) if large else Table(pd.DataFrame())


def server(recording: Recording) -> Table | Markdown:
    """The same requests served by llama-server, and its rule predicted."""
    found = analysis.beside_a_server(recording.rows)
    if found.empty:
        how = f"`plamo-study server build`, then `plamo-study measure 10-scheduling --scale {recording.scale}`"
        return Markdown(f"No server was asked here: {how}.")
    entries = []
    for row in found.to_dict("records"):
        for way in analysis.WAYS:
            entry = {"model": row["model"], "per_second": row["per_second"], "by": HEADED[way], "http": row["http"]}
            entries.append(entry | {name: row[f"{name}_{way}"] for name in METRICS} | {"first": row["ttft_p50"]})
    columns: Columns = {
        "model": ("model", ""), "per_second": ("requests/s", "g"), "by": ("predicted by", ""),
        "first": ("first token, P50 (ms)", scaled(MS, ".1f")), "ttft_p50": ("predicted / measured", ".2f"),
        "ttft_p99": ("first token, P99", ".2f"), "itl_p50": ("gap, P50", ".2f"), "itl_p99": ("gap, P99", ".2f"),
        "http": ("a request for nothing (ms)", scaled(MS, ".2f")),
    }  # fmt: skip
    return table(pd.DataFrame(entries), columns)


def picks(recording: Recording) -> Table:
    """What each way would pick at each load, and whether the engine confirms it."""
    entries = []
    for _, group in analysis.picks(recording.rows).groupby(["model", "per_second", "for"]):
        first = group.iloc[0]
        entry = {"model": first["model"], "per_second": first["per_second"], "what": _named(first["for"])}
        entry |= {"best": first["best"], "chance": first["chance"]}
        for way, rule, right in zip(group["way"], group["rule"], group["confirmed"], strict=True):
            entry[way] = f"{rule}: {'yes' if right else 'no'}"
        entries.append(entry)
    columns: Columns = {
        "model": ("model", ""), "per_second": ("requests/s", "g"), "what": ("best for", ""),
        "best": ("engine says", ""), "chance": ("by lots", ".0%"),
        **{way: (f"{HEADED[way]} picks", "") for way in analysis.WAYS},
    }  # fmt: skip
    found = pd.DataFrame(entries).reindex(columns=list(columns))
    note = (
        "Yes: the same policy, or one that the engine does not show to be worse. By lots: of how many policies that is "
        "so. Theory says nothing of gaps, and nothing of the split engine."
    )
    return table(found.where(found.notna(), None), columns, note)


def alone(recording: Recording) -> Table:
    """One machine by itself around the most that it serves in time: the share in time, measured and predicted."""
    found = analysis.alone(recording.rows)
    columns: Columns = {
        "per_second": ("requests/s", "g"), "pace": ("pace", ".2f"), "measured": ("in time, measured", ".1%"),
        **{way: (HEADED[way], ".1%") for way in analysis.WAYS}, "paced": (HEADED["simulation, paced"], ".1%"),
    }  # fmt: skip
    first, gap = WITHIN[recording.scale]
    note = (
        f"{', '.join(sorted(set(found['model'])))}, {', '.join(sorted(set(found['rule'])))}; a line a process, "
        f"{MANY:,} requests each; in time: the first token within {first * MS:g} ms, a further one every {gap * MS:g} "
        "ms in the mean."
    )
    return table(found, columns, f"{note} {_sustained()}")


def _sustained() -> str:
    """What the search for fleets says that one machine alone sustains, by the rows it was simulated by."""
    found = recordings.read("10-fleet", "recorded", "mini")
    rows = recordings.read(CALLS, "recorded", "mini")
    one = analysis.needed(found.rows) if found and rows else pd.DataFrame()
    one = one[(one["n_machines"] == 1) & (one["pattern"] == "steady")] if len(one) else one
    if rows is None or one.empty:
        return ""
    model, machines = str(one["model"].iloc[0]), one["needed"].iloc[0].value
    most = analysis.capacity(analysis.typical(rows.rows), analysis.fitted(rows.rows)[model], SLOTS)
    return (
        f"The search below says that one machine alone serves {WELL:.0%} in time of up to {most / machines:.0f} "
        "requests a second of steady traffic."
    )


def strategies(recording: Recording) -> Table:
    """The source's five strategies on this machine, at the middle load: measured or simulated."""
    rows, entries = recording.rows, []
    names = {"shared": "Shared (no chunking)", "chunked 64": "Chunked (64)", "chunked 128": "Chunked (128)",
             SPLIT: "Disaggregated", "decode first 64": "Priority (decode first)",
             "one at a time": "One at a time (not among the source's)"}  # fmt: skip
    taken, known, halves = analysis.live(rows), analysis.fitted(rows), analysis.half(rows)
    load = analysis.typical(recording.rows)
    rates = analysis.loads(rows)
    at = rates[len(rates) // 2]
    for model, group in taken.groupby("model"):
        asked = _at(load, at, recording)
        for rule, name in names.items():
            own = group[(group["rule"] == rule) & (group["per_second"] == at)]
            entry: dict[str, Any] = {"model": model, "name": name, "how": "measured"}
            if len(own):
                entry |= {metric: stats.median(own[metric].tolist()) for metric in METRICS}
            else:
                found = _simulated(recording, str(model), rule, asked, known, halves)
                entry |= found or dict.fromkeys(METRICS)
                entry["how"] = "simulated" if found else "neither"
            entries.append(entry)
    time = significant(3, MS)
    columns: Columns = {
        "model": ("model", ""), "name": (f"strategy, {at:g} requests/s", ""), "how": ("how", ""),
        "ttft_p50": ("TTFT P50 (ms)", time), "ttft_p99": ("TTFT P99 (ms)", time), "itl_p50": ("ITL P50 (ms)", time),
        "itl_p99": ("ITL P99 (ms)", time), "throughput": ("tokens/s", significant(3)),
    }  # fmt: skip
    note = f"Of the {len(load)} requests of a run, and of their gaps."
    return table(pd.DataFrame(entries), columns, note)


def _at(load: Load, per_second: float, recording: Recording) -> Load:
    """The same requests as at any measured load, so many a second."""
    rows = analysis.traffic_of(usable(recording.rows))
    rows = rows[rows["per_second"] == per_second]
    return analysis.load_of(next(rows.itertuples())) if len(rows) else load


def _simulated(
    recording: Recording, model: str, rule: str, load: Load, known: dict[str, Any], halves: dict[str, Any]
) -> dict[str, float] | None:
    if rule != SPLIT:
        return analysis.simulated(load, rule, known[model], SLOTS)
    ships = _shipping(recording, model)
    return analysis.disaggregated(load, halves[model], SLOTS, ships) if ships and model in halves else None


def objective(recording: Recording, milliseconds: float) -> Table:
    """At each load the policy with the shortest first token among those that keep P99 of the gaps, simulated; and what
    the engine measured of it where it was asked."""
    rows, entries = recording.rows, []
    taken, load = analysis.live(rows), analysis.typical(recording.rows)
    for model, known in analysis.fitted(rows).items():
        end = analysis.capacity(load, known, SLOTS)
        rates = [rate for rate in analysis.loads(rows) if rate <= end]
        every = analysis.over_loads(load, DESIGNS, known, [SLOTS], rates)
        for rate, group in every.groupby("per_second"):
            keeping = group[group["itl_p99"] <= milliseconds / MS]
            entry: dict[str, Any] = {"model": model, "per_second": rate, "rule": "none keeps it"}
            if len(keeping):
                best = keeping.sort_values("ttft_p90").iloc[0]
                entry |= {name: best[name] for name in ("rule", "ttft_p90", "itl_p99")}
                own = taken[(taken["model"] == model) & (taken["per_second"] == rate) & (taken["rule"] == best["rule"])]
                if len(own):
                    measured = stats.median(own["itl_p99"].tolist())
                    entry |= {"live": measured, "kept": measured.below(milliseconds / MS)}
            entries.append(entry)
    names = ["model", "per_second", "rule", "ttft_p90", "itl_p99", "live", "kept"]
    time = significant(3, MS)
    columns: Columns = {
        "model": ("model", ""), "per_second": ("requests/s", ".3g"), "rule": ("policy", ""),
        "ttft_p90": ("first token, P90 (ms)", time), "itl_p99": ("gap, P99 (ms)", time),
        "live": ("gap, P99, measured (ms)", time), "kept": ("kept, measured", lambda said: str(said)),
    }  # fmt: skip
    note = (
        f"Objective: 99 of 100 gaps take at most {milliseconds:g} ms. Simulated with {analysis.FINE:,} requests a load."
    )
    return table(pd.DataFrame(entries, columns=names), columns, note)


def memory(recording: Recording, model: str) -> Table:
    """Less memory than all slots could fill, simulated: who waits, who is computed again, whose state is saved."""
    load, known = analysis.typical(recording.rows), analysis.fitted(recording.rows)[model]
    rate = float(f"{BUSY * analysis.capacity(load, known, SLOTS):.2g}")
    longest = max(p + o for p, o in zip(load.prompt, load.output, strict=True))
    rooms = [SLOTS * longest, 3 * longest, 2 * longest]
    found = analysis.over_memory(load, "chunked 64", known, SLOTS, rate, rooms)
    time = significant(3, MS)
    columns: Columns = {
        "room": ("memory (tokens)", ","), "full": ("when it is full", ""), "preempted": ("put aside", ","),
        "ttft_p50": ("first token, P50 (ms)", time), "ttft_p99": ("first token, P99 (ms)", time),
        "itl_p50": ("gap, P50 (ms)", time), "itl_p99": ("gap, P99 (ms)", time),
        "throughput": ("tokens/s", significant(3)),
    }  # fmt: skip
    note = f"{escaped(model)}, chunks of 64, {analysis.FINE:,} requests at {rate:g} a second, simulated."
    return table(found, columns, note)


def printed() -> Table:
    """The source's five rows against their own arithmetic."""
    told = published.strategies()
    part = published.part(told["table"]["part"])
    found = published.checked(told, part)
    found["cuts"] = [{True: "yes", False: "no"}.get(cut, "–") for cut in found["chunk_cuts"]]
    found["below"] = ["yes" if each else "no" for each in found["possible"]]
    columns: Columns = {
        "name": ("strategy, as printed", ""), "itl": ("ITL P50 (ms)", scaled(MS, ".0f")),
        "floor": ("weights read once (ms)", scaled(MS, ".1f")), "below": ("possible on one", ""),
        "answer": ("tokens an answer", ".0f"), "at_once": ("sequences at once", ".0f"),
        "parts": ("H100s that hold them", ".0f"), "prompt": ("longest prompts (tokens)", ".0f"),
        "cuts": ("chunk cuts such a prompt", ""),
    }  # fmt: skip
    needs = published.needed(told, part, 2048)
    note = f"{told['table']['where']}. With prompts of 2,048 tokens such a load takes {needs:.0f} H100s at their peak."
    return table(found, columns, note)


def own_trace(recording: Recording, path: str, model: str) -> Table | Markdown:
    """A trace of your own, served by every policy."""
    if not path:
        return Markdown(
            "No trace is given. A CSV with the columns `arrives` (s), `prompt` and `output` (tokens) is one."
        )
    load, known = traffic.read(Path(path)), analysis.fitted(recording.rows)[model]
    entries = [{"rule": rule} | analysis.simulated(load, rule, known, SLOTS) for rule in DESIGNS]
    time = significant(3, MS)
    columns: Columns = {
        "rule": ("policy", ""), "ttft_p50": ("first token, P50 (ms)", time),
        "ttft_p99": ("first token, P99 (ms)", time), "itl_p50": ("gap, P50 (ms)", time),
        "itl_p99": ("gap, P99 (ms)", time), "throughput": ("tokens/s", significant(3)),
    }  # fmt: skip
    return table(pd.DataFrame(entries), columns, f"{len(load):,} requests of {path} on {escaped(model)}, simulated.")


def needed(recording: Recording) -> pd.DataFrame:
    """Machines that a load needs by the size of the fleet, simulated and as recorded."""
    return analysis.needed(_fleets(recording).rows)


def _fleets(recording: Recording) -> Recording:
    """Those of this scale, or of small models where there are none."""
    scales = dict.fromkeys((recording.scale, "mini"))
    return next(filter(None, (recordings.read("10-fleet", "recorded", scale) for scale in scales)))


def fleets(recording: Recording) -> Table:
    """Every fleet: the machines it needs, and what its users get with so many."""
    recorded = _fleets(recording)
    found = analysis.needed(recorded.rows).sort_values(["pattern", "balance", "n_machines"])
    first, gap = WITHIN[recorded.scale]
    time = significant(3, MS)
    columns: Columns = {
        "pattern": ("traffic", ""), "balance": ("shared out", ""), "n_machines": ("machines' worth of load", ","),
        "needed": ("machines for each", ".2f"), "well": ("in time", ".1%"),
        "ttft_p99": ("first token, P99 (ms)", time), "itl_p99": ("gap, P99 (ms)", time),
    }  # fmt: skip
    note = (
        f"{found['model'].iloc[0]} at {recorded.scale}, chunks of 64, {DAYS} simulations a line, {DAY} requests a "
        f"machine and day; in time: the first token within {first * MS:g} ms, a further one every {gap * MS:g} ms in "
        "the mean."
    )
    return table(found, columns, note)
