"""What tests of many studies build alike: a cell measured as a worker measures it, and rows that took longer."""

from pathlib import Path

import pandas as pd

from llama_meter.cells import Cell
from llama_meter.measure.process import work
from llama_meter.measure.worker import Job
from llama_meter.models import recipes
from llama_meter.rows import Measured


def measured(cell: Cell, path: Path | None = None, workload: str = "", right: bool = True) -> Measured:
    """What a process of its own measures of a cell, on its file unless another is named; right unless said not."""
    outcome = work(Job(cell=cell, path=str(path or recipes.model_path(*cell.files[0]))), 100.0, workload=workload)
    assert outcome.status == "ok", outcome.failure
    assert outcome.measured
    assert outcome.measured.valid or not right, outcome.measured.checks
    return outcome.measured


def longer(rows: pd.DataFrame, chosen: pd.Series, factor: float) -> pd.DataFrame:
    """The rows with every sample (ns) of the chosen ones `factor` times as long."""
    samples = rows["samples_ns"].map(lambda repetitions: [[ns * factor for ns in each] for each in repetitions])
    return rows.assign(samples_ns=rows["samples_ns"].mask(chosen, samples))
