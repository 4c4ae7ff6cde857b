"""What rows of loads say of calls, the step models fitted on these, and predictions: of each load from the others, and
of fleets.

A simulation, and a replay by two constants, tuned on the other loads as the simulation's clock is. Both serve the same
requests at the same times as the engine. Frames in, estimates out; a process is one number.

A fleet is days of requests shared out among simulated machines, which tell how many of them a load needs. Once requests
are shared out, machines are independent. So all requests are shared out among all machines, but only a random sample of
the machines is simulated and represents the others. Ten thousand machines took eleven times as long as one.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import product
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from llama_meter import stats
from llama_meter.cells import PARTS, SPLIT, WITHIN, Fleet
from llama_meter.errors import StudyError
from llama_meter.journal import LOCAL, REFERENCE, journal_path, stored
from llama_meter.rows import Measured
from plamo_study.read.frame import STOCK, marked, usable
from plamo_study.read.metrics import first_tokens, mean_gaps
from plamo_study.read.recording import read
from plamo_study.stats.estimates import NS, events
from plamo_study.studies.latency.loop import AWAKE_S, DRAWN, MORE, Load, Simulated, StepModel, policy, serve
from plamo_study.studies.latency.metrics import WAITS, waits
from plamo_study.studies.latency.plan import CALLS, WELL

ORIGIN = ["model", "n_threads", "per_second", "rule"]
LOADED = ["model", "per_second", "rule"]
CALL = ["decoding", "keys", "chunk", "before"]  # sequences, tokens they hold, a chunk's tokens, and those before it
LEAST = 3  # calls of a kind that a constant is fitted on
STRETCH = 16  # residuals kept in measured order, since slowdowns last for several calls
SLOPED = 3  # least number of places in a prompt to fit a slope
SLOWEST = ["ttft_p95", "itl_p95"]  # waits that a replay is tuned on
TUNED = tuple(product((1.0, 1.1, 1.2, 1.3, 1.4), (1.0, 0.85, 0.7, 0.55, 0.4)))  # times its constants: token, step
SIMULATED = 4000  # requests in all simulations of one load, whose median counts
SAMPLE = 40  # machine-days simulated of every load
MOST, HALVINGS = 64.0, 7  # most machines tried, relative to those that just keep up; steps of the search

# ------------------------------------------------------------------ what rows say


@dataclass(frozen=True)
class Observed:
    """What a study's rows say: usable rows of `traffic`; `calls`, one line each: ORIGIN, CALL, `seconds` and `idle`,
    the seconds without computation before it began (NaN: unknown); `moves` of sequences to other slots; and the
    `loads` (1/s) at which several policies were measured."""

    traffic: pd.DataFrame
    calls: pd.DataFrame
    moves: pd.DataFrame
    loads: tuple[float, ...]


def of_rows(rows: pd.DataFrame) -> Observed:
    """What these rows say of loads and of calls; only `comparable` rows."""
    used = usable(comparable(rows))
    used = used[(used["workload"] == "traffic") & (used["status"] == "ok")]
    served = used[used["rule"] != PARTS]
    policies = served.groupby("per_second")["rule"].nunique()
    moves = events(used, LOADED, lambda row: ({"seconds": s} for s in row.series.get("moves", ())), "seconds")
    return Observed(served, _calls(used[used["rule"] != SPLIT]), moves, tuple(sorted(policies[policies > 1].index)))


def comparable(frame: pd.DataFrame) -> pd.DataFrame:
    """The lines of one build, the engine as released where it ran. A model of several types goes by model and type."""
    builds = frame["build"][frame["build"] != ""]
    built = STOCK if STOCK in set(builds) else builds.mode().max() if len(builds) else ""
    frame = frame[frame["build"].isin([built, ""])]
    several = frame.groupby("model")["dtype"].transform("nunique") > 1
    return frame.assign(model=frame["model"].where(~several, frame["model"] + " " + frame["dtype"]))


def _calls(used: pd.DataFrame) -> pd.DataFrame:
    """Calls of undisturbed rows: a disturbance is not a property of a call. Where every process of a model was
    disturbed, all calls measured alone count, and none of traffic."""
    hit = marked(used)
    every = hit.groupby([used[name] for name in ("model", "n_threads", "rule")]).transform("all")
    parts = [_of_row(row) for row in used[~hit | (every & (used["rule"] == PARTS))].itertuples()]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=[*CALL, "seconds", "idle", *ORIGIN])


def _of_row(row: Any) -> pd.DataFrame:
    """The calls of a row. Idle seconds before a prompt begins: above 0 only where no request was active before it.

    Every policy begins prompts in order of arrival. The idle time before the first one is unknown: NaN.
    """
    made = pd.DataFrame({name: np.array(row.series[name], int) for name in CALL})
    made = made.assign(seconds=np.array(row.samples_ns[0]) / NS, idle=0.0)
    if row.requests:
        came, ends = zip(*sorted((each.arrived_ns, each.token_ns[-1]) for each in row.requests), strict=True)
        idle = np.maximum(came[1:] - np.maximum.accumulate(ends)[:-1], 0) / NS
        made.loc[(made["chunk"] > 0) & (made["before"] == 0), "idle"] = [nan, *idle]
    return made.assign(**{name: getattr(row, name) for name in ORIGIN})


def load_of(row: Any) -> Load:
    """The requests of a row of traffic."""
    arrives, prompt = [each.arrived_ns / NS for each in row.requests], [each.n_prompt for each in row.requests]
    return Load(arrives, prompt, [len(each.token_ns) for each in row.requests])


# ------------------------------------------------------------------ step models


def fitted(seen: Observed, without: float = 0.0) -> dict[str, StepModel]:
    """Step model by model: fitted on the calls measured alone, and on those of traffic at all loads but `without`.
    Models of which too few calls were measured have none."""
    calls, alone = seen.calls, seen.calls["rule"] == PARTS
    at_load = calls["per_second"].isin(set(seen.loads) - {without})
    used = pd.concat([calls[alone], calls[at_load & ~alone]])
    moves, fits = seen.moves[seen.moves["per_second"] != without], {}
    for name, of in used[used["n_threads"] == used["n_threads"].max()].groupby("model"):
        moving = moves[moves["model"] == name]["seconds"].tolist()
        with suppress(StudyError):
            fits[str(name)] = fit(of, moving)
    return fits


def fit(calls: pd.DataFrame, moving: Sequence[float] = ()) -> StepModel:
    """Fit a step model on calls, a line each: CALL, `seconds` and `idle`; `moving`: seconds of each move to a slot.

    Steps and chunks alone give constants and slopes; calls with both only give residuals, and calls after idle time
    only their extra seconds. StudyError where steps or chunks do not begin with one.
    """
    woken, calls = calls[calls["idle"] >= AWAKE_S], calls[calls["idle"] < AWAKE_S]
    steps, chunks = calls[calls["chunk"] == 0], calls[calls["decoding"] == 0]
    constants, per_key = _steps(steps)
    sizes, base, slope = _chunks(chunks)
    if 1 not in constants or 1 not in sizes:
        raise StudyError("a step model", "needs steps of one sequence and chunks of one token", MORE)
    every, lengths = (np.arange(1, max(each) + 1) for each in (constants, sizes))
    model = StepModel(
        step=tuple(np.interp(every, [*constants], [*constants.values()]).tolist()),
        per_key=per_key,
        held=int(np.ceil((steps["keys"] / steps["decoding"]).max())),
        base=tuple(np.interp(lengths, sizes, base).tolist()),
        slope=tuple(np.interp(lengths, sizes, slope).tolist()),
        before=int(chunks["before"].max()),
        moving=float(np.median(moving)) if len(moving) else 0.0,
        drawn={},
    )
    over = calls["seconds"].to_numpy() / _of_calls(model, calls)
    kinds = np.select([calls["chunk"] == 0, calls["decoding"] == 0], ["step", "chunk"], "both")
    by_kind = {name: over[~np.isnan(over) & (kinds == name)] for name in ("step", "chunk", "both")}
    every_kind = np.concatenate(list(by_kind.values()))
    rng, drawn = np.random.default_rng(0), {}
    for name, factors in by_kind.items():
        residuals = factors if len(factors) else every_kind
        starts = rng.integers(0, len(residuals), DRAWN // STRETCH)
        drawn[name] = residuals[(starts[:, None] + np.arange(STRETCH)) % len(residuals)].ravel().tolist()
    beyond = woken["seconds"].to_numpy() - _of_calls(model, woken)
    extra = np.maximum(beyond[~np.isnan(beyond)], 0.0)
    drawn["waking"] = np.random.default_rng(1).choice(extra, DRAWN).tolist() if len(extra) else []
    return replace(model, drawn=drawn)


def _of_calls(model: StepModel, calls: pd.DataFrame) -> np.ndarray:
    """Seconds of each call without its residual, (n,); NaN for a call outside the measured range."""
    seconds = np.full(len(calls), nan)
    for n, call in enumerate(calls[CALL].itertuples(index=False)):
        with suppress(StudyError):
            seconds[n] = model.seconds(*call)
    return seconds


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


# ------------------------------------------------------------------ predictions


def predictions(seen: Observed, measured: pd.DataFrame) -> pd.DataFrame:
    """Predictions of each load without its own data: a line per model, load, policy, metric of WAITS and `way`.

    `measured`: LOADED, `block`, `metric` and `value`, one process and metric a line. The engine that splits the work,
    two servers in series, is not predicted, nor a load with a call that was not measured. `predicted`; `ratio`,
    predicted over measured, None where one is missing.
    """
    taken = measured[measured["metric"].isin(WAITS) & (measured["rule"] != SPLIT)]
    taken = taken[taken["per_second"].isin(seen.loads)]
    taken = taken.pivot(index=[*LOADED, "block"], columns="metric", values="value").reindex(columns=WAITS)
    rows = {(row.model, row.per_second, row.rule): row for row in seen.traffic.drop_duplicates(LOADED).itertuples()}
    replays: dict[tuple[str, float], StepModel] = {}
    entries = []
    fits = {without: fitted(seen, without) for without in seen.loads}
    for key, group in taken.groupby(LOADED, sort=True):
        model, without, _ = key
        ways = {}
        with suppress(StudyError):  # a call that was not measured
            if clock := fits[without].get(model):
                ways["simulation"] = simulated(rows[key], clock, -(-SIMULATED // len(rows[key].requests)))
                if (model, without) not in replays:
                    others = taken.query("model == @model and per_second != @without")
                    replays[model, without] = tuned(clock, others, rows)
                ways["replay"] = simulated(rows[key], replays[model, without])
        for (way, times), name in product(ways.items(), WAITS):
            took = group[name].tolist()
            ratio = stats.ratio([times[name]] * len(took), took) if np.min([times[name], *took]) > 0 else None
            entry = {"metric": name, "way": way, "predicted": times[name], "ratio": ratio}
            entries.append(dict(zip(LOADED, key, strict=True)) | entry)
    return pd.DataFrame(entries, columns=[*LOADED, "metric", "way", "predicted", "ratio"])


def tuned(model: StepModel, known: pd.DataFrame, rows: dict[Any, Any]) -> StepModel:
    """The replay whose two constants meet the slowest waits of the known loads best, by the sum of log errors.

    `known`: WAITS of processes, by LOADED in its index; `rows`: a row of each, with its requests.
    """
    replays = [model.replay(token, step) for token, step in TUNED]
    off = np.zeros(len(replays))
    for key, group in known.groupby(level=LOADED):
        took = np.log(group[SLOWEST]).median()
        slowest = np.array([[simulated(rows[key], replay)[name] for name in SLOWEST] for replay in replays])
        with np.errstate(invalid="ignore", divide="ignore"):  # a wait of 0
            off += np.nansum(abs(np.log(slowest) - took.to_numpy()), axis=1)
    return replays[int(off.argmin())]


def simulated(row: Any, model: StepModel, many: int = 1) -> dict[str, float]:
    """WAITS of a row's load by its policy, the median of so many simulations."""
    load, rule, slots = load_of(row), policy(row.rule), int(row.n_seq)
    machines = (Simulated(model, seed) for seed in range(many))
    runs = [waits(np.array(load.arrives), serve(load, rule, machine, slots)) for machine in machines]
    return {name: float(np.median([run[name] for run in runs])) for name in WAITS}


