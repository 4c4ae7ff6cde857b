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

TIMES = 30.0  # tolerance: so many times the rounding of the sequence alone, but at least
LEAST = {"F32": 5e-4, "F16": 2e-3, "Q8_0": 2e-2}  # by type. Kernels at 17 slots: up to 2e-4; activations that round
AGAIN = 5.0  # times that, where keys that are kept in F16 are rotated once more


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


def tolerance(question: str, rounding: float, dtype: str = "F32", gpu: bool = False) -> float:
    """Largest relative error of logits that rounding explains.

    On a GPU, F32 counts as F16: CUDA multiplies 4 to 16 columns in TF32, whose mantissa is as short (ggml-cuda/mmf.cu).
    """
    least = LEAST["F16" if gpu and dtype == "F32" else dtype]
    return max(least, TIMES * rounding) * (AGAIN if question == "shifted" else 1)


RUNS = {Hybrid: run}
