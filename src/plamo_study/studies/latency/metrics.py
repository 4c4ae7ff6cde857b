"""What rows of chapter 7 measured, by kind of cell; and the calls of a prompt that arrives. Loads neither engine nor
pandas."""

from collections.abc import Iterator, Mapping
from math import ceil
from typing import Any

import numpy as np

from llama_meter import stats
from llama_meter.cells import PARTS, PHASES, Arrival, Calls
from plamo_study.read.metrics import NS, Measured, Stamps, first_tokens, gaps, stamps, throughput

QUANTILES = {"p90": 0.9, "p95": 0.95, "p99": 0.99}
WAITS = [f"{what}_{q}" for what in ("ttft", "itl") for q in QUANTILES]

# ------------------------------------------------------------------ a prompt that arrives


def calls(cell: Arrival) -> Calls:
    """What is evaluated, call by call: (sequence, tokens). The prompt is the sequence after the decoding ones."""
    step, arriving = tuple((seq, 1) for seq in range(cell.n_seq)), cell.n_seq
    after = (*step, (arriving, 1))
    return (*[step] * before(cell), *_arrival(cell, step), *[after] * cell.n_gen)


def before(cell: Arrival) -> int:
    """Steps before the prompt arrives; 0 if no sequence decodes."""
    return cell.n_gen if cell.n_seq else 0


def _arrival(cell: Arrival, step: tuple[tuple[int, int], ...]) -> Iterator[tuple[tuple[int, int], ...]]:
    size = cell.n_arriving if cell.way == "whole" else cell.n_chunk
    for start in range(0, cell.n_arriving, size):
        piece = (cell.n_seq, min(size, cell.n_arriving - start))
        if cell.way == "together":
            yield (*step, piece)
        else:
            yield (piece,)
            if cell.way == "apart" and step:
                yield step


def arrival(row: Mapping[str, Any]) -> Iterator[Measured]:
    """A prompt that arrives while others are answered, from the times of its calls, all in seconds.

    "chunk": the calls with the largest piece of the prompt. If sequences decode, also "step before": the steps before
    the prompt arrives; "itl" and "itl_max" of those sequences from its arrival on; and the prompt's "ttft".
    """
    says: dict[str, Any] = {name: row[name] for name in ("n_gen", "n_seq", "n_arriving", "n_chunk", "way")}
    cell = Arrival(**says)
    made, times, start = calls(cell), np.array(row["samples_ns"][0]), before(cell)
    pieces = np.array([dict(call).get(cell.n_seq, 0) for call in made[: len(made) - cell.n_gen]])
    measured = {"chunk": times[: len(pieces)][pieces == pieces.max()]}
    if cell.n_seq:
        ends, last = np.cumsum(times[start:]), len(pieces) - start - 1 - (cell.way == "apart")
        stepped = np.flatnonzero([0 in dict(call) for call in made[start:]])
        waits = np.diff(ends[stepped[: np.searchsorted(stepped, last) + 1]], prepend=0)
        measured |= {"step before": times[:start], "itl": waits, "itl_max": waits[[waits.argmax()]]}
        measured["ttft"] = ends[[last]]
    for metric, samples in measured.items():
        yield metric, "s", float(np.median(samples / NS)), samples / NS


# ------------------------------------------------------------------ loads and shipments


def traffic(row: Mapping[str, Any]) -> Iterator[Measured]:
    """A load that a policy served: WAITS and "throughput"; "call" where calls were made alone."""
    if row["rule"] == PARTS:
        times = np.array(row["samples_ns"][0], float) / NS
        yield "call", "s", float(np.median(times)), times
    elif all(request.token_ns for request in row["requests"]):
        arrived, tokens = stamps(row["requests"])
        for metric, value in waits(arrived, tokens).items():
            if not np.isnan(value):
                yield metric, "s", value, np.array([value])
        rate = throughput(arrived, tokens)
        yield "throughput", "tokens/s", rate, np.array([rate])


def waits(arrived: np.ndarray, tokens: Stamps) -> dict[str, float]:
    """WAITS (s): QUANTILES of ttft, by request, and of the gaps of all answers; NaN of too few."""
    percentiles: dict[str, float] = {}
    for what, values in (("ttft", first_tokens(arrived, tokens)), ("itl", gaps(tokens))):
        ordered = np.sort(values)
        for name, q in QUANTILES.items():
            enough = len(ordered) >= stats.NEEDED[q]
            percentiles[f"{what}_{name}"] = float(ordered[ceil(q * len(ordered)) - 1]) if enough else stats.NAN
    return percentiles


def shipment(row: Mapping[str, Any]) -> Iterator[Measured]:
    """Seconds of each of PHASES, the state's bytes, whether the answer is the same, and its error."""
    times = np.array(row["samples_ns"], float) / NS
    for phase, samples in zip(PHASES, times.T, strict=True):
        yield phase, "s", float(np.median(samples)), samples
    checks = row["checks"]
    others = {"state": row["n_bytes"], "identical": checks["identical"], "error": checks["second_path_error"]}
    for name, value in others.items():
        yield name, "B" if name == "state" else "", float(value), np.array([value], float)


def service(row: Mapping[str, Any]) -> Iterator[Measured]:
    """Requests of one engine or of two: "ttft", "itl_max" and "throughput"."""
    arrived, tokens = stamps(row["requests"])
    first, waits = first_tokens(arrived, tokens), gaps(tokens)
    yield "ttft", "s", float(np.median(first)), first
    yield "itl_max", "s", float(waits.max()), waits
    rate = throughput(arrived, tokens)
    yield "throughput", "tokens/s", rate, np.array([rate])


QUANTITIES = {"arrival": arrival, "traffic": traffic, "shipment": shipment, "service": service}
