"""What a worker does for each kind of cell: warm up, time, and prove that the timed computation was right.

The proof is a second path to the same logits. A prefill is checked against one whose last tokens are fed one by one;
a decode against one prefill of the same tokens; with several sequences each is checked alone. That path also warms up.
"""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np

from plamo_study.engine import kernels, library
from plamo_study.engine.session import Session, SessionConfig
from plamo_study.measure.machine import peak_rss
from plamo_study.measure.rows import Cell, Measured
from plamo_study.oracle import Oracle, agreement, relative_error

FIRST_TOKEN = 5  # ids below are special tokens
TAIL_STEPS = 8  # tokens fed one by one on the second path of a prefill; decode steps of a decode's warm-up
LOOP_TOKENS = 16  # a greedy tail of this length with at most two different tokens is a degenerate loop
MATMUL_COLUMNS = 512  # llama.cpp's default micro-batch
READ_WIDTH = 4096  # row length of the matrix a GPU's read ceiling is taken with
# Relative error of logits that rounding explains. The engine rounds activations to the weights' type, keeps keys and
# values in F16 and, on the CPU, sums attention in F16. The defects guarded against cause errors of 0.4 and more.
TOLERANCE = {"F32": 1e-2, "F16": 1e-2, "BF16": 6e-2, "Q8_0": 0.15}
LAW_TOLERANCE = 0.02  # of a replay on F16 minis: rounding is 1e-2 at most, a fading wrong state 0.05 at least
LOOSEST = max(TOLERANCE.values())

Prompts = dict[int, np.ndarray]
clock = time.perf_counter_ns


def run(cell: Cell, path: Path, replicate: int, stage: Callable[[str], None]) -> Measured:
    """Do one cell on one file. `stage` is told what is happening, so that a crash can say where."""
    if cell.workload in ("read", "matmul"):
        stage(cell.workload)
        return _read(cell) if cell.workload == "read" else _matmul(cell)
    stage("load")
    with _open(cell, path) as (session, load_ns, log):
        workload = {"prefill": _prefill, "decode": _decode, "gate": _gate, "replay": _replay, "overhead": _overhead}[
            cell.workload
        ]
        stage(cell.workload)
        measured = workload(cell, session, _draw(cell, session.n_vocab, replicate), path)
        return _finish(measured, load_ns, log)


def _prefill(cell: Cell, session: Session, draws: list[Prompts], path: Path) -> Measured:
    start = clock()
    expected = {seq: _by_steps(session, seq, tokens) for seq, tokens in draws[-1].items()}
    warmup = clock() - start
    samples, evaluated = [], 0
    for prompts in draws:
        session.clear()
        start = clock()
        logits = session.prefill(prompts, cell.policy)
        samples.append([clock() - start])
        evaluated += session.n_evaluated
    last = {seq: rows[-1] for seq, rows in logits.items()}
    checks = _checks(cell, last, expected, evaluated, sum(p.size for d in draws for p in d.values()))
    return _measured(cell, samples, [warmup], evaluated, checks, [sample[0] for sample in samples])


def _decode(cell: Cell, session: Session, draws: list[Prompts], path: Path) -> Measured:
    start = clock()
    expected = {seq: _alone(session, seq, tokens) for seq, tokens in draws[-1].items()}
    _run_steps(session, cell, draws[-1], min(TAIL_STEPS, cell.n_gen))
    warmup = clock() - start
    samples, evaluated = [], 0
    for tokens in draws:
        samples.append(_run_steps(session, cell, tokens, cell.n_gen))
        evaluated += session.n_evaluated - cell.n_prompt * cell.n_seq
    last = {seq: session.logits(row) for row, seq in enumerate(draws[-1])}
    checks = _checks(cell, last, expected, evaluated, cell.repetitions * cell.n_gen * cell.n_seq)
    return _measured(cell, samples, [warmup], evaluated, checks, samples[-1])


def _run_steps(session: Session, cell: Cell, tokens: Prompts, n_steps: int) -> list[int]:
    """Prefill the prompts, then time each decode step: nanoseconds from the end of one step to the end of the next."""
    session.clear()
    if cell.n_prompt:
        session.prefill({seq: t[: cell.n_prompt] for seq, t in tokens.items()}, cell.policy)
    steps = [{seq: int(t[cell.n_prompt + i]) for seq, t in tokens.items()} for i in range(n_steps)]
    return _time_steps(session, steps)


def _time_steps(session: Session, steps: list[dict[int, int]]) -> list[int]:
    stamps = [clock()]
    for step in steps:
        session.decode(step)
        stamps.append(clock())
    return np.diff(stamps).tolist()


def _overhead(cell: Cell, session: Session, draws: list[Prompts], path: Path) -> Measured:
    """A decode whose native calls are timed too: what is left of a step is the harness."""
    tokens = [int(token) for token in draws[0][0]]
    _run_steps(session, cell, draws[0], TAIL_STEPS)
    session.clear()
    session.prefill({0: tokens[: cell.n_prompt]})
    with library.native_time() as inside:
        steps = _time_steps(session, [{0: token} for token in tokens[cell.n_prompt :]])
    step = sum(steps) / len(steps)
    return Measured(samples_ns=[steps], checks={"step_ns": step, "outside_ns": step - inside[0] / len(steps)})


