"""Files of ours and of others: written whole or not at all, locked, and read within bounds.

What is written appears under its name only when it is complete, and never replaces anything but a regular file. What
comes from elsewhere is read up to a size and as text that a terminal can show.
"""

import errno
import fcntl
import glob
import os
import re
import stat
import tempfile
import time
import tomllib
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import psutil

from llama_meter.errors import StudyError, of_system

PID = "[0-9]{1,9}"  # of a process; other digits beside a name are somebody else's
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def growing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path`: it becomes `path` when the block succeeds, and is removed when it fails.

    Its name contains this process's id: two processes may write the same file, and the later one replaces it. What a
    killed process left of it is removed. Raises StudyError as `check_out` does; on a full disk the error names `path`.
    """
    check_out(path, replace=True)
    for left in path.parent.glob(f"{glob.escape(path.name)}.*.partial"):
        pid = left.name.split(".")[-2]
        if re.fullmatch(PID, pid) and not psutil.pid_exists(int(pid)) and not left.is_dir():
            left.unlink(missing_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.unlink(missing_ok=True)  # a link of that name would be followed
        yield partial
        check_out(path, replace=True)
        _sync(partial)
        os.replace(partial, path)
    except OSError as error:
        if error.filename == str(partial) or (error.filename is None and error.errno in FULL):
            error.filename = str(path)
        raise
    finally:
        with suppress(OSError):  # of a disk that nothing can be written to
            partial.unlink()


def _sync(path: Path) -> None:
    """Let the disk have a file before its name: a power cut would leave the name of an empty one."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def check_out(path: Path, replace: bool = False) -> None:
    """Raise StudyError unless a file may be written there: the name is free or, to `replace` it, a regular file's.

    A folder, a device, a pipe, a socket or a link to one of them is never replaced.
    """
    if path.name in ("", "..", "."):
        raise StudyError(repr(str(path)), "names no file", "name a new file")
    if not os.path.lexists(path):
        return
    if not path.is_file():
        raise StudyError(str(path), "is no regular file, and is left as it is", "name a new file")
    if not replace:
        raise StudyError(str(path), "is there already", "name another file, or replace it with --force")


GRACE_S = 1.0  # that a lock may outlive its run
WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


def lock(file: int) -> int:
    """Lock an open file or folder; returns the descriptor that holds the lock, to be closed with `file`: often itself.

    Raises BlockingIOError where another process holds it, and StudyError where nothing can be locked here.
    """
    try:
        _flock(file)
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        return _elsewhere(file)
    return file


def _elsewhere(file: int) -> int:
    """Lock a file of our own in the temporary folder that stands for `file`, by its number on its disk."""
    meant = os.fstat(file)
    place = Path(tempfile.gettempdir()) / f"plamo-study-{os.getuid()}-{meant.st_dev:x}-{meant.st_ino:x}.lock"
    try:
        held = os.open(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StudyError(str(place), f"cannot be written ({error.strerror})", MEND) from error
    try:
        _flock(held)
    except BlockingIOError:
        os.close(held)
        raise
    except OSError as error:
        os.close(held)
        raise StudyError(
            str(place), f"cannot be locked, nor can the project's disk ({error.strerror})", MEND
        ) from error
    return held


def _flock(file: int) -> None:
    """Lock a file. A run that was killed while it started a process holds its locks until that one has begun."""
    until = time.monotonic() + GRACE_S
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
        time.sleep(GRACE_S / 20)


MEND = "set TMPDIR to a folder on a local disk, or move the project to one"

MOST = 1 << 30  # bytes of a file that is read whole
MOST_SETTINGS, MOST_DOTS = 1 << 16, 64  # bytes of a file of settings; dots in a line of it, each of which may nest


def plain(text: str, kept: str = "\n\t\xa0\u3000") -> str:
    """The text with unprintable characters escaped, such as \\x1b; `kept` stays: lines, tabs and wide spaces."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else f"\\x{ord(c):02x}" for c in text)


SENTENCES = ("assumptions", "build", "description", "engine_description")  # of a fact
UNPLAIN = re.compile(r"[^\w .,:;()+\-/=@%°®™'・]|:(?=//)|(?<![^\W_])_|_(?![^\W_])")


@lru_cache(maxsize=1 << 14)  # rows repeat their names
def plain_name(name: str) -> str:
    """A name in which question marks replace what Markdown, HTML, TeX, links or terminals interpret.

    Accents that a Mac's disk keeps apart are composed (NFC), and marks that have no composed form stay.
    """
    return UNPLAIN.sub(
        lambda found: found[0] if unicodedata.category(found[0][0]).startswith("M") else "?",
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


def check_file(path: Path, most: int = MOST) -> None:
    """Raise StudyError unless a path is a regular file of at most `most` bytes: pipes and devices may have no end."""
    try:
        status = path.stat()
    except (OSError, ValueError) as error:  # a ValueError: a name with a NUL byte
        refusal = of_system(error) if isinstance(error, OSError) else None
        raise refusal or StudyError(str(path), f"cannot be read ({error})", "name a file") from error
    if not stat.S_ISREG(status.st_mode):
        raise StudyError(str(path), "is no regular file", "name a file; copy what a pipe or a device gives into one")
    if status.st_size > most:
        raise StudyError(str(path), f"has {status.st_size:,} bytes, more than {most:,}", "name a smaller file")


def content(path: Path, most: int = MOST) -> bytes:
    """All bytes of a regular file. StudyError where there is none, or where it is too large or cannot be read."""
    check_file(path, most)
    try:
        return path.read_bytes()
    except OSError as error:
        raise of_system(error) or error from error


def text(path: Path, most: int = MOST) -> str:
    """All text of a UTF-8 file. StudyError as `content`, and for invalid UTF-8."""
    data = content(path, most)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        why = f"is not UTF-8 (byte {error.start} is 0x{data[error.start]:02x})"
        raise StudyError(str(path), why, f"iconv -f ENCODING -t UTF-8 {path}") from error


def toml(path: Path, mend: str = "mend it: https://toml.io shows what a line may be") -> dict[str, Any]:
    """The content of a TOML file of at most MOST_SETTINGS bytes. StudyError as `text`, and for anything but TOML.

    A key nests once for each of its dots, and a parser may need the square of that in memory: hence MOST_DOTS.
    """
    document = text(path, MOST_SETTINGS)
    try:
        if any(line.count(".") > MOST_DOTS for line in document.splitlines()):
            raise ValueError(f"a line has more than {MOST_DOTS} dots")
        return tomllib.loads(document)
    except (ValueError, RecursionError) as error:  # a TOMLDecodeError is a ValueError
        raise StudyError(str(path), f"is no TOML ({error})", mend) from error


def expanded(name: str) -> Path:
    """A path in which ~ and ~NAME are replaced by a user's home. StudyError where there is no such home."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise StudyError(name, f"has no home folder to begin with ({error})", "name the whole path") from error


def parsed(data: bytes | str, kind: Any = Any) -> Any:
    """Strict JSON, decoded; ValueError for anything else, including non-finite numbers and deep nesting."""
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
