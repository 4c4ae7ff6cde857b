"""A worker's task for each kind of cell: warm up, time, and prove the result; the proof is the warm-up."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import msgspec
import numpy as np
import psutil

from llama_meter.cells import Cell, Decode, Gate, Isolation, MatMul, OnModel, Prefill, Read, Replay
from llama_meter.engine import kernels, library
from llama_meter.engine.session import Session, SessionConfig
from llama_meter.errors import NotJudgedError, StudyError
from llama_meter.limits import FIRST_TOKEN
from llama_meter.measure import machine, proof, watch
from llama_meter.measure.machine import peak_rss
from llama_meter.measure.proof import Prompts
from llama_meter.rows import Measured, passed

WARM_STEPS = 3  # decode steps before the timed ones, with the same number of sequences
GPU_WARM_STEPS = 32  # the same on a GPU, in as many passes as that takes: steps of milliseconds, while its clock rises
GPU_PASSES = 2  # untimed prompts of the cell's own shape on a GPU: its first two calls took 1.1 to 1.5 times as long
WARM_TOKENS = 32  # of a warm-up prompt where no proof runs: it brings all weights into memory
MATMUL_COLUMNS = 512  # llama.cpp's default micro-batch
READ_WIDTH = 4096  # row length of the matrix for a GPU's read ceiling
READ_LEAST = 4  # last-level caches that this matrix is large at least

clock = time.perf_counter_ns


def run(cell: Cell, path: Path, replicate: int, stage: Callable[[str], None]) -> Measured:
    """Run one cell on one file. `stage` is called with the current stage, so that a crash can be located."""
    if isinstance(cell, Read | MatMul):
        stage(cell.workload)
        with watch.timed():
            return _read(cell) if isinstance(cell, Read) else _matmul(cell)
    assert isinstance(cell, OnModel)
    stage("load")
    if isinstance(cell, Gate) and cell.judges == "consistent":
        from llama_meter.models import header  # gguf takes a third of a second, and only gates need it

        if role := header.not_judged(header.read(path)):
            raise NotJudgedError(path.name, role, "name a model that writes text")
    with _open(cell, path) as (session, load_ns, log):
        workload = RUNS[type(cell)]
        stage(cell.workload)
        draws = draw(cell, session.n_vocab, replicate)
        if isinstance(cell, Prefill | Decode) and cell.proof == "first":
            measured = workload(cell, session, draws, path, proved=replicate == 0)
            return _finish(measured, load_ns, log)
        return _finish(workload(cell, session, draws, path), load_ns, log)


def _prefill(cell: Prefill, session: Session, draws: list[Prompts], path: Path, proved: bool = True) -> Measured:
    start, expected = clock(), dict[int, np.ndarray]()
    if proved:
        other = proof.by_steps if cell.n_seq == 1 else proof.alone
        expected = {seq: other(session, seq, tokens) for seq, tokens in draws[-1].items()}
    else:
        session.clear()
        session.prefill({0: draws[-1][0][:WARM_TOKENS]})
    for _ in range(GPU_PASSES if cell.n_gpu_layers else 0):
        session.clear()
        _prompt(session, cell, draws[-1])
    warmup = clock() - start
    samples, evaluated = [], 0
    for prompts in draws:
        session.clear()
        with watch.timed():
            start = clock()
            logits = _prompt(session, cell, prompts)
            samples.append([clock() - start])
        evaluated += session.n_evaluated
    last = {seq: rows[-1] for seq, rows in logits.items()}
    checks = proof.checks(cell, last, expected, evaluated, sum(p.size for d in draws for p in d.values()))
    return _measured(cell, samples, [warmup], evaluated, checks)


def _decode(cell: Decode, session: Session, draws: list[Prompts], path: Path, proved: bool = True) -> Measured:
    """Fill the KV cache with prompts, then start the warm-up and the timed steps from their saved states."""
    start, expected = clock(), dict[int, np.ndarray]()
    if cell.policy != "shared":  # the shared prompt, which is not timed, is the warm-up there
        if proved:
            expected = {0: proof.alone(session, 0, draws[-1][0])}
        else:
            session.prefill({0: draws[-1][0][:WARM_TOKENS]})
    warmup, fills, samples, evaluated = clock() - start, [], [], 0
    for tokens in draws:
        states, fill = _fill(session, cell, tokens)
        start = clock()
        for n_steps in warm_passes(cell):
            _run_steps(session, cell, states, tokens, n_steps)
        warmup += clock() - start
        samples.append(_run_steps(session, cell, states, tokens, cell.n_gen, watch.timed()))
        evaluated += session.n_evaluated
        fills += [fill] if fill else []
    last = {seq: session.logits(row) for row, seq in enumerate(draws[-1])}
    for seq in (seq for seq in draws[-1] if proved and seq not in expected):
        prefix = (states[seq], cell.depth) if cell.policy == "shared" else None
        expected[seq] = proof.alone(session, seq, draws[-1][seq], prefix)
    checks = proof.checks(cell, last, expected, evaluated, cell.repetitions * cell.n_gen * cell.n_seq)
    measured = _measured(cell, samples, [warmup], evaluated, checks)
    return msgspec.structs.replace(measured, prefill_ns=fills)


def warm_passes(cell: Decode) -> list[int]:
    """Untimed steps before the timed ones, pass by pass; none goes beyond the steps whose tokens are drawn."""
    if cell.n_gpu_layers == 0 or not cell.n_gen:
        return [min(WARM_STEPS, cell.n_gen)]
    return [min(GPU_WARM_STEPS, cell.n_gen)] * -(-GPU_WARM_STEPS // cell.n_gen)


def _fill(session: Session, cell: Decode, tokens: Prompts) -> tuple[dict[int, bytes], int]:
    """Prefill every sequence's prompt: the states by sequence, and the nanoseconds taken (0 for a shared prompt)."""
    prompts = {seq: stream[: cell.depth] for seq, stream in tokens.items()}
    session.clear()
    if not cell.depth:
        return {}, 0
    if cell.policy == "shared":
        session.prefill({0: prompts[0]})
        return dict.fromkeys(prompts, session.get_state(0)), 0
    start = clock()
    _prompt(session, cell, prompts)
    spent = clock() - start
    return {seq: session.get_state(seq) for seq in prompts}, spent


