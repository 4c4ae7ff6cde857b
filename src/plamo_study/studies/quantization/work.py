"""Quality of quantized files: the reference and every candidate evaluated side by side, chunk by chunk, nothing kept.

As in llama-perplexity (`--kl-divergence`) a chunk is one sequence, its second half is scored, and the definitions are
those; nothing is rounded here. One `llama_decode` takes one chunk: several would be mixed up on PLaMo 2 (mixed prompts,
D2). The reference's log-probabilities live as long as one chunk. The output is sums per chunk; statistics are computed
elsewhere.

Series, one number per chunk: `tokens` scored, and of each file NAME `nll/NAME` (sum, nats) and `not_finite/NAME`
(tokens left out of all sums); of each candidate also `kld/NAME` (sum, nats) and `same_top/NAME` (count).
"""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from llama_meter.cells import Comparison, OnModel, Quality
from llama_meter.engine import library
from llama_meter.engine.session import Session, SessionConfig
from llama_meter.measure import texts
from llama_meter.rows import Measured, passed

DIGITS = 7  # a float32 has no more

Sums = dict[str, list[float]]
clock = time.perf_counter_ns


def run(cell: Quality, path: Path, stage: Callable[[str], None]) -> Measured:
    """Evaluate the cell's text with its reference `path` and its candidates, which lie beside it."""
    library.capture_log([])
    sums: Sums = {}
    samples: list[int] = []
    with ExitStack() as stack:
        start = clock()
        opened = {}
        for name, file in files(cell, path).items():
            stage(f"load {name}")
            opened[name] = stack.enter_context(Session(file, config(cell, cell.n_ctx)))
        load_ns = clock() - start
        chunks = cut(cell, opened[cell.dtype], cell.n_ctx)
        for number, chunk in enumerate(chunks):
            stage(f"chunk {number + 1} of {len(chunks)}")
            start = clock()
            add(sums, compared(chunk, cell.n_ctx // 2, opened, cell.dtype))
            samples.append(clock() - start)
    checks: dict[str, float | bool] = {"reference_finite": not any(sums[f"not_finite/{cell.dtype}"])}
    return Measured(
        samples_ns=[samples],
        load_ns=load_ns,
        n_evaluated=chunks.size * len(opened),
        checks=checks,
        series=sums,
        valid=passed(checks),
    )


def files(cell: Comparison, path: Path) -> dict[str, Path]:
    """Every file by its type: candidates lie beside the reference, named as models/registry.py names them."""
    named = {name: path.with_name(f"{cell.model}.{cell.scale}.{name}.gguf") for name in cell.candidates}
    return {cell.dtype: path} | named


def config(cell: OnModel, n_ctx: int) -> SessionConfig:
    """A context for `n_ctx` tokens, set by the cell and otherwise as in llama-perplexity."""
    return SessionConfig.of(cell, n_ctx, n_batch=n_ctx, swa_full=False)


def cut(cell: Comparison, session: Session, n_tokens: int) -> np.ndarray:
    """The chunks of a cell's text, (n_chunks, n_tokens) int32."""
    tokens = session.tokenize(texts.read(cell.text))
    return texts.chunks(tokens, n_tokens, cell.n_chunks, session.bos)


def compared(chunk: np.ndarray, first: int, opened: Mapping[str, Session], reference: str) -> dict[str, float]:
    """A chunk's sums over its tokens from `first` + 1 on, of the reference and of all others.

    A token counts where all its numbers are finite.
    """
    targets = chunk[first + 1 :]
    log_p = log_softmax(opened[reference].score(chunk, first))
    values: dict[str, float] = {"tokens": len(targets)}
    for name, session in opened.items():
        log_q = log_p if name == reference else log_softmax(session.score(chunk, first))
        rows = {"nll": nll(log_q, targets)}
        if name != reference:
            rows |= {"kld": kl_divergence(log_p, log_q), "same_top": same_top(log_p, log_q)}
        finite = np.isfinite(list(rows.values())).all(axis=0)
        values |= {f"{what}/{name}": of_tokens[finite].sum() for what, of_tokens in rows.items()}
        values[f"not_finite/{name}"] = (~finite).sum()
    return values


def add(sums: Sums, values: Mapping[str, float]) -> None:
    """Append one chunk's numbers to their series, rounded to the digits of a float32."""
    for name, value in values.items():
        sums.setdefault(name, []).append(float(f"{value:.{DIGITS}g}"))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities (n, v) float32 of logits (n, v) float32: x - max - ln(sum(exp(x - max))), row by row."""
    with np.errstate(all="ignore"):
        shifted = np.subtract(logits, logits.max(axis=1, keepdims=True), dtype=np.float32)
        shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def nll(log_q: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Negative log-likelihood (n,) float64, nats, of the tokens (n,) that followed; NaN where logits are not finite."""
    return -np.take_along_axis(log_q, np.asarray(targets)[:, None], axis=1)[:, 0].astype(np.float64)


def kl_divergence(log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """KL(p || q) = sum(p (ln p - ln q)), (n,) float64, nats, p the reference; p = 0 adds nothing.

    llama-perplexity leaves out tokens with less than exp(-16) under the reference: each below 1.2e-7.
    """
    p = np.exp(log_p)
    with np.errstate(all="ignore"):
        terms = np.where((p == 0) & ~np.isnan(log_q), 0, p * (log_p - log_q))
    return np.asarray(terms.sum(axis=1).astype(np.float64))


def same_top(log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """Whether both give the same token the highest probability, (n,) bool; False where q is NaN."""
    top = log_q.argmax(axis=1)  # NumPy treats a NaN as the largest
    return (log_p.argmax(axis=1) == top) & ~np.isnan(np.take_along_axis(log_q, top[:, None], axis=1)[:, 0])


RUNS = {Quality: run}
