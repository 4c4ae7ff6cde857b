"""What every command of this project runs in: clear messages instead of tracebacks, and alone where it must be."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from llama_meter import children, paths
from llama_meter.disk import lock
from llama_meter.errors import MENDABLE, StudyError, mendable
from plamo_study.cli import report, terminal

LOCK = ".running"
MOST_BYTES = 1000  # of a lock's text about its holder


def guarded(command: Callable[[], object]) -> None:
    """Run a command line; what a user can mend becomes one message and exit code 2."""
    terminal.prepare()
    children.keep_python_safe()
    try:
        _check_folder()
        command()
    except MENDABLE as error:
        study_error = mendable(error)
        if study_error is None:
            raise
        report.console.print(str(study_error), style="red", soft_wrap=True)
        raise SystemExit(2) from None


def _check_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:
        raise StudyError("the working directory", "has been deleted", f"cd {paths.ROOT}, or another folder") from None


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder` while the block runs.

    The system releases the lock when this process ends, however it ends.

    Raises StudyError, naming the process that holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            lock(file)
        except BlockingIOError:
            who = os.read(file, MOST_BYTES).decode(errors="replace") or "process unknown"
            raise StudyError("another run is at work", who, "wait until it ends, or end it with `kill`") from None
        os.ftruncate(file, 0)
        command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
        os.write(file, f"process {os.getpid()}, since {datetime.now():%H:%M:%S}, {command}"[:MOST_BYTES].encode())
        yield
    finally:
        os.close(file)
