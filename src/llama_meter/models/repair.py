"""Rewrites a file with corrected metadata and byte for byte the same tensor data.

Correct records are copied as bytes, including unknown keys: `gguf.GGUFWriter` takes no empty array, and decodes texts.
It repairs only what metadata alone can repair, and refuses a file that would stay unusable. It never judges whether a
rope theta is the right one.
"""

import shutil
import struct
from collections.abc import Iterable
from pathlib import Path

from llama_meter.disk import growing
from llama_meter.errors import StudyError, offer_check, unwritable
from llama_meter.models.check import inspect
from llama_meter.models.finding import blocking
from llama_meter.models.gguf_file import check_space
from llama_meter.models.header import ARRAY, FLOAT32, INT32, UINT32, Header, read
from llama_meter.models.tokenizer_check import PREFIX, SPECIAL, special_ids

PIECE = 8 << 20  # bytes copied at a time
SLACK = 1 << 20  # bytes that new records may add


def repair(path: Path, out: Path, rope_theta: float | None = None, sha256: str = "") -> list[str]:
    """Write `path` with corrected metadata to `out`; returns what was changed, one sentence each.

    Corrected: head counts become a scalar (lost rotation, D1); missing ids of special tokens are added where the
    vocabulary has their texts; the rotary base becomes `rope_theta` where one is given. `sha256`: what `path` should
    hash to. Memory is constant; nothing is left behind on failure.
    Raises StudyError when there is nothing to correct, when the file would stay unusable, when `out` is the file
    itself, or for a folder that cannot be written or is too full.
    """
    if rope_theta is not None and not 1 <= rope_theta <= 1e12:
        raise StudyError(f"rope theta {rope_theta:g}", "is no rotary base", "give the one of the model's config.json")
    header = read(path)
    _refuse_in_place(path, out)
    changes = _changes(header, rope_theta)
    if not changes:
        raise StudyError(str(path), "has nothing that can be repaired", offer_check(path))
    left = [f for f in blocking(inspect(path, sha256)[0]) if f.code not in _mended(header, changes)]
    if left:
        raise StudyError(str(path), f"would stay unusable: {left[0].evidence}", left[0].mend)
    try:
        check_space(out, header.size + SLACK)
        with growing(out) as partial:
            _write(header, {key: record for key, (record, _) in changes.items()}, partial)
    except OSError as error:
        raise unwritable(out, error) from error
    return [text for _, text in changes.values()]


def _changes(header: Header, rope_theta: float | None) -> dict[str, tuple[bytes, str]]:
    """Key → its new record, and a sentence about it."""
    arch = header.text("general.architecture")
    changes = {}
    for key, token in special_ids(header).items():
        changes[key] = _record(key, UINT32, token), f"{key} is {token}"
    key = f"{arch}.attention.head_count"
    record = header.records.get(key)
    if record and record.kind == ARRAY and record.item in (UINT32, INT32) and record.count:
        values = [int(value) for value in header.value(key)]
        if values[0] == 0 and len(set(values) - {0}) == 1:
            why = f"{key} is {max(values)} instead of an array that starts with 0"
            changes[key] = _record(key, UINT32, max(values)), why
    key = f"{arch}.rope.freq_base"
    before = header.number(key)
    if rope_theta is not None and before != rope_theta:
        changes[key] = _record(key, FLOAT32, rope_theta), f"{key} is {rope_theta:g} instead of {before}"
    return changes


def _mended(header: Header, changes: Iterable[str]) -> set[str]:
    """Codes of the blocking findings that these changes remove."""
    mistyped = {
        k for k in (PREFIX + name for name in SPECIAL) if k in header.records and header.records[k].kind != UINT32
    }
    heads = any(key.endswith(".attention.head_count") for key in changes)
    return ({"head-count-array"} if heads else set()) | ({"token-id"} if mistyped <= set(changes) else set())


def _record(key: str, kind: int, value: float) -> bytes:
    name = key.encode()
    return struct.pack("<Q", len(name)) + name + struct.pack("<If" if kind == FLOAT32 else "<II", kind, value)


def _refuse_in_place(path: Path, out: Path) -> None:
    if out.exists() and out.samefile(path):
        raise StudyError(str(out), "is the file to be repaired", "name another file: a repair is never in place")
    if out.is_dir():
        raise StudyError(str(out), "is a folder", "name a file in it")


def _write(header: Header, changes: dict[str, bytes], partial: Path) -> None:
    """The same file with some records replaced and new ones appended; offsets are relative to the data and stay."""
    records = [changes.get(key, header.data[r.start : r.end]) for key, r in header.records.items()]
    records += [record for key, record in changes.items() if key not in header.records]
    opening = b"GGUF" + struct.pack("<IQQ", header.version, len(header.tensors), len(records))
    head = b"".join([opening, *records, header.data[header.keys_end : header.tensors_end]])
    head += bytes(-len(head) % header.alignment)
    with header.path.open("rb") as source, partial.open("wb") as target:
        target.write(head)
        source.seek(header.data_start)
        shutil.copyfileobj(source, target, PIECE)
