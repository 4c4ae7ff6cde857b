"""The process of one measurement: it reads a job from stdin, writes a `Measured` to stdout and ends.

    python -m llama_meter.measure.worker [WORKLOAD]

WORKLOAD: a module whose `RUNS` names, for each type of cell or job of its own, the function that does it.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from llama_meter.cells import AnyCell, Cell
from llama_meter.measure import machine, watch
from llama_meter.rows import Measured

USUAL = "llama_meter.measure.phases"  # does what no plan names a module for

Run = Callable[..., Measured]  # takes a cell, its file's path, `stage`, and paths of further files; or a job alone
Runs = Mapping[type[msgspec.Struct], Run]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A cell with the files it runs on, or no cell: then the worker only reports which engine it loaded."""

    cell: Cell | None = None
    path: str = ""
    others: list[str] = []  # paths of further files
    replicate: int = 0


def main() -> None:
    """Do the one job on stdin, write what was measured to stdout, and end the process."""
    answers = begin()
    with failing():
        measured = _do(sys.stdin.buffer.readline(), "".join(sys.argv[1:]))
    peak = measured.peak_rss_bytes or machine.peak_rss()
    measured = msgspec.structs.replace(measured, evidence=watch.collected(), peak_rss_bytes=peak)
    library: Any = sys.modules.get("llama_meter.engine.library")
    if library:
        logged = {"buffer_bytes": library.buffer_bytes(), "flash_attention": library.flash_attention()}
        measured = msgspec.structs.replace(measured, splits=measured.splits or library.splits(), **logged)
    answers.write(msgspec.json.encode(measured))
    answers.flush()
    os._exit(0)  # the result is out; interpreter teardown would only cost time


def begin() -> BinaryIO:
    """The stream for the answer, the former stdout: stdout is the log from now on."""
    os.environ["GGML_NO_BACKTRACE"] = "1"  # an assertion's text is enough; the backtrace costs seconds
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever the engine prints is log, not result
    machine.count_stops()
    return answers


@contextmanager
def failing() -> Iterator[None]:
    """Context for the work: an exception is reported on stderr and ends the process."""
    try:
        yield
    except Exception as error:
        message = str(error).replace("\n  mend: ", "; mend: ")  # a StudyError's, on the one line that is kept
        print(f"@error {type(error).__name__}: {message}", file=sys.stderr, flush=True)
        os._exit(1)  # no teardown: the engine may be in any state


def _do(line: bytes, workload: str) -> Measured:
    stage("start")
    runs: Runs = import_module(workload).RUNS if workload else {}
    if kind := next((kind for kind in runs if not issubclass(kind, AnyCell)), None):  # a module does cells, or one job
        return runs[kind](msgspec.json.decode(line, type=kind))
    job = msgspec.json.decode(line, type=Job)
    if job.cell is None:
        from llama_meter.engine import library  # a simulation does without an engine

        library.capture_log([])
        return Measured(facts=library.describe() | {"gpus": library.gpus()})
    if run := runs.get(type(job.cell)):
        stage(job.cell.workload)
        return run(job.cell, Path(job.path), stage, *map(Path, job.others))
    usual = import_module(USUAL)  # it loads the engine and NumPy; a simulation does without both
    done: Measured = usual.run(job.cell, Path(job.path), job.replicate, stage)
    return done


def stage(name: str) -> None:
    """Report on stderr which stage begins, so that a crash can be located."""
    print(f"@stage {name}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
