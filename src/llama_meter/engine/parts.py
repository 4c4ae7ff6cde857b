"""The parts of a hybrid's state of one sequence, as llama.cpp writes it, and a state spliced from two.

In the engine's order: magic and number of the sequence; of each stream of the cache the number of its tokens, twelve
bytes for each, and every layer's keys, then every layer's values; the number of recurrent cells, eight bytes for each,
and every layer's last inputs of its convolution, then every layer's recurrent state. A layer's bytes follow their type
and the size of a row (`state_write` in llama-context.cpp, llama-kv-cache.cpp and llama-memory-recurrent.cpp).
"""

import struct
from collections.abc import Collection

from llama_meter.engine.session import EngineError

CACHE, CONVOLUTION, RECURRENT = "keys and values", "convolution", "recurrent state"
PARTS = (CACHE, CONVOLUTION, RECURRENT)
HEADER, OF_TOKEN, OF_CELL = 8, 12, 8  # bytes


class _Reader:
    def __init__(self, state: bytes):
        self.state, self.at = state, 0

    def number(self, kind: str = "I") -> int:
        """The next number of a kind of `struct`."""
        return int(struct.unpack("<" + kind, self.state[self.skip(struct.calcsize("<" + kind))])[0])

    def skip(self, n_bytes: int) -> slice:
        """Where the next bytes lie."""
        start, self.at = self.at, self.at + n_bytes
        if self.at > len(self.state):
            raise EngineError("the state is not that of one sequence of a hybrid")
        return slice(start, self.at)


def parts(state: bytes) -> dict[str, list[slice]]:
    """Where each of PARTS lies in a state, layer by layer. EngineError for a state that is not a hybrid's."""
    slices: dict[str, list[slice]] = {name: [] for name in PARTS}
    read = _Reader(state)
    read.skip(HEADER)
    for _ in range(read.number()):
        if n_tokens := read.number():
            read.skip(OF_TOKEN * n_tokens)
            transposed, n_layers = read.number(), read.number()
            for layer in range(2 * n_layers):
                read.skip(4)
                of_values = transposed and layer >= n_layers
                slices[CACHE].append(
                    read.skip(n_tokens * (read.number() * read.number() if of_values else read.number("Q")))
                )
    n_cells = read.number()
    read.skip(OF_CELL * n_cells + 8)
    rows = []
    while read.at < len(state):
        read.skip(4)
        rows.append(read.skip(n_cells * read.number("Q")))
    slices[CONVOLUTION], slices[RECURRENT] = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    if not rows or len(rows) % 2:
        raise EngineError("the state is not that of one sequence of a hybrid")
    return slices


def spliced(own: bytes, other: bytes, names: Collection[str]) -> bytes:
    """A state with these parts of `other`, and all else of `own`. EngineError for states of two layouts."""
    where = parts(own)
    if parts(other) != where:
        raise EngineError("states of two layouts cannot be spliced")
    made = bytearray(own)
    for part in (part for name in names for part in where[name]):
        made[part] = other[part]
    return bytes(made)
