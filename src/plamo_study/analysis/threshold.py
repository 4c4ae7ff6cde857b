"""The load at which a share of requests still met its objectives: a knee, estimated from all tried loads.

A bisection visits few loads with few requests each, and one unlucky load misleads it for good. So the knee is not the
last load that met the objectives: a falling logistic curve is fitted to all loads of all servers, and the knee is where
it passes the given level. Servers are the unit.
"""

from collections.abc import Sequence

import numpy as np

from plamo_study.analysis.stats import NAN, Estimate, t_quantile

COVERS = 0.91  # coverage of the interval, by the simulation of tests/test_serving.py
STEEPEST = 30.0  # scale of the penalty on the slope in log load, for loads that split cleanly into met and failed
ROUNDS = 60  # of Newton's method


def threshold(
    loads: Sequence[float], shares: Sequence[float], servers: Sequence[int], level: float, n: int
) -> Estimate:
    """The load at which the expected share of `n` requests falls to `level`.

    `loads`, `shares` and `servers` have one entry per tried load. The interval is Student's t of the logarithm
    over servers, by the jackknife (Tukey 1958): each server left out once. NaN bounds for fewer than three servers.
    """
    x, y, of = np.log(np.asarray(loads, float)), np.asarray(shares, float), np.asarray(servers)
    names = np.unique(of)
    whole = _at(x, y, level, n)
    if len(names) < 3:
        return Estimate(float(np.exp(whole)), NAN, NAN, len(names))
    without = np.array([_at(x[of != name], y[of != name], level, n) for name in names])
    pseudo = len(names) * whole - (len(names) - 1) * without
    reach = t_quantile(len(names) - 1) * pseudo.std(ddof=1) / len(names) ** 0.5
    low, high = (float(np.exp(np.clip(whole + side * reach, -700, 700))) for side in (-1, 1))
    return Estimate(float(np.exp(whole)), low, high, len(names), COVERS, tuple(pseudo.tolist()))


def _at(x: np.ndarray, y: np.ndarray, level: float, n: int) -> float:
    """The logarithm of the load at which a logistic curve through the shares passes the level."""
    centre = x.mean()
    design = np.column_stack([np.ones(len(x)), -(x - centre)])
    beta, ridge = np.array([0.0, 1.0]), np.diag([1e-6, n / STEEPEST**2])
    for _ in range(ROUNDS):
        fitted = 1 / (1 + np.exp(-np.clip(design @ beta, -30, 30)))
        slope = n * design.T @ (y - fitted) - ridge @ beta
        curvature = (design * (n * fitted * (1 - fitted))[:, None]).T @ design + ridge
        step = np.linalg.solve(curvature, slope)
        beta = beta + step * min(1.0, 5.0 / max(float(np.abs(step).max()), 1e-12))
        if np.abs(step).max() < 1e-9:
            break
    return float(centre + (beta[0] - np.log(level / (1 - level))) / max(beta[1], 1e-3))
