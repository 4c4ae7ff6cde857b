"""Whether a continuation ended in a loop, by a published rule on token ids.

Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration": a phrase of at least two tokens counts as a
repetition if it occurs at least three times in a row at the end of the generated tokens.
"""

import numpy as np

LEAST_TOKENS, LEAST_TIMES = 2, 3


def loop_period(tokens: np.ndarray) -> int:
    """Tokens in the shortest phrase repeated `LEAST_TIMES` times at the end of (n,) token ids; 0: no loop."""
    for period in range(LEAST_TOKENS, len(tokens) // LEAST_TIMES + 1):
        end = tokens[-LEAST_TIMES * period :]
        if np.array_equal(end[period:], end[:-period]):
            return period
    return 0
