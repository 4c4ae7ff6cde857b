"""What a load asks of a server, and when it is served well enough."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

SHORT = {"mini": (128, 64), "shape": (128, 16), "file": (128, 16)}  # of the loads
SLOTS = 4  # llama-server's own default
DISTINCT = 8  # prompts asked alone; a load of more requests asks them again
ENOUGH = 0.9  # of the requests of a rate that a server sustains meet its objectives


class Objectives(NamedTuple):
    """Latency objectives in seconds: time to the first token, and mean time per further token."""

    ttft_s: float = inf
    tpot_s: float = inf

    def met(self, ttft_s: Any, tpot_s: Any) -> Any:
        """Whether requests met both: of a number each, or of an array (n,) each. NaN, for never, meets none."""
        return (ttft_s <= self.ttft_s) & (tpot_s <= self.tpot_s)

    def met_by(self, due_ns: int, token_ns: Sequence[int], failure: str) -> bool:
        """Whether one request met both; a failed request never does."""
        if failure or not token_ns:
            return False
        rest = (token_ns[-1] - token_ns[0]) / max(len(token_ns) - 1, 1)
        return bool(self.met((token_ns[0] - due_ns) / 1e9, rest / 1e9))


NONE = Objectives()
OBJECTIVES: Mapping[str, Objectives] = {  # of `Serving`, by scale
    "mini": Objectives(0.25, 0.01),
    "shape": Objectives(10.0, 0.4),
    "file": Objectives(5.0, 0.2),  # five tokens a second: about as fast as people read
}
WITHIN: Mapping[str, Objectives] = {  # of `Traffic`, by scale
    "mini": Objectives(0.05, 0.01),
    "shape": Objectives(10.0, 0.5),
    "file": Objectives(10.0, 0.5),
}
