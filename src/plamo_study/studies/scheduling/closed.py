"""Closed formulas of queueing theory, the baseline of the simulator. Rates per second, times in seconds."""

import numpy as np


def mg1(arrivals: float, mean: float, second_moment: float) -> float:
    """Mean wait before service at one server, any service time (Pollaczek and Khinchine): λ E[S²] / (2 (1 − ρ))."""
    return arrivals * second_moment / (2 * (1 - arrivals * mean))


def exponential_wait(seconds: np.ndarray, wait: float, busy: float) -> np.ndarray:
    """Share of requests that wait at most `seconds` at one server, if waits are exponential; shape of `seconds`.

    `wait`: mean over all requests; `busy`: share of the time that the server is busy, and so of requests that wait.
    Exact for exponential service times: 1 - ρ exp(-ρ t / W).
    """
    return np.where(seconds < 0, 0.0, 1 - busy * np.exp(-busy * np.maximum(seconds, 0) / wait))
