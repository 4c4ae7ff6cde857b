"""Results that are one file beside the journals, data/measured/<place>/<name>: written whole, read with their type."""

import gzip
import zlib
from pathlib import Path
from typing import Any

import msgspec

from llama_meter import paths
from llama_meter.disk import content, growing, parsed
from llama_meter.errors import StudyError


def path(place: str, name: str) -> Path:
    """Path of a result's file."""
    return paths.MEASURED / place / name


def write(data: bytes, place: str, name: str) -> Path:
    """Keep a result; a new one replaces the one before it."""
    target = path(place, name)
    target.parent.mkdir(parents=True, exist_ok=True)
    with growing(target) as partial:
        partial.write_bytes(gzip.compress(data, mtime=0) if target.suffix == ".gz" else data + b"\n")
    return target


def keep(result: msgspec.Struct | list[Any], place: str, name: str) -> Path:
    """Keep a result as indented JSON."""
    return write(msgspec.json.format(msgspec.json.encode(result), indent=1), place, name)


def load(place: str, name: str, kind: Any, made_by: str) -> Any:
    """A result, of a type that msgspec knows; None where there is none.

    StudyError for a damaged file, naming the command that makes it again.
    """
    file = path(place, name)
    if not file.exists():
        return None
    try:
        data = content(file)
        return parsed(gzip.decompress(data) if file.suffix == ".gz" else data, kind)
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise StudyError(str(file), f"is damaged ({error})", made_by) from error
