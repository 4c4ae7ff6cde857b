"""Measured values of this study's rows, as `measurements` lists them: phases of a shipment, waits of a load."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from llama_meter.cells import PHASES

NS = 1e9
Measured = tuple[str, str, float, np.ndarray]  # metric, unit, value, samples


def shipment(row: Mapping[str, Any]) -> Iterator[Measured]:
    """Seconds of each of PHASES ("step" as "first step"), the state's bytes, and the error of the answer."""
    times = np.array(row["samples_ns"], float) / NS
    for phase, samples in zip(PHASES, times.T, strict=True):
        yield "first step" if phase == "step" else phase, "s", float(np.median(samples)), samples
    checks = row["checks"]
    others = [("state", "B", row["n_bytes"]), ("identical", "", checks["identical"])]
    for name, unit, value in (*others, ("error", "", checks["second_path_error"])):
        yield name, unit, float(value), np.array([value], float)


def service(row: Mapping[str, Any]) -> Iterator[Measured]:
    """Metrics of a load, as `waits` defines them, each with its samples."""
    units = {"throughput": "tokens/s", "arrivals": "1/s"}
    for name, (value, samples) in waits(row["requests"]).items():
        yield name, units.get(name, "s"), value, samples


def waits(requests: list[Any]) -> dict[str, tuple[float, np.ndarray]]:
    """Value and samples of each metric of a load.

    ttft, itl
        Seconds to the first token, and between two of an answer: medians over requests and over gaps.
    itl_max
        Seconds: the longest of those gaps.
    throughput
        Tokens per second, from the first arrival to the last token.
    arrivals
        Requests per second as they really arrived; the mean of few random gaps differs from the nominal one.
    """
    first = np.array([each.token_ns[0] - each.arrived_ns for each in requests]) / NS
    gaps = np.array([after - before for each in requests for before, after in pairwise(each.token_ns)]) / NS
    tokens, last = sum(len(each.token_ns) for each in requests), max(each.token_ns[-1] for each in requests)
    arrived = (len(requests) - 1) / max(each.arrived_ns for each in requests) * NS
    return {
        "ttft": (median(first), first),
        "itl": (median(gaps), gaps),
        "itl_max": (float(gaps.max()), gaps),
        "throughput": (tokens / last * NS, np.array([tokens / last * NS])),
        "arrivals": (round(arrived, 1), np.array([arrived])),
    }