def _gate(cell: Cell, session: Session, draws: list[Prompts], path: Path) -> Measured:
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
    tolerance = TOLERANCE.get(cell.dtype, LOOSEST)
    verdicts = {
        "prefill": agreement(whole, expected, tolerance),
        "decode": agreement(np.concatenate(stepped), expected, tolerance),
    }
    checks: dict[str, float | bool] = {f"{name}_error": v.max_relative_error for name, v in verdicts.items()}
    checks |= {f"{name}_top1_checked": v.top1_checked for name, v in verdicts.items()}
    checks |= {f"{name}_agrees": v.ok for name, v in verdicts.items()}
    greedy = _greedy(session, cell.n_gen)
    checks["greedy_distinct"] = len(set(greedy))
    checks["degenerate_loop"] = len(set(greedy[-LOOP_TOKENS:])) <= 2
    agree = all(v.ok for v in verdicts.values())
    return Measured(checks=checks, valid=agree, n_evaluated=session.n_evaluated)


def _replay(cell: Cell, session: Session, draws: list[Prompts], path: Path) -> Measured:
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


def _by_steps(session: Session, seq: int, tokens: np.ndarray) -> np.ndarray:
    """Logits after `tokens`, the last few of them fed one at a time, no other sequence present."""
    n_steps = min(TAIL_STEPS, len(tokens) - 1)
    session.clear()
    logits = session.prefill({seq: tokens[: len(tokens) - n_steps]})[seq][-1]
    for token in tokens[len(tokens) - n_steps :]:
        session.decode({seq: int(token)})
        logits = session.logits()
    return logits


def _alone(session: Session, seq: int, tokens: np.ndarray) -> np.ndarray:
    """Logits after one prefill of `tokens`, no other sequence present."""
    session.clear()
    return session.prefill({seq: tokens})[seq][-1]


def _checks(
    cell: Cell, logits: dict[int, np.ndarray], expected: dict[int, np.ndarray], evaluated: int, due: int
) -> dict[str, float | bool]:
    error = max(relative_error(logits[seq], expected[seq]) for seq in expected)
    finite = all(bool(np.isfinite(row).all()) for row in logits.values())
    within = error <= TOLERANCE.get(cell.dtype, LOOSEST)
    return {"second_path_error": error, "second_path": within, "finite": finite, "evaluated": evaluated == due}


def _measured(
    cell: Cell,
    samples: list[list[int]],
    warmup: list[int],
    evaluated: int,
    checks: dict[str, float | bool],
    series: list[int],
) -> Measured:
    quarter = max(len(series) // 4, 1)
    ratio = float(np.median(series[-quarter:]) / np.median(series[:quarter]))
    if len(series) > 1:
        checks = {**checks, "last_to_first_quarter": ratio}
    valid = all(value for value in checks.values() if isinstance(value, bool))
    return Measured(samples_ns=samples, warmup_ns=warmup, n_evaluated=evaluated, checks=checks, valid=valid)


def _read(cell: Cell) -> Measured:
    """Read ceiling: a dot product on the CPU, a matrix-vector product of the same size on a GPU."""
    if cell.n_gpu_layers == 0:
        return _ceiling(kernels.read_times(cell.size, cell.n_threads, cell.repetitions), n_bytes=cell.size)
    rows = cell.size // kernels.matrix_bytes(cell.dtype, 1, READ_WIDTH)
    times = kernels.matmul_times(cell.dtype, (rows, READ_WIDTH, 1), cell.n_threads, True, cell.repetitions)
    return _ceiling(times, n_bytes=kernels.matrix_bytes(cell.dtype, rows, READ_WIDTH))


def _matmul(cell: Cell) -> Measured:
    shape = (cell.size, cell.size, MATMUL_COLUMNS)
    times = kernels.matmul_times(cell.dtype, shape, cell.n_threads, cell.n_gpu_layers != 0, cell.repetitions)
    return _ceiling(times, n_flops=2 * cell.size**2 * MATMUL_COLUMNS)


def _ceiling(times: list[int], n_bytes: int = 0, n_flops: int = 0) -> Measured:
    """The first repetition is the warm-up."""
    samples = [[t] for t in times[1:]]
    return Measured(
        samples_ns=samples, warmup_ns=times[:1], n_bytes=n_bytes, n_flops=n_flops, peak_rss_bytes=peak_rss()
    )


def _draw(cell: Cell, n_vocab: int, replicate: int) -> list[Prompts]:
    """Random tokens per repetition and sequence; every draw has another first token, so no prefix can be reused."""
    rng = np.random.default_rng([cell.seed, replicate])
    length = cell.n_prompt + cell.n_gen
    tokens = rng.integers(FIRST_TOKEN, n_vocab, (cell.repetitions, cell.n_seq, length), dtype=np.int32)
    firsts = rng.permutation(n_vocab - FIRST_TOKEN)[: cell.repetitions * cell.n_seq] + FIRST_TOKEN
    tokens[:, :, 0] = firsts.reshape(cell.repetitions, cell.n_seq)
    return [dict(enumerate(draw)) for draw in tokens]


@contextmanager
def _open(cell: Cell, path: Path) -> Iterator[tuple[Session, int, list[str]]]:
    log: list[str] = []
    library.capture_log(log)
    config = SessionConfig(
        n_ctx_seq=cell.n_prompt + cell.n_gen,
        n_seq_max=cell.n_seq,
        n_threads=cell.n_threads,
        n_threads_batch=cell.n_threads,
        **{
            name: getattr(cell, name)
            for name in ("n_batch", "n_ubatch", "type_k", "type_v", "flash_attn", "n_gpu_layers")
        },
    )
    start = clock()
    with Session(path, config) as session:
        yield session, clock() - start, log


def _finish(measured: Measured, load_ns: int, log: list[str]) -> Measured:
    found = re.search(r"\bn_rot\s*=\s*(\d+)", "".join(log))
    checks = measured.checks | ({"n_rot": int(found.group(1))} if found else {})
    return msgspec.structs.replace(measured, load_ns=load_ns, checks=checks, peak_rss_bytes=peak_rss())
