"""Rewrites a file with corrected metadata and byte for byte the same tensor data.

Correct records are copied as bytes, including unknown keys. It repairs only what metadata alone can repair, and refuses
a file that would stay unusable. It never judges whether a rope theta is the right one.
"""

import shutil
import struct
from pathlib import Path

from gguf import GGUFValueType, ReaderField

from llama_meter.disk import growing
from llama_meter.errors import StudyError, offer_check, unwritable
from llama_meter.models.check import inspect
from llama_meter.models.finding import blocking
from llama_meter.models.gguf_file import check_space
from llama_meter.models.header import Header, read

PIECE = 8 << 20  # bytes copied at a time
SLACK = 1 << 20  # bytes that new records may add


def repair(path: Path, out: Path, rope_theta: float | None = None) -> list[str]:
    """Write `path` with corrected metadata to `out`; returns what was changed, one sentence each.

    Corrected: head counts become a scalar (lost rotation, D1), and the rotary base becomes `rope_theta` where one is
    given. Memory is constant; nothing is left behind on failure.
    Raises StudyError when there is nothing to correct, when the file would stay unusable, when `out` is the file
    itself, or for a folder that cannot be written or is too full.
    """
    if rope_theta is not None and not 1 <= rope_theta <= 1e12:
        raise StudyError(f"rope theta {rope_theta:g}", "is no rotary base", "give the one of the model's config.json")
    header = read(path)
    if out.is_dir():
        raise StudyError(str(out), "is a folder", "name a file in it")
    if out.exists() and out.samefile(path):
        raise StudyError(str(out), "is the file to be repaired", "name another file: a repair is never in place")
    changes = _changes(header, rope_theta)
    if not changes:
        raise StudyError(str(path), "has nothing that can be repaired", offer_check(path))
    mended = {"head-count-array"} if any(key.endswith(".head_count") for key in changes) else set()
    left = [finding for finding in blocking(inspect(path)[0]) if finding.code not in mended]
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
    changes = {}
    key = f"{header.arch}.attention.head_count"
    heads = header.value(key)
    if isinstance(heads, list) and heads and heads[0] == 0 and len(set(heads) - {0}) == 1:
        why = f"{key} is {max(heads)} instead of an array that starts with 0"
        changes[key] = _record(key, GGUFValueType.UINT32, max(heads)), why
    key = f"{header.arch}.rope.freq_base"
    before = header.number(key)
    if rope_theta is not None and before != rope_theta:
        why = f"{key} is {rope_theta:g} instead of {before}"
        changes[key] = _record(key, GGUFValueType.FLOAT32, rope_theta), why
    return changes


def _record(key: str, kind: GGUFValueType, value: float) -> bytes:
    name, form = key.encode(), "<If" if kind == GGUFValueType.FLOAT32 else "<II"
    return struct.pack("<Q", len(name)) + name + struct.pack(form, kind, value)


def _write(header: Header, changes: dict[str, bytes], partial: Path) -> None:
    """The same file with some records replaced and new ones appended; offsets are relative to the data and stay."""

    def raw(field: ReaderField) -> bytes:
        return b"".join(bytes(part) for part in field.parts)

    kept = {key: field for key, field in header.fields.items() if not key.startswith("GGUF.")}
    records = [changes.get(key) or raw(field) for key, field in kept.items()]
    records += [record for key, record in changes.items() if key not in kept]
    version = int(header.fields["GGUF.version"].parts[0][0])
    opening = b"GGUF" + struct.pack("<IQQ", version, len(header.tensors), len(records))
    head = b"".join([opening, *records, *(raw(tensor.field) for tensor in header.tensors)])
    head += bytes(-len(head) % int(header.alignment))
    with header.path.open("rb") as source, partial.open("wb") as target:
        target.write(head)
        source.seek(header.data_offset)
        shutil.copyfileobj(source, target, PIECE)
