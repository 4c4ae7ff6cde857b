"""Is an answer that is given together with others the one that its prompt gets alone?

Both are greedy, so they should match. But batches of different shapes round differently, and between two nearly equally
likely tokens rounding decides: such a difference proves nothing. The lead of the likeliest token over the second where
the answers part, alone, reveals it.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from llama_meter.measure.tolerance import near_tie

SAME = -1  # the first differing token of two answers that do not differ, and in rows a lead that is not known


class Parting(NamedTuple):
    """Where an answer parts from the one alone: `token` from 0, SAME for nowhere, and the likeliest one's lead there.

    `lead` in nats, by the logits alone; below zero or NaN where it is not known, which is no near-tie.
    """

    token: int = SAME
    lead: float = float("nan")

    @property
    def verdict(self) -> Literal["same", "near-tie", "other"]:
        """Whether the answer is the one alone, may have been turned by rounding, or is another."""
        if self.token < 0:
            return "same"
        return "near-tie" if near_tie(self.lead) else "other"


def parting(
    alone: Sequence[Any] | np.ndarray,
    together: Sequence[Any] | np.ndarray,
    leads: Sequence[float] | np.ndarray = (),
    pieces: Sequence[str] = (),
) -> Parting:
    """First token at which an answer given together differs from the one alone.

    `alone`, `together`: tokens; or texts, and then `pieces` is the text of each token alone. `leads`: of the likeliest
    token over the second at each token alone, in nats.
    """
    shorter, longer = sorted((len(alone), len(together)))
    at = next((i for i, (a, b) in enumerate(zip(alone, together, strict=False)) if a != b), shorter)
    if at == longer:
        return Parting()
    if pieces:
        ends = np.cumsum([len(piece) for piece in pieces])
        at = min(int(np.searchsorted(ends, at, side="right")), len(pieces) - 1)
    return Parting(at, float(leads[at]) if at < len(leads) else float("nan"))
