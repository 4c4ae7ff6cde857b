"""Snapshots: the files of one commit of a released repository, and a record of the download.

data/models/hub/<model>/<commit>/ holds the files and fetched.json. A folder named <commit>.partial is an unfinished
download; it takes its final name in one step when every file is verified, so a folder with a record is complete.

It knows no network and no tensors: fetch.py brings the files, convert.py reads them.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from llama_meter import paths
from llama_meter.disk import growing, parsed
from llama_meter.errors import StudyError
from llama_meter.models import tensors
from llama_meter.models.gguf_file import Progress
from llama_meter.models.registry import Hub

RECORD = "fetched.json"
COMMIT, SHA256 = re.compile(r"[0-9a-f]{40}"), re.compile(r"[0-9a-f]{64}")
PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")  # a name that stays in its folder on any system


@dataclass(frozen=True)
class Wanted:
    """One file as it must be: bytes, its SHA-256 and the id git gives its content ("" if unknown)."""

    name: str
    size: int
    sha256: str
    git: str = ""


@dataclass(frozen=True)
class Held:
    """One file of a snapshot: bytes, and the SHA-256 it had when it was verified (64 hex digits)."""

    size: int
    sha256: Annotated[str, msgspec.Meta(pattern=rf"\A{SHA256.pattern}\Z")]


@dataclass(frozen=True)
class Snapshot:
    """A download's record: repository, commit, requested revision (branch, tag or commit), time (ISO 8601, UTC)."""

    repository: str
    revision: Annotated[str, msgspec.Meta(pattern=rf"\A{COMMIT.pattern}\Z")]
    asked: str
    fetched: str
    files: dict[Annotated[str, msgspec.Meta(pattern=rf"\A{PLAIN.pattern}\Z")], Held]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())


def root(name: str) -> Path:
    """Where the snapshots of a model lie: data/models/hub/<name>. It need not exist."""
    return paths.MODELS / "hub" / name


def folder_of(name: str, revision: str) -> Path:
    """Where the snapshot of a model at a commit lies: data/models/hub/<name>/<commit>. It need not exist."""
    return root(name) / revision


def pins(hub: Hub, revision: str) -> dict[str, str]:
    """The pinned SHA-256 by file name that hold for a commit: none for any but the pinned one."""
    return hub.sha256 if revision == hub.revision else {}


def pinned(hub: Hub) -> str:
    """How far data/models.toml pins a release: "pinned", "revision only" or "unpinned"."""
    return "unpinned" if not hub.revision else "pinned" if hub.sha256 else "revision only"


def read(folder: Path) -> Snapshot | None:
    """The record of a snapshot folder, None when there is none. StudyError when the record is damaged."""
    path = folder / RECORD
    try:
        snapshot: Snapshot = parsed(path.read_bytes(), Snapshot)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise StudyError(str(path), f"is damaged ({error})", f"delete {folder}, then fetch again") from error
    return snapshot


def held(name: str) -> list[Snapshot]:
    """The complete snapshots of a model, the latest last."""
    snapshots = [read(folder) for folder in root(name).glob("*") if COMMIT.fullmatch(folder.name)]
    return sorted((snapshot for snapshot in snapshots if snapshot), key=lambda snapshot: snapshot.fetched)


def find(name: str, revision: str | None) -> Snapshot | None:
    """The latest complete snapshot of a model at a commit, branch or tag; at any of them without `revision`."""
    matching = (s for s in held(name) if revision in (None, s.revision, s.asked))
    return max(matching, key=lambda snapshot: snapshot.fetched, default=None)


def faults(
    folder: Path, snapshot: Snapshot, pins: Mapping[str, str], progress: Progress | None = None
) -> dict[str, str]:
    """Faults in the files of a snapshot, by file name; every byte is read and hashed.

    A pin overrides the record. A pinned file that is missing is a fault, too.
    """
    reasons, done = {name: "is pinned, and not there" for name in pins.keys() - snapshot.files.keys()}, 0
    for name, file in snapshot.files.items():
        _, fault = checked(folder / name, Wanted(name, file.size, pins.get(name, file.sha256)))
        if fault:
            reasons[name] = fault
        done += file.size
        if progress:
            progress(done, snapshot.size)
    return reasons


def checked(path: Path, file: Wanted) -> tuple[str, str]:
    """The SHA-256 of a file on disk and its fault, "" for none; every byte is read."""
    if not path.is_file():
        return "", "is missing"
    size = path.stat().st_size
    if size != file.size:
        return "", f"has {size:,} bytes instead of {file.size:,}"
    digest = tensors.sha256(path)
    if file.sha256 and digest != file.sha256:
        return digest, f"has SHA-256 {digest[:12]}… instead of {file.sha256[:12]}…"
    if file.git and _git_blob(path) != file.git:
        return digest, f"is not the content that git knows as {file.git[:12]}…"
    return digest, ""


def _git_blob(path: Path) -> str:
    """The id git gives a file's content: SHA-1 of "blob <bytes>\\0" and the content, as 40 hex digits."""
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def reopen(folder: Path, damaged: Mapping[str, str]) -> None:
    """Take a snapshot back to an unfinished download without its damaged files; the record stays valid."""
    for name in damaged:
        (folder / name).unlink(missing_ok=True)
    unfinished = partial(folder)
    shutil.rmtree(unfinished, ignore_errors=True)
    os.replace(folder, unfinished)


def partial(folder: Path) -> Path:
    """The folder of a snapshot until it is complete."""
    return folder.with_name(folder.name + ".partial")


def finish(folder: Path, snapshot: Snapshot) -> Path:
    """Write the record beside the verified files, then give the folder its name; returns the folder."""
    unfinished = partial(folder)
    with growing(unfinished / RECORD) as record:
        record.write_bytes(msgspec.json.format(msgspec.json.encode(snapshot), indent=1))
    os.replace(unfinished, folder)
    return folder


def toml(name: str, snapshot: Snapshot) -> str:
    """The lines that pin a snapshot, for [models.<name>.hub] in data/models.toml."""
    key = name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else f'"{name}"'
    files = "\n".join(f'"{file}" = "{held.sha256}"' for file, held in snapshot.files.items())
    return f'[models.{key}.hub]\nrevision = "{snapshot.revision}"\n\n[models.{key}.hub.sha256]\n{files}'
