"""A cell of kind "relay": requests read by one file and written by another that takes their states, in one process.

Both files have a context of the same layout. The reader evaluates a prompt without its last token; its state is saved,
and loaded into the writer, which evaluates that token and the answer's next ones. One file alone reads the prompt to
its end, which gives the first token, and moves nothing. Several requests are read one after the other and written
together. Tokens are random and given beforehand, so that every answer can be held against another evaluation.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np

from llama_meter.cells import Relay
from llama_meter.engine import library
from llama_meter.engine.session import Session
from llama_meter.errors import StudyError
from llama_meter.limits import FIRST_TOKEN
from llama_meter.measure import machine, sessions, watch
from llama_meter.measure.tolerance import tolerance
from llama_meter.oracle.compare import relative_error
from llama_meter.rows import Measured, passed

clock = time.perf_counter_ns
WARM_TOKENS, WARM_STEPS = 32, 2  # evaluated by each file before anything is timed, with as many sequences


def run(cell: Relay, path: Path, stage: Callable[[str], None], *others: Path) -> Measured:
    """Measure one cell. `samples_ns`: of every repetition the time to read, to save and to load states, and to write.

    `series`: "resident", bytes of the process's memory before any file and after each was loaded and used; "load" (s)
    of each file. `n_bytes`: of one state.
    """
    library.capture_log([])
    config = sessions.config(cell, cell.n_prompt + cell.n_gen, n_seq_max=cell.n_seq, swa_full=False)
    resident, loads, warmup = [float(machine.memory().rss)], [], 0
    with ExitStack() as stack:
        opened: list[Session] = []
        for file in (path, *others):
            stage(f"load {len(opened) + 1}")
            start = clock()
            opened.append(stack.enter_context(Session(file, config)))
            loaded = clock()
            tokens = drawn(cell, opened[0].n_vocab)
            _warm(opened[-1], tokens[0, 0])
            loads.append((loaded - start) / 1e9)
            warmup += clock() - loaded
            resident.append(float(machine.memory().rss))
        reader, writer = opened[0], opened[-1]
        if reader.n_vocab != writer.n_vocab:
            why = f"knows {writer.n_vocab} tokens, and the reader {reader.n_vocab}"
            raise StudyError("the writer", why, "give two files of one model")
        samples: list[list[int]] = []
        checks: dict[str, float | bool] = {}
        for streams in tokens:
            stage("requests")
            spent, states, last = _answered(cell, reader, writer, streams)
            samples.append(spent)
            counted = reader.n_evaluated + (0 if reader is writer else writer.n_evaluated)
        stage("proof")
        checks |= _proved(cell, reader, writer, tokens[-1], states, last)
    checks["evaluated"] = counted == cell.n_seq * (cell.n_prompt + cell.n_gen - 1)
    return Measured(
        samples_ns=samples, warmup_ns=[warmup], load_ns=int(1e9 * sum(loads)), n_evaluated=len(tokens) * counted,
        n_bytes=len(states[0]), checks=checks, series={"resident": resident, "load": loads}, valid=passed(checks),
    )  # fmt: skip


def drawn(cell: Relay, n_vocab: int) -> np.ndarray:
    """Random tokens (repetitions, n_seq, n_prompt + n_gen) int32 of every request's prompt and answer."""
    shape = cell.repetitions, cell.n_seq, cell.n_prompt + cell.n_gen
    return np.random.default_rng(cell.seed).integers(FIRST_TOKEN, n_vocab, shape, dtype=np.int32)


def _warm(session: Session, stream: np.ndarray) -> None:
    """A short prompt, its state in every sequence, and some steps of all of them."""
    n = min(WARM_TOKENS, len(stream) - WARM_STEPS)
    session.prefill({0: stream[:n]})
    state, sequences = session.read_state(0), range(session.config.n_seq_max)
    for seq in sequences:
        session.set_state(seq, state, n)
    for token in stream[n : n + WARM_STEPS].tolist():
        session.decode(dict.fromkeys(sequences, token))
    session.clear()


def _answered(
    cell: Relay, reader: Session, writer: Session, streams: np.ndarray
) -> tuple[list[int], list[bytes], list[np.ndarray]]:
    """One repetition: its times, the state of each request's prompt, and the last logits of each answer."""
    alone = reader is writer
    end = cell.n_prompt - (0 if alone else 1)  # tokens that are read
    steps = [dict(enumerate(tokens)) for tokens in streams[:, end : cell.n_prompt + cell.n_gen - 1].T.tolist()]
    reader.clear()
    writer.clear()
    read = save = load = 0
    kept: list[np.ndarray] = []
    with watch.timed():
        for seq, stream in enumerate(streams):
            start = clock()
            if alone:
                writer.prefill({seq: stream[:end]})
                read += clock() - start
                continue
            reader.remove_tail(0, 0)
            reader.prefill({0: stream[:end]})
            came = clock()
            kept.append(reader.read_state(0))
            saved = clock()
            writer.set_state(seq, kept[-1], end)
            read, save, load = read + came - start, save + saved - came, load + clock() - saved
    states = [writer.get_state(seq) for seq in range(cell.n_seq)] if alone else [state.tobytes() for state in kept]
    with watch.timed():
        start = clock()
        for step in steps:
            writer.decode(step)
        write = clock() - start
    return [read, save, load, write], states, [writer.logits(row) for row in range(cell.n_seq)]


def _proved(
    cell: Relay, reader: Session, writer: Session, streams: np.ndarray, states: list[bytes], last: list[np.ndarray]
) -> dict[str, float | bool]:
    """The first and the last answer alone and in one call, from the state of their prompts."""
    end = cell.n_prompt - (0 if reader is writer else 1)
    limit = max(tolerance(cell), tolerance(msgspec.structs.replace(cell, dtype=cell.writer_dtype or cell.dtype)))
    errors, identical = [], True
    for seq in sorted({0, cell.n_seq - 1}):
        writer.clear()
        writer.set_state(0, states[seq], end)
        if reader is not writer:
            identical &= writer.get_state(0) == states[seq]
        rest = writer.prefill({0: streams[seq, end : cell.n_prompt + cell.n_gen - 1]})[0][-1]
        errors.append(relative_error(last[seq], rest))
    error = max(errors)
    checks: dict[str, float | bool] = {"second_path_error": error, "second_path": error <= limit, "tolerance": limit}
    checks["finite"] = bool(np.isfinite(np.stack(last)).all())
    return checks | ({"state_identical": identical} if reader is not writer else {})


RUNS = {Relay: run}
