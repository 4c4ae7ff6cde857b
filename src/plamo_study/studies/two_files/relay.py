"""A cell of kind "relay": requests read by one file and written by another that takes their states.

Both files have a context of the same layout. The reader evaluates a prompt without its last token; its state is saved,
and loaded into the writer, which evaluates that token and the answer's next ones. One file alone reads the prompt to
its end, which gives the first token, and moves nothing. Several requests are read one after the other and written
together. A reader may have a process of its own; its states then come over a connection. With several
requests it reads the next prompts while those that it has read are written, and each file has half of the threads.
Tokens are random and given beforehand, so that every answer can be held against another evaluation.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np

from llama_meter.cells import Relay
from llama_meter.engine import library
from llama_meter.engine.session import Session
from llama_meter.errors import StudyError
from llama_meter.limits import FIRST_TOKEN
from llama_meter.measure import machine, peers, sessions, watch
from llama_meter.measure.peers import clock
from llama_meter.measure.tolerance import tolerance
from llama_meter.oracle.compare import relative_error
from llama_meter.rows import Measured, passed

WARM_TOKENS, WARM_STEPS = 32, 2  # evaluated by each file before anything is timed, with as many sequences


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """Task of a reader that has a process of its own."""

    cell: Relay
    path: str


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """The reader is warm: seconds to load, nanoseconds to warm up, bytes of its process before and after."""

    load_s: float
    warmup_ns: int
    resident: tuple[float, float]


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Which prompt to read."""

    repetition: int
    seq: int


