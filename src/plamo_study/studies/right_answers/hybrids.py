"""What a cell on a small random file does: ask the engine one question and measure how far off its answer is."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from llama_meter.cells import Hybrid
from llama_meter.engine import library
from llama_meter.engine.session import SessionConfig
from llama_meter.models import tensors
from llama_meter.models.file_types import FILE_TYPES
from llama_meter.rows import Measured
from plamo_study.studies.right_answers import architectures, hybrid_questions
from plamo_study.studies.right_answers.architectures import N_CTX, tolerance


def run(cell: Hybrid, path: Path, stage: Callable[[str], None]) -> Measured:
    """Checks: `error`, the largest relative error of any logits against the sequence alone, with its `tolerance` and
    `rounding`; `wrong`, how many sequences are beyond the tolerance; `refused`, the engine said that it cannot. Series:
    `error` by sequence.

    A refusal is no wrong answer. Where a fault is planted, the answer is valid if it shows.
    """
    library.capture_log([])
    n = cell.n_threads
    config = SessionConfig(N_CTX, n_threads=n, n_threads_batch=n, n_gpu_layers=cell.n_gpu_layers)
    with tempfile.TemporaryDirectory() as folder:
        stage("writing the file")
        file = architectures.write(cell.model, Path(folder), cell.form)
        if cell.dtype != "F32":
            library.quantize(file, file.with_suffix(".quantized"), FILE_TYPES[cell.dtype][0])
            file = file.with_suffix(".quantized")
        digest = tensors.read_sha256(file)
        stage(cell.question)
        answer = hybrid_questions.ask(cell.question, cell.number, file, config, cell.seed, cell.planted, cell.longer)
    errors, refused = list(answer.error.values()), bool(answer.refused)
    limit = tolerance(cell.question, answer.rounding, cell.dtype, gpu=cell.n_gpu_layers != 0)
    wrong = sum(error > limit for error in errors)
    checks: dict[str, float | bool] = {"refused": refused, "rounding": answer.rounding, "tolerance": limit}
    checks |= {"error": max(errors), "wrong": float(wrong)} if errors else {}
    valid = refused or bool(wrong) == cell.planted
    return Measured(checks=checks, series={"error": errors}, file_sha256=digest, valid=valid)


RUNS = {Hybrid: run}
