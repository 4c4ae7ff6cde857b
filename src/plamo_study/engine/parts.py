"""A model's residual sums after each mixer and each feed-forward, as the engine computes them.

The graph stops at those sums only. It does not know their correct values: see oracle/judge.py.
"""

import ctypes
import re
from typing import Any

import numpy as np

from plamo_study.engine.nodes import Tensor, WatchedModel
from plamo_study.engine.session import Session

SUM = re.compile(r"(attn_residual|ffn_residual|l_out)-(\d+)")  # plamo2.cpp and plamo3.cpp; l_out renames the second
MIXER, FEED_FORWARD = "mixer", "feed-forward"
Sums = dict[tuple[int, str], np.ndarray]


class PartSums(WatchedModel):
    """A second context on a session's model that keeps the residual sum after every part of every token.

    Raises EngineError as its base class does.
    """

    def __init__(self, session: Session):
        self._found: dict[tuple[int, str], list[np.ndarray]] = {}
        super().__init__("", session.config, model=session.model)

    def wanted(self, node: Tensor) -> bool:
        """Whether a node is one of the two sums of a layer."""
        return SUM.fullmatch(node.name.decode(errors="replace")) is not None

    def see(self, node: Tensor) -> None:
        """Keep the node's rows."""
        name: Any = SUM.fullmatch(node.name.decode(errors="replace"))
        part = MIXER if name[1] == "attn_residual" else FEED_FORWARD
        rows = self.values(ctypes.pointer(node)).reshape(-1, node.ne[0])
        self._found.setdefault((int(name[2]), part), []).append(rows)

    def sums(self) -> Sums:
        """Residual sums by (layer, part), (n_tokens, hidden) float32, tokens in evaluation order."""
        return {place: np.concatenate(rows) for place, rows in self._found.items()}