class Read(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt is read: nanoseconds, tokens, and the bytes of its state, which follow."""

    read_ns: int
    n_evaluated: int
    n_bytes: int


@dataclass
class Here:
    """A reader in this process."""

    session: Session
    helpers: tuple[int, ...] = ()

    def state(self, _: Wanted, prompt: np.ndarray) -> tuple[np.ndarray, Read]:
        """The state of a prompt, and what it took."""
        self.session.clear()
        start = clock()
        self.session.prefill({0: prompt})
        came = clock()
        state = self.session.read_state(0)
        return state, Read(read_ns=came - start, n_evaluated=self.session.n_evaluated, n_bytes=state.size)


@dataclass
class There:
    """A reader in another process, which knows the prompts; its CPU time is the cell's own."""

    line: Connection
    helpers: tuple[int, ...]

    def state(self, wanted: Wanted, _: np.ndarray) -> tuple[np.ndarray, Read]:
        """The state of a prompt, once all of it is here."""
        self.line.send(wanted)
        return self.next()

    def next(self) -> tuple[np.ndarray, Read]:
        """The next state of those that were asked for, once all of it is here."""
        came = self.line.recv()
        return peers.take(self.line, came.n_bytes), came

    def has_read(self) -> bool:
        """Whether a state has begun to come, or the reader is gone."""
        return self.line.poll()


def run(cell: Relay, path: Path, stage: Callable[[str], None], *others: Path) -> Measured:
    """Measure one cell. `samples_ns`: of every repetition the time to read, to save and to load states, and to write.

    Of a reader in another process, saving lasts until the state is here. Where reading and writing overlap, reading is
    the time in which the writer has nothing to write, so that the four sum up to the whole. `series`: "resident", bytes
    of the processes' memory before any file and after each was loaded and used; "load" (s) of each file. `n_bytes`: of
    one state.
    """
    library.capture_log([])
    with ExitStack() as stack:
        stage("load 1")
        reader: Here | There | None = None
        if cell.n_processes > 1:
            task = Reading(cell=cell, path=str(path))
            peer = stack.enter_context(peers.started(__name__, {"the reader": task}))["the reader"]
            reader = There(peer.line, (peer.process.pid,))
            first = reader.line.recv()
            stage("load 2")
            writer, last = _opened(stack, cell, others[0])
            ready = [first, last]
        else:
            writer, last = _opened(stack, cell, path)
            ready = [last]
            for file in others:
                stage("load 2")
                own, (writer, last) = writer, _opened(stack, cell, file)
                reader = Here(own)
                ready.append(last)
                if own.n_vocab != writer.n_vocab:
                    why = f"knows {writer.n_vocab} tokens, and the reader {own.n_vocab}"
                    raise StudyError("the writer", why, "give two files of one model")
        samples: list[list[int]] = []
        tokens = drawn(cell, writer.n_vocab)
        for repetition in range(len(tokens)):
            stage("requests")
            if isinstance(reader, There) and cell.overlaps:
                spent, states, logits, counted = _overlapped(cell, reader, writer, tokens, repetition)
            else:
                spent, states, logits, counted = _answered(cell, reader, writer, tokens, repetition)
            samples.append(spent)
        stage("proof")
        checks = _proved(cell, reader is None, writer, tokens[-1], states, logits)
    checks["evaluated"] = counted == cell.n_seq * (cell.n_prompt + cell.n_gen - 1)
    loads = [loaded.load_s for loaded in ready]
    return Measured(
        samples_ns=samples,
        warmup_ns=[sum(loaded.warmup_ns for loaded in ready)],
        load_ns=int(1e9 * sum(loads)),
        n_evaluated=len(tokens) * counted,
        n_bytes=len(states[0]),
        checks=checks,
        series={"resident": _resident(cell, ready), "load": loads},
        valid=passed(checks),
    )


def _resident(cell: Relay, ready: list[Loaded]) -> list[float]:
    """Bytes before any file and after each: of one process as it grows, or of two, each over what it began with."""
    if cell.n_processes == 1:
        return [ready[0].resident[0], *(loaded.resident[1] for loaded in ready)]
    grown = [after - before for before, after in (loaded.resident for loaded in ready)]
    return [0.0, *np.cumsum(grown).tolist()]


def _opened(stack: ExitStack, cell: Relay, path: Path) -> tuple[Session, Loaded]:
    """A warm context on a file, which ends with the stack. All of a cell have one layout."""
    before, start = float(machine.memory().rss), clock()
    threads = {"n_threads": cell.threads_each, "n_threads_batch": cell.threads_each}
    config = sessions.config(cell, cell.n_prompt + cell.n_gen, n_seq_max=cell.n_seq, swa_full=False, **threads)
    session = stack.enter_context(Session(path, config))
    loaded = clock()
    _warm(session, drawn(cell, session.n_vocab)[0, 0])
    resident = (before, float(machine.memory().rss))
    return session, Loaded(load_s=(loaded - start) / 1e9, warmup_ns=clock() - loaded, resident=resident)


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
    cell: Relay, reader: Here | There | None, writer: Session, tokens: np.ndarray, repetition: int
) -> tuple[list[int], list[bytes], list[np.ndarray], int]:
    """One repetition: its times, the state of each request's prompt, the last logits of each answer, tokens evaluated.

    `reader`: None where the writer reads, too.
    """
    streams, end = tokens[repetition], cell.n_prompt - (1 if reader else 0)  # tokens that are read
    steps = [dict(enumerate(step)) for step in streams[:, end : cell.n_prompt + cell.n_gen - 1].T.tolist()]
    writer.clear()
    read = save = load = counted = 0
    states: list[bytes] = []
    helpers = reader.helpers if reader else ()
    with watch.timed(*helpers):
        for seq, stream in enumerate(streams):
            start = clock()
            if reader is None:
                writer.prefill({seq: stream[:end]})
                read += clock() - start
                continue
            state, took = reader.state(Wanted(repetition=repetition, seq=seq), stream[:end])
            here = clock()
            writer.set_state(seq, state, end)
            loaded = clock()
            states.append(state.tobytes())
            counted += took.n_evaluated
            read, save, load = read + took.read_ns, save + here - start - took.read_ns, load + loaded - here
    if reader is None:
        states = [writer.get_state(seq) for seq in range(cell.n_seq)]
    with watch.timed(*helpers):
        start = clock()
        for step in steps:
            writer.decode(step)
        write = clock() - start
    last = [writer.logits(row) for row in range(cell.n_seq)]
    return [read, save, load, write], states, last, counted + writer.n_evaluated


