"""One cell measured once, outside of any study."""

from pathlib import Path

from plamo_study.errors import StudyError
from plamo_study.measure.cells import Cell
from plamo_study.measure.process import work
from plamo_study.measure.rows import Measured
from plamo_study.measure.worker import Job

LIMIT_S = 600.0


def measured(cell: Cell, path: Path, replicate: int = 0) -> Measured:
    """A worker's measurement of a cell; StudyError when the worker ended badly."""
    outcome = work(Job(cell=cell, path=str(path), replicate=replicate), LIMIT_S)
    if outcome.status != "ok":
        why = f"{outcome.status}: {outcome.failure.message if outcome.failure else ''}"
        raise StudyError("selfcheck", f"its worker ended badly ({why})", "python tools/selfcheck.py --scale mini")
    return outcome.measured
