"""Proof that a computation was right: a second path to its logits, and the oracle.

A prefill is compared with one whose last tokens are fed one by one, a decode with one prefill of the same tokens, and
each of several sequences with itself alone.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from llama_meter.cells import Calls, Gate, Isolation, OnModel, Replay
from llama_meter.engine import library
from llama_meter.engine.nodes import PartSums
from llama_meter.engine.session import Session, SessionConfig
from llama_meter.limits import BACKENDS, DEEP_POSITIONS, FIRST_TOKEN, backend
from llama_meter.measure.tolerance import attention_tolerance, part_tolerance, tolerance
from llama_meter.oracle.compare import agreement, relative_error
from llama_meter.rows import Measured, report_check

if TYPE_CHECKING:  # a third of what a worker imports, and only gates need it
    from llama_meter.oracle.judge import Judged

TAIL_STEPS = 8  # tokens fed one by one on the second path of a prefill
CONSISTENT_SEQUENCES, CONSISTENT_PIECE = 3, 7  # of a gate without an oracle: slots, and tokens of a piece
PROBE_TOKENS = 32  # evaluated alone, split in several ways, beside a replay: the size of rounding
PROBE_CUTS = (PROBE_TOKENS, 5, 1)  # tokens of each call; the first split is the reference

Prompts = dict[int, np.ndarray]


def by_steps(session: Session, seq: int, tokens: np.ndarray) -> np.ndarray:
    """Logits after `tokens`, (n_vocab,), the last few tokens fed one at a time, with no other sequence present."""
    n_steps = min(TAIL_STEPS, len(tokens) - 1)
    session.clear()
    logits = session.prefill({seq: tokens[: len(tokens) - n_steps]})[seq][-1]
    for token in tokens[len(tokens) - n_steps :]:
        session.decode({seq: int(token)})
        logits = session.logits()
    return logits


def alone(session: Session, seq: int, tokens: np.ndarray, prefix: tuple[bytes, int] | None = None) -> np.ndarray:
    """Logits after one prefill of `tokens`, (n_vocab,), with no other sequence present.

    `prefix`: the state after a number of leading tokens, from a prefill alone; only the rest is evaluated then.
    """
    session.clear()
    state, n_past = prefix or (b"", 0)
    if state:
        session.set_state(seq, state, n_past)
    return session.prefill({seq: tokens[n_past:]})[seq][-1]


def checks(
    cell: OnModel, logits: dict[int, np.ndarray], expected: dict[int, np.ndarray], evaluated: int, due: int
) -> dict[str, float | bool]:
    """Compare last logits by sequence with the expected ones; check that they are finite and all tokens evaluated."""
    finite = all(bool(np.isfinite(row).all()) for row in logits.values())
    always: dict[str, float | bool] = {"finite": finite, "evaluated": evaluated == due}
    if not expected:  # another process of the cell proves it
        return always
    error = max(relative_error(logits[seq], expected[seq]) for seq in expected)
    return {"second_path_error": error, "second_path": error <= tolerance(cell)} | always


def gate(cell: Gate, session: Session, draws: list[Prompts], path: Path) -> Measured:
    """Engine against the NumPy oracle: one prefill, then half a prefill continued step by step, at every position.

    The steps are judged part by part too (oracle/judge.py), with what planted faults would show in each part. A build
    with a window is compared with the oracle with that window.
    """
    if cell.judges == "consistent":
        return _consistent(cell, session)
    if cell.judges == "depth":
        return _at_depth(cell, session, draws[0][0], path)
    from llama_meter.oracle.forward import Oracle  # a third of what a worker imports, and only gates need it
    from llama_meter.oracle.judge import judge, judge_at
    from llama_meter.oracle.weights import FEW

    tokens = draws[0][0][: cell.n_prompt]
    half, window = len(tokens) // 2, library.window()
    session.clear()
    whole = session.prefill({0: tokens}, every=True)[0]
    stepped = _stepped(session, tokens, half)
    n_evaluated = session.n_evaluated
    with PartSums(session) as model:
        watched, sums = _stepped(model, tokens, half), model.sums()
    backend = computed_on(cell)
    stepped_from = 0 if cell.n_ubatch <= FEW else half
    oracle, allowed = Oracle(path, backend, window, stepped_from=stepped_from), part_tolerance(cell, backend)
    if cell.judges == "parts":
        judged = judge_at(oracle, tokens, sums, watched, np.arange(len(tokens)))
        return _parts_alone(cell, judged, watched, stepped, whole, allowed)
    judged = judge(oracle, tokens, sums, watched)
    apart = oracle.depends_on_calls and stepped_from
    together = Oracle(path, backend, window).logits(tokens) if apart else judged.logits
    verdicts = {
        "prefill": agreement(whole, together, tolerance(cell)),
        "decode": agreement(stepped, judged.logits, tolerance(cell)),
    }
    checks: dict[str, float | bool] = {f"{name}_error": v.max_relative_error for name, v in verdicts.items()}
    checks |= {f"{name}_top1_checked": v.top1_checked for name, v in verdicts.items()}
    checks |= {f"{name}_agrees": v.ok for name, v in verdicts.items()}
    checks |= _by_parts(cell, judged, watched, stepped, allowed)
    agree = all(value for name, value in checks.items() if name.endswith("_agrees"))
    series = judged.parts | {f"fault: {name}": errors for name, errors in judged.faults.items()}
    return Measured(checks=checks, series=series, valid=agree, n_evaluated=n_evaluated)


def _consistent(cell: Gate, session: Session) -> Measured:
    """The engine against itself, where no oracle reads the file: this shows no fault that every way has alike.

    Errors are relative, of the last logits. One prefill of a prompt is compared with the prompt cut in pieces, with its
    last tokens stepped, with steps together with two other sequences, and with steps beside other neighbours.
    """
    n, shape = cell.n_prompt, (2, CONSISTENT_SEQUENCES, cell.n_prompt)
    rng = np.random.default_rng(cell.seed)
    first, second = (
        dict(enumerate(draw)) for draw in rng.integers(FIRST_TOKEN, session.n_vocab, shape, dtype=np.int32)
    )
    whole = {seq: alone(session, 0, tokens) for seq, tokens in first.items()}
    errors = {"steps": relative_error(by_steps(session, 0, first[0]), whole[0])}
    session.clear()
    for start in range(0, n, CONSISTENT_PIECE):
        pieces = session.prefill({0: first[0][start : start + CONSISTENT_PIECE]})[0][-1]
    errors["pieces"] = relative_error(pieces, whole[0])
    with Session(session, SessionConfig.of(cell, n, n_seq_max=CONSISTENT_SEQUENCES)) as crowd:

        def together(tokens: Prompts) -> dict[int, np.ndarray]:
            crowd.clear()
            crowd.prefill({seq: prompt[: n - TAIL_STEPS] for seq, prompt in tokens.items()})
            for at in range(n - TAIL_STEPS, n):
                crowd.decode({seq: int(prompt[at]) for seq, prompt in tokens.items()})
            return {seq: crowd.logits(row) for row, seq in enumerate(tokens)}

        crowd_logits = together(first)
        errors["together"] = max(relative_error(crowd_logits[seq], whole[seq]) for seq in whole)
        errors["neighbours"] = relative_error(together({**second, 0: first[0]})[0], whole[0])
    limit = tolerance(cell)
    checks: dict[str, float | bool] = {f"{name}_error": error for name, error in errors.items()}
    checks |= {f"{name}_agrees": error <= limit for name, error in errors.items()}
    checks["finite_agrees"] = all(bool(np.isfinite(logits).all()) for logits in whole.values())
    right = all(value for name, value in checks.items() if name.endswith("_agrees"))
    return Measured(checks=checks | {"tolerance": limit}, valid=right, n_evaluated=session.n_evaluated)


def _at_depth(cell: Gate, session: Session, tokens: np.ndarray, path: Path) -> Measured:
    """A long prompt in the micro-batches of rows and some steps after it, judged by the oracle at DEEP_POSITIONS.

    The first of them lies at 3/8 of the prompt; the last ones are the steps. `judged_from` and `judged_to` are the
    first position and the number of tokens.
    """
    from llama_meter.oracle.forward import Oracle  # a third of what a worker imports, and only gates need it
    from llama_meter.oracle.judge import judge_at

    n = cell.n_prompt
    tokens = tokens[: n + cell.n_gen]
    inside = np.linspace(3 * n // 8, n - 1, DEEP_POSITIONS - cell.n_gen).astype(int)
    at = np.concatenate([inside, np.arange(n, n + cell.n_gen)])
    plain = _long(session, tokens, inside)
    with PartSums(session) as model:
        watched = _long(model, tokens, inside)
        sums = model.sums()
    backend = computed_on(cell)
    oracle = Oracle(path, backend, library.window(), stepped_from=n)
    judged, allowed = judge_at(oracle, tokens, sums, watched, at), part_tolerance(cell, backend)
    attention = max((e for i, e in enumerate(judged.parts["mixer"]) if not oracle.is_mamba(i)), default=0.0)
    others = [e for i, e in enumerate(judged.parts["mixer"]) if oracle.is_mamba(i)] + judged.parts["feed-forward"]
    error, of_attention = relative_error(watched, plain), attention_tolerance(cell, allowed)
    checks: dict[str, float | bool] = {"parts_error": max(judged.head, *others), "attention_error": attention}
    checks |= {"parts_agrees": checks["parts_error"] <= allowed, "attention_agrees": attention <= of_attention}
    checks |= {
        "watched_error": error,
        "watched_agrees": error <= allowed,
        "finite_agrees": bool(np.isfinite(plain).all()),
    }
    checks |= {"parts_tolerance": allowed, "attention_tolerance": of_attention}
    checks |= {"judged_from": float(at[0]), "judged_to": float(len(tokens))}
    agree = all(value for name, value in checks.items() if name.endswith("_agrees"))
    return Measured(checks=checks, series=judged.parts, valid=agree, n_evaluated=2 * len(tokens))


def _long(session: Session, tokens: np.ndarray, inside: np.ndarray) -> np.ndarray:
    """Logits at the positions `inside` a prompt that ends with the last of them, and after each of the other tokens."""
    session.clear()
    n = int(inside[-1]) + 1
    rows = [session.evaluate([(0, tokens[:n])], inside.tolist())[0].copy()]
    for token in tokens[n:].tolist():
        session.decode({0: token})
        rows.append(session.logits()[None])
    return np.concatenate(rows)


def computed_on(cell: Gate) -> str:
    """The backend whose rounding the oracle follows: the GPU's where layers are on a known one, else the CPU's."""
    boards = library.gpus() if cell.n_gpu_layers else []
    name = backend(boards[0]["name"]) if boards else ""
    return name if name in BACKENDS else "CPU"


def _by_parts(
    cell: Gate, judged: "Judged", watched: np.ndarray, stepped: np.ndarray, allowed: float
) -> dict[str, float | bool]:
    """Whether every part is right, and whether observing the engine changed its results."""
    parts = max(judged.head, *(max(errors) for errors in judged.parts.values()))
    checks: dict[str, float | bool] = {"parts_error": parts, "parts_agrees": parts <= allowed}
    error = relative_error(watched, stepped)
    checks |= {"watched_error": error, "watched_agrees": error <= allowed}
    return checks | {"tolerance": tolerance(cell), "parts_tolerance": allowed}


def _parts_alone(
    cell: Gate, judged: "Judged", watched: np.ndarray, stepped: np.ndarray, whole: np.ndarray, allowed: float
) -> Measured:
    """The verdict of a gate that judges parts only; one prefill must also agree with half of one continued by steps.

    Parts chain from the embedding to the logits, so the whole computation is judged for these tokens. Effects of longer
    texts, such as the end of a window, are not covered, and no faults are planted.
    """
    checks, error = _by_parts(cell, judged, watched, stepped, allowed), relative_error(stepped, whole)
    checks |= {"second_path_error": error, "second_path_agrees": error <= tolerance(cell)}
    agree = all(value for name, value in checks.items() if name.endswith("_agrees"))
    return Measured(checks=checks, series=judged.parts, valid=agree, n_evaluated=2 * cell.n_prompt)


def _stepped(session: Session, tokens: np.ndarray, half: int) -> np.ndarray:
    """Logits at every position, (n, n_vocab), of half a prefill from an empty memory continued step by step."""
    session.clear()
    rows = [session.prefill({0: tokens[:half]}, every=True)[0]]
    for token in tokens[half:].tolist():
        session.decode({0: token})
        rows.append(session.logits()[None])
    return np.concatenate(rows)


def replay(cell: Replay, session: Session, draws: list[Prompts], path: Path) -> Measured:
    """Run any calls in order: relative error of each sequence's logits after each call, against the sequence alone.

    Checks are named "call/sequence", plus "rounding". There is no verdict: all rows are judged together. Sequences run
    alone first, and every error is reported as it is found, so that a run that aborts is judged up to that point.
    """
    rounding = _rounding(session)
    expected: dict[tuple[int, int], np.ndarray] = {}
    for seq in draws[0]:
        alone_calls = tuple(tuple(part for part in call if part[0] == seq) for call in cell.calls)
        expected |= dict(_by_calls(session, alone_calls, draws[0]))
    errors: dict[str, float | bool] = {"rounding": report_check("rounding", rounding)}
    for (call, seq), row in _by_calls(session, cell.calls, draws[0]):
        name = f"{call}/{seq}"
        errors[name] = report_check(name, relative_error(row, expected[call, seq]))
    return Measured(checks=errors, n_evaluated=session.n_evaluated)


def isolation(cell: Isolation, session: Session, draws: list[Prompts], path: Path) -> Measured:
    """The same calls twice, sequence 0 with the same tokens and its neighbours with others: may sequence 0 change?"""
    first, second = draws
    rounding = _rounding(session)
    before = dict(_by_calls(session, cell.calls, first))
    after = dict(_by_calls(session, cell.calls, {**second, 0: first[0]}))
    error = max(relative_error(after[at], row) for at, row in before.items() if at[1] == 0)
    checks: dict[str, float | bool] = {"isolation_error": error, "rounding": rounding}
    return Measured(checks=checks, n_evaluated=session.n_evaluated)


def _rounding(session: Session) -> float:
    """Distance between correct computations: one sequence alone, its tokens split into calls in different ways.

    The largest relative error over positions. No batch of sequences is involved, and so none of the law's defects.
    """
    tokens = np.random.default_rng(0).integers(FIRST_TOKEN, session.n_vocab, PROBE_TOKENS, dtype=np.int32)
    ways = []
    for size in PROBE_CUTS:
        session.clear()
        pieces = [tokens[start : start + size] for start in range(0, PROBE_TOKENS, size)]
        ways.append(np.concatenate([session.prefill({0: piece}, every=True)[0] for piece in pieces]))
    return max(relative_error(way, ways[0]) for way in ways[1:])


def _by_calls(session: Session, calls: Calls, tokens: Prompts) -> Iterator[tuple[tuple[int, int], np.ndarray]]:
    """Run calls from an empty cache; yield ((call, sequence), last logits) for every sequence of every call."""
    session.clear()
    streams = {seq: iter(stream) for seq, stream in tokens.items()}
    for number, call in enumerate(calls):
        for seq in (seq for seq, n_tokens in call if n_tokens == 0):
            session.remove_tail(seq, 0)
        parts = [(seq, np.fromiter(islice(streams[seq], n), np.int32, n)) for seq, n in call if n]
        for seq, rows in (session.evaluate(parts) if parts else {}).items():
            yield (number, seq), rows[-1].copy()
