"""Waits of requests, measured or simulated: one definition of each quantity.

`ttft`: from a request's arrival to its first token. `itl`: a gap between two tokens of an answer, counted once for
each request that waited. `throughput`: answered tokens a second, from the first arrival to the last token. `well`:
share of requests served within the load's limits. `busy`: share of that time in which the engine computed.
"""

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from llama_meter import stats
from llama_meter.cells import PARTS, SERVER, SPLIT
from llama_meter.serve.objectives import WITHIN
from llama_meter.simulate.loop import Load, quantile
from plamo_study.stats.estimates import NS

QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
METRICS = [f"{what}_{q}" for what in ("ttft", "itl") for q in ("mean", *QUANTILES)] + ["throughput", "well"]
UNITS = {"throughput": "tokens/s", "well": "", "busy": ""}


def measured(row: Mapping[str, Any]) -> Iterator[tuple[str, str, float, np.ndarray]]:
    """(metric, unit, value, samples) of a row of traffic: METRICS and "busy", or "call" where calls were made alone.

    A percentile of too few requests or gaps (`stats.NEEDED`) is left out, "busy" where calls are not known.
    """
    if row["label"] == PARTS:
        calls = np.array(row["samples_ns"][0], float) / NS
        yield "call", "s", float(np.median(calls)), calls
    elif all(each.token_ns for each in row["requests"]):
        for metric, value in _of(row).items():
            if not np.isnan(value):
                yield metric, UNITS.get(metric, "s"), value, np.array([value])


def _of(row: Mapping[str, Any]) -> dict[str, float]:
    load, came = load_of(SimpleNamespace(**row)), [np.array(each.token_ns) / NS for each in row["requests"]]
    gaps = np.concatenate([np.diff(each) for each in came])
    ttft = np.array([each[0] for each in came]) - np.array(load.arrives)
    tpot = np.array([(each[-1] - each[0]) / max(len(each) - 1, 1) for each in came])
    rate = sum(load.output), max(each[-1] for each in came) - load.arrives[0]
    known = row["label"] not in (SPLIT, SERVER)
    busy = {"busy": sum(row["samples_ns"][0]) / NS / rate[1]} if known else {}
    return figures(ttft, tpot, (gaps, np.ones(len(gaps))), rate, load) | busy


def load_of(row: Any) -> Load:
    """The requests of a row."""
    told = [(each.arrived_ns / NS, min(each.n_prompt, row.n_prompt), len(each.token_ns)) for each in row.requests]
    arrives, prompt, output = map(list, zip(*told, strict=True))
    return Load(arrives, prompt, output, WITHIN[row.scale])


def figures(
    ttft: np.ndarray, tpot: np.ndarray, gaps: tuple[np.ndarray, np.ndarray], rate: tuple[int, float], load: Load
) -> dict[str, float]:
    """METRICS of one load.

    `ttft`, `tpot`: seconds to the first token and mean seconds per further one, by request; `gaps`: seconds and
    how many waited; `rate`: tokens written, and seconds from the first arrival to the last token.
    """
    well = float(in_time(ttft, tpot, load.within).mean())
    return waits(ttft, gaps) | {"throughput": rate[0] / rate[1], "well": well}


def waits(ttft: np.ndarray, gaps: tuple[np.ndarray, np.ndarray]) -> dict[str, float]:
    """Means and QUANTILES (s) of first tokens, by request, and of gaps, each counted for those who waited.

    A percentile with too few values (`stats.NEEDED`) is NaN.
    """
    found: dict[str, float] = {}
    for what, values, weights in (("ttft", ttft, np.ones(len(ttft))), ("itl", *gaps)):
        many = float(weights.sum())
        found[f"{what}_mean"] = float(values @ weights / many) if many else stats.NAN
        for (name, q), value in zip(
            QUANTILES.items(), quantile(values, weights, list(QUANTILES.values())), strict=True
        ):
            found[f"{what}_{name}"] = float(value) if many >= stats.NEEDED[q] else stats.NAN
    return found


def in_time(ttft: np.ndarray, tpot: np.ndarray, within: tuple[float, float]) -> np.ndarray:
    """Whether each request was served within the load's limits, (n,) bool."""
    return (ttft <= within[0]) & (tpot <= within[1])  # type: ignore[no-any-return] # an array
