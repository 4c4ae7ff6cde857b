"""Arrival times of independent requests."""

import numpy as np


def since_first(gaps: np.ndarray) -> np.ndarray:
    """Arrival time of each request since the first, (n,); `gaps`: the gap before each, (n,), in the same unit."""
    return np.asarray(np.cumsum(gaps) - gaps[0])
