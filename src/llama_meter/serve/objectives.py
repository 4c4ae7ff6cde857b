"""What a load asks of a server, and when it is served well enough."""

from collections.abc import Sequence
from dataclasses import dataclass

SHORT = {"mini": (128, 64), "shape": (128, 16), "weights": (128, 16), "file": (128, 16)}  # of the loads
SLOTS = 4  # llama-server's own default
DISTINCT = 8  # prompts asked alone; a load of more requests asks them again
ENOUGH = 0.9  # of the requests of a rate that a server sustains meet its objectives
# Of `Traffic`, in seconds: first token, mean gap
WITHIN = {"mini": (0.05, 0.01), "shape": (10.0, 0.5), "weights": (10.0, 0.5), "file": (10.0, 0.5)}


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


OBJECTIVES = {"mini": Objectives(0.25, 0.01), "shape": Objectives(10.0, 0.4), "weights": Objectives(10.0, 0.4)}
OBJECTIVES["file"] = Objectives(5.0, 0.2)  # five tokens a second: about as fast as people read
