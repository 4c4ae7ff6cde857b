"""What a cell of this study does: write a small random file, ask it one question, say how far off the answers are."""

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path

from plamo_study.engine import architectures, library, quantizer
from plamo_study.engine.session import SessionConfig
from plamo_study.measure.cells import Hybrid
from plamo_study.measure.rows import Measured
from plamo_study.models.file_types import FILE_TYPES
from plamo_study.studies.hybrids import costs, questions
from plamo_study.studies.hybrids.catalogue import N_CTX
from plamo_study.studies.hybrids.tolerance import tolerance


def run(cell: Hybrid, path: Path, stage: Callable[[str], None]) -> Measured:
    """Checks: `error`, the largest relative error of any logits against the sequence alone, with its `tolerance` and
    `rounding`; `wrong`, how many sequences are beyond the tolerance; `refused`, the engine said that it cannot. Series:
    `error` by sequence, `sha256` of the file by byte.

    A refusal is no wrong answer. Where a fault is planted, the answer is valid if it shows. The question "costs" is
    that of drafts taken back where states are kept, and weighs and times these; check `bytes`: of one kept state.
    """
    log: list[str] = []
    library.capture_log(log)
    question = "kept" if cell.question == "costs" else cell.question
    n = cell.n_threads
    config = SessionConfig(N_CTX, n_threads=n, n_threads_batch=n, n_gpu_layers=cell.n_gpu_layers)
    with tempfile.TemporaryDirectory() as folder:
        stage("writing the file")
        file = architectures.write(cell.model, Path(folder), cell.shape)
        if cell.dtype != "F32":
            quantizer.quantize(file, file.with_suffix(".quantized"), FILE_TYPES[cell.dtype][0])
            file = file.with_suffix(".quantized")
        digest = hashlib.sha256(file.read_bytes()).digest()
        stage(cell.question)
        answer = questions.ask(question, cell.number, file, config, cell.seed, cell.planted, cell.longer)
        spent, weighed = {}, {}
        if cell.question == "costs" and not answer.refused:
            stage("times")
            spent = costs.times(file, cell.number, config, cell.seed)
            weighed = {"bytes": costs.bytes_each(file, cell.number, config, log)}
    errors, refused = list(answer.error.values()), bool(answer.refused)
    limit = tolerance(question, answer.rounding, cell.dtype, gpu=cell.n_gpu_layers != 0)
    wrong = sum(error > limit for error in errors)
    checks: dict[str, float | bool] = {"refused": refused, "rounding": answer.rounding, "tolerance": limit}
    checks |= weighed | ({"error": max(errors), "wrong": float(wrong)} if errors else {})
    series = spent | {"error": errors, "sha256": [float(byte) for byte in digest]}
    return Measured(checks=checks, series=series, valid=refused or bool(wrong) == cell.planted)


RUNS = {Hybrid: run}
