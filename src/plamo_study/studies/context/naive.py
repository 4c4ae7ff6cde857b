"""The loop without a cache: every output token evaluates the whole text again, beside the same tokens with the cache.

Both methods see the same tokens, so their logits must agree token by token: each is the other's second path.
"""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from llama_meter.cells import Depth, Naive
from llama_meter.engine import library
from llama_meter.engine.session import Session
from llama_meter.limits import FIRST_TOKEN
from llama_meter.measure import sessions, watch
from llama_meter.measure.tolerance import tolerance
from llama_meter.oracle.compare import relative_error
from llama_meter.rows import Measured, passed

clock = time.perf_counter_ns


def run(cell: Naive, path: Path, stage: Callable[[str], None]) -> Measured:
    """Evaluate n_gen output tokens after n_prompt with both methods. `samples_ns`: per output token naive, then cached.

    The first output token is the prompt's prefill in both.
    """
    library.capture_log([])
    start = clock()
    with Session(path, sessions.config(cell, cell.n_prompt + cell.n_gen, swa_full=False)) as session:
        load_ns = clock() - start
        tokens = draw(cell, session.n_vocab, cell.n_prompt + cell.n_gen - 1)
        stage("warm-up")
        start = clock()
        session.prefill({0: tokens[: cell.n_prompt]})
        warmup = clock() - start
        stage("cached")
        with watch.timed():
            cached, expected, n_cached = _cached(cell, session, tokens)
        stage("naive")
        with watch.timed():
            naive, logits, n_naive = _naive(cell, session, tokens)
    errors = [relative_error(row, other) for row, other in zip(logits, expected, strict=True)]
    due = (cell.n_prompt + cell.n_gen - 1, sum(range(cell.n_prompt, cell.n_prompt + cell.n_gen)))
    checks: dict[str, float | bool] = {"second_path_error": max(errors)}
    checks |= {"second_path": max(errors) <= tolerance(cell)}
    checks |= {"finite": all(bool(np.isfinite(row).all()) for row in (*logits, *expected))}
    checks |= {"evaluated": (n_cached, n_naive) == due}
    return Measured(
        samples_ns=[naive, cached],
        warmup_ns=[warmup],
        load_ns=load_ns,
        n_evaluated=n_cached + n_naive,
        checks=checks | {"naive_tokens": float(n_naive), "cached_tokens": float(n_cached)},
        series={"error": errors},
        valid=passed(checks),
    )


def _cached(cell: Naive, session: Session, tokens: np.ndarray) -> tuple[list[int], list[np.ndarray], int]:
    """Nanoseconds and logits of each output token, every token evaluated once; and the number evaluated."""
    session.clear()
    start = clock()
    logits = [session.prefill({0: tokens[: cell.n_prompt]})[0][-1]]
    taken = [clock() - start]
    for token in tokens[cell.n_prompt :].tolist():
        start = clock()
        session.decode({0: token})
        taken.append(clock() - start)
        logits.append(session.logits())
    return taken, logits, session.n_evaluated


def _naive(cell: Naive, session: Session, tokens: np.ndarray) -> tuple[list[int], list[np.ndarray], int]:
    """The same with an empty memory before every output token."""
    taken, logits, evaluated = [], [], 0
    for end in range(cell.n_prompt, cell.n_prompt + cell.n_gen):
        start = clock()
        session.clear()
        logits.append(session.prefill({0: tokens[:end]})[0][-1])
        taken.append(clock() - start)
        evaluated += session.n_evaluated
    return taken, logits, evaluated


def draw(cell: Depth | Naive, n_vocab: int, n: int) -> np.ndarray:
    """Random tokens (n,) int32: speed does not depend on them."""
    return np.random.default_rng(cell.seed).integers(FIRST_TOKEN, n_vocab, n, dtype=np.int32)
