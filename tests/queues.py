"""Closed formulas of queueing theory, which the simulator is held against. Rates per second, times in seconds.

Each gives the mean wait of a request before its service, in a steady state.
"""

from math import factorial

import numpy as np
from scipy.optimize import brentq

from plamo_study.studies.scheduling.simulations import mg1


def mm1(arrivals: float, mean: float) -> float:
    """One server, exponential service times: ρ S / (1 − ρ)."""
    return mg1(arrivals, mean, 2 * mean**2)


def md1(arrivals: float, mean: float) -> float:
    """One server, constant service times: half the wait of `mm1`."""
    return mg1(arrivals, mean, mean**2)


def mmc(arrivals: float, mean: float, servers: int) -> float:
    """One queue before several servers, exponential service times (Erlang's C)."""
    offered = arrivals * mean
    full = offered**servers / factorial(servers) / (1 - offered / servers)
    waits = full / (sum(offered**n / factorial(n) for n in range(servers)) + full)
    return waits * mean / (servers - offered)


def em1(arrivals: float, mean: float, phases: int) -> float:
    """One server that gets every `phases`-th of Poisson arrivals, as round robin gives them: σ S / (1 − σ), where
    σ = (λ / (λ + (1 − σ) / S)) ** phases; `arrivals` are those before they are shared out."""
    root = brentq(lambda s: s - (arrivals / (arrivals + (1 - s) / mean)) ** phases, 0.0, 1 - 1e-9)
    return float(root * mean / (1 - root))


def standard_error(values: np.ndarray, batches: int = 50) -> float:
    """Standard error of the mean of correlated values, from the means of `batches` stretches (batch means)."""
    means = [part.mean() for part in np.array_split(values, batches)]
    return float(np.std(means, ddof=1) / batches**0.5)
