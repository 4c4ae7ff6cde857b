"""Latency objectives of a request. Workers import this module, so nothing here loads pandas."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Objectives:
    """Latency objectives in seconds: time to the first token, and mean time per further token."""

    ttft_s: float
    tpot_s: float

    def met(self, due_ns: int, token_ns: Sequence[int], failure: str) -> bool:
        """Whether a request met both objectives; a failed request never does."""
        if failure or not token_ns:
            return False
        rest = (token_ns[-1] - token_ns[0]) / max(len(token_ns) - 1, 1)
        return token_ns[0] - due_ns <= self.ttft_s * 1e9 and rest <= self.tpot_s * 1e9
