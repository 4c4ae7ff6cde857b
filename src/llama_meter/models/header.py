"""The header of any GGUF, as the `gguf` package reads it, within the bounds of the file.

`GGUFReader` believes every count. Here each read ends where the file ends, texts of arrays are stepped over, and a
header of more parts than any model has is refused, so that a damaged file costs neither time nor memory.
"""

import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, ReaderTensor

from llama_meter.errors import StudyError
from llama_meter.models.finding import AGAIN, printable

MOST_PARTS = 1 << 17  # reads of a header; the largest PLaMo takes some 4,000
MOST = 1 << 31  # what no number of a model's shape reaches
NUMBER = int | float | bool
DAMAGE = (ArithmeticError, LookupError, RecursionError, TypeError, ValueError)  # as GGUFReader meets it


class Header(GGUFReader):
    """Keys and tensors of a GGUF. Weights are mapped and not read.

    `arch`: general.architecture, "" where it is no text.
    """

    def __init__(self, path: Path):
        self.path, self.size, self._left = path, path.stat().st_size, MOST_PARTS
        super().__init__(path)
        self.arch = self.text("general.architecture") or ""

    def value(self, key: str) -> Any:
        """A number, a text or a list of numbers; None for a missing key, [] for a list of texts."""
        field = self.fields.get(key)
        if field and field.types == [GGUFValueType.STRING]:
            return bytes(field.parts[-1]).decode(errors="replace")
        return field and field.contents()

    def text(self, key: str) -> str | None:
        """A text; None where the key is missing or holds anything else."""
        value = self.value(key)
        return value if isinstance(value, str) else None

    def number(self, key: str) -> float | None:
        """One number of any type; None where the key is missing or holds anything else."""
        value = self.value(key)
        return value if isinstance(value, NUMBER) else None

    def count(self, key: str) -> int:
        """Entries of a list; 0 where the key is missing or holds anything else."""
        field = self.fields.get(key)
        return int(field.parts[4][0]) if field and field.types[0] == GGUFValueType.ARRAY else 0

    def size_of(self, name: str, default: int = 0) -> int:
        """A whole number of the architecture, of a list the largest. StudyError for one that no model has."""
        key = f"{self.arch}.{name}"
        if (value := self.value(key)) is None:
            return default
        values = value if isinstance(value, list) else [value]
        if not values or not all(isinstance(each, NUMBER) and 0 <= each < MOST for each in values):
            raise StudyError(str(self.path), f"states what no model has: {key} is {printable(value)}", AGAIN)
        return int(max(values))

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        """What lies there; ValueError beyond the end of the file."""
        with np.errstate(over="raise"):
            found = super()._get(offset, dtype, count, override_order)
        self._left -= 1
        if found.size < count:
            raise ValueError(self._cut())
        if self._left < 0:
            raise ValueError(f"its header has more than {MOST_PARTS:,} parts")
        return found

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        """A value, and a list as one part; a list of texts has no data."""
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kinds, counts = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        kind, count, start = GGUFValueType(int(kinds[0])), int(counts[0]), orig_offs + 12
        if kind == GGUFValueType.ARRAY:
            raise ValueError("it holds a list of lists")
        if kind == GGUFValueType.STRING:
            part = self._get(start, np.uint8, self._length(start, count))
        else:
            part = self._get(start, self.gguf_scalar_to_np[kind], count)
        data = [] if kind == GGUFValueType.STRING else [2]
        return 12 + part.nbytes, [kinds, counts, part], data, [GGUFValueType.ARRAY, kind]

    def _length(self, start: int, count: int) -> int:
        """Bytes that so many texts take."""
        data: Any = self.data  # a memmap, which is a buffer
        data, at, unpack = memoryview(data), start, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at + 8 > self.size:
                raise ValueError(self._cut())
            at += 8 + unpack(data, at)[0]
        return at - start

    def _cut(self) -> str:
        return f"it is cut short or damaged: its {self.size:,} bytes end within what it announces"


def check_path(path: Path) -> None:
    """Raise StudyError unless a path is a regular file or a link to one: a pipe or a device may have no end."""
    try:
        if path.is_file():
            return
        why = "is a folder" if path.is_dir() else "is no regular file" if path.exists() else "no such file"
    except (OSError, ValueError) as error:  # a name too long, or with a NUL byte
        why = f"no such file ({error})"
    raise StudyError(str(path), why, "name a .gguf file; a blank or a comma in a path needs quotes, or a YAML list")


def read(path: Path) -> Header:
    """The header of a GGUF file. StudyError for anything else, and for a file that is damaged or cut short."""
    check_path(path)
    try:
        with path.open("rb") as file:
            begins = file.read(24)
        if begins[:4] != b"GGUF":
            raise StudyError(str(path), f"is no GGUF file: it begins with {begins!r}", AGAIN)
        return Header(path)
    except OSError as error:
        raise StudyError(str(path), f"cannot be read ({error.strerror})", "make the file readable") from error
    except DAMAGE as damage:
        raise StudyError(str(path), f"cannot be read as a GGUF: {printable(damage, 200)}", AGAIN) from damage


def type_name(tensor: ReaderTensor) -> str:
    """The name of a tensor's type, e.g. Q8_0."""
    return str(tensor.tensor_type.name)


def shape(tensor: ReaderTensor) -> tuple[int, ...]:
    """A tensor's shape in NumPy order (out, in)."""
    return tuple(int(n) for n in reversed(tensor.shape))


def core(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without leading ones: (1, 128) and (128,) are the same to ggml."""
    while len(sizes) > 1 and sizes[0] == 1:
        sizes = sizes[1:]
    return sizes
