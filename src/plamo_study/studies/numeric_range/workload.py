"""What a cell of this study does: probe a file, plant amplitudes in it, or have it lose its rotation."""

from collections.abc import Callable
from pathlib import Path

from plamo_study.engine import library
from plamo_study.measure import range_probe
from plamo_study.measure.cells import PLANTED, ROTATION, Ranges
from plamo_study.measure.rows import Measured
from plamo_study.studies.numeric_range import planting, rotation


def run(cell: Ranges, path: Path, stage: Callable[[str], None]) -> Measured:
    """Do what the cell's label asks for, on the file at `path`; a text, or random tokens where the cell names none."""
    library.capture_log([])
    if cell.mode == ROTATION:
        return rotation.run(cell, stage)
    if cell.mode.startswith(PLANTED):
        return planting.run(cell, path, cell.mode.removeprefix(PLANTED), stage)
    return range_probe.probe(cell, path, stage)


RUNS = {Ranges: run}
