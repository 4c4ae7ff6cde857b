"""Untrusted files: read within limits, and shown without terminal control sequences."""

import stat
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from plamo_study.errors import StudyError, of_system

MOST = 1 << 30  # bytes of a file that is read whole
MOST_SETTINGS, MOST_DOTS = 1 << 16, 64  # bytes of a file of settings; dots in a line of it, each of which may nest


def plain(text: str, kept: str = "\n\t\xa0\u3000") -> str:
    """The text with unprintable characters escaped, such as \\x1b; `kept` stays: lines, tabs and wide spaces."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else f"\\x{ord(c):02x}" for c in text)


def check_file(path: Path, most: int = MOST) -> None:
    """Raise StudyError unless a path is a regular file of at most `most` bytes: pipes and devices may have no end."""
    try:
        found = path.stat()
    except (OSError, ValueError) as error:  # a ValueError: a name with a NUL byte
        told = of_system(error) if isinstance(error, OSError) else None
        raise told or StudyError(str(path), f"cannot be read ({error})", "name a file") from error
    if not stat.S_ISREG(found.st_mode):
        raise StudyError(str(path), "is no regular file", "name a file; copy what a pipe or a device gives into one")
    if found.st_size > most:
        raise StudyError(str(path), f"has {found.st_size:,} bytes, more than {most:,}", "name a smaller file")


def content(path: Path, most: int = MOST) -> bytes:
    """All bytes of a regular file. StudyError where there is none, or where it is too large or cannot be read."""
    check_file(path, most)
    try:
        return path.read_bytes()
    except OSError as error:
        raise of_system(error) or error from error


def text(path: Path, most: int = MOST) -> str:
    """All text of a UTF-8 file. StudyError as `content`, and for invalid UTF-8."""
    found = content(path, most)
    try:
        return found.decode()
    except UnicodeDecodeError as error:
        why = f"is not UTF-8 (byte {error.start} is 0x{found[error.start]:02x})"
        raise StudyError(str(path), why, f"iconv -f ENCODING -t UTF-8 {path}") from error


def toml(path: Path, mend: str = "mend it: https://toml.io shows what a line may be") -> dict[str, Any]:
    """The content of a TOML file of at most MOST_SETTINGS bytes. StudyError as `text`, and for anything but TOML.

    A key nests once for each of its dots, and a parser may need the square of that in memory: hence MOST_DOTS.
    """
    found = text(path, MOST_SETTINGS)
    try:
        if any(line.count(".") > MOST_DOTS for line in found.splitlines()):
            raise ValueError(f"a line has more than {MOST_DOTS} dots")
        return tomllib.loads(found)
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
