"""Prefill and decode times at growing depth, and the loop without a cache.

The ladder fills the memory to each depth with copies of one computed part (engine/states.py) and times there one part
of a prompt and a few decode steps. The walk evaluates a whole prompt part by part and times every one, as a check of
the ladder. A part is one micro-batch. Depths exceed a model's training context: the cost of a step does not depend on
it, but predictions do, so a ladder measures no quality.

Every timed part is proved on another path. In the ladder its first tokens are those of the decode steps from the same
state, so one of its rows must match theirs; the deepest part is evaluated once more in two calls. So are the walk's
first and last part. Of the loop, each method is the other's second path.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from llama_meter.cells import FEW, WALK, WHOLE_WINDOW, Depth, Naive
from llama_meter.engine import library, states
from llama_meter.engine.session import Session, SessionConfig, random_tokens
from llama_meter.measure import phases, watch
from llama_meter.measure.machine import peak_rss
from llama_meter.measure.tolerance import tolerance
from llama_meter.oracle.compare import relative_error
from llama_meter.rows import Measured, passed

BUFFERS = {"kv_bytes": "KV", "state_bytes": "RS", "compute_bytes": "compute"}  # by check, the engine's word
WARM_STEPS = 1  # decode steps at each depth before the timed ones
Stage = Callable[[str], None]
clock = time.perf_counter_ns


@dataclass
class Timed:
    """Results of a process: (depth, nanoseconds) of every part and step, relative errors, tokens evaluated."""

    parts: list[tuple[int, int]] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    evaluated: int = 0
    due: int = 0


def depths(cell: Depth) -> tuple[int, ...]:
    """Depths of a ladder: 0, its rungs or else one part and doublings, n_ctx; first and last alone for other ways."""
    if cell.ladder in (FEW, WHOLE_WINDOW) or cell.rungs:
        return tuple(dict.fromkeys((0, *cell.rungs, cell.n_ctx)))
    doubled = [cell.n_ubatch << n for n in range(cell.n_ctx.bit_length())]
    return (0, *(depth for depth in doubled if depth < cell.n_ctx), cell.n_ctx)


def run(cell: Depth, path: Path, stage: Stage) -> Measured:
    """Do one cell. `samples_ns`: the parts, then the steps; the series give the depth of each."""
    log: list[str] = []
    library.capture_log(log)
    room = cell.n_ctx + cell.n_ubatch + cell.n_gen + WARM_STEPS
    start = clock()
    with Session(path, SessionConfig.of(cell, room, swa_full=cell.ladder == WHOLE_WINDOW)) as session:
        load_ns, cells = clock() - start, states.cells(log)
        tokens = random_tokens(cell.seed, session.n_vocab, room)
        stage("warm-up")
        start, timed = clock(), Timed()
        session.clear()
        expected = _in_halves(session, tokens[: cell.n_ubatch])
        warmup, resident, seed = clock() - start, peak_rss(), session.get_state(0)
        stage(cell.ladder or "ladder")
        if cell.ladder == WALK:
            _walk(cell, session, tokens, expected, timed)
        else:
            for _ in range(cell.repetitions):
                _ladder(cell, session, tokens, expected, (seed, cells), timed)
    checks = _second_path(cell, max(timed.errors)) | {"evaluated": timed.evaluated == timed.due}
    return Measured(
        samples_ns=[[ns for _, ns in timed.parts], [ns for _, ns in timed.steps]],
        warmup_ns=[warmup],
        load_ns=load_ns,
        n_evaluated=timed.evaluated,
        checks=checks | {name: sum(library.buffers(kind).values()) for name, kind in BUFFERS.items()},
        series={"part_depth": _depths(timed.parts), "step_depth": _depths(timed.steps)},
        valid=passed(checks),
        peak_rss_bytes=resident,
    )


def _second_path(cell: Depth | Naive, error: float) -> dict[str, float | bool]:
    return {"second_path_error": error, "second_path": error <= tolerance(cell)}


def _in_halves(session: Session, tokens: np.ndarray) -> np.ndarray:
    """Logits after the next `tokens`, in two calls."""
    session.prefill({0: tokens[: len(tokens) // 2]})
    return session.prefill({0: tokens[len(tokens) // 2 :]})[0][-1]


def _ladder(
    cell: Depth,
    session: Session,
    tokens: np.ndarray,
    expected: np.ndarray,
    source: tuple[bytes, tuple[int, ...]],
    timed: Timed,
) -> None:
    part, n_steps = cell.n_ubatch, cell.n_gen + WARM_STEPS
    for depth in depths(cell):
        state = states.filled(session, source[0], depth, source[1]) if depth else b""
        new = tokens[part : 2 * part] if depth else tokens[:part]
        _restore(session, state, depth)
        early, last = _time_part(session, new, (n_steps - 1, part - 1), timed)
        _restore(session, state, depth)
        logits = _time_steps(session, new[:n_steps], timed)
        _restore(session, state, depth)
        timed.errors += [relative_error(logits, one) for one in (early, session.prefill({0: new[:n_steps]})[0][-1])]
        if depth == cell.n_ctx:
            _restore(session, state, depth)
            expected = _in_halves(session, new)
        if depth in (0, cell.n_ctx):
            timed.errors.append(relative_error(last, expected))
    timed.due += len(depths(cell)) * (part + n_steps)


def _walk(cell: Depth, session: Session, tokens: np.ndarray, expected: np.ndarray, timed: Timed) -> None:
    session.clear()
    part, before = cell.n_ubatch, b""
    for depth in range(0, cell.n_ctx, part):
        before = session.get_state(0) if depth == cell.n_ctx - part else before
        (last,) = _time_part(session, tokens[depth : depth + part], (part - 1,), timed)
        if depth == 0:
            timed.errors.append(relative_error(last, expected))
    state, new = session.get_state(0), tokens[cell.n_ctx : cell.n_ctx + cell.n_gen + WARM_STEPS]
    logits = _time_steps(session, new, timed)
    _restore(session, state, cell.n_ctx)
    timed.errors.append(relative_error(logits, session.prefill({0: new})[0][-1]))
    _restore(session, before, cell.n_ctx - part)
    timed.errors.append(relative_error(last, _in_halves(session, tokens[cell.n_ctx - part : cell.n_ctx])))
    timed.due += cell.n_ctx + len(new)


def _restore(session: Session, state: bytes, depth: int) -> None:
    session.clear()
    if depth:
        session.set_state(0, state, depth)


def _time_part(session: Session, tokens: np.ndarray, rows: tuple[int, ...], timed: Timed) -> np.ndarray:
    """One part of a prompt in one call; the logits at some of its tokens, (n_rows, n_vocab)."""
    depth, before = session.n_past[0], session.n_evaluated
    with watch.timed():
        start = clock()
        logits = session.evaluate([(0, tokens)], list(rows))[0].copy()
        timed.parts.append((depth, clock() - start))
    timed.evaluated += session.n_evaluated - before
    return logits


def _time_steps(session: Session, tokens: np.ndarray, timed: Timed) -> np.ndarray:
    """A decode step for each token; the logits after the last one."""
    first, before = session.n_past[0], session.n_evaluated
    with watch.timed():
        taken = phases.time_steps(session, [{0: token} for token in tokens.tolist()])
    timed.steps += [(first + n, ns) for n, ns in enumerate(taken)][WARM_STEPS:]
    timed.evaluated += session.n_evaluated - before
    return session.logits()


def _depths(samples: list[tuple[int, int]]) -> list[float]:
    return [float(depth) for depth, _ in samples]


def loop(cell: Naive, path: Path, stage: Stage) -> Measured:
    """Evaluate n_gen output tokens after n_prompt, the whole text again for each and then with the cache.

    `samples_ns`: per output token without the cache, then with it. The first one is the prompt's prefill in both.
    """
    library.capture_log([])
    room = cell.n_prompt + cell.n_gen
    start = clock()
    with Session(path, SessionConfig.of(cell, room, swa_full=False)) as session:
        load_ns = clock() - start
        tokens = random_tokens(cell.seed, session.n_vocab, room - 1)
        stage("warm-up")
        start = clock()
        session.prefill({0: tokens[: cell.n_prompt]})
        warmup = clock() - start
        stage("cached")
        cached, expected, n_cached = _outputs(cell, session, tokens, cached=True)
        stage("naive")
        naive, logits, n_naive = _outputs(cell, session, tokens, cached=False)
    checks = _second_path(cell, relative_error(logits, expected))
    checks["evaluated"] = (n_cached, n_naive) == (room - 1, sum(range(cell.n_prompt, room)))
    return Measured(
        samples_ns=[naive, cached],
        warmup_ns=[warmup],
        load_ns=load_ns,
        n_evaluated=n_cached + n_naive,
        checks=checks,
        valid=passed(checks),
    )


def _outputs(cell: Naive, session: Session, tokens: np.ndarray, cached: bool) -> tuple[list[int], np.ndarray, int]:
    """Nanoseconds of each output token, its logits (n_gen, n_vocab), and the number of tokens evaluated."""
    taken, rows, evaluated = list[int](), list[np.ndarray](), 0
    session.clear()
    with watch.timed():
        for end in range(cell.n_prompt, cell.n_prompt + cell.n_gen):
            start = clock()
            if cached and rows:
                session.decode({0: int(tokens[end - 1])})
                rows.append(session.logits())
            else:
                evaluated += session.n_evaluated
                session.clear()
                rows.append(session.prefill({0: tokens[:end]})[0][-1])
            taken.append(clock() - start)
    return taken, np.stack(rows), evaluated + session.n_evaluated


RUNS = {Depth: run, Naive: loop}
