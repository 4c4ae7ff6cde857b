"""Predictions of live loads: every load from the others, by each of WAYS.

Simulation, and a replay by two constants, tuned on the other loads as the simulation's clock is. Frames in, estimates
out. A process is one number. Both serve the same requests at the same times as the engine.
"""

from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from llama_meter import stats
from llama_meter.cells import SERVER, SPLIT
from llama_meter.errors import StudyError
from llama_meter.simulate.steps import StepModel
from plamo_study.read.metrics import METRICS, load_of
from plamo_study.studies.latency import observed
from plamo_study.studies.latency.observed import Observed
from plamo_study.studies.latency.simulations import simulated

LOADED = ["model", "per_second", "rule"]
WAYS = ("simulation", "replay")
SLOWEST = ["ttft_p95", "itl_p95"]  # waits that a replay is tuned on
TUNED = tuple(product((1.0, 1.1, 1.2, 1.3, 1.4), (1.0, 0.85, 0.7, 0.55, 0.4)))  # times its constants: token, step


def predictions(seen: Observed, measured: pd.DataFrame) -> pd.DataFrame:
    """Predictions of each load without its own data: one row per model, load, policy, metric of METRICS and `way`.

    `measured`: LOADED, `block`, `metric` and `value`, one process and metric a line. The replay does not cover the
    split engine, which is two servers in series. `predicted`; `measured`, over processes; `ratio`, predicted over
    measured, None if either is missing, as where a call was not measured.
    """
    entries = []
    used = seen.traffic.drop_duplicates(["model", "per_second", "rule"])
    first = {(row.model, row.per_second, row.rule): row for row in used.itertuples()}
    taken = measured[measured["metric"].isin(METRICS) & ~measured["rule"].isin((SERVER, SPLIT))]
    taken = taken.pivot(index=[*LOADED, "block"], columns="metric", values="value").reindex(columns=METRICS)
    taken = taken.reset_index().set_index("block")
    taken = taken[taken["per_second"].isin(seen.loads)]
    fits = {without: observed.fitted(seen, without) for without in seen.loads}
    for key, group in taken.groupby(LOADED, sort=True):
        model, per_second, rule = key
        row, fit = first[key], fits[per_second].get(model)
        load, slots = load_of(row), int(row.n_seq)
        ways: dict[str, Any] = {}
        with suppress(StudyError):  # a call that was not measured
            if fit:
                ways["simulation"] = simulated(load, rule, fit, slots)
                known = taken[(taken["model"] == model) & (taken["per_second"] != per_second)]
                ways["replay"] = simulated(load, rule, tuned(fit.untuned(), known, first), slots, 1)
        by_block = group[METRICS].to_dict()
        middle = {name: stats.median(list(by_block[name].values())) for name in METRICS}
        for way, name in product(WAYS, METRICS):
            entry = dict(zip(LOADED, key, strict=True)) | {"metric": name, "way": way}
            said = _held_against(ways.get(way, {}).get(name), by_block[name])
            entries.append(entry | {"measured": middle[name]} | said)
    columns = [*LOADED, "metric", "way", "predicted", "measured", "ratio"]
    return pd.DataFrame(entries, columns=columns)


def tuned(replay: StepModel, known: pd.DataFrame, rows: dict[Any, Any]) -> StepModel:
    """The replay whose two constants meet the slowest waits of the known loads best, by the sum of log errors.

    `known`: METRICS of processes by `model`, `per_second` and `rule`; `rows`: a row of each, with its requests.
    """
    models = [
        replace(replay, base=tuple(token * value for value in replay.base), step=tuple(step * v for v in replay.step))
        for token, step in TUNED
    ]
    off = np.zeros(len(models))
    for key, group in known.groupby(LOADED):
        row, took = rows[key], np.log(group[SLOWEST]).median()
        said = [simulated(load_of(row), row.rule, model, int(row.n_seq), 1) for model in models]
        with np.errstate(invalid="ignore", divide="ignore"):  # a wait of 0
            off += [np.nansum(abs(np.log([waits[name] for name in SLOWEST]) - took)) for waits in said]
    return models[int(off.argmin())]


def _held_against(said: float | None, taken: dict[int, float]) -> dict[str, Any]:
    """A prediction beside the measured values by block: `predicted` and `ratio`, None where one is 0 or NaN."""
    if said is None:
        return {"predicted": stats.NAN, "ratio": None}
    positive = taken and said > 0 and all(value > 0 for value in taken.values())  # `well` may be 0; a percentile NaN
    ratio = stats.ratio([said] * len(taken), list(taken.values())) if positive else None
    return {"predicted": said, "ratio": ratio}
