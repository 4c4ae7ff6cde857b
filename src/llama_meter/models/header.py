"""Reads the header of an untrusted GGUF: bounded time, bounded memory, one clear error per kind of damage.

Layout (ggml/src/gguf.cpp): magic, version, number of tensors, number of keys, key/value records, tensor records,
padding to the alignment, tensor data. At most MAX_HEADER bytes are read, no count is believed before the bytes it
promises are there, and what llama.cpp would refuse is an error here. It does not know PLaMo, and never reads weights.
Files that are ours, or were checked, are read with `gguf.GGUFReader`.
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType

from llama_meter.errors import StudyError
from llama_meter.models import mistaken
from llama_meter.models.finding import AGAIN, printable

MAX_HEADER = 32 << 20  # bytes; a vocabulary of 107,520 tokens takes 3 MB
MAX_RECORDS = 1 << 14  # keys, or tensors; the largest PLaMo has some 40 and 500
MAX_STRINGS = 1 << 20  # entries of one array of strings
MAX_KEY = 1 << 16  # bytes, as the format says
MAX_NAME = 63  # bytes of a tensor's name (ggml.h, GGML_MAX_NAME)
MAX_DIMS = 4  # ggml.h, GGML_MAX_DIMS
VERSIONS = (2, 3)  # 1 had other widths; 3 differs from 2 only in that big-endian files are allowed
DEFAULT_ALIGNMENT, MAX_ALIGNMENT = 32, 1 << 20
BOOL, STRING, ARRAY = GGUFValueType.BOOL, GGUFValueType.STRING, GGUFValueType.ARRAY
UINT32, INT32, FLOAT32 = GGUFValueType.UINT32, GGUFValueType.INT32, GGUFValueType.FLOAT32
NUMBERS = {int(kind): np.dtype(item) for kind, item in GGUFReader.gguf_scalar_to_np.items()}  # all but STRING, ARRAY
TYPE_NAMES = ("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64")


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
        has_name = self.type_id in GGMLQuantizationType._value2member_map_
        return GGMLQuantizationType(self.type_id).name if has_name else str(self.type_id)

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


class HeaderError(StudyError):
    """An unusable header; `code` names the kind of damage."""

    def __init__(self, path: Path, code: str, why: str, mend: str = AGAIN):
        super().__init__(str(path), why, mend)
        self.code = code


def read(path: Path) -> Header:
    """The header of a GGUF file.

    Raises HeaderError (a StudyError) for a header that llama.cpp would refuse or that exceeds this module's limits, and
    StudyError for a path that is no readable file.
    """
    mistaken.check_path(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return _Parser(path, size, file.read(MAX_HEADER)).header()
    except OSError as error:
        raise StudyError(str(path), f"cannot be read ({error.strerror})", "make the file readable") from error


class _Parser:
    """A position in the first bytes of a file, moved only over bytes that are there."""

    def __init__(self, path: Path, size: int, data: bytes):
        self.path, self.size, self.data, self.at = path, size, data, 0

    def header(self) -> Header:
        version, n_tensors, n_keys = self._opening()
        records: dict[str, Record] = {}
        for number in range(n_keys):
            record = self._record(number)
            if record.key in records:
                raise self._damage("duplicate-key", f"key {printable(record.key)} is in the file twice")
            records[record.key] = record
        keys_end, alignment = self.at, self._alignment(records.get("general.alignment"))
        tensors = [self._tensor(number) for number in range(n_tensors)]
        names = {tensor.name for tensor in tensors}
        if len(names) < len(tensors):
            raise self._damage("duplicate-tensor", f"{len(tensors)} tensors have only {len(names)} names")
        end, start = self.at, -(-self.at // alignment) * alignment
        head = self.data[:end]
        return Header(self.path, self.size, version, alignment, records, tensors, keys_end, end, start, head)

    def _opening(self) -> tuple[int, int, int]:
        if self.data[:4] != b"GGUF":
            what = mistaken.foreign(self.data, self.size, self.path.name)
            why = what.what if what else f"is not a GGUF file (it starts with {self.data[:4]!r})"
            raise self._damage("not-gguf", why, what.mend if what else mistaken.FETCH)
        self.at = 4
        version = self._number("<I", "the version")
        if version & 0xFFFF == 0 and version:
            mend = "take the file for this byte order, or convert a copy of it: gguf-convert-endian COPY native"
            raise self._damage("byte-order", "is written for machines of the other byte order (big-endian)", mend)
        if version not in VERSIONS:
            newer = "newer" if version > max(VERSIONS) else "older"
            raise self._damage("version", f"GGUF version {version} is {newer} than the known ones ({VERSIONS})")
        return version, self._count("tensors", MAX_RECORDS, 24), self._count("keys", MAX_RECORDS, 13)

    def _record(self, number: int) -> Record:
        start, key = self.at, self._text(f"key {number}")
        kind = item = self._number("<I", f"the type of {key}")
        count = 1
        if kind == ARRAY:
            item = self._number("<I", f"the element type of {key}")
            if item == ARRAY:
                raise self._damage("nested-array", f"{printable(key)} is an array of arrays, which llama.cpp refuses")
            least = 8 if item == STRING else NUMBERS[item].itemsize if item in NUMBERS else 1
            count = self._count(f"entries of {key}", MAX_STRINGS if item == STRING else MAX_HEADER, least)
        payload = self.at
        if item == STRING:
            self._skip_strings(key, count)
        elif item in NUMBERS:
            self._skip(count * NUMBERS[item].itemsize, f"the value of {key}")
        else:
            raise self._damage("value-type", f"{printable(key)} has type {item}; GGUF has {len(TYPE_NAMES)} types")
        return Record(key, kind, item, count, start, payload, self.at)

    def _skip_strings(self, key: str, count: int) -> None:
        """Step over strings: a tight loop, because a vocabulary has 100,000 of them."""
        data, at, last, unpack = self.data, self.at, len(self.data) - 8, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at > last:  # no room for a length: let _skip say so
                at = last + 9
                break
            at += 8 + unpack(data, at)[0]
        self._skip(at - self.at, f"the text of {key}")

    def _tensor(self, number: int) -> TensorRecord:
        name = self._text(f"tensor {number}", MAX_NAME)
        shown = printable(name)
        n_dims = self._number("<I", f"the dimensions of {name}")
        if n_dims > MAX_DIMS:
            raise self._damage("dimensions", f"tensor {shown} has {n_dims:,} dimensions, more than {MAX_DIMS}")
        dims = tuple(self._number("<q", f"the shape of {name}") for _ in range(n_dims)) or (1,)
        if min(dims) < 1 or prod(dims) >= 1 << 63:
            raise self._damage("dimensions", f"tensor {shown} has the shape {dims[::-1]}")
        return TensorRecord(
            name, dims, self._number("<I", f"the type of {name}"), self._number("<Q", f"the offset of {name}")
        )

    def _alignment(self, record: Record | None) -> int:
        if record is None:
            return DEFAULT_ALIGNMENT
        if record.kind != UINT32:
            raise self._damage("alignment", f"general.alignment is {record.type_name}, not u32")
        (alignment,) = struct.unpack_from("<I", self.data, record.payload)
        if not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            why = f"general.alignment is {alignment:,}, not a power of two up to {MAX_ALIGNMENT:,}"
            raise self._damage("alignment", why)
        return int(alignment)

    def _text(self, what: str, longest: int = MAX_KEY) -> str:
        n = self._number("<Q", f"the name of {what}")
        if not 0 < n <= longest:
            length = f"{n:,}" if n <= self.size else "a senseless number of"
            raise self._damage("name", f"the name of {what} is {length} bytes long; 1 to {longest:,} are allowed")
        start = self._skip(n, f"the name of {what}")
        try:
            return self.data[start : self.at].decode()
        except UnicodeDecodeError:
            raise self._damage("name", f"the name of {what} is not text: {self.data[start : start + 40]!r}") from None

    def _count(self, what: str, most: int, least_bytes: int) -> int:
        """A count, trusted only if its items can fit into the rest of the file."""
        n = self._number("<Q", f"the number of {what}")
        if n > most or n * least_bytes > self.size - self.at:
            room = f"{self.size - self.at:,} bytes are left, and at most {most:,} are accepted"
            count = f"{n:,}" if n <= self.size else "a senseless number"
            raise self._damage("absurd-count", f"is damaged or cut short: {count} of {printable(what)}, {room}")
        return n

    def _number(self, form: str, what: str) -> int:
        return int(struct.unpack_from(form, self.data, self._skip(struct.calcsize(form), what))[0])

    def _skip(self, n: int, what: str) -> int:
        """Skip n bytes; returns their start."""
        start, self.at = self.at, self.at + n
        if self.at > self.size:
            short = mistaken.damage_of(printable(what), start, n, self.size)
            raise self._damage("cut-short", f"is cut short or damaged: {short}", mistaken.REST)
        if self.at > len(self.data):
            why = f"its header is longer than {MAX_HEADER:,} bytes at {printable(what)}"
            raise self._damage("header-too-long", why)
        return start

    def _damage(self, code: str, why: str, mend: str = AGAIN) -> HeaderError:
        return HeaderError(self.path, code, why, mend)
