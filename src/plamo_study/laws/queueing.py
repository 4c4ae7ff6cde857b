"""Predictions of live loads: every load from the others, by each of WAYS.

Simulation, and a replay by two constants, tuned on the other loads as the simulation's clock is. Frames in, estimates
out. A process is one number. Both serve the same requests at the same times as the engine.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from llama_meter import stats
from llama_meter.cells import SERVER, SPLIT
from llama_meter.errors import StudyError
from llama_meter.simulate.steps import StepModel
from plamo_study.laws import observed
from plamo_study.laws.observed import Observed
from plamo_study.laws.simulations import Seconds, disaggregated, simulated
from plamo_study.read.metrics import METRICS, load_of

LOADED = ["model", "per_second", "rule"]
WAYS = ("simulation", "replay")
SLOWEST = ["ttft_p95", "itl_p95"]  # waits that a replay is tuned on
TUNED = tuple(product((1.0, 1.1, 1.2, 1.3, 1.4), (1.0, 0.85, 0.7, 0.55, 0.4)))  # times its constants: token, step


def predictions(seen: Observed, measured: pd.DataFrame) -> pd.DataFrame:
    """Predictions of each load without its own data: one row per model, load, policy, metric of METRICS and `way`.

    `measured`: LOADED, `block`, `metric` and `value`, one process and metric a line. The replay does not cover the
    split engine, which is two servers in series. `among`: whether policies are compared at the load. `asked`: whether
    the load is "between" known ones or "beyond" them. `predicted`; `measured`, over processes; `ratio`, predicted over
    measured, None if either is missing. `refused`: why the simulation gave no prediction.
    """
    entries = []
    used = seen.traffic.drop_duplicates(["model", "per_second", "rule"])
    first = {(row.model, row.per_second, row.rule): row for row in used.itertuples()}
    taken = measured[measured["metric"].isin(METRICS) & (measured["rule"] != SERVER)]
    taken = taken.pivot(index=[*LOADED, "block"], columns="metric", values="value").reindex(columns=METRICS)
    taken = taken.reset_index().set_index("block")
    at = set(seen.loads)
    unknown = {per_second: per_second if per_second in at else 0.0 for per_second in sorted(set(taken["per_second"]))}
    fits = {without: observed.fitted(seen, without) for without in set(unknown.values())}
    for key, group in taken.groupby(LOADED, sort=True):
        model, per_second, rule = key
        row, without = first[key], unknown[per_second]
        load, slots, fit = load_of(row), int(row.n_seq), fits[without].get(model)
        others = taken[(taken["model"] == model) & (taken["rule"] == rule)]
        others = others[others["per_second"].isin(at - {per_second})]
        line = dict(zip(LOADED, key, strict=True)) | {"among": per_second in at}
        line |= {"asked": _asked(per_second, set(others["per_second"]))}
        ways: dict[str, Any] = {}
        try:
            ways["simulation"] = (
                _split(seen, row, without) if rule == SPLIT else simulated(load, rule, _fitted(fit), slots)
            )
            if rule != SPLIT:
                known = taken[(taken["model"] == model) & taken["per_second"].isin(at - {per_second})]
                ways["replay"] = simulated(load, rule, tuned(_fitted(fit).untuned(), known, first), slots, 1)
            why = ""
        except StudyError as error:
            why = f"{error.what}: {error.why}"
        by_block = group[METRICS].to_dict()
        middle = {name: stats.median(list(by_block[name].values())) for name in METRICS}
        for way, name in product(WAYS, METRICS):
            entry = line | {"metric": name, "way": way, "refused": why if way == "simulation" else ""}
            said = _held_against(ways.get(way, {}).get(name), by_block[name])
            entries.append(entry | {"measured": middle[name]} | said)
    columns = [*LOADED, "among", "asked", "metric", "way", "refused", "predicted", "measured", "ratio"]
    return pd.DataFrame(entries, columns=columns)


def _fitted(fit: StepModel | None) -> StepModel:
    if fit is None:
        raise StudyError("a step model", "the calls that traffic is made of were not measured alone", observed.MISSING)
    return fit


def tuned(replay: StepModel, known: pd.DataFrame, rows: dict[Any, Any]) -> StepModel:
    """The replay whose two constants meet the slowest waits of the known loads best, by the sum of log errors.

    `known`: METRICS of processes by `model`, `per_second` and `rule`; `rows`: a row of each, with its requests.
    """
    models = [
        replace(replay, base=tuple(token * value for value in replay.base), step=tuple(step * v for v in replay.step))
        for token, step in TUNED
    ]
    off = np.zeros(len(models))
    for key, group in known[known["rule"] != SPLIT].groupby(LOADED):
        row, took = rows[key], np.log(group[SLOWEST]).median()
        said = [simulated(load_of(row), row.rule, model, int(row.n_seq), 1) for model in models]
        with np.errstate(invalid="ignore", divide="ignore"):  # a wait of 0
            off += [np.nansum(abs(np.log([waits[name] for name in SLOWEST]) - took)) for waits in said]
    return models[int(off.argmin())]


def _asked(per_second: float, loads: set[float]) -> str:
    """Whether a load is "between" known ones or "beyond" them, or "none known"."""
    if not loads:
        return "none known"
    return "between" if min(loads) < per_second < max(loads) else "beyond"


def _split(seen: Observed, row: Any, without: float) -> dict[str, float]:
    """The simulation of a load that two machines share, each with half of the threads. StudyError if it refuses."""
    moves, halves = shipping(seen, row.model, without), observed.half(seen)
    if row.model not in halves:
        raise StudyError(row.model, "was not measured with half of the threads", seen.command)
    return disaggregated(load_of(row), halves[row.model], int(row.n_seq), moves)


def shipping(seen: Observed, model: str, without: float = 0.0) -> tuple[Seconds, Seconds]:
    """Seconds to move a state, by its tokens: to save, check and send it, which occupies the sender; to load it, which
    occupies the receiver. Medians of the shipments at all loads except `without`, interpolated linearly between the
    shipped lengths, and constant beyond them.

    Raises StudyError if nothing was shipped at those loads.
    """
    used = seen.traffic[(seen.traffic["rule"] == SPLIT) & (seen.traffic["model"] == model)]
    used = used[used["per_second"] != without]
    moves = [
        (request.n_prompt, *took)
        for row in used.itertuples()
        for request, *took in zip(row.requests, row.series["shipped"], row.series["loaded"], strict=True)
    ]
    if not moves:
        raise StudyError(model, "no state was shipped at a load that the simulation knows", seen.command)
    by_tokens = pd.DataFrame(moves, columns=["tokens", "shipped", "loaded"]).groupby("tokens").median()
    return _between(by_tokens["shipped"]), _between(by_tokens["loaded"])


def _between(by_tokens: pd.Series) -> Seconds:
    sizes, seconds = by_tokens.index.to_numpy(), by_tokens.to_numpy()
    return lambda tokens: float(np.interp(tokens, sizes, seconds))


def _held_against(said: float | None, taken: dict[int, float]) -> dict[str, Any]:
    """A prediction beside the measured values by block: `predicted` and `ratio`, None where one is 0 or NaN."""
    if said is None:
        return {"predicted": stats.NAN, "ratio": None}
    positive = taken and said > 0 and all(value > 0 for value in taken.values())  # `well` may be 0; a percentile NaN
    ratio = stats.ratio([said] * len(taken), list(taken.values())) if positive else None
    return {"predicted": said, "ratio": ratio}
