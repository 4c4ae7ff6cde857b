"""What is remembered of model files from call to call, so that a large one is read once: its hash, and its name.

It stands in data/models/given.json and holds while a file looks the same: path, inode, size and times. A record that is
torn, or that something else wrote, is none: the files are read again. Two processes that write at once cost each other
no more than that. What exists to catch changed bytes asks `tensors.sha256`, which reads them.
"""

import threading
from collections.abc import Sequence
from hashlib import sha256 as sha256_of
from pathlib import Path
from typing import Annotated

import msgspec

from llama_meter import paths
from llama_meter.disk import growing, parsed
from llama_meter.errors import StudyError
from llama_meter.models import tensors

SHA256 = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]


class Noted(msgspec.Struct, frozen=True):
    """A file as it was: how it looked and its hash. `name`: of its rows where its header has none, as first called."""

    looks: tuple[int, int, int, int]
    sha256: SHA256
    name: str = ""


_writing = threading.Lock()  # files are hashed side by side


def sha256(path: Path) -> str:
    """SHA-256 of a file, read only where it is new or looks other than when it was read. StudyError as `tensors`."""
    return _noted(path).sha256


def of_parts(parts: Sequence[Path]) -> str:
    """The hash of a file with all its parts: of the hashes of these where there are several."""
    digests = [sha256(part) for part in parts]
    return digests[0] if len(parts) == 1 else sha256_of("".join(digests).encode()).hexdigest()


def name(path: Path, now: str) -> str:
    """The name under which a file without one in its header was first given, wherever it lies; `now` for a new one."""
    here = _noted(path)
    first = next((noted.name for noted in _memory().values() if noted.sha256 == here.sha256 and noted.name), now)
    if here.name != first:
        _note(path, msgspec.structs.replace(here, name=first))
    return first


def _noted(path: Path) -> Noted:
    """What is remembered of a file that looks as it did, else what is read of it now."""
    looks = tensors.looks(path)
    old = _memory().get(str(path.resolve()))
    if old and old.looks == looks:
        return old
    new = Noted(looks, tensors.sha256(path))
    if tensors.looks(path) == looks:  # nobody wrote to it meanwhile
        _note(path, new)
    return new


def _note(path: Path, noted: Noted) -> None:
    with _writing:
        try:
            paths.MODELS.mkdir(parents=True, exist_ok=True)
            with growing(_place()) as partial:
                partial.write_bytes(msgspec.json.encode(_memory() | {str(path.resolve()): noted}))
        except (OSError, StudyError):
            pass  # a folder that cannot be written to: the next call reads the file again


def _memory() -> dict[str, Noted]:
    try:
        memory: dict[str, Noted] = parsed(_place().read_bytes(), dict[str, Noted])
    except (OSError, ValueError):
        return {}
    return memory


def _place() -> Path:
    return paths.MODELS / "given.json"
