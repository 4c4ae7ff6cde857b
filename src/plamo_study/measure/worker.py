"""The process of one measurement: it reads a job from stdin, writes a `Measured` to stdout and ends.

It dies with its parent: a thread waits for the end of a pipe whose other end only the runner holds.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from plamo_study.measure import machine, watch
from plamo_study.measure.cells import Cell
from plamo_study.measure.rows import Measured

ORPHANED = 9


Run = Callable[..., Measured]  # takes a cell, its file's path, a callback for the stage, and paths of further files
Asked = TypeVar("Asked", bound=msgspec.Struct)


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A cell with the files it runs on, or no cell: then the worker only reports which engine it loaded."""

    cell: Cell | None = None
    path: str = ""
    others: list[str] = []  # paths of further files
    replicate: int = 0


def main(own: Mapping[str, Run] = {}) -> None:
    """Run the one job on stdin; `own`: workloads of one study, which open the model themselves."""
    serve(Job, partial(_do, own))


def serve(kind: type[Asked], do: Callable[[Asked], Measured]) -> None:
    """Read a job of this kind from stdin, do it, write what was measured to stdout, and end the process."""
    result = begin()
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=kind)
    with failing():
        measured = do(job)
    peak = measured.peak_rss_bytes or machine.peak_rss()
    measured = msgspec.structs.replace(measured, evidence=watch.collected(), peak_rss_bytes=peak)
    result.write(msgspec.json.encode(measured))
    result.flush()
    os._exit(0)  # the result is out; interpreter teardown would only cost time


def begin() -> BinaryIO:
    """The stream for the answer, the former stdout: stdout is the log from now on. The process ends with its parent."""
    os.environ["GGML_NO_BACKTRACE"] = "1"  # an assertion's text is enough; the backtrace costs seconds
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever the engine prints is log, not result
    machine.count_stops()
    machine.report_no_abort()
    threading.Thread(target=end_with_parent, args=(int(sys.argv[1]),), daemon=True).start()
    return answers


@contextmanager
def failing() -> Iterator[None]:
    """Context for the work: an exception is reported on stderr and ends the process."""
    try:
        yield
    except Exception as error:
        print(f"@error {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)  # no teardown: the engine may be in any state


def _do(own: Mapping[str, Run], job: Job) -> Measured:
    stage("start")
    if job.cell is None:
        from plamo_study.engine import library

        log: list[str] = []
        library.capture_log(log)
        return Measured(facts=library.describe() | {"gpus": library.gpus(log)})
    if run := own.get(job.cell.workload):
        stage(job.cell.workload)
        return run(job.cell, Path(job.path), stage, *map(Path, job.others))
    from plamo_study.measure import workloads

    return workloads.run(job.cell, Path(job.path), job.replicate, stage)


def stage(name: str) -> None:
    """Report on stderr which stage begins, so that a crash can be located."""
    print(f"@stage {name}", file=sys.stderr, flush=True)


def end_with_parent(lifeline: int) -> None:
    """End this process and those it started when the other end of a pipe closes, however the parent died."""
    os.read(lifeline, 1)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(ORPHANED)


if __name__ == "__main__":
    main()
