"""Files that are there whole or not at all."""

import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil


@contextmanager
def growing(path: Path) -> Iterator[Path]:
    """A file to write beside `path`: it becomes `path` when the block ends well, and is gone when it does not.

    Its name has this process's number in it: two processes may make the same file, and the later one replaces it. What
    a killed process left of the same file is removed.
    """
    for left in path.parent.glob(f"{glob.escape(path.name)}.*.partial"):
        pid = left.name.split(".")[-2]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            left.unlink(missing_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
