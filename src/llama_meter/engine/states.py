"""A sequence's state as bytes: filled to any depth, taken apart and spliced.

The layout is that of llama.cpp 0c1e57098 (`state_write` in llama-context.cpp, llama-kv-cache.cpp and
llama-memory-recurrent.cpp). In its order: magic and number of the sequence; of each cache the number of its streams, of
a stream that of its tokens, twelve bytes for each, and every layer's keys, then every layer's values; of a hybrid the
number of recurrent cells, eight bytes for each, and every layer's last inputs of its convolution, then every layer's
recurrent state. A layer's bytes follow their type and the size of a row. A build with another layout is refused.
"""

import re
import struct
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from llama_meter.engine.bindings import llama
from llama_meter.engine.session import EngineError, Session

MAGIC = 0xAF143CD8  # llama-context.cpp, io_magic; then the number of the sequence
UNKNOWN = "this state is not laid out as that of one sequence is in llama.cpp 0c1e57098"
OF_TOKEN, OF_CELL = 12, 8  # bytes
CELLS = re.compile(r"llama_kv_cache: size = +[\d.]+ MiB \( *(\d+) cells")
CACHE, CONVOLUTION, RECURRENT = "keys and values", "convolution", "recurrent state"
PARTS = (CACHE, CONVOLUTION, RECURRENT)  # of a hybrid's state


def cells(log: Sequence[str]) -> tuple[int, ...]:
    """Size of each key-value cache of a context in tokens, from its log: of PLaMo 2 one, of PLaMo 3 one for its full
    layers and one for its sliding layers."""
    return tuple(map(int, CELLS.findall("".join(log))))


class _Layer(NamedTuple):
    """Keys or values of a layer: their type, what describes a row, whether a token is a column, and where they lie."""

    kind: int
    sizes: tuple[int, ...]  # bytes of a row; of transposed values bytes of a number, and numbers of a token
    where: slice


class _Reader:
    """Reads a state from front to back. EngineError where it ends too early."""

    def __init__(self, state: bytes):
        self.state, self.at = state, 0

    def skip(self, n_bytes: int) -> slice:
        """Where the next bytes lie."""
        start, self.at = self.at, self.at + n_bytes
        if self.at > len(self.state):
            raise EngineError(UNKNOWN)
        return slice(start, self.at)

    def number(self, kind: str = "I") -> int:
        """The next number of a kind of `struct`."""
        return int(struct.unpack("<" + kind, self.state[self.skip(struct.calcsize("<" + kind))])[0])

    def stream(self) -> tuple[int, int, list[_Layer]]:
        """A stream of a cache: its tokens, whether values are transposed, and the keys, then the values, of layers."""
        n_tokens = self.number()
        if not n_tokens:
            return 0, 0, []
        self.skip(OF_TOKEN * n_tokens)
        transposed, n_layers = self.number(), self.number()
        layers = []
        for number in range(2 * n_layers):
            kind, of_values = self.number("i"), transposed and number >= n_layers
            sizes = (self.number(), self.number()) if of_values else (self.number("Q"),)
            layers.append(_Layer(kind, sizes, self.skip(n_tokens * int(np.prod(sizes)))))
        return n_tokens, transposed, layers


def filled(session: Session, state: bytes, depth: int, cells: Sequence[int]) -> bytes:
    """The state of a sequence of `depth` tokens, its caches filled by repeating the cells of `state`.

    The cost of a step depends on its depth, not on the cells' contents, so a deep memory is filled in milliseconds
    instead of computed in minutes. Its outputs continue no text. `cells`: size of each cache in tokens; a cache smaller
    than the depth holds the last positions. EngineError for an unknown layout.
    """
    read = _Reader(state)
    if read.number() != MAGIC:
        raise EngineError(UNKNOWN)
    made = [struct.pack("<Ii", MAGIC, read.number("i"))]
    for room in cells:
        if read.number() != 1:  # streams
            raise EngineError(UNKNOWN)
        n_tokens, transposed, layers = read.stream()
        n = min(depth, room)
        of_tokens = np.column_stack([np.arange(depth - n, depth), np.ones(n), np.zeros(n)]).astype("<i4")
        made += [struct.pack("<II", 1, n), of_tokens.tobytes(), struct.pack("<II", transposed, len(layers) // 2)]
        take = np.arange(n) % n_tokens
        for layer in layers:
            numbers = np.frombuffer(state[layer.where], np.uint8)
            if len(layer.sizes) == 2:
                size, width = layer.sizes
                rows = numbers.reshape(width, n_tokens, size)[:, take]
                made.append(struct.pack("<iII", layer.kind, size, width))
            else:
                rows = numbers.reshape(n_tokens, -1)[take]
                made.append(struct.pack("<iQ", layer.kind, *layer.sizes))
            made.append(rows.tobytes())
    if llama.llama_model_is_hybrid(session.model):
        n_cells = read.number()
        read.number("i")  # the position of the recurrent cell
        made += [struct.pack("<Ii", n_cells, depth - 1), state[read.at :]]
    elif read.at < len(state):
        raise EngineError(UNKNOWN)
    return b"".join(made)


def parts(state: bytes) -> dict[str, list[slice]]:
    """Where each of PARTS lies in a hybrid's state, layer by layer. EngineError for another state."""
    read, rows = _Reader(state), []
    read.skip(8)
    caches = [layer.where for _ in range(read.number()) for layer in read.stream()[2]]
    n_cells = read.number()
    read.skip(OF_CELL * n_cells + 8)
    while read.at < len(state):
        read.number("i")
        rows.append(read.skip(n_cells * read.number("Q")))
    if not rows or len(rows) % 2:
        raise EngineError(UNKNOWN)
    return {CACHE: caches, CONVOLUTION: rows[: len(rows) // 2], RECURRENT: rows[len(rows) // 2 :]}


def spliced(state: bytes, other: bytes, names: Collection[str]) -> bytes:
    """A state with these parts of `other`, and all else of `own`. EngineError for states of two layouts."""
    where = parts(state)
    if parts(other) != where:
        raise EngineError("states of two layouts cannot be spliced")
    made = bytearray(state)
    for part in (part for name in names for part in where[name]):
        made[part] = other[part]
    return bytes(made)
