"""A prompt read by one file and its answer written by another file of the same model.

The state of a sequence does not depend on the type of the weights. The reader evaluates a prompt without its last
token; the writer takes the state, and evaluates that token and the next ones.

Of a cell of kind "handover" a text gives the written tokens, and the writer predicts every one of them. The reference
is one undivided pass of the file `dtype`: a pair of it with itself shows what dividing alone changes. Series, one
number per text, of a pair "A>B" (read by A, written by B): `kld/A>B`, a sum over the written tokens, and, of pairs
written in `dtype`, `near/A>B` and `far/A>B` (of the first and the last `STEP` tokens). `distance/A>B` of these: KLD of
every `STEP` tokens, the mean a token over all texts. Of parts: `kld/A>B/PART`, where B read the prompt itself and only
PART of the state is A's. Of free answers: `same/A>B`, tokens until a greedy answer leaves the reference's own.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from llama_meter.cells import Handover
from llama_meter.engine import library
from llama_meter.engine.session import EngineError, Session
from llama_meter.engine.states import PARTS, spliced
from llama_meter.measure import phases
from llama_meter.measure.tolerance import parting, tolerance
from llama_meter.models.registry import FILE_SCALE
from llama_meter.oracle.compare import relative_error
from llama_meter.rows import Measured, passed
from plamo_study.studies.quantization import work as quality
from plamo_study.studies.two_files.law import STEP

NONE, ALL = "none", "all"  # of the parts
Sessions = dict[str, Session]
Stage = Callable[[str], None]
clock = time.perf_counter_ns


@dataclass(frozen=True)
class Text:
    """Tokens of a text, `n_prompt` of which are read, and the undivided reference's logits of the others."""

    tokens: np.ndarray
    n_prompt: int
    whole: np.ndarray
    log_p: np.ndarray

    @property
    def prompt(self) -> np.ndarray:
        """What a reader evaluates."""
        return self.tokens[: self.n_prompt - 1]


@dataclass
class Tally:
    """What all texts gave: sums, KLD by distance, and of every check the worst."""

    sums: quality.Sums = field(default_factory=dict)
    distances: dict[str, list[np.ndarray]] = field(default_factory=dict)
    checks: dict[str, float | bool] = field(default_factory=dict)

    def check(self, **seen: float | bool) -> None:
        """Note checks of one text: what is true must be true of all, and of errors the largest stays."""
        for name, value in seen.items():
            worst = self.checks.get(name, value)
            self.checks[name] = bool(worst and value) if isinstance(value, bool) else max(worst, value)


def run(cell: Handover, path: Path, stage: Stage, *others: Path) -> Measured:
    """Evaluate `n_chunks` texts with every pair of files, then plant states that must not pass."""
    library.capture_log([])
    tally, samples = Tally(), []
    by_type = dict(zip((cell.dtype, *cell.candidates), (path, *others), strict=False))
    files = by_type if cell.scale == FILE_SCALE else quality.files(cell, path)
    with ExitStack() as stack:
        n_tokens = cell.n_ctx + cell.n_gen
        config = quality.config(cell, n_tokens)
        opened = {name: stack.enter_context(Session(file, config)) for name, file in files.items()}
        reference = opened[cell.dtype]
        chunks = quality.cut(cell, reference, n_tokens)
        for number, chunk in enumerate(chunks):
            stage(f"text {number + 1} of {len(chunks)}")
            start = clock()
            whole = reference.score(chunk, cell.n_ctx - 1).copy()
            text = Text(chunk, cell.n_ctx, whole, quality.log_softmax(whole))
            quality.add(tally.sums, {"tokens": cell.n_gen})
            COMPARES[cell.compares](cell, opened, text, tally)
            samples.append(clock() - start)
        stage("planted states")
        tally.check(**_by_steps(cell, reference, chunks[0]))
        tally.check(**_planted(cell, reference, others[-1] if cell.stranger else None, chunks))
    if "undivided_error" in tally.checks:
        tally.check(undivided=tally.checks["undivided_error"] <= tolerance(cell))
    for pair, of in tally.distances.items():
        for value in np.mean(of, axis=0):
            quality.add(tally.sums, {f"distance/{pair}": value})
    return Measured(samples_ns=[samples], checks=tally.checks, series=tally.sums, valid=passed(tally.checks))


def pairs(cell: Handover) -> list[tuple[str, str]]:
    """Reader and writer of every pair that a cell compares."""
    names = (cell.dtype, *cell.candidates)
    every = [(reader, writer) for reader in names for writer in names]
    return every if cell.paired == "whole" else [pair for pair in every if cell.dtype in pair or pair[0] == pair[1]]