# ------------------------------------------------------------------ fleets


def run(cell: Fleet, path: Path, stage: Callable[[str], None]) -> Measured:
    """Find the fewest machines for steady days by least work, once per repetition, each time with other requests.

    Series, one number per trial: `repetition`; `machines`, relative to those that just keep up; `well`, the share of
    the simulated requests that were served in time. Valid where every request has all of its tokens. StudyError where
    the journal that the cell names is missing.
    """
    stage("fit")
    seen = of_rows(measured_calls(cell))
    models = {name.removesuffix("*"): model for name, model in fitted(seen).items()}
    typical = load_of(next(seen.traffic[seen.traffic["per_second"].isin(seen.loads)].itertuples()))
    series: dict[str, list[float]] = {"repetition": [], "machines": [], "well": []}
    complete = True
    for repetition in range(cell.repetitions):
        stage(f"repetition {repetition}")
        days = Days(cell, models[cell.model], typical, repetition)
        for machines, well in fewest(days.well):
            for name, value in zip(series, (float(repetition), machines, well), strict=True):
                series[name].append(value)
        complete &= days.complete
    return Measured(checks={"complete": complete}, series=series, valid=complete)


def measured_calls(cell: Fleet) -> pd.DataFrame:
    """Rows of calls that a fleet's simulation is fitted on; StudyError if no journal here has the cell's SHA-256."""
    for source, place in (("live", LOCAL), ("recorded", REFERENCE)):
        lines = stored(journal_path(CALLS, cell.scale, place))
        if sha256(lines).hexdigest() == cell.rows_sha256 and (recording := read(CALLS, source, cell.scale)):
            return recording.rows
    why = "the rows that this fleet is simulated by are not here"
    raise StudyError(f"{CALLS} at {cell.scale}", why, f"{MORE} --scale {cell.scale}")


