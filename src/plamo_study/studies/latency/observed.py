"""Calls of recorded rows on one machine, and the step models that are fitted on them.

What a frame of rows says of them is taken once, by `of_rows`, and passed on to what is fitted.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import nan
from typing import Any

import numpy as np
import pandas as pd

from llama_meter.cells import PARTS, SERVER, SPLIT
from llama_meter.errors import StudyError
from llama_meter.simulate.loop import Load
from llama_meter.simulate.steps import AWAKE_S, Calls, StepModel, fit
from plamo_study.read.metrics import load_of
from plamo_study.read.usable import STOCK, marked, usable
from plamo_study.stats.estimates import NS, events

COLUMNS = ["decoding", "keys", "chunk", "before", "seconds"]
MISSING = "plamo-study measure 07-scheduling"
ORIGIN = ["model", "n_threads", "per_second", "block", "rule"]
FLASH = ("auto", "on")


@dataclass(frozen=True)
class Observed:
    """What a study's rows say: usable rows of `traffic`, the `calls`, `moves` and `loads` that step models are fitted
    on, and the `command` that measures more."""

    traffic: pd.DataFrame
    calls: pd.DataFrame
    moves: pd.DataFrame
    loads: tuple[float, ...]
    command: str


def of_rows(rows: pd.DataFrame) -> Observed:
    """What these rows say of loads and of calls; only `comparable` rows."""
    rows = comparable(rows)
    served = traffic_of(usable(rows))
    return Observed(served, calls(rows), moves(rows), loads(served), command(rows))


def comparable(frame: pd.DataFrame) -> pd.DataFrame:
    """The lines of one build, the engine as released where it ran. A model of several types goes by model and type."""
    builds = frame["build"][frame["build"] != ""]
    built = STOCK if STOCK in set(builds) else builds.mode().max() if len(builds) else ""
    frame = frame[frame["build"].isin([built, ""])]
    several = frame.groupby("model")["dtype"].transform("nunique") > 1
    return frame.assign(model=frame["model"].where(~several, frame["model"] + " " + frame["dtype"]))


def calls(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per call with the usual cache and attention: ORIGIN, COLUMNS and `idle`, the seconds
    without any computation before it began (NaN: unknown).

    Disturbed rows are left out: a disturbance is not a property of a call.
    """
    used = _steady(usable(rows))
    used = used[used["flash_attn"].isin(FLASH) & ~used["kv_unified"]]
    used = used[~used["rule"].isin((SERVER, SPLIT))]  # whose calls are not recorded
    used = used[(used["type_k"] == "f16") & (used["type_v"] == "f16") & (used["status"] == "ok")]
    used = used[used["workload"] == "traffic"]
    recorded: list[Call] = []
    idle: list[float] = []
    origin: list[int] = []  # of each call, the place of its row
    for number, row in enumerate(used.itertuples()):
        of_row = list(_calls(row))
        recorded += of_row
        idle += _idle(row, of_row)
        origin += [number] * len(of_row)
    whence = used.iloc[origin]
    made = pd.DataFrame(recorded, columns=COLUMNS).assign(idle=idle, **{name: whence[name].array for name in ORIGIN})
    return made[made["chunk"] <= whence["n_ubatch"].to_numpy()].reset_index(drop=True)


def _steady(used: pd.DataFrame) -> pd.DataFrame:
    """Undisturbed rows. Where every process was disturbed, all calls measured alone are kept, and no traffic is."""
    hit = marked(used)
    every = hit.groupby([used[name] for name in ("model", "n_threads", "workload", "rule")]).transform("all")
    return used[~hit | (every & (used["rule"] == PARTS))]


