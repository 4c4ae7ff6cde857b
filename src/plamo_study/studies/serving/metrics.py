"""What a load on a server measured. Loads neither engine nor pandas."""

from collections.abc import Iterator, Mapping
from math import nan
from typing import Any

import numpy as np

from llama_meter.cells import OBJECTIVES
from plamo_study.read.metrics import Measured, answered, first_tokens, gaps, mean_gaps, stamps, throughput

MS = 1e3


def serving(row: Mapping[str, Any]) -> Iterator[Measured]:
    """A load on a server, by the client's clock and ("own_") the server's, as `measurements` names its metrics."""
    requests, series = row["requests"], row["series"]
    came = answered(requests)
    arrived, tokens = stamps(came)
    several = [times for times in tokens if len(times) > 1]
    samples = {
        "ttft": first_tokens(arrived, tokens),
        "tpot": mean_gaps(several),
        "itl": gaps(tokens),
        "whole": np.array([times[-1] for times in tokens]) - arrived,
    }
    n_gen, prompt_ms, answer_ms = (np.array(series[name], float) for name in ("n_gen", "prompt_ms", "answer_ms"))
    further = answer_ms / np.maximum(n_gen - 1, 1) / MS
    counted = (prompt_ms > 0) & (n_gen > 1)
    samples |= {"own_ttft": prompt_ms[counted] / MS, "own_tpot": further[counted]}
    for name, values in samples.items():
        if len(values):
            yield name, "s", float(np.median(values)), np.array(values)
    if not row["n_clients"]:
        yield from _open_loop(row)
    waits = samples["itl"]
    others = {
        "largest": ("s", float(waits.max()) if len(waits) else nan),
        "throughput": ("tokens/s", throughput(arrived, tokens) if came else nan),
        "late": ("", series["lag"][1] / float(np.median(waits)) if len(waits) else nan),
        "binds": ("", float(row["checks"]["client_binds"])),
    }
    for name, (unit, value) in others.items():
        if value == value:
            yield name, unit, value, np.array([value])


def _open_loop(row: Mapping[str, Any]) -> Iterator[Measured]:
    """The rates (1/s) of a load that came at random times, and the share of each that met the objectives."""
    requests, objectives, series = row["requests"], OBJECTIVES[row["scale"]], row["series"]
    n_met = sum(objectives.met_by(request.arrived_ns, request.token_ns, request.failure) for request in requests)
    rates = np.array(series.get("rates", [row["per_second"]]))
    shares = np.array(series.get("met", [n_met / len(requests)]))
    yield "rate", "1/s", float(np.median(rates)), rates
    yield "met", "", float(np.median(shares)), shares


QUANTITIES = {"serving": serving}
