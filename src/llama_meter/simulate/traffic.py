"""Requests: drawn from the distributions of real traffic, or read from a trace of your own.

Lengths have the shape of the conversations that Microsoft published of its service in 2023 (AzurePublicDataset, CC-BY;
Patel et al., Splitwise): lognormal, the logarithms' standard deviations as fitted there, prompt and answer
independent. They are scaled to what a small machine can serve, and cut at the longest that the cell allows.
"""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from llama_meter.cells import Traffic
from llama_meter.disk import check_file
from llama_meter.errors import StudyError
from llama_meter.simulate.loop import Load

PROMPT_SPREAD, OUTPUT_SPREAD = 0.99, 0.86  # standard deviations of the logarithms
MEDIAN = 4  # longest over median length
GRAIN = 16  # prompt lengths are multiples of it, so that every chunk size is common
COLUMNS = ("arrives", "prompt", "output")
MOST = 10_000_000  # requests of a trace


def drawn(cell: Traffic) -> Load:
    """Requests of a cell, the same for every policy and load except for the time between arrivals."""
    lengths = np.random.default_rng([cell.seed, 0])
    n = cell.n_requests
    prompt = _lengths(lengths, n, cell.n_prompt, PROMPT_SPREAD, GRAIN)
    output = _lengths(lengths, n, cell.n_gen, OUTPUT_SPREAD, 1)
    gaps = np.random.default_rng([cell.seed, 1]).exponential(1 / cell.per_second, n)
    return Load((np.cumsum(gaps) - gaps[0]).tolist(), prompt, np.maximum(output, 2).tolist())


def _lengths(rng: np.random.Generator, n: int, most: int, spread: float, grain: int) -> list[int]:
    free = most / MEDIAN * np.exp(spread * rng.standard_normal(n))
    return (np.clip(np.round(free / grain), 1, most // grain).astype(int) * grain).tolist()


def shaped(load: Load, shape: str) -> Load:
    """The same requests over the same time, with a rate that varies by the shape around the same mean.

    steady: as they are. diurnal: a day over the whole load, from a fifth of the mean rate to nine fifths. bursty: five
    times, half of the time at eight fifths of the mean rate and half at two fifths.
    """
    grid = np.linspace(0, 1, 2001)
    rate = {
        "steady": np.ones_like(grid),
        "diurnal": 1 + 0.8 * np.sin(2 * np.pi * grid),
        "bursty": np.where(grid * 5 % 1 < 0.5, 1.6, 0.4),
    }[shape]
    passed = np.concatenate([[0.0], np.cumsum((rate[1:] + rate[:-1]) / 2)])
    span = load.arrives[-1]
    return replace(load, arrives=(np.interp(np.array(load.arrives) / span, passed / passed[-1], grid) * span).tolist())


def read(path: Path, most: int = MOST) -> Load:
    """A trace of your own: a CSV with the columns `arrives` (s, ascending), `prompt` and `output` (tokens).

    Raises
    ------
    StudyError
        The file is missing, empty or longer than `most` requests, or a line is invalid; the error names it.

    """
    check_file(path)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return _requests(path, csv.reader(file), most)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise StudyError(str(path), f"cannot be read ({error})", f"give a CSV with {','.join(COLUMNS)}") from error


def _requests(path: Path, lines: Any, most: int) -> Load:
    head = [name.strip() for name in next(lines, [])]
    if missing := [name for name in COLUMNS if name not in head]:
        raise StudyError(f"{path}, line 1", f"has no column {', '.join(missing)}", f"name {','.join(COLUMNS)} there")
    where = [head.index(name) for name in COLUMNS]
    load = Load([], [], [])
    before = 0.0
    for fields in filter(None, lines):
        if len(load) == most:
            raise StudyError(f"{path}, line {lines.line_num}", f"is beyond {most:,} requests", "shorten the trace")
        arrives, prompt, output = _line(path, lines.line_num, fields, where)
        if arrives < before:
            why = f"arrives at {arrives:g}, before the line above it ({before:g})"
            raise StudyError(f"{path}, line {lines.line_num}", why, "sort the trace by arrival")
        before = arrives
        load.arrives.append(arrives)
        load.prompt.append(prompt)
        load.output.append(output)
    if not load.arrives:
        raise StudyError(str(path), "holds no requests", "put one on each line below the names")
    return load


def _line(path: Path, number: int, fields: list[str], where: list[int]) -> tuple[float, int, int]:
    what = f"{path}, line {number}"
    values: list[float] = []
    for name, at in zip(COLUMNS, where, strict=True):
        text = fields[at].strip() if at < len(fields) else ""
        try:
            value = float(text) if name == "arrives" else int(text)
        except ValueError:
            kind = "a number of seconds" if name == "arrives" else "a whole number of tokens"
            raise StudyError(what, f"{name} is {text!r}, not {kind}", "mend the line") from None
        least = 0 if name == "arrives" else 1
        if not least <= value < float("inf"):
            raise StudyError(what, f"{name} is {text}, and must be {least} or more", "mend the line")
        values.append(value)
    return values[0], int(values[1]), int(values[2])
