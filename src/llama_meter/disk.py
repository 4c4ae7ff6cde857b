"""Files that are written whole or not at all, locks, and names and texts that a terminal or a page can show."""

import fcntl
import os
import re
import time
import tomllib
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from llama_meter.errors import StudyError

GRACE_S = 1.0  # that a lock may outlive its run


@contextmanager
def growing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path`: it becomes `path` when the block succeeds, and is removed when it fails.

    Its name contains this process's id: two processes may write the same file, and the later one replaces it. An error
    of the system names `path`.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        with partial.open("rb") as written:  # a power cut would leave the name of an empty one
            os.fsync(written.fileno())
        os.replace(partial, path)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        with suppress(OSError):  # of a disk that nothing can be written to
            partial.unlink()


def check_out(path: Path, replace: bool = False) -> None:
    """Raise StudyError unless a file may be written there: the name is free or, to `replace` it, a file's."""
    if path.is_dir():
        raise StudyError(str(path), "is a folder", "name a new file")
    if path.exists() and not replace:
        raise StudyError(str(path), "is there already", "name another file, or replace it with --force")


def lock(file: int) -> None:
    """Lock an open file until it is closed. BlockingIOError where another process holds it.

    A run that was killed while it started a process holds its locks until that one has begun.
    """
    until = time.monotonic() + GRACE_S
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
        time.sleep(GRACE_S / 20)


def plain(text: str, allowed: str = "\n\t\xa0\u3000") -> str:
    """The text with unprintable characters escaped, such as \\x1b; `allowed` stay: lines, tabs and wide spaces."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in allowed else f"\\x{ord(c):02x}" for c in text)


def printable(value: object, longest: int = 80) -> str:
    """Text from a file or a server, truncated and without control characters."""
    text = value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
    return plain(text[:longest], allowed="")[:longest] + ("…" if len(text) > longest else "")


SENTENCES = ("assumptions", "build", "description", "engine_description")  # of a fact
UNPLAIN = re.compile(r"[^\w .,:;()+\-/=@%°®™'・]|:(?=//)|(?<![^\W_])_|_(?![^\W_])")


@lru_cache(maxsize=1 << 14)  # rows repeat their names
def plain_name(name: str) -> str:
    """A name in which question marks replace what Markdown, HTML, TeX, links or terminals interpret.

    Accents that a Mac's disk keeps apart are composed (NFC), and marks that have no composed form stay.
    """
    return UNPLAIN.sub(
        lambda match: match[0] if unicodedata.category(match[0][0]).startswith("M") else "?",
        unicodedata.normalize("NFC", name),
    )


def plainly(value: Any) -> Any:
    """A fact, or a part of one, with all its names plain, keys too; sentences, which tables escape, stay unchanged."""
    if isinstance(value, str):
        return plain_name(value)
    if isinstance(value, list | tuple):
        return type(value)(map(plainly, value))
    if isinstance(value, dict):
        return {plain_name(key): part if key in SENTENCES else plainly(part) for key, part in value.items()}
    return value


def toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file. StudyError for anything else."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # so is a TOMLDecodeError, and text that is no UTF-8
        raise StudyError(
            str(path), f"is no TOML ({error})", "mend it: https://toml.io shows what a line may be"
        ) from error


def expanded(name: str) -> Path:
    """A path in which ~ and ~NAME are replaced by a user's home. StudyError where there is no such home."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise StudyError(name, f"has no home folder to begin with ({error})", "name the whole path") from error
