"""What a cell on a small random file does: ask the engine one question, measure how far off it is and what it costs."""

import hashlib
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from llama_meter.cells import Hybrid
from llama_meter.engine import library, quantizer
from llama_meter.engine.session import Session, SessionConfig
from llama_meter.measure import watch
from llama_meter.models.file_types import FILE_TYPES
from llama_meter.rows import Measured
from llama_meter.workloads import architectures, hybrid_questions
from llama_meter.workloads.architectures import N_CTX, tolerance


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
        answer = hybrid_questions.ask(question, cell.number, file, config, cell.seed, cell.planted, cell.longer)
        spent, weighed = {}, {}
        if cell.question == "costs" and not answer.refused:
            stage("times")
            spent = times(file, cell.number, config, cell.seed)
            weighed = {"bytes": bytes_each(file, cell.number, config, log)}
    errors, refused = list(answer.error.values()), bool(answer.refused)
    limit = tolerance(question, answer.rounding, cell.dtype, gpu=cell.n_gpu_layers != 0)
    wrong = sum(error > limit for error in errors)
    checks: dict[str, float | bool] = {"refused": refused, "rounding": answer.rounding, "tolerance": limit}
    checks |= weighed | ({"error": max(errors), "wrong": float(wrong)} if errors else {})
    series = spent | {"error": errors, "sha256": [float(byte) for byte in digest]}
    return Measured(checks=checks, series=series, valid=refused or bool(wrong) == cell.planted)


RUNS = {Hybrid: run}

SLOTS = 64  # of the contexts that are weighed: the engine's log rounds to a hundredth of a MiB
PROMPT, CALLS, ROUNDS = 24, 16, 12  # tokens; timed calls of a context in a turn, and turns
SIZE = re.compile(r"llama_memory_recurrent: size = +([\d.]+) MiB")
MIB = 1 << 20


def bytes_each(path: Path, number: int, config: SessionConfig, log: Sequence[str]) -> float:
    """Bytes that a slot takes more for each of `number` kept states, by the engine's log; 0 where it keeps none."""
    sizes = []
    for n_states in (0, number):
        start = len(log)
        with Session(path, replace(config, n_seq_max=SLOTS, n_rs_seq=n_states)):
            matches = SIZE.findall("".join(log[start:]))
        sizes.append(sum(map(float, matches)) * MIB)
    return (sizes[1] - sizes[0]) / (SLOTS * number)


def times(path: Path, number: int, config: SessionConfig, seed: int) -> dict[str, list[float]]:
    """Nanoseconds of calls: "step" of one token, "draft" of one and `number` more, and both in a context that keeps.

    Turns of the two contexts alternate, and so does which of them is first. The first turns are not counted.
    """
    keeping = replace(config, n_rs_seq=number)
    series: dict[str, list[float]] = {f"{what}{suffix}": [] for what in ("step", "draft") for suffix in ("", " kept")}
    with Session(path, config) as plain, Session(path, keeping) as other:
        tokens = np.random.default_rng(seed).integers(0, plain.n_vocab, N_CTX, dtype=np.int32)
        with watch.timed():
            for turn in range(-1, ROUNDS):
                for what, n in (("step", 1), ("draft", 1 + number)):
                    both = (("", plain), (" kept", other))
                    for suffix, session in both if turn % 2 else both[::-1]:
                        spent = _calls(session, tokens, n)
                        if turn >= 0:
                            series[what + suffix] += spent
    return series


def _calls(session: Session, tokens: np.ndarray, n: int) -> list[float]:
    """Nanoseconds of calls of `n` tokens each behind a prompt."""
    session.clear()
    session.evaluate([(0, tokens[:PROMPT])])
    spent = []
    for at in range(PROMPT, PROMPT + n * CALLS, n):
        start = time.perf_counter_ns()
        session.evaluate([(0, tokens[at : at + n])])
        spent.append(float(time.perf_counter_ns() - start))
    return spent
