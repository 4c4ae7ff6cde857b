"""One request recorded operator by operator, through llama.cpp's evaluation callback.

The callback requests every node that computes something, so ggml's scheduler computes one node at a time and waits for
it. A node's time runs from the callback's return to its next call; the callback's own time is a separate span. Backends
that fuse nodes or overlap them (GPUs; on the CPU an RMS norm and the product after it) cannot do so while recorded.

It knows neither a node's purpose nor its cost. Views are not waited for: they compute nothing.
"""

import ctypes
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Literal, NamedTuple

import numpy as np

from llama_meter.engine.ggml import Tensor
from llama_meter.engine.nodes import Operators, name_of
from llama_meter.engine.session import Session

EMPTY = (b"NONE", b"RESHAPE", b"VIEW", b"PERMUTE", b"TRANSPOSE")  # ggml-impl.h, ggml_op_is_empty
SIZE, SOURCES, OP = ctypes.sizeof(Tensor), Tensor.src.offset, Tensor.op.offset
POINTERS = struct.Struct("10P")

ADDS_UP = 0.02  # spans fill their phase, and phases the request, within this share of the wall time

Kind = Literal["prepare", "operator", "callback", "finish"]

clock = time.perf_counter_ns


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


class Call(NamedTuple):
    """One node between two calls of the callback: timestamps in nanoseconds, ggml's structs of it and its sources."""

    begun: int
    answered: int
    computed: int
    left: int
    structs: tuple[bytes, ...]


class Recorder(Operators):
    """A second context on the model of an open session, with its own memory, in which every node is recorded."""

    def __init__(self, session: Session):
        self._begun, self._answered = 0, 0
        self._ops: dict[int, bool] = {}  # whether an operation computes something, by its number
        self._seen: list[tuple[int, int, int, tuple[bytes, ...]]] = []
        self._left: list[int] = []
        super().__init__(session, session.config)

    def record(self, prompt: np.ndarray, following: np.ndarray) -> tuple[Timeline, list[np.ndarray]]:
        """Record every operator of one request (see `request`); its timeline and the logits after each phase."""
        self._seen.clear()
        self._left.clear()
        start = clock()
        stamps, logits = request(self, prompt, following)
        end = clock()
        calls = [Call(*seen[:3], left, seen[3]) for seen, left in zip(self._seen, self._left, strict=True)]
        return self._timeline(start, end, stamps, calls), logits

    def _run(self, n_tokens: int) -> None:
        self._begun = 0
        super()._run(n_tokens)

    def _on_node(self, address: int, ask: bool, _: int) -> bool:
        """With `ask`: whether to wait for the node. Without: it is computed; its structs are copied and read later."""
        if ask:
            self._begun = self._begun or clock()
            op = ctypes.c_int.from_address(address + OP).value
            if op not in self._ops:
                self._ops[op] = self._base.ggml_op_name(op) not in EMPTY
            wanted = self._ops[op]
            self._answered = clock()
            return wanted
        computed = clock()
        node = ctypes.string_at(address, SIZE)
        sources = (ctypes.string_at(source, SIZE) for source in POINTERS.unpack_from(node, SOURCES) if source)
        self._seen.append((self._begun, self._answered, computed, (node, *sources)))
        self._begun = 0
        self._left.append(clock())
        return True

    def _timeline(self, start: int, end: int, stamps: list[int], calls: list[Call]) -> Timeline:
        node_of: dict[tuple[bytes, ...], int] = {}
        numbers: dict[Node, int] = {}
        for call in calls:
            if call.structs not in node_of:
                node_of[call.structs] = numbers.setdefault(self._node(call.structs), len(numbers))
        nodes, phases = tuple(numbers), []
        for step, (begin, finish) in enumerate(pairwise(stamps)):
            within = [call for call in calls if begin <= call.computed < finish]
            spans = _spans(begin, finish, within, [node_of[call.structs] for call in within], nodes)
            phases.append(Phase(f"DECODE_STEP {step}" if step else "PREFILL", begin, finish, tuple(spans)))
        return Timeline(start, end, tuple(phases), nodes)

    def _node(self, structs: tuple[bytes, ...]) -> Node:
        result, *sources = (Tensor.from_buffer_copy(struct) for struct in structs)
        op = self._base.ggml_op_desc(ctypes.byref(result)).decode()
        return Node(self._operand(result), op, tuple(map(self._operand, sources)))

    def _operand(self, tensor: Tensor) -> Operand:
        shape = tuple(tensor.ne)
        rows = shape[1] * shape[2] * shape[3]
        n_bytes = self._base.ggml_row_size(tensor.type, shape[0]) * rows
        dtype = self._base.ggml_type_name(tensor.type).decode()
        return Operand(name_of(tensor), dtype, shape, n_bytes)


def request(session: Session, prompt: np.ndarray, following: np.ndarray) -> tuple[list[int], list[np.ndarray]]:
    """One request from an empty memory: a prompt (n_prompt,), then one decode step for each of `following` (n_gen,).

    Returns (1 + n_gen) + 1 timestamps in nanoseconds around the phases, and the logits (n_vocab,) after each phase.
    """
    session.clear()
    stamps = [clock()]
    logits = [session.prefill({0: prompt})[0][-1]]
    stamps.append(clock())
    for token in following.tolist():
        session.decode({0: token})
        logits.append(session.logits())
        stamps.append(clock())
    return stamps, logits


def _spans(start: int, end: int, calls: list[Call], indices: list[int], nodes: tuple[Node, ...]) -> Iterator[Span]:
    """Spans from `start` to `end` without a gap. Every graph of a phase begins with the same node as its first."""
    at = left = start
    for call, index in zip(calls, indices, strict=True):
        if _alike(nodes[index], nodes[indices[0]]):
            if left > at:
                yield Span("callback", at, left)
            yield Span("prepare", left, call.begun)
            at = call.begun
        yield Span("callback", at, call.answered)
        yield Span("operator", call.answered, call.computed, index)
        at, left = call.computed, call.left
    if left > at:
        yield Span("callback", at, left)
    yield Span("finish", left, end)


def _alike(one: Node, other: Node) -> bool:
    return (one.op, one.result.name) == (other.op, other.result.name)
