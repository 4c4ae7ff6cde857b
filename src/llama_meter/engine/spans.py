"""A recorded request as data: phases, the spans that fill them, and the graph nodes behind the spans.

The engine's recorder writes it; analysis and export read it. It needs no engine and assigns no costs to nodes. Times
are nanoseconds of one monotonic clock.
"""

from dataclasses import dataclass
from math import prod
from typing import Literal

ADDS_UP = 0.02  # spans fill their phase, and phases the request, within this share of the wall time

Kind = Literal["prepare", "operator", "callback", "finish"]


@dataclass(frozen=True)
class Operand:
    """A tensor as ggml describes it: `shape` in ggml's order, fastest dimension first; `n_bytes` counts its elements.

    A view counts its own elements, not those of the tensor behind it.
    """

    name: str
    dtype: str
    shape: tuple[int, int, int, int]
    n_bytes: int

    @property
    def n_elements(self) -> int:
        """Number of elements; 0 for the empty tensors some graphs hold."""
        return prod(self.shape)


@dataclass(frozen=True)
class Node:
    """A graph node: its result, the operation that makes it (e.g. "MUL_MAT", "SWIGLU") and its inputs."""

    result: Operand
    op: str
    sources: tuple[Operand, ...]


@dataclass(frozen=True)
class Span:
    """An interval of a phase. `node`: index into the timeline's nodes, -1 where none was computed.

    prepare: llama.cpp splits the batch, builds and allocates the graph, sets its inputs. operator: one node is computed
    and waited for. callback: the recorder itself and the scheduler's loop around it. finish: the end of llama.cpp's
    call and the copy of the logits.
    """

    kind: Kind
    start: int
    end: int
    node: int = -1

    @property
    def duration(self) -> int:
        """Nanoseconds."""
        return self.end - self.start


@dataclass(frozen=True)
class Phase:
    """PREFILL or one DECODE_STEP; its spans cover it without gaps."""

    name: str
    start: int
    end: int
    spans: tuple[Span, ...]

    @property
    def duration(self) -> int:
        """Nanoseconds."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """One request: its phases in order, and every node that was computed."""

    start: int
    end: int
    phases: tuple[Phase, ...]
    nodes: tuple[Node, ...]

    @property
    def duration(self) -> int:
        """Nanoseconds from before the first phase to after the last, by the caller's clock."""
        return self.end - self.start
