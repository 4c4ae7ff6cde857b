"""Proof that a computation was right: a second path to its logits, and the oracle.

A prefill is held against one whose last tokens are fed one by one, a decode against one prefill of the same tokens, and
with several sequences each against itself alone.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from plamo_study.engine.session import Session
from plamo_study.measure.rows import Cell, Measured
from plamo_study.oracle import Oracle, agreement, relative_error

TAIL_STEPS = 8  # tokens fed one by one on the second path of a prefill; decode steps of a decode's warm-up
LOOP_TOKENS = 16  # a greedy tail of this length with at most two different tokens is a degenerate loop
# Relative error of logits that rounding explains. The engine rounds activations to the weights' type, keeps keys and
# values in F16 and, on the CPU, sums attention in F16. The defects guarded against cause errors of 0.4 and more.
TOLERANCE = {"F32": 1e-2, "F16": 1e-2, "BF16": 6e-2, "Q8_0": 0.15}
LAW_TOLERANCE = 0.02  # of a replay on F16 minis: rounding is 1e-2 at most, a fading wrong state 0.05 at least
LOOSEST = max(TOLERANCE.values())
EXACT_CACHE = 5e-3  # for F32 and F16 weights with keys and values in F32 and no flash attention

Prompts = dict[int, np.ndarray]


def by_steps(session: Session, seq: int, tokens: np.ndarray) -> np.ndarray:
    """Logits after `tokens`, the last few of them fed one at a time, no other sequence present."""
    n_steps = min(TAIL_STEPS, len(tokens) - 1)
    session.clear()
    logits = session.prefill({seq: tokens[: len(tokens) - n_steps]})[seq][-1]
    for token in tokens[len(tokens) - n_steps :]:
        session.decode({seq: int(token)})
        logits = session.logits()
    return logits


def alone(session: Session, seq: int, tokens: np.ndarray) -> np.ndarray:
    """Logits after one prefill of `tokens`, no other sequence present."""
    session.clear()
    return session.prefill({seq: tokens})[seq][-1]


def checks(
    cell: Cell, logits: dict[int, np.ndarray], expected: dict[int, np.ndarray], evaluated: int, due: int
) -> dict[str, float | bool]:
    """Last logits by sequence against the expected ones, their finiteness, and evaluated tokens against those due."""
    error = max(relative_error(logits[seq], expected[seq]) for seq in expected)
    finite = all(bool(np.isfinite(row).all()) for row in logits.values())
    within = error <= tolerance(cell)
    return {"second_path_error": error, "second_path": within, "finite": finite, "evaluated": evaluated == due}


def tolerance(cell: Cell) -> float:
    """The largest relative error that is rounding, for a cell's weights and cache."""
    exact = cell.dtype in ("F32", "F16") and (cell.type_k, cell.type_v, cell.flash_attn) == ("f32", "f32", "off")
    return EXACT_CACHE if exact else TOLERANCE.get(cell.dtype, LOOSEST)


def gate(cell: Cell, session: Session, draws: list[Prompts], path: Path) -> Measured:
    """Engine against the NumPy oracle at every position: one prefill, then half a prefill continued step by step."""
    tokens = draws[0][0][: cell.n_prompt]
    half = len(tokens) // 2
    expected = Oracle(path, round_activations=True).logits(tokens)
    session.clear()
    whole = session.prefill({0: tokens}, every=True)[0]
    session.clear()
    stepped = [session.prefill({0: tokens[:half]}, every=True)[0]]
    for token in tokens[half:]:
        session.decode({0: int(token)})
        stepped.append(session.logits()[None])
    verdicts = {
        "prefill": agreement(whole, expected, tolerance(cell)),
        "decode": agreement(np.concatenate(stepped), expected, tolerance(cell)),
    }
    checks: dict[str, float | bool] = {f"{name}_error": v.max_relative_error for name, v in verdicts.items()}
    checks |= {f"{name}_top1_checked": v.top1_checked for name, v in verdicts.items()}
    checks |= {f"{name}_agrees": v.ok for name, v in verdicts.items()}
    greedy = _greedy(session, cell.n_gen)
    checks["greedy_distinct"] = len(set(greedy))
    checks["degenerate_loop"] = len(set(greedy[-LOOP_TOKENS:])) <= 2
    agree = all(v.ok for v in verdicts.values())
    return Measured(checks=checks, valid=agree, n_evaluated=session.n_evaluated)


def replay(cell: Cell, session: Session, draws: list[Prompts], path: Path) -> Measured:
    """Any calls, in order: the error of every sequence's logits after each call against the same sequence alone.

    Checks are named "call/sequence". Sequences are run alone first, so that an abort costs the row and no proof.
    """
    expected = {
        key: row for seq, tokens in draws[0].items() for key, row in _alone_by_calls(session, cell, seq, tokens)
    }
    session.clear()
    errors: dict[str, float | bool] = {}
    streams = {seq: iter(tokens) for seq, tokens in draws[0].items()}
    for number, call in enumerate(cell.calls):
        for seq in (seq for seq, n_tokens in call if n_tokens == 0):
            session.remove_tail(seq, 0)
        parts = [(seq, np.fromiter(islice(streams[seq], n), np.int32, n)) for seq, n in call if n]
        for seq, row in (session.evaluate(parts) if parts else {}).items():
            errors[f"{number}/{seq}"] = relative_error(row, expected[number, seq])
    right = all(error < LAW_TOLERANCE for error in errors.values())
    return Measured(checks=errors, valid=right, n_evaluated=session.n_evaluated)


def _alone_by_calls(
    session: Session, cell: Cell, seq: int, tokens: np.ndarray
) -> Iterator[tuple[tuple[int, int], np.ndarray]]:
    """One sequence's logits after each of its calls, ((call, sequence), row), nobody else being there."""
    session.clear()
    start = 0
    for number, call in enumerate(cell.calls):
        n_tokens = sum(n for s, n in call if s == seq)
        if (seq, 0) in call:
            session.clear()
        elif n_tokens:
            yield (number, seq), session.evaluate([(seq, tokens[start : start + n_tokens])])[seq]
            start += n_tokens


def _greedy(session: Session, n_tokens: int) -> list[int]:
    """Continue sequence 0 with its most likely tokens. Random weights may loop here; released ones should not."""
    tokens = []
    for _ in range(n_tokens):
        tokens.append(int(session.logits().argmax()))
        session.decode({0: tokens[-1]})
    return tokens
