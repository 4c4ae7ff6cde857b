"""Requests drawn from the distributions of real traffic.

Lengths have the shape of the conversations that Microsoft published of its service in 2023 (AzurePublicDataset, CC-BY;
Patel et al., Splitwise): lognormal, the logarithms' standard deviations as fitted there, prompt and answer
independent. They are scaled to what a small machine can serve, and cut at the longest that the cell allows.
"""

from dataclasses import replace

import numpy as np

from llama_meter.cells import Traffic
from llama_meter.simulate.loop import Load

PROMPT_SPREAD, OUTPUT_SPREAD = 0.99, 0.86  # standard deviations of the logarithms
MEDIAN = 4  # longest over median length
GRAIN = 16  # prompt lengths are multiples of it, so that every chunk size is common


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
