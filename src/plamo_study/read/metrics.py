"""What requests measured: one definition of each metric, and one function a kind of work for `measurements`.

Processes without requests, such as steps, prompts and ceilings, stand in `measurements._measured`.

ttft
    Time to first token: from when a request arrived, or was due, to its first token.
itl, itl_max (of a load on a server: largest)
    The gap between two tokens of one answer, and the longest gap. Of traffic, a gap counts once for each request
    that waited.
tpot
    The mean gap of one answer: (last token - first token) / (tokens - 1).
throughput
    Answered tokens a second, from the first arrival to the last token.
whole
    From a request's arrival to its last token.
well, met
    The share of requests whose ttft and tpot kept the limits of their load; goodput is their number a second.
busy
    The share of the time from the first arrival to the last token in which the engine computed.

A percentile of too few values (`stats.NEEDED`) is left out. A quantity that is undefined is left out too.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from math import nan
from types import SimpleNamespace
from typing import Any

import numpy as np

from llama_meter import stats
from llama_meter.cells import PARTS, PHASES, SERVER, SPLIT, Arrival
from llama_meter.rows import Request
from llama_meter.serve.objectives import OBJECTIVES, WITHIN
from llama_meter.simulate.loop import Load, quantile
from plamo_study.stats.estimates import NS
from plamo_study.studies.latency.chunk_calls import before, calls

MS = 1e3
QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
METRICS = [f"{what}_{q}" for what in ("ttft", "itl") for q in ("mean", *QUANTILES)] + ["throughput", "well"]
UNITS = {"throughput": "tokens/s", "arrivals": "1/s", "well": "", "busy": ""}  # of the others: s

Measured = tuple[str, str, float, np.ndarray]  # metric, unit, value, samples
Quantities = Callable[[Mapping[str, Any]], Iterator[Measured]]
Stamps = list[np.ndarray]  # when the tokens of each request came


# ------------------------------------------------------------------ primitives: in the unit of their stamps, ns or s


def stamps(requests: Sequence[Request], unit: float = 1) -> tuple[np.ndarray, Stamps]:
    """When requests arrived, (n,), and when their tokens came, an array a request; `unit` is in ns."""
    arrived, tokens = [request.arrived_ns for request in requests], [np.array(request.token_ns) for request in requests]
    return (np.array(arrived), tokens) if unit == 1 else (np.array(arrived) / unit, [times / unit for times in tokens])


def first_tokens(arrived: np.ndarray, tokens: Stamps) -> np.ndarray:
    """ttft of each request, (n,)."""
    return np.array([times[0] for times in tokens]) - arrived  # type: ignore[no-any-return] # an array


def gaps(tokens: Stamps) -> np.ndarray:
    """itl: the gaps of all answers, one answer after the other."""
    return np.concatenate([np.diff(times) for times in tokens]) if tokens else np.empty(0)


def mean_gaps(tokens: Stamps) -> np.ndarray:
    """tpot of each request, (n,); 0 for an answer of one token."""
    return np.array([(times[-1] - times[0]) / max(len(times) - 1, 1) for times in tokens])


def span(arrived: np.ndarray, tokens: Stamps) -> float:
    """The time from the first arrival to the last token."""
    return float(max(times[-1] for times in tokens) - arrived.min())


def throughput(arrived: np.ndarray, tokens: Stamps, second: float = 1) -> float:
    """Tokens a second, where a second has `second` units of the stamps; otherwise tokens a unit."""
    return sum(map(len, tokens)) / (span(arrived, tokens) / second)


def answered(requests: Sequence[Request]) -> list[Request]:
    """The requests that were answered in full."""
    return [request for request in requests if not request.failure and request.token_ns]


# ------------------------------------------------------------------ one function a kind of work


def shipment(row: Mapping[str, Any]) -> Iterator[Measured]:
    """Seconds of each of PHASES ("step" as "first step"), the state's bytes, and the error of the answer."""
    times = np.array(row["samples_ns"], float) / NS
    for phase, samples in zip(PHASES, times.T, strict=True):
        yield "first step" if phase == "step" else phase, "s", float(np.median(samples)), samples
    checks = row["checks"]
    others = [("state", "B", row["n_bytes"]), ("identical", "", checks["identical"])]
    for name, unit, value in (*others, ("error", "", checks["second_path_error"])):
        yield name, unit, float(value), np.array([value], float)