def moves(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per move of a sequence to another slot: `model`, `per_second` of the load, and `seconds`."""
    used = usable(rows)
    return events(
        used[used["workload"] == "traffic"],
        ("model", "per_second"),
        lambda row: ({"seconds": seconds} for seconds in row.series.get("moves", ())),
        "seconds",
    )


Call = tuple[int, int, int, int, float]


def _calls(row: Any) -> Iterator[Call]:
    whole = (map(int, row.series[name]) for name in COLUMNS[:-1])
    return zip(*whole, (ns / NS for ns in row.samples_ns[0]), strict=True)  # type: ignore[arg-type, return-value]


def _idle(row: Any, calls: list[Call]) -> list[float]:
    """Idle seconds before each call: above 0 only where a prompt begins and no request was active before it.

    Every policy begins prompts in order of arrival. The idle time before the first one is unknown: NaN.
    """
    if not row.requests:
        return [0.0] * len(calls)
    came = sorted((request.arrived_ns, request.token_ns[-1]) for request in row.requests)
    ended = np.maximum.accumulate([0, *(end for _, end in came)])
    idle = [max(arrived - before, 0) / NS for (arrived, _), before in zip(came, ended[:-1], strict=True)]
    gaps = iter([nan, *idle[1:]])
    return [next(gaps) if chunk and not before else 0.0 for _, _, chunk, before, _ in calls]


def of_model(timed: pd.DataFrame, model: str, n_threads: int, moved: pd.DataFrame, missing: str) -> StepModel:
    """Step model of the calls of one model and number of threads. StudyError if steps or chunks are missing.

    `moved`: `moves`, of any models. `missing`: the command that measures more.
    """
    took = moved[moved["model"] == model]["seconds"].tolist()
    own = timed[(timed["model"] == model) & (timed["n_threads"] == n_threads)]
    name, awake, asleep = f"{model} on {n_threads} threads", own["idle"] < AWAKE_S, own["idle"] >= AWAKE_S
    return fit(name, table(own[awake]), took, missing, table(own[asleep]))


def table(timed: pd.DataFrame) -> Calls:
    """Calls in the form that `fit` takes."""
    whole = {name: timed[name].to_numpy(dtype=np.int64) for name in COLUMNS[:-1]}
    return Calls(**whole, seconds=timed["seconds"].to_numpy(dtype=float))


def parts_of(timed: pd.DataFrame) -> pd.DataFrame:
    """The calls that were measured alone, in cells made for it."""
    return timed[timed["rule"] == PARTS]


# ------------------------------------------------------------------ fits


def traffic_of(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of loads that a policy served."""
    served = ~rows["rule"].isin((PARTS, SERVER))
    return rows[(rows["workload"] == "traffic") & served & (rows["status"] == "ok")]


def loads(served: pd.DataFrame) -> tuple[float, ...]:
    """Loads (1/s) at which several policies were measured; each is predicted from the others."""
    policies_at = served.groupby("per_second")["rule"].nunique()
    return tuple(sorted(policies_at[policies_at > 1].index))


def typical(seen: Observed) -> Load:
    """Requests of the loads at which policies are compared."""
    compared_at = seen.traffic[seen.traffic["per_second"].isin(seen.loads)]
    return load_of(next((compared_at if len(compared_at) else seen.traffic).itertuples()))


def fitted(seen: Observed, without: float = 0.0) -> dict[str, StepModel]:
    """Step model by model: fitted on the calls measured alone, and on those of traffic at all loads but `without`."""
    timed = seen.calls
    at_load = timed["per_second"].isin(set(seen.loads) - {without})
    own = pd.concat([parts_of(timed), timed[at_load & (timed["rule"] != PARTS)]])
    return _models(own, seen, without)


def _models(own: pd.DataFrame, seen: Observed, without: float = 0.0) -> dict[str, StepModel]:
    """A step model for each model of which these calls are enough, with the moves at all loads but `without`."""
    threads = int(own["n_threads"].max()) if len(own) else 0
    moved = seen.moves[seen.moves["per_second"] != without]
    fits = {}
    for name in sorted(own["model"].unique()):
        with suppress(StudyError):
            fits[name] = of_model(own, name, threads, moved, seen.command)
    return fits


def command(rows: pd.DataFrame) -> str:
    """The command that measures more of these rows."""
    return f"{MISSING} --scale {rows['scale'].iloc[0]}"
