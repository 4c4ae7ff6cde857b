"""A sequence's state at any depth, built by repeating a short one's cells; and the memory a context reserves.

The cost of a step depends on its depth, not on the cells' contents, so a deep memory can be filled in milliseconds
instead of computed in minutes. Its outputs continue no text. The layout is that of llama.cpp 0c1e57098 (`state_write`
of llama_kv_cache, llama_kv_cache_iswa and llama_memory_hybrid); a build with another layout is refused. It does not
know what is timed.
"""

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llama_meter.engine.bindings import llama
from llama_meter.engine.session import EngineError, Session

MAGIC = 0xAF143CD8  # llama-context.cpp, io_magic; then the number of the sequence
UNKNOWN = "this build lays states out otherwise than llama.cpp 0c1e57098"
MIB = 1 << 20
KV_SIZE = re.compile(r"llama_kv_cache: size = +([\d.]+) MiB \( *(\d+) cells")
STATE_SIZE = re.compile(r"llama_memory_recurrent: size = +([\d.]+) MiB")
COMPUTE_SIZE = re.compile(r"compute buffer size = +([\d.]+) MiB")


@dataclass(frozen=True)
class Memory:
    """Bytes that a context reserved, from the engine's log; `cells`: size of each key-value cache in tokens.

    PLaMo 2 has one cache and a recurrent state; PLaMo 3 has a cache for its full layers and one for its sliding layers.
    """

    kv: float
    state: float
    compute: float
    cells: tuple[int, ...]


def memory(log: Sequence[str]) -> Memory:
    """The memory that a context reserved, from its log."""
    text = "".join(log)
    caches = KV_SIZE.findall(text)
    kv = sum(float(size) for size, _ in caches)
    state, compute = (sum(map(float, pattern.findall(text))) for pattern in (STATE_SIZE, COMPUTE_SIZE))
    return Memory(kv * MIB, state * MIB, compute * MIB, tuple(int(cells) for _, cells in caches))


def filled(session: Session, state: bytes, depth: int, cells: Sequence[int]) -> bytes:
    """The state of a sequence of `depth` tokens, its caches filled by repeating the cells of `state`.

    `cells`: size of each cache in tokens; a cache smaller than the depth holds the last positions.

    Raises
    ------
    EngineError
        The state's layout is unknown.

    """
    view = _Reader(state)
    if view.number("I") != MAGIC:
        raise EngineError(UNKNOWN)
    parts = [struct.pack("<Ii", MAGIC, view.number("i"))]
    for room in cells:
        parts += _cache(view, depth, min(depth, room))
    if llama.llama_model_is_hybrid(session.model):
        n_cells = view.number("I")
        view.number("i")  # the position of the recurrent cell
        parts += [struct.pack("<Ii", n_cells, depth - 1), view.rest()]
    if not view.at_end():
        raise EngineError(UNKNOWN)
    return b"".join(parts)


class _Reader:
    """Reads little-endian numbers and arrays from a state, front to back."""

    def __init__(self, data: bytes):
        self.data, self.at = data, 0

    def number(self, kind: str) -> int:
        if self.at + struct.calcsize(kind) > len(self.data):
            raise EngineError(UNKNOWN)
        (value,) = struct.unpack_from("<" + kind, self.data, self.at)
        self.at += struct.calcsize(kind)
        return int(value)

    def array(self, *shape: int) -> np.ndarray:
        n = int(np.prod(shape, dtype=np.int64))
        if not 0 <= n <= len(self.data) - self.at:
            raise EngineError(UNKNOWN)
        values = np.frombuffer(self.data, np.uint8, n, self.at).reshape(shape)
        self.at += n
        return values

    def rest(self) -> bytes:
        tail, self.at = self.data[self.at :], len(self.data)
        return tail

    def at_end(self) -> bool:
        return self.at == len(self.data)


def _cache(view: _Reader, depth: int, n: int) -> list[bytes]:
    """One key-value cache with `n` cells, the last of them at position depth - 1."""
    if view.number("I") != 1:  # streams
        raise EngineError(UNKNOWN)
    n_cells = view.number("I")
    view.array(n_cells, 12)  # of each cell: position, number of sequences, sequence
    cells = np.column_stack([np.arange(depth - n, depth), np.ones(n), np.zeros(n)]).astype("<i4")
    parts, take = [struct.pack("<II", 1, n), cells.tobytes()], np.arange(n) % max(n_cells, 1)
    transposed, layers = view.number("I"), view.number("I")
    parts.append(struct.pack("<II", transposed, layers))
    for is_value in (False, True):
        for _ in range(layers):
            kind = view.number("i")
            if is_value and transposed:
                size, width = view.number("I"), view.number("I")
                rows = view.array(width, n_cells, size)[:, take]
                parts.append(struct.pack("<iII", kind, size, width))
            else:
                size = view.number("Q")
                rows = view.array(n_cells, size)[take]
                parts.append(struct.pack("<iQ", kind, size))
            parts.append(rows.tobytes())
    return parts