def _prompt(session: Session, cell: Prefill | Decode, prompts: Prompts) -> Prompts:
    """Prefill the prompts as the cell's policy says; the logits by sequence."""
    return session.prefill(prompts, "packed" if cell.policy == "packed" else "per_sequence")


def _run_steps(
    session: Session,
    cell: Decode,
    states: dict[int, bytes],
    tokens: Prompts,
    n_steps: int,
    watched: AbstractContextManager[None] | None = None,
) -> list[int]:
    """Restore the states and time each decode step: nanoseconds from the end of one step to the end of the next."""
    session.clear()
    for seq, state in states.items():
        session.set_state(seq, state, cell.depth)
    steps = [{seq: int(t[cell.depth + i]) for seq, t in tokens.items()} for i in range(n_steps)]
    with watched or nullcontext():
        return time_steps(session, steps)


def time_steps(session: Session, steps: list[dict[int, int]]) -> list[int]:
    """Nanoseconds of decode steps, the tokens of each by sequence: from the end of one to the end of the next."""
    stamps = [clock()]
    for step in steps:
        session.decode(step)
        stamps.append(clock())
    return np.diff(stamps).tolist()


def greedy(session: Session, token: int, n_steps: int) -> np.ndarray:
    """Logits (n_steps, n_vocab) of greedy decode steps of sequence 0, beginning with `token`."""
    rows = np.empty((n_steps, session.n_vocab), np.float32)
    for row in rows:
        session.decode({0: token})
        row[:] = session.logits()
        token = int(row.argmax())
    return rows


def _measured(
    cell: OnModel,
    samples: list[list[int]],
    warmup: list[int],
    evaluated: int,
    checks: dict[str, float | bool],
) -> Measured:
    valid = passed(checks) and (True if "second_path" in checks else None)  # None: proved by its cell's first process
    return Measured(samples_ns=samples, warmup_ns=warmup, n_evaluated=evaluated, checks=checks, valid=valid)


