"""A prompt read by one file and its answer written by another file of the same model, for every pair of types.

The state of a sequence does not depend on the type of the weights. The reader evaluates a prompt without its last
token; the writer takes the state, evaluates that token and the text's next ones, and so predicts every written token.
The reference is one undivided pass of the file `dtype`: a pair of it with itself shows what dividing alone changes.

Series, one number per text, of each pair "A>B" (read by A, written by B): sums over the written tokens as in the study
of quality, `near` and `far` (sums of KLD over the first and the last `STEP` tokens), and `same_first`. `distance/A>B`:
KLD of every `STEP` tokens, the mean a token over all texts.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from llama_meter.cells import Handover
from llama_meter.engine import library
from llama_meter.engine.session import EngineError, Session
from llama_meter.measure import texts
from llama_meter.measure.tolerance import tolerance
from llama_meter.oracle.compare import relative_error
from llama_meter.rows import Measured, passed
from llama_meter.workloads import divergence, quality

STEP = 8  # written tokens that are one distance from the hand-over
UNDIVIDED = "undivided"
clock = time.perf_counter_ns


def run(cell: Handover, path: Path, stage: Callable[[str], None], stranger: Path) -> Measured:
    """Evaluate `n_chunks` texts with every pair of files, then plant states that must not pass."""
    library.capture_log([])
    names = (cell.dtype, *cell.candidates)
    sums: quality.Sums = {}
    first = np.empty(0)  # logits of the first text in one pass
    distances: dict[str, list[np.ndarray]] = {}
    samples: list[int] = []
    identical, finite, error = True, True, 0.0
    with ExitStack() as stack:
        config = quality.config(cell, cell.n_ctx + cell.n_gen)
        sessions = {cell.dtype: stack.enter_context(Session(path, config))}
        for name in cell.candidates:
            sessions[name] = stack.enter_context(Session(quality.candidate_path(cell, path, name), config))
        reference = sessions[cell.dtype]
        tokens = reference.tokenize(texts.planned(cell.text, cell.text_sha256))
        chunks = texts.chunks(tokens, cell.n_ctx + cell.n_gen, cell.n_chunks, reference.bos)
        for number, chunk in enumerate(chunks):
            stage(f"text {number + 1} of {len(chunks)}")
            start, targets = clock(), chunk[cell.n_ctx :]
            whole = reference.score(chunk, cell.n_ctx - 1).copy()
            first = whole if number == 0 else first
            log_p = divergence.log_softmax(whole)
            nll = divergence.nll(log_p, targets)
            quality.add(sums, {"tokens": len(targets), f"nll/{UNDIVIDED}": nll.sum()})
            for reader in names:
                state = read(sessions[reader], chunk[: cell.n_ctx - 1])
                for writer in names:
                    pair, session = f"{reader}>{writer}", sessions[writer]
                    take(session, state, cell.n_ctx - 1)
                    identical &= session.get_state(0) == state
                    logits = written(session, chunk, cell.n_ctx)
                    finite &= bool(np.isfinite(logits).all())
                    if reader == writer == cell.dtype:
                        error = max(error, relative_error(logits, whole))
                    found = quality.divergences(log_p, logits, targets)
                    quality.add(sums, _sums(pair, found))
                    distances.setdefault(pair, []).append(found[:, 1].reshape(-1, STEP).mean(axis=1))
            samples.append(clock() - start)
        stage("planted states")
        planted = _by_steps(cell, reference, chunks[0], first) | _planted(cell, reference, stranger, chunks)
    series = {f"distance/{pair}": [quality.short(v) for v in np.mean(of, axis=0)] for pair, of in distances.items()}
    checks: dict[str, float | bool] = {"undivided_error": error, "undivided": error <= tolerance(cell)}
    checks |= {"state_identical": identical, "finite": finite} | planted
    return Measured(
        samples_ns=[samples],
        n_evaluated=len(chunks) * len(names) * (cell.n_ctx - 1 + len(names) * cell.n_gen),
        checks=checks,
        series=sums | series,
        valid=passed(checks),
    )


def read(session: Session, prompt: np.ndarray) -> bytes:
    """The state of a sequence that holds a prompt."""
    session.clear()
    session.prefill({0: prompt})
    return session.get_state(0)


def take(session: Session, state: bytes, n_past: int) -> None:
    """Put a state into an empty context."""
    session.clear()
    session.set_state(0, state, n_past)


def written(session: Session, chunk: np.ndarray, n_prompt: int) -> np.ndarray:
    """Logits (n_gen, n_vocab) of a text's tokens from `n_prompt` on; the context holds all but the prompt's last."""
    return session.verify({0: chunk[n_prompt - 1 : -1]})[0].copy()


def refuses(session: Session, state: bytes, n_past: int) -> bool:
    """Whether the engine refuses a state. The context is empty afterwards."""
    try:
        take(session, state, n_past)
    except EngineError:
        return True
    finally:
        session.clear()
    return False


def _sums(pair: str, found: np.ndarray) -> dict[str, float]:
    """A text's sums of one pair, from `quality.divergences` of its tokens."""
    nll, kld, same, _ = found.sum(axis=0)
    values = {"kld": kld, "near": found[:STEP, 1].sum(), "far": found[-STEP:, 1].sum(), "nll": nll}
    values |= {"same_top": int(same), "same_first": int(found[0, 2])}
    return {f"{what}/{pair}": value for what, value in values.items()}


def _by_steps(cell: Handover, session: Session, chunk: np.ndarray, whole: np.ndarray) -> dict[str, float | bool]:
    """A second path: one text written token by token after the hand-over, as a server does, against its one pass."""
    take(session, read(session, chunk[: cell.n_ctx - 1]), cell.n_ctx - 1)
    rows = []
    for token in chunk[cell.n_ctx - 1 : -1].tolist():
        session.decode({0: token})
        rows.append(session.logits())
    error = relative_error(np.stack(rows), whole)
    return {"second_path_error": error, "second_path": error <= tolerance(cell)}


def _planted(cell: Handover, session: Session, stranger: Path, chunks: np.ndarray) -> dict[str, float | bool]:
    """States that must not pass: another prompt's changes the logits, another model's and a cut one are refused."""
    n_past = cell.n_ctx - 1
    own, others = (read(session, chunk[:n_past]) for chunk in (chunks[0], chunks[-1]))
    answers = []
    for state in (own, others):
        take(session, state, n_past)
        answers.append(written(session, chunks[0], cell.n_ctx))
    right, other = answers
    with Session(stranger, session.config) as another:
        foreign = read(another, chunks[0][:n_past])
    error = relative_error(other, right)
    return {
        "other_prompt_error": error,
        "other_prompt": error > tolerance(cell),
        "stranger_refused": refuses(session, foreign, n_past),
        "truncated_refused": refuses(session, own[: len(own) // 2], n_past),
    }


RUNS = {Handover: run}