def _pairs(cell: Handover, opened: Sessions, text: Text, tally: Tally) -> None:
    states = {name: read(session, text.prompt) for name, session in opened.items()}
    for reader, writer in pairs(cell):
        pair, logits = f"{reader}>{writer}", _handed(opened[writer], states[reader], text, tally)
        kld = quality.kl_divergence(text.log_p, quality.log_softmax(logits))
        quality.add(tally.sums, {f"kld/{pair}": kld.sum()})
        if writer == cell.dtype:
            quality.add(tally.sums, {f"near/{pair}": kld[:STEP].sum(), f"far/{pair}": kld[-STEP:].sum()})
            steps = kld[: cell.n_gen // STEP * STEP].reshape(-1, STEP).mean(axis=1)
            tally.distances.setdefault(pair, []).append(steps)
        if reader == writer == cell.dtype:
            tally.check(undivided_error=relative_error(logits, text.whole))


def _by_parts(cell: Handover, opened: Sessions, text: Text, tally: Tally) -> None:
    """Each part of a state alone from another reader: a bad part among good ones, and a good one among bad ones."""
    states = {name: read(session, text.prompt) for name, session in opened.items()}
    for name in cell.candidates:
        for reader, writer in ((name, cell.dtype), (cell.dtype, name)):
            state, other = states[writer], states[reader]
            tally.check(
                all_is_other=spliced(state, other, PARTS) == other, none_is_own=spliced(state, other, ()) == state
            )
            for what, taken in {NONE: (), ALL: PARTS, **{part: (part,) for part in PARTS}}.items():
                logits = _handed(opened[writer], spliced(state, other, taken), text, tally)
                kld = quality.kl_divergence(text.log_p, quality.log_softmax(logits)).sum()
                quality.add(tally.sums, {f"kld/{reader}>{writer}/{what}": kld})


def _free(cell: Handover, opened: Sessions, text: Text, tally: Tally) -> None:
    """Greedy answers: how long each is the reference's own."""
    states = {name: read(session, text.prompt) for name, session in opened.items()}
    answers = {}
    for reader, writer in pairs(cell):
        take(opened[writer], states[reader], len(text.prompt))
        logits = phases.greedy(opened[writer], int(text.tokens[cell.n_ctx - 1]), cell.n_gen)
        answers[reader, writer] = logits.argmax(axis=1)
    for (reader, writer), answer in answers.items():
        same = parting(answers[cell.dtype, cell.dtype], answer).token
        quality.add(tally.sums, {f"same/{reader}>{writer}": same if same >= 0 else cell.n_gen})


COMPARES = {"": _pairs, "parts": _by_parts, "free": _free}


def read(session: Session, prompt: np.ndarray) -> bytes:
    """The state of a sequence that holds a prompt."""
    session.clear()
    session.prefill({0: prompt})
    return session.get_state(0)


def take(session: Session, state: bytes, n_past: int) -> None:
    """Put a state into an empty context."""
    session.clear()
    session.set_state(0, state, n_past)


def written(session: Session, chunk: np.ndarray, n_prompt: int) -> np.ndarray:
    """Logits (n_gen, n_vocab) of a text's tokens from `n_prompt` on; the context holds all but the prompt's last."""
    return session.evaluate([(0, chunk[n_prompt - 1 : -1])], slice(None))[0].copy()


def refuses(session: Session, state: bytes, n_past: int) -> bool:
    """Whether the engine refuses a state. The context is empty afterwards."""
    try:
        take(session, state, n_past)
    except EngineError:
        return True
    finally:
        session.clear()
    return False


def _handed(session: Session, state: bytes, text: Text, tally: Tally) -> np.ndarray:
    """Logits of the written tokens by a writer that takes this state."""
    take(session, state, len(text.prompt))
    tally.check(state_identical=session.get_state(0) == state)
    logits = written(session, text.tokens, text.n_prompt)
    tally.check(finite=bool(np.isfinite(logits).all()))
    return logits


def _by_steps(cell: Handover, session: Session, chunk: np.ndarray) -> dict[str, float | bool]:
    """A second path: one text written token by token after the hand-over, as a server does, against its one pass."""
    whole = session.score(chunk, cell.n_ctx - 1).copy()
    take(session, read(session, chunk[: cell.n_ctx - 1]), cell.n_ctx - 1)
    rows = []
    for token in chunk[cell.n_ctx - 1 : -1].tolist():
        session.decode({0: token})
        rows.append(session.logits())
    error = relative_error(np.stack(rows), whole)
    return {"second_path_error": error, "second_path": error <= tolerance(cell)}


def _planted(cell: Handover, session: Session, stranger: Path | None, chunks: np.ndarray) -> dict[str, float | bool]:
    """States that must not pass: another prompt's, or a part of it, changes the logits; the engine refuses another
    model's, one of another type of cache, and a cut one."""
    n_past = cell.n_ctx - 1
    usual, other = (read(session, chunk[:n_past]) for chunk in (chunks[0], chunks[-1]))
    planted = {"other_prompt": other}
    if cell.compares == "parts":
        planted |= {f"other_{part.replace(' ', '_')}": spliced(usual, other, (part,)) for part in PARTS}
    answers = {}
    for name, state in {"": usual, **planted}.items():
        take(session, state, n_past)
        answers[name] = written(session, chunks[0], cell.n_ctx)
    errors = {name: relative_error(answers[name], answers[""]) for name in planted}
    seen: dict[str, float | bool] = {f"{name}_error": error for name, error in errors.items()}
    seen |= {name: error > tolerance(cell) for name, error in errors.items()}
    if stranger:
        with Session(stranger, session.config) as another:
            seen["stranger_refused"] = refuses(session, read(another, chunks[0][:n_past]), n_past)
    with Session(session, replace(session.config, type_k="q8_0" if cell.type_k != "q8_0" else "f16")) as other_cache:
        seen["other_cache_refused"] = refuses(other_cache, usual, n_past)
    return seen | {"truncated_refused": refuses(session, usual[: len(usual) // 2], n_past)}


RUNS = {Handover: run}
