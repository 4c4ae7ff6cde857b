"""Weights in Hugging Face layout: the place of every tensor in its safetensors file. Reads headers, never weights.

The files are untrusted. Sizes are bounded before anything is read, an index may only name files of
its own folder, and every fault becomes one StudyError. It does not know PLaMo.
"""

import json
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from plamo_study.errors import StudyError, of_memory
from plamo_study.models.numbers import STORED

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FETCH = "plamo-study models fetch NAME"
JSON_LIMIT = 8 << 20  # bytes of a configuration, index or header; those of 30 B parameters are below 0.2 MiB
FLOATS = tuple(dtype for dtype in STORED if dtype != "Q8_0")  # types weights may have, by their names in the format
LONGEST_SHAPE = 4  # dimensions


@dataclass(frozen=True)
class Stored:
    """The place of a tensor: it begins at byte `start` of `path`. `shape` is as in PyTorch, (out, in)."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def n_elements(self) -> int:
        """Number of weights."""
        return prod(self.shape)


def read_json(path: Path, limit: int = JSON_LIMIT) -> dict[str, Any]:
    """A JSON object from a file of at most `limit` bytes. StudyError when it is missing, larger or no object."""
    size = size_of(path)
    if size > limit:
        raise StudyError(str(path), f"has {size:,} bytes, more than {limit:,}", f"name another folder, or {FETCH}")
    try:
        return _object(path.read_bytes())
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise of_memory(error, str(path)) or damaged(path, f"is no JSON object ({error})") from error


def size_of(path: Path) -> int:
    """Bytes of a regular file (a link to one is followed). StudyError when there is none."""
    try:
        if path.is_file():
            return path.stat().st_size
    except (OSError, ValueError) as error:
        raise damaged(path, f"cannot be read ({error})") from error
    raise damaged(path, "no such file")


def damaged(what: Path | str, why: str) -> StudyError:
    """The error for files that cannot be used as they are."""
    return StudyError(str(what), why, f"fetch the files again: {FETCH}")


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of a folder by name: from `model.safetensors.index.json` and its shards, or `model.safetensors`.

    Raises StudyError for a missing or damaged file, an index that names files elsewhere, or one that disagrees with
    its shards.
    """
    if not (folder / INDEX).exists():
        return header(folder / SINGLE)
    found: dict[str, Stored] = {}
    for shard, listed in _shards(folder / INDEX).items():
        held = header(folder / shard)
        if wrong := sorted(held.keys() ^ listed):
            where = "is not in the index" if wrong[0] in held else "is in the index, not in the file"
            raise damaged(f"{folder / shard}, tensor {wrong[0]}", where)
        found |= held
    return found


def _shards(index: Path) -> dict[str, set[str]]:
    """File name → names of the tensors it should hold."""
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise damaged(index, "has no weight_map")
    shards: dict[str, set[str]] = {}
    for tensor, name in listed.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise damaged(index, f"tensor {tensor} lies in {name!r}, which is no safetensors file of this folder")
        shards.setdefault(name, set()).add(tensor)
    return shards


def header(path: Path) -> dict[str, Stored]:
    """The tensors of one safetensors file (8 bytes of length, that much JSON, then the data without gaps).

    StudyError when anything in the header cannot be true of this file, or the format's own library refuses it.
    """
    size = size_of(path)
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(JSON_LIMIT, size - 8):
                raise ValueError(f"a header of {length:,} bytes in a file of {size:,}")
            entries = _object(file.read(length))
        entries.pop("__metadata__", None)
        found = {name: _stored(path, name, entry, 8 + length) for name, entry in entries.items()}
        _check_gaps(found, 8 + length, size)
        with safe_open(path, framework="numpy"):
            pass
    except (OSError, ValueError, RecursionError, MemoryError, struct.error, SafetensorError) as error:
        raise of_memory(error, str(path)) or damaged(path, f"is no whole safetensors file ({error})") from error
    return found


def _stored(path: Path, name: str, entry: Any, data: int) -> Stored:
    """One header entry, checked. `data`: the byte of the file at which the data begins."""
    if not isinstance(entry, dict):
        raise ValueError(f"tensor {name} is described by {entry!r:.40}")
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if dtype not in FLOATS:
        why = f"has type {dtype!r:.40}, which cannot be converted"
        raise StudyError(f"{path}, tensor {name}", why, f"use weights in {', '.join(FLOATS)}")
    if not _whole(shape) or len(shape) > LONGEST_SHAPE:
        raise ValueError(f"tensor {name} has shape {shape}")
    if not _whole(offsets) or len(offsets) != 2 or offsets[1] - offsets[0] != prod(shape) * STORED[dtype].itemsize:
        raise ValueError(f"tensor {name} lies at {offsets}, which does not fit its shape {shape}")
    return Stored(path, dtype, tuple(shape), data + offsets[0])


def _whole(values: Any) -> bool:
    """Whether `values` is a list of whole numbers from 0 up to what a file can hold."""
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 62 for value in values)


def _check_gaps(found: dict[str, Stored], start: int, size: int) -> None:
    """ValueError unless the tensors fill the data of the file, each beginning where another ends."""
    for name, tensor in sorted(found.items(), key=lambda item: (item[1].start, item[1].n_elements)):
        if tensor.start != start:
            raise ValueError(f"tensor {name} begins at byte {tensor.start:,} instead of {start:,}")
        start += tensor.n_elements * STORED[tensor.dtype].itemsize
    if start != size:
        raise ValueError(f"the tensors end at byte {start:,}, the file at {size:,}")


def _object(raw: bytes) -> dict[str, Any]:
    value = json.loads(raw)
    if not isinstance(value, dict):
        raise ValueError(f"a {type(value).__name__}")
    return value
