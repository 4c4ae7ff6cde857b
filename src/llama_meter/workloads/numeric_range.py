"""What a cell of this study does: probe a file, plant amplitudes in it, or have it lose its rotation."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from llama_meter.cells import PLANTED, ROTATION, Ranges
from llama_meter.engine import library
from llama_meter.engine.session import Session
from llama_meter.measure.tolerance import tolerance
from llama_meter.models import registry, synthetic
from llama_meter.oracle.compare import relative_error
from llama_meter.rows import Measured
from llama_meter.workloads import planting, range_probe


def run(cell: Ranges, path: Path, stage: Callable[[str], None]) -> Measured:
    """Do what the cell's label asks for, on the file at `path`; a text, or random tokens where the cell names none."""
    library.capture_log([])
    if cell.mode == ROTATION:
        return _rotation(cell, stage)
    if cell.mode.startswith(PLANTED):
        return planting.run(cell, path, cell.mode.removeprefix(PLANTED), stage)
    return range_probe.probe(cell, path, stage)


def _rotation(cell: Ranges, stage: Callable[[str], None]) -> Measured:
    """A file that loses its rotary positions against the same file with them: what does this backend make of it (D1)?

    The CPU never returns from such a file, and its row is a hang. Checks: `error`, of its last logits against the right
    file's; `rounding`, of the right file one token at a time against its prompt at once.
    """
    spec = registry.spec(cell.model, cell.scale)
    with tempfile.TemporaryDirectory() as folder:
        files = {
            lost: synthetic.write(spec, cell.dtype, Path(folder) / f"{lost}.gguf", head_count_array=lost)
            for lost in (False, True)
        }
        stage("right file")
        whole, stepped = (_logits(cell, files[False], size) for size in (cell.n_prompt, 1))
        stage("lost rotation")
        error = relative_error(_logits(cell, files[True], cell.n_prompt), whole)
    rounding, within = relative_error(stepped, whole), error <= tolerance(cell)
    checks: dict[str, float | bool] = {"error": error, "rounding": rounding}
    return Measured(checks=checks, valid=within, n_evaluated=3 * cell.n_prompt)


def _logits(cell: Ranges, path: Path, size: int) -> np.ndarray:
    """The logits behind the cell's tokens, evaluated so many at a time."""
    config = range_probe.session_config(msgspec.structs.replace(cell, n_gen=0))
    with Session(path, config) as model:
        tokens = range_probe.tokens_of(cell, model)[: cell.n_prompt]
        logits = [model.prefill({0: tokens[start : start + size]})[0][-1] for start in range(0, len(tokens), size)]
        return logits[-1]


RUNS = {Ranges: run}
