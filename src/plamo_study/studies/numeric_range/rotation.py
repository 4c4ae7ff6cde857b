"""A file that loses its rotary positions against the same file with them: what does this backend make of it (D1)?

The CPU never returns from such a file, and its row is a hang. Checks: `error`, of its last logits against the right
file's; `rounding`, of the right file one token at a time against its prompt at once.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from plamo_study.engine.ranges import InputRanges
from plamo_study.measure import range_probe
from plamo_study.measure.cells import Ranges
from plamo_study.measure.rows import Measured
from plamo_study.measure.tolerance import tolerance
from plamo_study.models import registry, synthetic
from plamo_study.oracle.compare import relative_error


def run(cell: Ranges, stage: Callable[[str], None]) -> Measured:
    """Write both files with random weights, and evaluate the cell's tokens on each."""
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
    with InputRanges(path, config, watch=False) as model:
        tokens = range_probe.tokens_of(cell, model)[: cell.n_prompt]
        for start in range(0, len(tokens), size):
            model.evaluate(tokens[start : start + size])
        return model.logits(size)[-1]
