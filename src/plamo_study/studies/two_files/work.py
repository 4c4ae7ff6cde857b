"""A prompt read by one file and its answer written by another file of the same model, for pairs of types.

The state of a sequence does not depend on the type of the weights. The reader evaluates a prompt without its last
token; the writer takes the state, evaluates that token and the text's next ones, and so predicts every written token.
The reference is one undivided pass of the file `dtype`: a pair of it with itself shows what dividing alone changes.

Series, one number per text, of a pair "A>B" (read by A, written by B), sums over the written tokens: `kld/A>B`,
`nll/A>B`, `same_first/A>B` and, of pairs written in `dtype`, `near/A>B` and `far/A>B` (KLD of the first and the last
`STEP` tokens). `distance/A>B` of these: KLD of every `STEP` tokens, the mean a token over all texts.

Asked for parts: `kld/A>B/PART`, where B read the prompt itself and only PART of the state is A's. Asked for free
answers: `same/A>B`, tokens until a greedy answer leaves the reference's own, and `under/A>B`, the answer's nll under
the undivided reference.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from llama_meter.cells import Handover
from llama_meter.engine import library
from llama_meter.engine.parts import CACHE, CONVOLUTION, HEADER, PARTS, RECURRENT, parts, spliced
from llama_meter.engine.session import EngineError, Session
from llama_meter.measure import texts
from llama_meter.measure.parting import parting
from llama_meter.measure.tolerance import tolerance
from llama_meter.models.registry import GIVEN
from llama_meter.oracle.compare import relative_error
from llama_meter.rows import Measured, passed
from plamo_study.studies.quantization import divergence, work as quality

STEP = 8  # written tokens that are one distance from the hand-over
UNDIVIDED = "undivided"
NONE, ALL = "none", "all"  # of the parts
Sessions = dict[str, Session]
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

    @property
    def targets(self) -> np.ndarray:
        """The written tokens."""
        return self.tokens[self.n_prompt :]


@dataclass
class Found:
    """What all texts gave: sums, KLD by distance, and of every check the worst."""

    sums: quality.Sums = field(default_factory=dict)
    distances: dict[str, list[np.ndarray]] = field(default_factory=dict)
    checks: dict[str, float | bool] = field(default_factory=dict)

    def check(self, **seen: float | bool) -> None:
        """Note checks of one text: what is true must be true of all, and of errors the largest stays."""
        for name, value in seen.items():
            worst = self.checks.get(name, value)
            self.checks[name] = bool(worst and value) if isinstance(value, bool) else max(worst, value)


def run(cell: Handover, path: Path, stage: Callable[[str], None], *others: Path) -> Measured:
    """Evaluate `n_chunks` texts with every pair of files, then plant states that must not pass."""
    library.capture_log([])
    tally, samples = Found(), []
    first = np.empty(0)  # logits of the first text in one pass
    with ExitStack() as stack:
        config = quality.config(cell, cell.n_ctx + cell.n_gen)
        sessions = {
            name: stack.enter_context(Session(file, config)) for name, file in files(cell, path, others).items()
        }
        reference = sessions[cell.dtype]
        tokens = reference.tokenize(texts.planned(cell.text, cell.text_sha256))
        chunks = texts.chunks(tokens, cell.n_ctx + cell.n_gen, cell.n_chunks, reference.bos)
        for number, chunk in enumerate(chunks):
            stage(f"text {number + 1} of {len(chunks)}")
            start = clock()
            whole = reference.score(chunk, cell.n_ctx - 1).copy()
            first = whole if number == 0 else first
            text = Text(chunk, cell.n_ctx, whole, divergence.log_softmax(whole))
            nll = divergence.nll(text.log_p, text.targets)
            quality.add(tally.sums, {"tokens": len(text.targets), f"nll/{UNDIVIDED}": nll.sum()})
            ASKED[cell.compares](cell, sessions, text, tally)
            samples.append(clock() - start)
        stage("planted states")
        tally.check(**_by_steps(cell, reference, chunks[0], first))
        tally.check(**_planted(cell, reference, others[-1] if cell.stranger else None, chunks))
    if "undivided_error" in tally.checks:
        tally.check(undivided=tally.checks["undivided_error"] <= tolerance(cell))
    series = {
        f"distance/{pair}": [quality.short(v) for v in np.mean(of, axis=0)] for pair, of in tally.distances.items()
    }
    return Measured(samples_ns=[samples], checks=tally.checks, series=tally.sums | series, valid=passed(tally.checks))


def files(cell: Handover, path: Path, others: tuple[Path, ...]) -> dict[str, Path]:
    """Every file by its type: candidates lie beside the reference, or were given as it was."""
    if cell.scale == GIVEN:
        return {cell.dtype: path} | dict(zip(cell.candidates, others, strict=True))
    return {cell.dtype: path} | {name: quality.candidate_path(cell, path, name) for name in cell.candidates}


def pairs(cell: Handover) -> list[tuple[str, str]]:
    """Reader and writer of every pair that a cell asks for."""
    names = (cell.dtype, *cell.candidates)
    every = [(reader, writer) for reader in names for writer in names]
    return every if cell.paired == "whole" else [pair for pair in every if cell.dtype in pair or pair[0] == pair[1]]


def _pairs(cell: Handover, sessions: Sessions, text: Text, tally: Found) -> None:
    states = {name: read(session, text.prompt) for name, session in sessions.items()}
    for reader, writer in pairs(cell):
        pair, logits = f"{reader}>{writer}", _handed(sessions[writer], states[reader], text, tally)
        of = quality.divergences(text.log_p, logits, text.targets)
        values = {"nll": of[:, 0].sum(), "kld": of[:, 1].sum()}
        if reader in (writer, cell.dtype):
            values["same_first"] = int(of[0, 2])
        if writer == cell.dtype:
            values |= {"near": of[:STEP, 1].sum(), "far": of[-STEP:, 1].sum()}
            tally.distances.setdefault(pair, []).append(
                of[: cell.n_gen // STEP * STEP, 1].reshape(-1, STEP).mean(axis=1)
            )
        if reader == writer == cell.dtype:
            tally.check(undivided_error=relative_error(logits, text.whole))
        quality.add(tally.sums, {f"{what}/{pair}": value for what, value in values.items()})


def _by_parts(cell: Handover, sessions: Sessions, text: Text, tally: Found) -> None:
    """Each part of a state alone from another reader: a bad part among good ones, and a good one among bad ones."""
    states = {name: read(session, text.prompt) for name, session in sessions.items()}
    for name in cell.candidates:
        for reader, writer in ((name, cell.dtype), (cell.dtype, name)):
            own, other = states[writer], states[reader]
            tally.check(all_is_other=spliced(own, other, PARTS) == other, none_is_own=spliced(own, other, ()) == own)
            for what, taken in {NONE: (), ALL: PARTS, **{part: (part,) for part in PARTS}}.items():
                logits = _handed(sessions[writer], spliced(own, other, taken), text, tally)
                kld = quality.divergences(text.log_p, logits, text.targets)[:, 1].sum()
                quality.add(tally.sums, {f"kld/{reader}>{writer}/{what}": kld})


def _free(cell: Handover, sessions: Sessions, text: Text, tally: Found) -> None:
    """Greedy answers: how long each is the reference's own, and how likely the reference finds it."""
    states = {name: read(session, text.prompt) for name, session in sessions.items()}
    answers = {}
    for reader, writer in pairs(cell):
        take(sessions[writer], states[reader], len(text.prompt))
        answers[reader, writer] = greedy(sessions[writer], int(text.tokens[cell.n_ctx - 1]), cell.n_gen)
    for (reader, writer), answer in answers.items():
        same = parting(answers[cell.dtype, cell.dtype], answer).token
        logits = sessions[cell.dtype].score(np.concatenate([text.tokens[: cell.n_ctx], answer]), cell.n_ctx - 1)
        nll = divergence.nll(divergence.log_softmax(logits), answer).sum()
        values = {"same": same if same >= 0 else cell.n_gen, "under": nll}
        quality.add(tally.sums, {f"{what}/{reader}>{writer}": value for what, value in values.items()})


