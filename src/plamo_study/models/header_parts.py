"""The parts of a GGUF header: key/value records and tensor records, with their places in the file."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

BOOL, STRING, ARRAY, UINT32, INT32, FLOAT32 = 7, 8, 9, 4, 5, 6  # gguf.h, enum gguf_type
NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "u1", 10: "<u8", 11: "<i8", 12: "<f8"}
TYPE_NAMES = dict(
    enumerate(("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64"))
)


@dataclass(frozen=True)
class Record:
    """One key with its value: `kind` a GGUF type, `item` its elements' type (else `kind`), `count` its length or 1.

    `start`, `payload` and `end` are positions in the file, in bytes: of the key's length, of the first element, and
    after the last one.
    """

    key: str
    kind: int
    item: int
    count: int
    start: int
    payload: int
    end: int

    @property
    def type_name(self) -> str:
        """The type's name, e.g. u32 or "array of u32"."""
        name = TYPE_NAMES[self.item]
        return f"array of {name}" if self.kind == ARRAY else name


@dataclass(frozen=True)
class TensorRecord:
    """One tensor as the file names it: `dims` in ggml's order (fastest first), `offset` in bytes from the data."""

    name: str
    dims: tuple[int, ...]
    type_id: int
    offset: int

    @property
    def type_name(self) -> str:
        """The name of the GGML type, or its number where `gguf` knows none."""
        known = self.type_id in GGMLQuantizationType._value2member_map_
        return GGMLQuantizationType(self.type_id).name if known else str(self.type_id)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in NumPy order (out, in), leading ones left out, as llama.cpp compares shapes."""
        dims = list(self.dims)
        while len(dims) > 1 and dims[-1] == 1:
            dims.pop()
        return tuple(reversed(dims))

    @property
    def block(self) -> tuple[int, int]:
        """Weights and bytes of a block; (0, 0) for an unknown type."""
        return GGML_QUANT_SIZES.get(self.type_id, (0, 0))  # type: ignore[call-overload,no-any-return]

    @property
    def n_bytes(self) -> int:
        """Bytes without padding; 0 for an unknown type."""
        weights, size = self.block
        return prod(self.dims) // weights * size if weights else 0


@dataclass(frozen=True)
class Header:
    """Everything before the weights. `data` is that part of the file itself; `data_start` may lie beyond `size`."""

    path: Path
    size: int
    version: int
    alignment: int
    records: dict[str, Record]
    tensors: list[TensorRecord]
    keys_end: int
    tensors_end: int
    data_start: int
    data: bytes

    def value(self, key: str) -> Any:
        """A number, text (str, undecodable bytes replaced), NumPy array, or list of bytes; None for a missing key."""
        record = self.records.get(key)
        if record is None:
            return None
        if record.item == STRING:
            texts = list(_strings(self.data, record))
            return texts if record.kind == ARRAY else texts[0].decode(errors="replace")
        numbers = np.frombuffer(self.data, NUMBERS[record.item], record.count, record.payload)
        return numbers if record.kind == ARRAY else numbers[0].item()

    def text(self, key: str) -> str | None:
        """A text; None where the key is missing or holds anything else."""
        record = self.records.get(key)
        return str(self.value(key)) if record and record.kind == STRING else None

    def number(self, key: str) -> float | None:
        """One number of any type; None where the key is missing or holds anything else."""
        record = self.records.get(key)
        return self.value(key) if record and record.kind in NUMBERS else None


def _strings(data: bytes, record: Record) -> Iterator[bytes]:
    at = record.payload
    for _ in range(record.count):
        (n,) = struct.unpack_from("<Q", data, at)
        yield data[at + 8 : at + 8 + n]
        at += 8 + n
