"""When requests of people who know nothing of one another arrive."""

import numpy as np


def since_first(gaps: np.ndarray) -> np.ndarray:
    """When each request arrives, (n,), counted from the first; `gaps`: before each, (n,), in the same unit."""
    return np.asarray(np.cumsum(gaps) - gaps[0])