def relay(row: Mapping[str, Any]) -> Iterator[Measured]:
    """Requests that one file read and another wrote: seconds of "reading", "saving", "loading", "writing", and of all,
    "request"; to load the files before, "first load" and "second load"; bytes of a "state", and of what the process
    grew by with the "first file" and with the "second file"."""
    times = np.array(row["samples_ns"], float) / NS
    for name, samples in zip(("reading", "saving", "loading", "writing"), times.T, strict=True):
        yield name, "s", float(np.median(samples)), samples
    yield "request", "s", float(np.median(times.sum(axis=1))), times.sum(axis=1)
    grown = np.diff(row["series"]["resident"]).tolist()
    for name, value in zip(("state", "first file", "second file"), (row["n_bytes"], *grown), strict=False):
        yield name, "B", float(value), np.array([value], float)
    for name, value in zip(("first load", "second load"), row["series"].get("load", []), strict=False):
        yield name, "s", float(value), np.array([value], float)


def service(row: Mapping[str, Any]) -> Iterator[Measured]:
    """A load of chapter 7: "ttft", "itl", "itl_max", "throughput", and "arrivals" as they really came."""
    arrived, tokens = stamps(row["requests"])
    waits, rate = gaps(tokens) / NS, throughput(arrived, tokens) * NS
    came = (len(tokens) - 1) / arrived.max() * NS  # the mean of few random gaps differs from the nominal one
    first = first_tokens(arrived, tokens) / NS
    for name, value, samples in (
        ("ttft", np.median(first), first),
        ("itl", np.median(waits), waits),
        ("itl_max", waits.max(), waits),
        ("throughput", rate, np.array([rate])),
        ("arrivals", round(float(came), 1), np.array([came])),
    ):
        yield name, UNITS.get(name, "s"), float(value), samples


def replicas(row: Mapping[str, Any]) -> Iterator[Measured]:
    """Processes that share sequences out, all of them together.

    "throughput", prompts included, and "ttft": since the common start. "step": of every process, in which each of its
    sequences gets a token. "itl_max". "ready": from the first start until all had loaded. Bytes as in `memory`. Where a
    process is killed: "finished" (requests) and "got" (tokens of each of its sequences).
    """
    if row["killed"] >= 0:
        measured = {"finished": ("requests", [row["checks"]["finished"]])}
        measured["got"] = ("tokens", [len(row["samples_ns"][row["killed"]]) + 1])
    else:
        arrived, tokens = stamps([request for request in row["requests"] if request.token_ns])
        measured = {
            "throughput": ("tokens/s", [throughput(arrived, tokens) * NS]),
            "ttft": ("s", list(first_tokens(arrived, tokens) / NS)),
            "step": ("s", [ns / NS for ns in chain(*row["samples_ns"])]),
            "itl_max": ("s", [gaps(tokens).max() / NS]),
            "ready": ("s", [max(row["series"]["start"]) + row["load_ns"] / NS]),
        }
        measured |= {name: ("B", [value]) for name, value in memory(row).items() if value == value}
    for metric, (unit, samples) in measured.items():
        yield metric, unit, float(np.median(samples)), np.array(samples, float)


def memory(row: Mapping[str, Any]) -> dict[str, float]:
    """Bytes of all processes of a row of replicas; NaN for what the system does not tell.

    `grown`: their memory after loading, less that before; `mapped`: pages of the file in it; `own`: weights elsewhere,
    as the engine says. Private pages stand in where the system reports no shares (macOS), which hides the mapped ones.
    """
    series = row["series"]
    share = "pss" if "pss" in series else "private"
    after, before = (sum(series.get(name, [nan])) for name in (share, f"before {share}"))
    mapped = sum(series["mapped"]) if series["mapped"] else nan
    return {"grown": after - before, "mapped": mapped, "own": row["n_processes"] * row["checks"]["own_bytes"]}


