"""The inputs of an executed notebook besides itself: code, rows, registry, engine. One digest for all of them."""

import hashlib
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from llama_meter import paths
from llama_meter.journal import LOCAL, REFERENCE
from plamo_study.studies.registry import OF_ALL

KINDS = ("*.py", "*.toml", "*.json", "*.jsonl", "*.jsonl.gz", "*.csv", "*.lock")
DECIDING = ("LLAMA_CPP_LIB_PATH", "PLAMO_STUDY_DEVICE")  # environment, changes results


def digest(notebook: str) -> str:
    """SHA-256 of the contents that an executed notebook depends on; any change gives another digest."""
    hasher = hashlib.sha256(sys.version.encode())
    for name in DECIDING:
        hasher.update(f"{name}={os.environ.get(name, '')}".encode())
    for path in _files(notebook):
        seen = path.stat()
        hasher.update(path.name.encode() + b"\0" + _content(path, seen.st_ino, seen.st_size, seen.st_mtime_ns))
    return hasher.hexdigest()


@cache  # notebooks share most of their inputs
def _content(path: Path, *_looks: int) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


def _files(notebook: str) -> Iterator[Path]:
    code = Path(__file__).resolve().parents[2]
    folders = (code, paths.MEASURED / REFERENCE, paths.DATA / "published")
    for folder in folders:
        yield from sorted(path for kind in KINDS for path in folder.rglob(kind))
    own = "" if notebook in OF_ALL else notebook[:2]
    yield from sorted((paths.MEASURED / LOCAL).glob(f"{own}*"))
    yield from (path for path in (paths.DATA / "models.toml", paths.ROOT / "requirements.lock") if path.exists())