def fewest(well: Callable[[float], float]) -> Iterator[tuple[float, float]]:
    """Trials of a bisection (in the logarithm) for the fewest machines that serve WELL of all requests in time, and the
    share that each serves. A single trial if even MOST times the machines that keep up are not enough."""
    low, high = 0.0, float(np.log2(MOST))
    yield MOST, (share := well(MOST))
    for _ in range(HALVINGS if share >= WELL else 0):
        machines = float(2 ** ((low + high) / 2))
        yield machines, (share := well(machines))
        low, high = (low, (low + high) / 2) if share >= WELL else ((low + high) / 2, high)


class Days:
    """Requests of some days for a fleet, drawn once. More machines mean the same requests further apart.

    `complete`: whether, so far, those simulated got all of their tokens.
    """

    def __init__(self, cell: Fleet, model: StepModel, typical: Load, seed: int):
        self.cell, self.model, self.complete = cell, model, True
        n, many = cell.n_machines, -(-SAMPLE // cell.n_machines)
        rate = capacity(typical, model, cell.n_seq)
        self.days = [at_rate(typical, n * rate, n * cell.n_requests, seed * many + day) for day in range(many)]
        self.per_token = 1 / rate / float(np.mean(typical.prompt))  # s of work per prompt token
        draw = np.random.default_rng([cell.seed, seed])
        self.machines = [draw.choice(n, min(n, SAMPLE), replace=False).tolist() for _ in range(many)]

    def well(self, machines: float) -> float:
        """The share of requests served in time, with `machines` times as many as just keep up."""
        rule, well = policy(self.cell.rule), []
        for load, chosen in zip(self.days, self.machines, strict=True):
            apart = replace(load, arrives=(np.array(load.arrives) * machines).tolist())
            shares = least_work(apart, self.cell.n_machines, (np.array(load.prompt) * self.per_token).tolist())
            for seed, machine in enumerate(chosen):
                if shares[machine]:
                    share = apart.chosen(shares[machine])
                    tokens = serve(share, rule, Simulated(self.model, seed), self.cell.n_seq)
                    self.complete &= [*map(len, tokens)] == share.output
                    ttft = first_tokens(np.array(share.arrives), tokens)
                    well.append(WITHIN[self.cell.scale].met(ttft, mean_gaps(tokens)))
        return float(np.concatenate(well).mean())


def least_work(load: Load, n: int, work: list[float]) -> list[list[int]]:
    """Indices of each machine's requests if each goes to the one that finishes its queue first, by `work` (s).

    `work`: of each request alone. Where machines serve one request at a time and the work is exact, this is one
    queue before n servers.
    """
    free = [(0.0, machine) for machine in range(n)]
    shares: list[list[int]] = [[] for _ in range(n)]
    for number, arrives in enumerate(load.arrives):
        until, machine = free[0]
        shares[machine].append(number)
        heapq.heapreplace(free, (max(until, arrives) + work[number], machine))
    return shares


def at_rate(load: Load, per_second: float, n: int, seed: int) -> Load:
    """`n` requests with a load's lengths, drawn at random, at `per_second` requests a second (Poisson)."""
    rng = np.random.default_rng([n, round(per_second * 1000), seed])
    which = rng.integers(0, len(load.arrives), n)
    gaps = rng.exponential(1 / per_second, n)
    return replace(load.chosen(which.tolist()), arrives=(np.cumsum(gaps) - gaps[0]).tolist())


def capacity(load: Load, model: StepModel, slots: int) -> float:
    """Most requests a second of a machine with whole prompts and full slots: λ (t_p + (o - 1) t_b / b) < 1.

    `t_p`: mean seconds of a prompt and its token; `o`: mean tokens of an answer; `t_b`: seconds of a step of `b` slots.
    """
    read = float(np.mean([model.seconds(0, 0, n, 0) for n in load.prompt]))
    held = int(np.mean(load.prompt) + np.mean(load.output) / 2)
    step = model.seconds(slots, min(held, model.held) * slots, 0, 0)
    return 1 / (read + float(np.mean(load.output) - 1) * step / slots)


RUNS = {Fleet: run}  # not in the meter: fitting needs pandas, which no other cell should wait for