ASKED = {"": _pairs, "parts": _by_parts, "free": _free}


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
    return session.verify({0: chunk[n_prompt - 1 : -1]})[0].copy()


def greedy(session: Session, token: int, n_gen: int) -> np.ndarray:
    """The likeliest tokens (n_gen,) int32 after a context and `token`, one by one."""
    tokens = []
    for _ in range(n_gen):
        session.decode({0: token})
        tokens.append(token := int(session.logits().argmax()))
    return np.array(tokens, np.int32)


def refuses(session: Session, state: bytes, n_past: int) -> bool:
    """Whether the engine refuses a state. The context is empty afterwards."""
    try:
        take(session, state, n_past)
    except EngineError:
        return True
    finally:
        session.clear()
    return False


def _handed(session: Session, state: bytes, text: Text, tally: Found) -> np.ndarray:
    """Logits of the written tokens by a writer that takes this state."""
    take(session, state, len(text.prompt))
    tally.check(state_identical=session.get_state(0) == state)
    logits = written(session, text.tokens, text.n_prompt)
    tally.check(finite=bool(np.isfinite(logits).all()))
    return logits


def _by_steps(cell: Handover, session: Session, chunk: np.ndarray, whole: np.ndarray) -> dict[str, float | bool]:
    """A second path: one text written token by token after the hand-over, as a server does, against its one pass."""
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
    own, others = (read(session, chunk[:n_past]) for chunk in (chunks[0], chunks[-1]))
    planted = {"other_prompt": others}
    if cell.compares == "parts":
        planted |= {f"other_{part.replace(' ', '_')}": spliced(own, others, (part,)) for part in PARTS}
    answers = {}
    for name, state in {"": own, **planted}.items():
        take(session, state, n_past)
        answers[name] = written(session, chunks[0], cell.n_ctx)
    errors = {name: relative_error(answers[name], answers[""]) for name in planted}
    seen: dict[str, float | bool] = {f"{name}_error": error for name, error in errors.items()}
    seen |= {name: error > tolerance(cell) for name, error in errors.items()}
    if cell.compares == "parts":
        seen["fixed_is_tail"] = _fixed_is_tail(session, chunks[0][:n_past])
    if stranger:
        with Session(stranger, session.config) as another:
            seen["stranger_refused"] = refuses(session, read(another, chunks[0][:n_past]), n_past)
    with Session(session, replace(session.config, type_k="q8_0" if cell.type_k != "q8_0" else "f16")) as other_cache:
        seen["other_cache_refused"] = refuses(other_cache, own, n_past)
    return seen | {"truncated_refused": refuses(session, own[: len(own) // 2], n_past)}


def _fixed_is_tail(session: Session, prompt: np.ndarray) -> bool:
    """Whether what the engine itself writes as the recurrent part holds both parts taken for it, and not the cache."""
    state, where = read(session, prompt), parts(read(session, prompt))
    fixed = session.read_state(0, "fixed").tobytes()[HEADER:]
    start = len(state) - len(fixed)
    inside = all(part.start > start for name in (CONVOLUTION, RECURRENT) for part in where[name])
    return state[start:] == fixed and inside and all(part.stop <= start for part in where[CACHE])


RUNS = {Handover: run}