def _read(cell: Read) -> Measured:
    """Read ceiling: a dot product on the CPU, a matrix-vector product of the same size on a GPU."""
    if cell.n_gpu_layers == 0:
        measured = _ceiling(
            kernels.read_times(cell.array_bytes, cell.n_threads, cell.repetitions), n_bytes=cell.array_bytes
        )
        return msgspec.structs.replace(measured, checks={"accelerate": float(kernels.reads_with_accelerate())})
    rows = _within_memory(cell.array_bytes) // kernels.matrix_bytes(cell.dtype, 1, READ_WIDTH)
    times, _ = kernels.matmul_times(cell.dtype, (rows, READ_WIDTH, 1), cell.n_threads, True, cell.repetitions)
    return _ceiling(times, n_bytes=kernels.matrix_bytes(cell.dtype, rows, READ_WIDTH))


def _within_memory(n_bytes: int) -> int:
    """At most a quarter of the free memory: a matrix for a GPU lies in memory twice while it is filled.

    StudyError where that leaves an array that the caches hold a large part of.
    """
    free, least = psutil.virtual_memory().available, READ_LEAST * machine.last_level_cache()
    if free // 4 < min(n_bytes, least):
        why = f"{free / 2**30:.1f} GiB of memory are free, and the array must be far larger than the caches"
        raise StudyError("the GPU's read ceiling", why, "close other programs")
    return min(n_bytes, free // 4)


def _matmul(cell: MatMul) -> Measured:
    """A matrix product by a loaded model's kernel, or with `plain` weights. With one column, it is a rate of bytes."""
    columns, gpu = cell.n_columns or MATMUL_COLUMNS, cell.n_gpu_layers != 0
    shape, packed = (cell.n_rows, cell.n_rows, columns), cell.layout != "plain"
    times, kernel = kernels.matmul_times(cell.dtype, shape, cell.n_threads, gpu, cell.repetitions, packed)
    work = {"n_flops": 2 * cell.n_rows**2 * columns}
    if columns == 1:
        work = {"n_bytes": kernels.matrix_bytes(cell.dtype, cell.n_rows, cell.n_rows)}
    checks = {name: float(kernel == name) for name in ("packed", "accelerate")}
    checks["blas"] = float(kernel in ("blas", "accelerate"))
    return msgspec.structs.replace(_ceiling(times, **work), checks=checks)


def _ceiling(times: list[int], n_bytes: int = 0, n_flops: int = 0) -> Measured:
    """The first repetition is the warm-up."""
    samples = [[t] for t in times[1:]]
    return Measured(samples_ns=samples, warmup_ns=times[:1], n_bytes=n_bytes, n_flops=n_flops)


def draw(cell: OnModel, n_vocab: int, replicate: int) -> list[Prompts]:
    """Random tokens per repetition and sequence; every draw has another first token, so no prefix can be reused."""
    rng = np.random.default_rng([cell.seed, replicate])
    n, (n_seq, n_prompt, n_gen) = cell.repetitions, cell.shape
    tokens = rng.integers(FIRST_TOKEN, n_vocab, (n, n_seq, n_prompt + n_gen), dtype=np.int32)
    firsts = rng.permutation(n_vocab - FIRST_TOKEN)[: n * n_seq] + FIRST_TOKEN
    tokens[:, :, 0] = firsts.reshape(n, n_seq)
    if isinstance(cell, Decode) and cell.policy == "shared":
        tokens[:, :, :n_prompt] = tokens[:, :1, :n_prompt]
    return [dict(enumerate(drawn)) for drawn in tokens]


@contextmanager
def _open(cell: OnModel, path: Path) -> Iterator[tuple[Session, int, list[str]]]:
    log: list[str] = []
    library.capture_log(log)
    start = clock()
    n_seq, *tokens = cell.shape
    room = max(sum(tokens), proof.PROBE_TOKENS if isinstance(cell, Replay) else 0)
    with Session(path, SessionConfig.of(cell, room, n_seq_max=n_seq)) as session:
        yield session, clock() - start, log


def _finish(measured: Measured, load_ns: int, log: list[str]) -> Measured:
    match = re.search(r"\bn_rot\s*=\s*(\d+)", "".join(log))
    checks = measured.checks | ({"n_rot": int(match.group(1))} if match else {})
    return msgspec.structs.replace(measured, load_ns=load_ns, checks=checks, peak_rss_bytes=peak_rss())


RUNS: dict[type[OnModel], Callable[..., Measured]] = {
    Prefill: _prefill,
    Decode: _decode,
    Gate: proof.gate,
    Replay: proof.replay,
    Isolation: proof.isolation,
}
