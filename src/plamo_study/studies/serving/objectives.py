"""What a request has to keep to. Workers import this, so nothing here loads pandas."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Objectives:
    """What a request must keep to, in seconds: to its first token, and for each further one in the mean."""

    ttft_s: float
    tpot_s: float

    def met(self, due_ns: int, token_ns: Sequence[int], failure: str) -> bool:
        """Whether a request kept to them; one that failed did not."""
        if failure or not token_ns:
            return False
        rest = (token_ns[-1] - token_ns[0]) / max(len(token_ns) - 1, 1)
        return token_ns[0] - due_ns <= self.ttft_s * 1e9 and rest <= self.tpot_s * 1e9