def traffic(row: Mapping[str, Any]) -> Iterator[Measured]:
    """A load that a policy served: METRICS, and "busy" where calls are known; "call" where calls were made alone."""
    if row["rule"] == PARTS:
        times = np.array(row["samples_ns"][0], float) / NS
        yield "call", "s", float(np.median(times)), times
    elif all(request.token_ns for request in row["requests"]):
        for metric, value in _served(row).items():
            if not np.isnan(value):
                yield metric, UNITS.get(metric, "s"), value, np.array([value])


def _served(row: Mapping[str, Any]) -> dict[str, float]:
    arrived, tokens = stamps(row["requests"], NS)  # in seconds, as a simulation counts
    waits, load = gaps(tokens), load_of(SimpleNamespace(**row))
    metrics = figures(
        first_tokens(arrived, tokens),
        mean_gaps(tokens),
        (waits, np.ones(len(waits))),
        throughput(arrived, tokens),
        load,
    )
    has_calls = row["rule"] not in (SPLIT, SERVER)
    return metrics | ({"busy": sum(row["samples_ns"][0]) / NS / span(arrived, tokens)} if has_calls else {})


def serving(row: Mapping[str, Any]) -> Iterator[Measured]:
    """A load on a server, by the client's clock and ("own_") the server's, as `measurements` names its metrics."""
    requests, series = row["requests"], row["series"]
    came = answered(requests)
    arrived, tokens = stamps(came)
    several = [times for times in tokens if len(times) > 1]
    samples = {
        "ttft": first_tokens(arrived, tokens) / NS,
        "tpot": mean_gaps(several) / NS,
        "itl": gaps(tokens) / NS,
        "whole": (np.array([times[-1] for times in tokens]) - arrived) / NS,
    }
    n_gen, prompt_ms, answer_ms = (np.array(series[name], float) for name in ("n_gen", "prompt_ms", "answer_ms"))
    further = answer_ms / np.maximum(n_gen - 1, 1) / MS
    counted = (prompt_ms > 0) & (n_gen > 1)
    samples |= {"own_ttft": prompt_ms[counted] / MS, "own_tpot": further[counted]}
    ended = np.argsort([request.ended_ns for request in requests])[: len(requests) - row["n_clients"]]
    full = [further[n] for n in ended if row["n_clients"] and n_gen[n] > 1]
    samples["own_tpot_full"] = full if row["server"] == "llama-server" else []
    for name, values in samples.items():
        if len(values):
            yield name, "s", float(np.median(values)), np.array(values)
    if not row["n_clients"]:
        yield from _open_loop(row)
    switches, waits = series.get("switches", [0.0])[0], samples["itl"]
    others = {
        "largest": ("s", float(waits.max()) if len(waits) else nan),
        "throughput": ("tokens/s", throughput(arrived, tokens, NS) if came else nan),
        "late": ("", series["lag"][1] / float(np.median(waits)) if len(waits) else nan),
        "wakes": ("", switches / n_gen.sum() if switches and n_gen.sum() else nan),
        "binds": ("", float(row["checks"]["client_binds"])),
    }
    for name, (unit, value) in others.items():
        if value == value:
            yield name, unit, value, np.array([value])


def _open_loop(row: Mapping[str, Any]) -> Iterator[Measured]:
    """The rates (1/s) of a load that came at random times, the share of each that met the objectives, and goodput."""
    requests, objectives, series = row["requests"], OBJECTIVES[row["scale"]], row["series"]
    n_met = sum(objectives.met_by(request.arrived_ns, request.token_ns, request.failure) for request in requests)
    rates = np.array(series.get("rates", [row["per_second"]]))
    shares = np.array(series.get("met", [n_met / len(requests)]))
    yield "rate", "1/s", float(np.median(rates)), rates
    yield "met", "", float(np.median(shares)), shares
    if came := [request for request in requests if request.token_ns]:
        goodput = n_met / (span(*stamps(came)) / NS)
        yield "goodput", "1/s", goodput, np.array([goodput])