def _overlapped(
    cell: Relay, reader: There, writer: Session, tokens: np.ndarray, repetition: int
) -> tuple[list[int], list[bytes], list[np.ndarray], int]:
    """As `_answered`: the reader knows all requests at once, and each is written from the next step on after it came.

    Between two steps every state that is here is loaded. An answer that is complete leaves the batch. In a call the
    newest answer comes first: the oldest then leaves the end of a hybrid's cells. From the front, llama.cpp aborts in
    PLaMo 2 (`measure.defects`, D3).
    """
    streams, end, stop = tokens[repetition], cell.n_prompt - 1, cell.n_prompt + cell.n_gen - 1
    read = save = load = write = counted = 0
    states: list[bytes] = []
    at: dict[int, int] = {}  # the next token of every answer that is being written
    last: dict[int, np.ndarray] = {}
    writer.clear()
    with watch.timed(*reader.helpers):
        for seq in range(cell.n_seq):
            reader.line.send(Wanted(repetition=repetition, seq=seq))
        while len(last) < cell.n_seq:
            while len(states) < cell.n_seq and (not at or reader.has_read()):
                start, seq = clock(), len(states)
                state, took = reader.next()
                states.append(state.tobytes())
                here = clock()
                writer.set_state(seq, state, end)
                loaded = clock()
                waited = 0 if at else min(took.read_ns, here - start)
                at[seq] = end
                counted += took.n_evaluated
                read, save, load = read + waited, save + here - start - waited, load + loaded - here
            start, batch = clock(), [*reversed(at)]
            writer.decode({seq: int(streams[seq, at[seq]]) for seq in batch})
            for row, seq in enumerate(batch):
                at[seq] += 1
                if at[seq] == stop:
                    last[seq] = writer.logits(row)
                    del at[seq]
            write += clock() - start
    return [read, save, load, write], states, [last[seq] for seq in range(cell.n_seq)], counted + writer.n_evaluated


def _proved(
    cell: Relay, alone: bool, writer: Session, streams: np.ndarray, states: list[bytes], last: list[np.ndarray]
) -> dict[str, float | bool]:
    """The first and the last answer, or all that overlapped, alone and in one call from the state of their prompts."""
    end = cell.n_prompt - (0 if alone else 1)
    limit = max(tolerance(cell), tolerance(msgspec.structs.replace(cell, dtype=cell.writer_dtype or cell.dtype)))
    errors, identical = [], True
    for seq in range(cell.n_seq) if cell.overlaps else sorted({0, cell.n_seq - 1}):
        writer.clear()
        writer.set_state(0, states[seq], end)
        if not alone:
            identical &= writer.get_state(0) == states[seq]
        rest = writer.prefill({0: streams[seq, end : cell.n_prompt + cell.n_gen - 1]})[0][-1]
        errors.append(relative_error(last[seq], rest))
    error = max(errors)
    checks: dict[str, float | bool] = {"second_path_error": error, "second_path": error <= limit, "tolerance": limit}
    checks["finite"] = bool(np.isfinite(np.stack(last)).all())
    return checks | ({} if alone else {"state_identical": identical})


def serve(task: Reading, line: Connection) -> None:
    """In a process of its own: load, and read prompts as they are wanted until nobody is there."""
    library.capture_log([])
    with ExitStack() as stack:
        session, ready = _opened(stack, task.cell, Path(task.path))
        tokens, reader = drawn(task.cell, session.n_vocab), Here(session)
        line.send(ready)
        while True:
            wanted = line.recv()
            state, took = reader.state(wanted, tokens[wanted.repetition, wanted.seq, : task.cell.n_prompt - 1])
            line.send(took)
            peers.push(line, state)


RUNS = {Relay: run}
