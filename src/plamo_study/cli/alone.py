"""One run at a time: two would write the same reports and disturb each other's times."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from plamo_study.errors import StudyError
from plamo_study.locking import lock

MOST_BYTES = 1000  # of a lock's text about its holder


LOCK = ".running"


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder` while the block runs. The system releases it when this process ends, however it ends.

    Raises StudyError, naming the process that holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = held = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            held = lock(file)
        except BlockingIOError:
            who = os.read(file, MOST_BYTES).decode(errors="replace") or "process unknown"
            raise StudyError("another run is at work", who, "wait until it ends, or end it with `kill`") from None
        os.ftruncate(file, 0)
        command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
        os.write(file, f"process {os.getpid()}, since {datetime.now():%H:%M:%S}, {command}"[:MOST_BYTES].encode())
        yield
    finally:
        for each in {file, held}:
            os.close(each)
