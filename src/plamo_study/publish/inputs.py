"""What an executed notebook is made from besides itself: code, rows, registry, engine. One digest of all of it."""

import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from plamo_study import paths

KINDS = ("*.py", "*.toml", "*.json", "*.jsonl", "*.csv", "*.lock")
DECIDING = ("LLAMA_CPP_LIB_PATH", "PLAMO_STUDY_ACCEPT")  # environment variables that a result depends on


def digest() -> str:
    """SHA-256 of the contents that executed notebooks depend on; any change gives another one."""
    found = hashlib.sha256(sys.version.encode())
    for name in DECIDING:
        found.update(f"{name}={os.environ.get(name, '')}".encode())
    for path in _files():
        found.update(f"{path.name} {path.stat().st_size} ".encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def _files() -> Iterator[Path]:
    code = Path(__file__).resolve().parents[1]
    folders = (code, paths.MEASURED, paths.DATA / "published")
    for folder in folders:
        yield from sorted(path for kind in KINDS for path in folder.rglob(kind))
    yield from (path for path in (paths.DATA / "models.toml", paths.ROOT / "requirements.lock") if path.exists())
