"""Files that appear whole or not at all, and never replace anything but a regular file."""

import errno
import glob
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from plamo_study.errors import StudyError

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
