"""Proof that a computation was right: a second path to its logits, and the oracle.

A prefill is held against one whose last tokens are fed one by one, a decode against one prefill of the same tokens, and
with several sequences each against itself alone.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from plamo_study.engine import library
from plamo_study.engine.session import Session
from plamo_study.limits import LAW_TOLERANCE
from plamo_study.measure.rows import Cell, Measured
from plamo_study.models.mixture import FILE_TYPES
from plamo_study.oracle import Oracle, agreement, relative_error

TAIL_STEPS = 8  # tokens fed one by one on the second path of a prefill
LOOP_TOKENS = 16  # a greedy tail of this length with at most two different tokens is a degenerate loop
# Relative error of logits that rounding explains. The engine rounds activations to the weights' type, keeps keys and
# values in F16 and, on the CPU, sums attention in F16. The defects guarded against cause errors of 0.4 and more.
# K types round activations in blocks of 256 instead of 32, so an outlier costs more neighbours their precision. The
# largest errors measured on full-size random weights: F32 0.001, F16 0.003, BF16 0.016, Q8_0 0.05, Q4_0 0.05, K 0.09.
TOLERANCE = {"F32": 1e-2, "F16": 1e-2, "BF16": 6e-2}
TOLERANCE |= dict.fromkeys(("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"), 0.15)
TOLERANCE |= dict.fromkeys(("Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K"), 0.2)
LOOSEST = max(TOLERANCE.values())
EXACT_CACHE = 5e-3  # for F32 and F16 weights with keys and values in F32 and no flash attention

Prompts = dict[int, np.ndarray]
Calls = tuple[tuple[tuple[int, int], ...], ...]


def by_steps(session: Session, seq: int, tokens: np.ndarray) -> np.ndarray:
    """Logits after `tokens`, the last few of them fed one at a time, no other sequence present."""
    n_steps = min(TAIL_STEPS, len(tokens) - 1)
    session.clear()
    logits = session.prefill({seq: tokens[: len(tokens) - n_steps]})[seq][-1]
    for token in tokens[len(tokens) - n_steps :]:
        session.decode({seq: int(token)})
        logits = session.logits()
    return logits


def alone(session: Session, seq: int, tokens: np.ndarray, known: tuple[bytes, int] | None = None) -> np.ndarray:
    """Logits after one prefill of `tokens`, no other sequence present.

    `known`: the state after so many first tokens, made by a prefill alone; only the others are evaluated then.
    """
    session.clear()
    state, n_past = known or (b"", 0)
    if state:
        session.set_state(seq, state, n_past)
    return session.prefill({seq: tokens[n_past:]})[seq][-1]


def checks(
    cell: Cell, logits: dict[int, np.ndarray], expected: dict[int, np.ndarray], evaluated: int, due: int
) -> dict[str, float | bool]:
    """Last logits by sequence against the expected ones, their finiteness, and evaluated tokens against those due."""
    error = max(relative_error(logits[seq], expected[seq]) for seq in expected)
    finite = all(bool(np.isfinite(row).all()) for row in logits.values())
    within = error <= tolerance(cell)
    return {"second_path_error": error, "second_path": within, "finite": finite, "evaluated": evaluated == due}


def tolerance(cell: Cell) -> float:
    """The largest relative error that is rounding, for a cell's weights and cache: that of its roughest type."""
    exact = cell.dtype in ("F32", "F16") and (cell.type_k, cell.type_v, cell.flash_attn) == ("f32", "f32", "off")
    return EXACT_CACHE if exact else max(TOLERANCE.get(name, LOOSEST) for name in _types(cell.dtype))


def _types(dtype: str) -> tuple[str, ...]:
    """The tensor types a type or recipe asks for; a publisher's own name stands for itself."""
    file_type, *words = dtype.split("-")
    return FILE_TYPES.get(file_type, (0, file_type))[1], *words[1::2]


def gate(cell: Cell, session: Session, draws: list[Prompts], path: Path) -> Measured:
    """Engine against the NumPy oracle at every position: one prefill, then half a prefill continued step by step.

    A build with a window is held against the oracle with that window; how far it is from one without it is told beside
    it, for the reader to see that the check would find a window that is not there.
    """
    tokens = draws[0][0][: cell.n_prompt]
    half = len(tokens) // 2
    window = library.window()
    expected = Oracle(path, round_activations=True, window=window).logits(tokens)
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
    if 0 < window < len(tokens):
        others = Oracle(path, round_activations=True).logits(tokens)
        checks["without_window"] = agreement(whole, others, tolerance(cell)).max_relative_error
    greedy = _greedy(session, cell.n_gen)
    checks["greedy_distinct"] = len(set(greedy))
    checks["degenerate_loop"] = len(set(greedy[-LOOP_TOKENS:])) <= 2
    agree = all(v.ok for v in verdicts.values())
    return Measured(checks=checks, valid=agree, n_evaluated=session.n_evaluated)


def replay(cell: Cell, session: Session, draws: list[Prompts], path: Path) -> Measured:
    """Any calls, in order: the error of every sequence's logits after each call against the same sequence alone.

    Checks are named "call/sequence". Sequences are run alone first, so that an abort costs the row and no proof.
    """
    expected: dict[tuple[int, int], np.ndarray] = {}
    for seq in draws[0]:
        alone_calls = tuple(tuple(part for part in call if part[0] == seq) for call in cell.calls)
        expected |= dict(_by_calls(session, alone_calls, draws[0]))
    found = _by_calls(session, cell.calls, draws[0])
    errors: dict[str, float | bool] = {f"{at[0]}/{at[1]}": relative_error(row, expected[at]) for at, row in found}
    return Measured(checks=errors, valid=max(errors.values()) < LAW_TOLERANCE, n_evaluated=session.n_evaluated)


def isolation(cell: Cell, session: Session, draws: list[Prompts], path: Path) -> Measured:
    """The same calls twice, sequence 0 with the same tokens and its neighbours with others: may sequence 0 change?"""
    first, second = draws
    before = dict(_by_calls(session, cell.calls, first))
    after = dict(_by_calls(session, cell.calls, {**second, 0: first[0]}))
    error = max(relative_error(after[at], row) for at, row in before.items() if at[1] == 0)
    return Measured(checks={"isolation_error": error}, valid=error < LAW_TOLERANCE, n_evaluated=session.n_evaluated)


def _by_calls(session: Session, calls: Calls, tokens: Prompts) -> Iterator[tuple[tuple[int, int], np.ndarray]]:
    """Run calls from an empty memory; ((call, sequence), last logits) for every sequence of every call."""
    session.clear()
    streams = {seq: iter(stream) for seq, stream in tokens.items()}
    for number, call in enumerate(calls):
        for seq in (seq for seq, n_tokens in call if n_tokens == 0):
            session.remove_tail(seq, 0)
        parts = [(seq, np.fromiter(islice(streams[seq], n), np.int32, n)) for seq, n in call if n]
        for seq, row in (session.evaluate(parts) if parts else {}).items():
            yield (number, seq), row


def _greedy(session: Session, n_tokens: int) -> list[int]:
    """Continue sequence 0 with its most likely tokens. Random weights may loop here; released ones should not."""
    tokens = []
    for _ in range(n_tokens):
        tokens.append(int(session.logits().argmax()))
        session.decode({0: tokens[-1]})
    return tokens
