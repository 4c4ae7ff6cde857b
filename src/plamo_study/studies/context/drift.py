"""How flash attention and the type of the KV cache change predictions, on chunks of a text.

A candidate is "FLASH/K/V", e.g. on/q8_0/q8_0; the reference is off/f16/f16, on the same file. Chunks, sums and the
names of the series are those of the quality study. Only a trained model's numbers are meaningful.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np

from llama_meter.cells import Depth
from llama_meter.engine import library
from llama_meter.engine.session import Session
from llama_meter.measure import proof, texts
from llama_meter.measure.tolerance import tolerance
from llama_meter.oracle.compare import relative_error
from llama_meter.rows import Measured, passed
from plamo_study.studies.quantization import divergence, work as quality

REFERENCE = "off/f16/f16"
clock = time.perf_counter_ns


def run(cell: Depth, path: Path, stage: Callable[[str], None]) -> Measured:
    """Evaluate `n_chunks` chunks of `n_ctx` tokens with the reference and every candidate."""
    library.capture_log([])
    sums: quality.Sums = {}
    samples: list[int] = []
    with ExitStack() as stack:
        names = (REFERENCE, *cell.caches)
        sessions = {name: stack.enter_context(_open(cell, path, name)) for name in names}
        chunks = _chunks(cell, sessions[REFERENCE])
        checks = _second_path(sessions[REFERENCE], chunks[0], cell)
        for number, chunk in enumerate(chunks):
            stage(f"chunk {number + 1} of {len(chunks)}")
            start = clock()
            _add_chunk(sums, sessions, chunk)
            samples.append(clock() - start)
    checks |= {"reference_finite": not any(sums[f"not_finite/{REFERENCE}"])}
    return Measured(
        samples_ns=[samples],
        n_evaluated=chunks.size * len(names),
        checks=checks,
        series=sums,
        valid=passed(checks),
    )


def _open(cell: Depth, path: Path, name: str) -> Session:
    flash, type_k, type_v = name.split("/")
    attention = msgspec.structs.replace(cell, flash_attn=flash, type_k=type_k, type_v=type_v)
    return Session(path, quality.config(attention, cell.n_ctx))


def _chunks(cell: Depth, session: Session) -> np.ndarray:
    text = texts.planned(cell.text, cell.text_sha256)
    return texts.chunks(session.tokenize(text), cell.n_ctx, cell.n_chunks, session.bos)


def _second_path(session: Session, chunk: np.ndarray, cell: Depth) -> dict[str, float | bool]:
    """The reference's last logits of a chunk against those of its last tokens evaluated one by one."""
    scored = session.score(chunk, len(chunk) - 2)[-1].copy()
    error = relative_error(scored, proof.by_steps(session, 0, chunk[:-1]))
    return {"second_path_error": error, "second_path": error <= tolerance(cell)}


def _add_chunk(sums: quality.Sums, sessions: dict[str, Session], chunk: np.ndarray) -> None:
    first = len(chunk) // 2
    targets = chunk[first + 1 :]
    quality.add(sums, {"tokens": len(targets)})
    log_p = divergence.log_softmax(sessions[REFERENCE].score(chunk, first))
    quality.add(sums, quality.reference_sums(REFERENCE, divergence.nll(log_p, targets)))
    for name, session in sessions.items():
        if name != REFERENCE:
            rows = quality.divergences(log_p, session.score(chunk, first), targets)
            quality.add(sums, quality.candidate_sums(name, rows))
