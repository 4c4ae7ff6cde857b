"""What rows of loads say of calls, the step models fitted on these, and predictions of each load from the others.

A simulation, and a replay by two constants, tuned on the other loads as the simulation's clock is. Both serve the same
requests at the same times as the engine. Frames in, estimates out; a process is one number.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from math import nan
from typing import Any

import numpy as np
import pandas as pd

from llama_meter import stats
from llama_meter.cells import PARTS, SPLIT, WITHIN
from llama_meter.errors import StudyError
from plamo_study.read.frame import STOCK, marked, usable
from plamo_study.stats.estimates import NS, events
from plamo_study.studies.latency.loop import Load, serve
from plamo_study.studies.latency.metrics import WAITS, percentiles
from plamo_study.studies.latency.steps import AWAKE_S, CALL, Simulated, StepModel, fit

ORIGIN = ["model", "n_threads", "per_second", "rule"]
LOADED = ["model", "per_second", "rule"]
SLOWEST = ["ttft_p95", "itl_p95"]  # waits that a replay is tuned on
TUNED = tuple(product((1.0, 1.1, 1.2, 1.3, 1.4), (1.0, 0.85, 0.7, 0.55, 0.4)))  # times its constants: token, step
ASKED = 4000  # requests in all simulations of one load, whose median counts

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
    made = pd.DataFrame({name: np.array(row.series[name], int) for name in CALL})
    made = made.assign(seconds=np.array(row.samples_ns[0]) / NS, idle=0.0)
    if row.requests:
        made.loc[(made["chunk"] > 0) & (made["before"] == 0), "idle"] = _idle(row)
    return made.assign(**{name: getattr(row, name) for name in ORIGIN})


def _idle(row: Any) -> list[float]:
    """Idle seconds before each prompt begins: above 0 only where no request was active before it.

    Every policy begins prompts in order of arrival. The idle time before the first one is unknown: NaN.
    """
    came = sorted((request.arrived_ns, request.token_ns[-1]) for request in row.requests)
    ended = np.maximum.accumulate([end for _, end in came])
    return [nan, *(max(arrived - end, 0) / NS for (arrived, _), end in zip(came[1:], ended, strict=False))]


def load_of(row: Any) -> Load:
    """The requests of a row of traffic."""
    arrives, prompt = [each.arrived_ns / NS for each in row.requests], [each.n_prompt for each in row.requests]
    return Load(arrives, prompt, [len(each.token_ns) for each in row.requests], WITHIN[row.scale])


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
            fits[str(name)] = fit(of[of["idle"] < AWAKE_S], moving, of[of["idle"] >= AWAKE_S])
    return fits


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
            if own := fits[without].get(model):
                ways["simulation"] = simulated(rows[key], own, -(-ASKED // len(rows[key].requests)))
                if (model, without) not in replays:
                    others = taken.query("model == @model and per_second != @without")
                    replays[model, without] = tuned(own.untuned(), others, rows)
                ways["replay"] = simulated(rows[key], replays[model, without])
        for (way, waits), name in product(ways.items(), WAITS):
            took = group[name].tolist()
            ratio = stats.ratio([waits[name]] * len(took), took) if np.min([waits[name], *took]) > 0 else None
            entry = {"metric": name, "way": way, "predicted": waits[name], "ratio": ratio}
            entries.append(dict(zip(LOADED, key, strict=True)) | entry)
    return pd.DataFrame(entries, columns=[*LOADED, "metric", "way", "predicted", "ratio"])


def tuned(replay: StepModel, known: pd.DataFrame, rows: dict[Any, Any]) -> StepModel:
    """The replay whose two constants meet the slowest waits of the known loads best, by the sum of log errors.

    `known`: WAITS of processes, by LOADED in its index; `rows`: a row of each, with its requests.
    """
    models = [
        replace(replay, base=tuple(token * s for s in replay.base), step=tuple(step * s for s in replay.step))
        for token, step in TUNED
    ]
    off = np.zeros(len(models))
    for key, group in known.groupby(level=LOADED):
        took = np.log(group[SLOWEST]).median()
        waits = np.array([[simulated(rows[key], model)[name] for name in SLOWEST] for model in models])
        with np.errstate(invalid="ignore", divide="ignore"):  # a wait of 0
            off += np.nansum(abs(np.log(waits) - took.to_numpy()), axis=1)
    return models[int(off.argmin())]


def simulated(row: Any, model: StepModel, many: int = 1) -> dict[str, float]:
    """WAITS of a row's load by its policy, the median of so many simulations."""
    load, runs = load_of(row), []
    for seed in range(many):
        served = serve(load, row.rule, Simulated(model, seed), int(row.n_seq))
        runs.append(percentiles(served.ttft, served.gaps, served.weights))
    return {name: float(np.median([run[name] for run in runs])) for name in WAITS}
