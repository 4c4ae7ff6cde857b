"""Whether a continuation ended in a loop, by a published rule. It knows token ids only.

Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration": a phrase of at least two tokens counts as a
repetition when it stands at least three times in a row at the end of what was generated.
"""

import numpy as np

LEAST_TOKENS, LEAST_TIMES = 2, 3


def loop_period(tokens: np.ndarray) -> int:
    """Length of the shortest phrase that stands `LEAST_TIMES` times in a row at the end of (n,) ids; 0: no loop."""
    for period in range(LEAST_TOKENS, len(tokens) // LEAST_TIMES + 1):
        end = tokens[-LEAST_TIMES * period :]
        if np.array_equal(end[period:], end[:-period]):
            return period
    return 0
