"""Prefill and decode times at growing depth, in one process: a ladder of depths, or a walk that computes every token.

The ladder fills the memory to each depth with copies of one computed part (engine/filling.py) and times there one part
of a prompt and a few decode steps. The walk evaluates a whole prompt part by part and times every one, as a check of
the ladder. A part is one micro-batch. Depths exceed a model's training context: the cost of a step does not depend on
it, but predictions do, so nothing here measures quality, except cells with a `text` (drift.py).

Every timed part is proved on another path. In the ladder its first tokens are those of the decode steps from the same
state, so one of its rows must match theirs; the deepest part is evaluated once more in two calls. The walk's
last part is evaluated once more in two calls, and at mini the whole walk with all ends of micro-batches shifted.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from llama_meter.cells import FEW, WALK, WHOLE_WINDOW, Depth, Naive
from llama_meter.engine import filling, library
from llama_meter.engine.session import Session, SessionConfig
from llama_meter.measure import sessions, watch
from llama_meter.measure.machine import peak_rss
from llama_meter.measure.tolerance import tolerance
from llama_meter.oracle.compare import relative_error
from llama_meter.rows import Measured, passed
from plamo_study.studies.context import drift, naive

WARM_STEPS = 1  # decode steps at each depth before the timed ones
clock = time.perf_counter_ns


@dataclass
class Timed:
    """Results of a process: (depth, nanoseconds) of every part and step, relative errors, tokens evaluated."""

    parts: list[tuple[int, int]] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    finite: bool = True
    evaluated: int = 0
    due: int = 0


def depths(cell: Depth) -> tuple[int, ...]:
    """Depths of a ladder: 0, its rungs or else one part and doublings, n_ctx; first and last alone for other ways."""
    if cell.ladder in (FEW, WHOLE_WINDOW) or cell.rungs:
        return tuple(dict.fromkeys((0, *cell.rungs, cell.n_ctx)))
    doubled = [cell.n_ubatch << n for n in range(cell.n_ctx.bit_length())]
    return (0, *(depth for depth in doubled if depth < cell.n_ctx), cell.n_ctx)


def config(cell: Depth, room: int) -> SessionConfig:
    """The session of a cell: room for its tokens; sliding layers keep their window unless the way says otherwise."""
    return sessions.config(cell, room, swa_full=cell.ladder == WHOLE_WINDOW)


def run(cell: Depth, path: Path, stage: Callable[[str], None]) -> Measured:
    """Do one cell. `samples_ns`: the parts, then the steps; the series give the depth of each."""
    if cell.text:
        return drift.run(cell, path, stage)
    log: list[str] = []
    library.capture_log(log)
    start = clock()
    with Session(path, config(cell, cell.n_ctx + cell.n_ubatch + cell.n_gen + WARM_STEPS)) as session:
        load_ns, taken = clock() - start, filling.memory(log)
        tokens = naive.draw(cell, session.n_vocab, cell.n_ctx + cell.n_ubatch + cell.n_gen + WARM_STEPS)
        stage("warm-up")
        start, timed = clock(), Timed()
        session.clear()
        expected = _in_halves(session, tokens[: cell.n_ubatch])
        warmup, resident, seed = clock() - start, peak_rss(), session.get_state(0)
        if cell.ladder == WALK:
            _walk(cell, session, tokens, expected, timed, stage)
        else:
            for _ in range(cell.repetitions):
                _ladder(cell, session, tokens, expected, (seed, taken.cells), timed, stage)
    checks: dict[str, float | bool] = {"second_path_error": max(timed.errors)}
    checks |= {"second_path": max(timed.errors) <= tolerance(cell), "finite": timed.finite}
    checks |= {"evaluated": timed.evaluated == timed.due}
    return Measured(
        samples_ns=[[ns for _, ns in timed.parts], [ns for _, ns in timed.steps]],
        warmup_ns=[warmup],
        load_ns=load_ns,
        n_evaluated=timed.evaluated,
        checks=checks | {"kv_bytes": taken.kv, "state_bytes": taken.state, "compute_bytes": taken.compute},
        series={"part_depth": _depths(timed.parts), "step_depth": _depths(timed.steps)},
        valid=passed(checks),
        peak_rss_bytes=resident,
    )


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
    stage: Callable[[str], None],
) -> None:
    part, n_steps = cell.n_ubatch, cell.n_gen + WARM_STEPS
    asked = (n_steps - 1, part - 1)
    for depth in depths(cell):
        stage(f"depth {depth}")
        state = filling.filled(session, source[0], depth, source[1]) if depth else b""
        new = tokens[part : 2 * part] if depth else tokens[:part]
        _restore(session, state, depth)
        early, last = _time_part(session, new, asked, timed)
        _restore(session, state, depth)
        _time_steps(session, new[:n_steps], timed)
        logits = session.logits()
        _compare(early, logits, timed)
        _restore(session, state, depth)
        _compare(logits, session.prefill({0: new[:n_steps]})[0][-1], timed)
        if depth == cell.n_ctx:
            _restore(session, state, depth)
        if depth in (0, cell.n_ctx):
            _compare(last, _in_halves(session, new) if depth else expected, timed)
    timed.due += len(depths(cell)) * (part + n_steps)


def _walk(
    cell: Depth, session: Session, tokens: np.ndarray, expected: np.ndarray, timed: Timed, stage: Callable[[str], None]
) -> None:
    stage("walk")
    session.clear()
    part, before = cell.n_ubatch, b""
    for depth in range(0, cell.n_ctx, part):
        before = session.get_state(0) if depth == cell.n_ctx - part else before
        (last,) = _time_part(session, tokens[depth : depth + part], (part - 1,), timed)
        if depth == 0:
            _compare(last, expected, timed)
    state, new = session.get_state(0), tokens[cell.n_ctx : cell.n_ctx + cell.n_gen + WARM_STEPS]
    _time_steps(session, new, timed)
    logits = session.logits()
    _restore(session, state, cell.n_ctx)
    _compare(logits, session.prefill({0: new})[0][-1], timed)
    _restore(session, before, cell.n_ctx - part)
    _compare(last, _in_halves(session, tokens[cell.n_ctx - part : cell.n_ctx]), timed)
    if cell.scale == "mini":
        session.clear()
        session.prefill({0: tokens[: part // 2]})
        _compare(last, session.prefill({0: tokens[part // 2 : cell.n_ctx]})[0][-1], timed)
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
        logits = session.evaluate_at(tokens, rows)
        timed.parts.append((depth, clock() - start))
    timed.evaluated += session.n_evaluated - before
    return logits


def _time_steps(session: Session, tokens: np.ndarray, timed: Timed) -> None:
    before, first = session.n_evaluated, session.n_past[0]
    with watch.timed():
        stamps = [clock()]
        for token in tokens.tolist():
            session.decode({0: token})
            stamps.append(clock())
    taken = np.diff(stamps).tolist()
    timed.steps += [(first + n, ns) for n, ns in enumerate(taken)][WARM_STEPS:]
    timed.evaluated += session.n_evaluated - before


def _compare(logits: np.ndarray, expected: np.ndarray, timed: Timed) -> None:
    timed.finite &= bool(np.isfinite(logits).all())
    timed.errors.append(relative_error(logits, expected))


def _depths(samples: list[tuple[int, int]]) -> list[float]:
    return [float(depth) for depth, _ in samples]


RUNS = {Depth: run, Naive: naive.run}