def arrival(row: Mapping[str, Any]) -> Iterator[Measured]:
    """A prompt that arrives while others are answered, from the times of its calls, all in seconds.

    "chunk": the calls with the largest piece of the prompt. If sequences decode, also "step before": the steps before
    the prompt arrives; "itl" and "itl_max" of those sequences from its arrival on; and the prompt's "ttft".
    """
    cell = cell_of(row)
    times = [ns / NS for ns in row["samples_ns"][0]]
    measured = {"chunk": _full_calls(cell, times)}
    if cell.n_seq:
        waits, ttft = _during(cell, times)
        measured |= {"step before": times[: cell.n_gen], "itl": waits, "itl_max": [max(waits)]}
        measured["ttft"] = [ttft]
    for metric, samples in measured.items():
        yield metric, "s", float(np.median(samples)), np.array(samples)


def cell_of(row: Mapping[str, Any]) -> Arrival:
    """The cell of a row, as far as its calls depend on it."""
    return Arrival(
        depth=int(row["depth"]),
        n_gen=int(row["n_gen"]),
        n_seq=int(row["n_seq"]),
        n_arriving=int(row["n_arriving"]),
        n_chunk=int(row["n_chunk"]),
        way=row["way"],
    )


def _full_calls(cell: Arrival, times: list[float]) -> list[float]:
    """Seconds of the calls with the largest piece of the prompt."""
    pieces = [dict(call).get(cell.n_seq, 0) for call in calls(cell)]
    pieces[len(pieces) - cell.n_gen :] = [0] * cell.n_gen  # the tokens after the prompt
    largest = max(pieces)
    return [seconds for seconds, piece in zip(times, pieces, strict=True) if piece == largest]


def _during(cell: Arrival, times: list[float]) -> tuple[list[float], float]:
    """Gaps between tokens of those decoding, from the prompt's arrival on, and its time to the first token."""
    waits, waited, ttft, left = [], 0.0, 0.0, cell.n_arriving
    for call, seconds in list(zip(calls(cell), times, strict=True))[before(cell) :]:
        waited += seconds
        if left > 0:
            ttft += seconds
            left -= dict(call).get(cell.n_seq, 0)
        if 0 in dict(call):
            waits.append(waited)
            waited = 0.0
            if left <= 0:
                break
    return waits, ttft


# ------------------------------------------------------------------ traffic, measured or simulated


def load_of(row: Any) -> Load:
    """The requests of a row of traffic."""
    requests = [
        (request.arrived_ns / NS, min(request.n_prompt, row.n_prompt), len(request.token_ns))
        for request in row.requests
    ]
    arrives, prompt, output = map(list, zip(*requests, strict=True))
    return Load(arrives, prompt, output, WITHIN[row.scale])


def figures(
    ttft: np.ndarray, tpot: np.ndarray, waits: tuple[np.ndarray, np.ndarray], rate: float, load: Load
) -> dict[str, float]:
    """METRICS of one load: `ttft`, `tpot` (s) by request; `waits`: gaps (s) and how many waited; `rate` (tokens/s)."""
    well = float(load.within.met(ttft, tpot).mean())
    return percentiles(ttft, waits) | {"throughput": rate, "well": well}


def percentiles(ttft: np.ndarray, waits: tuple[np.ndarray, np.ndarray]) -> dict[str, float]:
    """Means and QUANTILES (s) of ttft, by request, and of gaps, each counted for those who waited; NaN of too few."""
    metrics: dict[str, float] = {}
    for what, values, weights in (("ttft", ttft, np.ones(len(ttft))), ("itl", *waits)):
        many = float(weights.sum())
        metrics[f"{what}_mean"] = float(values @ weights / many) if many else stats.NAN
        for (name, q), value in zip(
            QUANTILES.items(), quantile(values, weights, list(QUANTILES.values())), strict=True
        ):
            metrics[f"{what}_{name}"] = float(value) if many >= stats.NEEDED[q] else stats.NAN
    return metrics


# By kind of work: what a row holds in place of its times in one piece, and what it holds besides.
INSTEAD: Mapping[str, Quantities] = {
    "traffic": traffic,
    "shipment": shipment,
    "service": service,
    "replicas": replicas,
    "relay": relay,
}
BESIDE: Mapping[str, Quantities] = {"arrival": arrival, "serving": serving}
