"""What an arrival evaluates, call by call, and the waiting times that follow from the times of its calls."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from llama_meter.cells import Arrival, Calls

NS = 1e9


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


def lengths(cell: Arrival) -> dict[int, int]:
    """Tokens of every sequence at the end, those it starts from included."""
    found = {seq: cell.depth for seq in range(cell.n_seq)} | {cell.n_seq: 0}
    for call in calls(cell):
        for seq, n in call:
            found[seq] += n
    return found


def arrival(row: Mapping[str, Any]) -> Iterator[tuple[str, str, float, np.ndarray]]:
    """(metric, unit, median, samples) of an arrival, all in seconds.

    "chunk": the calls with the largest piece of the prompt. If sequences decode, also "step before": the steps before
    the prompt arrives; "itl": the waits for a token from its arrival on; "itl_max": the longest; and "ttft", of the
    prompt, since it arrived.
    """
    cell = cell_of(row)
    times = [ns / NS for ns in row["samples_ns"][0]]
    found = {"chunk": full_calls(cell, times)}
    if cell.n_seq:
        gaps, ttft = during(cell, times)
        found |= {"step before": times[: cell.n_gen], "itl": gaps, "itl_max": [max(gaps)]}
        found["ttft"] = [ttft]
    for metric, samples in found.items():
        yield metric, "s", float(np.median(samples)), np.array(samples)


def cell_of(row: Mapping[str, Any]) -> Arrival:
    """The cell of a row, as far as its calls depend on it."""
    return Arrival(
        depth=int(row["n_prompt"]), n_gen=int(row["n_gen"]), n_seq=int(row["n_seq"]),
        n_arriving=int(row["n_arriving"]), n_chunk=int(row["n_chunk"]), way=row["way"],
    )  # fmt: skip


def full_calls(cell: Arrival, times: list[float]) -> list[float]:
    """Seconds of the calls with the largest piece of the prompt."""
    pieces = [dict(call).get(cell.n_seq, 0) for call in calls(cell)]
    pieces[len(pieces) - cell.n_gen :] = [0] * cell.n_gen  # the tokens after the prompt
    largest = max(pieces)
    return [seconds for seconds, piece in zip(times, pieces, strict=True) if piece == largest]


def during(cell: Arrival, times: list[float]) -> tuple[list[float], float]:
    """Gaps between tokens of those decoding, from the prompt's arrival on, and its time to the first token."""
    gaps, waited, ttft, left = [], 0.0, 0.0, cell.n_arriving
    for call, seconds in list(zip(calls(cell), times, strict=True))[before(cell) :]:
        waited += seconds
        if left > 0:
            ttft += seconds
            left -= dict(call).get(cell.n_seq, 0)
        if 0 in dict(call):
            gaps.append(waited)
            waited = 0.0
            if left <= 0:
                break
    return gaps, ttft
