"""The header of any GGUF, as the `gguf` package reads it, within the bounds of the file.

`GGUFReader` believes every count. Here each read ends where the file ends, and texts of arrays are stepped over.
Also what a GGUF is for: writing text from left to right, something else, or a part of a model only.
"""

import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, ReaderTensor

from llama_meter.disk import printable
from llama_meter.errors import StudyError

MOST = 1 << 31  # what no number of a model's shape reaches
AGAIN = "fetch or convert the file again"
NUMBER = int | float | bool
MOST_FILES = 1 << 16
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")  # as llama-gguf-split names parts
RANKS = 4  # llama.h, LLAMA_POOLING_TYPE_RANK
DIFFUSES = ("dream", "llada", "rnd1")  # architectures begin so, or a key is `diffusion.…`
EMBEDS = re.compile(r"bert|embedding|llama-embed|t5encoder")
NO_MODELS = ("imatrix", "controlvector", "mmproj", "clip")  # architectures of other files
DAMAGE = (ArithmeticError, LookupError, RecursionError, TypeError, ValueError)  # as GGUFReader meets it


class Header(GGUFReader):
    """Keys and tensors of a GGUF. Weights are mapped and not read.

    `arch`: general.architecture, "" where it is no text.
    """

    def __init__(self, path: Path):
        self.path, self.size = path, path.stat().st_size
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
            values = super()._get(offset, dtype, count, override_order)
        if values.size < count:
            raise ValueError(self._cut())
        return values

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
    if not path.is_file():
        why = "is a folder" if path.is_dir() else "is no regular file" if path.exists() else "no such file"
        raise StudyError(str(path), why, "name a .gguf file; a blank or a comma in a path needs quotes, or a list")


def read(path: Path) -> Header:
    """The header of a GGUF file. StudyError for anything else, and for a file that is damaged or cut short."""
    check_path(path)
    try:
        return Header(path)
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


def require_model(header: Header) -> None:
    """StudyError for a GGUF that holds no language model, such as an adapter, a projector or a vocabulary alone."""
    role = header.text("general.type") or "model"
    if any(tensor.name.endswith(".lora_a") for tensor in header.tensors):
        role = "adapter"
    if role != "model" or header.arch in ("", *NO_MODELS) or not header.tensors:
        why = f"holds no language model (type: {printable(role)}, architecture: {printable(header.arch)})"
        raise StudyError(str(header.path), why, "name the file with the weights of the model that it was made for")


def not_judged(header: Header) -> str:
    """What a model is for that does not write text from left to right, and what follows; "" for one that does.

    The engine's own test holds pieces of a text against the whole, which agree only where no token sees later ones.
    """
    arch = header.arch
    begins = {tensor.name.partition(".")[0] for tensor in header.tensors}
    pooling, causal = header.number(f"{arch}.pooling_type"), header.number(f"{arch}.attention.causal")
    if pooling == RANKS or "cls" in begins:
        return "a reranking model: it scores texts, not measured"
    if {"enc", "dec"} <= begins:
        return "an encoder with a decoder: it reads the whole text before it writes, not measured"
    if pooling or EMBEDS.search(arch) or "enc" in begins:
        return "an embedding model: it embeds and writes nothing, not measured"
    if arch.startswith(DIFFUSES) or any(key.startswith("diffusion.") for key in header.fields):
        return "a diffusion model: it attends both ways, not judged"
    return "a model that attends both ways, not judged" if causal == 0 else ""


def split_of(header: Header) -> tuple[int, int]:
    """Which part of how many a file is, from 1: (1, 1) for a whole one."""
    count, number = header.number("split.count") or 1, header.number("split.no") or 0
    return (int(number) + 1, int(count)) if 1 < count < MOST_FILES and 0 <= number < count else (1, 1)


def named_parts(path: Path, count: int) -> list[Path]:
    """All parts of a split file beside `path`, by its name; none where the name is no part's."""
    name = PART.fullmatch(path.name)
    return [path.with_name(f"{name[1]}-{n:05d}-of-{count:05d}.gguf") for n in range(1, count + 1)] if name else []
