"""Questions to a model that keeps a state: is a sequence's answer its own, whatever else the engine is doing?

Each question evaluates sequences as a server would. Every sequence is then held against itself alone: its own context,
its prompt in one call, one token a step. All tokens are drawn in advance, so that rounding cannot change what follows.
"""

import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from llama_meter.cells import Hybrid
from llama_meter.engine import library
from llama_meter.engine.session import EngineError, Session, SessionConfig
from llama_meter.models import tensors
from llama_meter.models.recipes import KINDS
from llama_meter.oracle.compare import relative_error
from llama_meter.rows import Measured
from plamo_study.studies.right_answers import architectures
from plamo_study.studies.right_answers.architectures import (
    ABOUT_FILES,
    KEPT,
    LISTED,
    N_CTX,
    QUESTIONS,
    STEPS,
    tolerance,
)

SHORT = 6  # tokens of a prompt where many sequences are asked
FEW = 4  # tokens of a draft, at most
SHIFT = 5  # positions that a sequence is moved by
ALONE = SessionConfig(N_CTX)
Logits = dict[tuple[int, int], np.ndarray]  # (n_vocab,) by sequence and the number of its tokens that were evaluated


class RefusedError(Exception):
    """The engine said that it cannot do what a question needs."""


@dataclass
class Serving:
    """Contexts on one file, the tokens of sequences, how many of each were evaluated, and the logits behind them.

    `lengths`: tokens of each prompt. `number`: what the question counts. `planted`: a fault is. After a step the last
    sequence gets the first one's state; where there is only one, the last tokens of its prompt are others.
    """

    path: Path
    config: SessionConfig
    tokens: list[np.ndarray]
    lengths: list[int]
    number: int
    planted: bool
    logits: Logits = field(default_factory=dict)
    stack: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.done = [0] * len(self.tokens)
        self.slots = list(range(len(self.tokens)))

    def context(self, **changed: object) -> Session:
        """A further context, with a model of its own; it ends with the question."""
        return self.stack.enter_context(Session(self.path, replace(self.config, **changed)))  # type: ignore[arg-type]

    def call(self, session: Session, parts: Mapping[int, int]) -> None:
        """Evaluate so many next tokens of these sequences in one call."""
        given = []
        for seq, n in parts.items():
            own = self.tokens[seq][self.done[seq] : self.done[seq] + n]
            if self.planted and len(self.tokens) == 1 and not self.done[seq]:
                last = min(max(self.number, 1), FEW)
                own = np.concatenate([own[:-last], (own[-last:] + 1) % session.n_vocab])
            given.append((self.slots[seq], own))
            self.done[seq] += n
        logits = session.evaluate(given)
        self.logits |= {(seq, self.done[seq]): logits[self.slots[seq]][-1].copy() for seq in parts}

    def read(self, session: Session, *seqs: int) -> None:
        """Evaluate the prompts of these sequences in one call."""
        self.call(session, {seq: self.lengths[seq] for seq in seqs})

    def drafted(self, seq: int, n: int) -> np.ndarray:
        """A sequence's next token, and a draft of `n` wrong ones behind it: as if they were taken back already."""
        at = self.done[seq]
        self.done[seq] += 1
        return np.concatenate([self.tokens[seq][at : at + 1], self.tokens[seq][:n]])

    def go_on(self, session: Session, *seqs: int, steps: int = STEPS) -> None:
        """Let these sequences, by default all, take steps together."""
        chosen = seqs or range(len(self.tokens))
        for step in range(steps):
            if self.planted and step == 1 and len(chosen) > 1:
                first, last = self.slots[chosen[0]], self.slots[chosen[-1]]
                session.set_state(last, session.read_state(first), session.n_past[first])
            self.call(session, dict.fromkeys(chosen, 1))

    def take_back(self, session: Session, *seqs: int) -> None:
        """Leave these sequences as many tokens as they are to have."""
        for seq in seqs:
            if not session.remove_tail(seq, self.done[seq]):
                raise RefusedError("the engine does not take tokens back")

    def go_on_in_copies(self, session: Session) -> None:
        """Copy the first sequence's state to all others, and let all step together."""
        for seq in range(1, len(self.tokens)):
            session.copy(0, seq)
            self.done[seq] = self.done[0]
        self.go_on(session)


def equal(serving: Serving, **changes: object) -> None:
    """All prompts are read in one call, in a context with these `changes`."""
    session = serving.context(**changes)
    serving.read(session, *range(len(serving.tokens)))
    serving.go_on(session)


def cut(serving: Serving) -> None:
    """A prompt is read in micro-batches of this many tokens."""
    equal(serving, n_ubatch=serving.number)


def by_layer(serving: Serving) -> None:
    """The same file with a number of heads for each layer: 0 where a layer has no attention."""
    serving.path = architectures.by_layer(serving.path)
    equal(serving)


def steps(serving: Serving, **changes: object) -> None:
    """Prompts are read one by one, and all sequences step together, in a context with these `changes`."""
    session = serving.context(**changes)
    for seq in range(len(serving.tokens)):
        serving.read(session, seq)
    serving.go_on(session)


def gaps(serving: Serving) -> None:
    """The slots in use do not lie side by side."""
    serving.slots = [0, 2, 5]
    steps(serving, n_seq_max=8)


def late(serving: Serving) -> None:
    """A prompt is read in a call with the steps of others."""
    session = serving.context()
    *others, last = range(len(serving.tokens))
    for seq in others:
        serving.read(session, seq)
    for _ in range(2):
        serving.call(session, dict.fromkeys(others, 1))
    serving.call(session, dict.fromkeys(others, 1) | {last: serving.lengths[last]})
    serving.go_on(session, steps=STEPS - 3)


def left(serving: Serving) -> None:
    """One sequence leaves; another takes its slot while the others go on."""
    session = serving.context(n_seq_max=len(serving.tokens) - 1)
    first, *others, new = range(len(serving.tokens))
    for seq in (first, *others):
        serving.read(session, seq)
    serving.go_on(session, first, *others, steps=3)
    if not session.remove_tail(serving.slots[first], 0):
        raise RefusedError("a sequence does not leave")
    serving.call(session, dict.fromkeys(others, 1))
    serving.slots[new] = serving.slots[first]
    serving.read(session, new)
    serving.go_on(session, *others, new, steps=STEPS - 4)


def moved(serving: Serving) -> None:
    """A saved state goes on in another slot."""
    session = serving.context(n_seq_max=3)
    serving.read(session, 0)
    session.move(0, 2)
    serving.slots[0] = 2
    serving.go_on(session)


def elsewhere(serving: Serving, n_seq_max: int) -> None:
    """A saved state of a context with three slots goes on in another one, with `n_seq_max`."""
    here, there = serving.context(n_seq_max=3), serving.context(n_seq_max=n_seq_max)
    serving.read(here, 0)
    there.set_state(1, here.read_state(0), here.n_past[0])
    serving.slots[0] = 1
    serving.go_on(there)


def keeping(serving: Serving) -> Session:
    """A context that keeps the states of its last tokens."""
    session = serving.context(n_rs_seq=KEPT)
    if session.is_recurrent and session.n_rollback < serving.number:
        raise RefusedError(f"the context keeps the states of {session.n_rollback} tokens")
    return session


def back(serving: Serving, keeps: bool, together: bool = True) -> None:
    """A draft of this many tokens is evaluated behind a right one, and taken back.

    `keeps`: in a context that keeps states; `together`: in one call, else each token in a call of its own.
    """
    session = keeping(serving) if keeps else serving.context()
    serving.read(session, 0)
    drafted = serving.drafted(0, serving.number)
    for call in [drafted] if together else drafted[:, None]:
        session.evaluate([(0, call)])
    serving.take_back(session, 0)
    serving.go_on(session, steps=STEPS - 1)


def kept_beside(serving: Serving) -> None:
    """Drafts of several slots in one call, all taken back; the slots were read in another order."""
    session = keeping(serving)
    first, second, *others = every = range(len(serving.tokens))
    for seq in (second, first, *others):
        serving.read(session, seq)
    session.evaluate([(seq, serving.drafted(seq, serving.number + (seq == first))) for seq in every])
    serving.take_back(session, *every)
    serving.go_on(session, steps=STEPS - 1)


def kept_copied(serving: Serving) -> None:
    """A draft of one call is taken back, and copies of the sequence go on with tokens of their own."""
    session = keeping(serving)
    serving.done[0] = serving.lengths[0] - 1
    for call in (serving.tokens[0][: serving.done[0]], serving.drafted(0, serving.number)):
        session.evaluate([(0, call)])
    serving.take_back(session, 0)
    serving.go_on_in_copies(session)


def copied(serving: Serving) -> None:
    """One prompt is read, its state copied, and the copies go on with tokens of their own."""
    session = serving.context()
    serving.read(session, 0)
    serving.go_on_in_copies(session)


def shifted(serving: Serving) -> None:
    """A sequence's positions are moved on: attention looks at distances, and a state knows no position."""
    session = serving.context()
    serving.read(session, 0)
    if not session.shift(0, SHIFT):
        raise RefusedError("the memory does not shift")
    serving.go_on(session)


RULES: dict[str, Callable[[Serving], None]] = {
    "equal": equal,
    "unequal": equal,
    "steps": steps,
    "late": late,
    "left": left,
    "gaps": gaps,
    "unified": partial(steps, kv_unified=True),
    "slots": steps,
    "cut": cut,
    "moved": moved,
    "elsewhere": partial(elsewhere, n_seq_max=3),
    "resized": partial(elsewhere, n_seq_max=5),
    "copied": copied,
    LISTED: by_layer,
    "shifted": shifted,
    "back": partial(back, keeps=False),
    "kept": partial(back, keeps=True),
    "kept apart": partial(back, keeps=True, together=False),
    "kept beside": kept_beside,
    "kept copied": kept_copied,
}


@dataclass(frozen=True)
class Answer:
    """What came of a question. Errors are relative, of logits (`relative_error`).

    `error`: the largest of each sequence; empty where the engine refused. `rounding`: of the first sequence alone, its
    prompt token by token against its prompt in one call. `refused`: why the engine did not do it.
    """

    error: dict[int, float]
    rounding: float
    refused: str = ""


def ask(
    name: str,
    number: int,
    path: Path,
    config: SessionConfig = ALONE,
    seed: int = 0,
    planted: bool = False,
    longer: int = 0,
) -> Answer:
    """Ask a file one question. EngineError where the engine fails to load it; an abort ends the process.

    `config`: of a sequence alone; other contexts differ from it by what the question changes, so all are on one device.
    `longer`: tokens more than usual in each prompt.
    """
    question = (QUESTIONS | ABOUT_FILES)[name]
    lengths = [n + longer for n in question.lengths or (SHORT,) * number]
    with Session(path, config) as session:
        rng = np.random.default_rng(seed)
        tokens = [rng.integers(0, session.n_vocab, n + STEPS, dtype=np.int32) for n in lengths]
        if question.shared:
            tokens = [np.concatenate([tokens[0][:n], own[n:]]) for n, own in zip(lengths, tokens, strict=True)]
        alone: Logits = {}
        for seq, own in enumerate(tokens):
            alone |= by_itself(session, seq, own, lengths[seq])
        stepped = by_itself(session, 0, tokens[0], 1)
        rounding = max(relative_error(stepped[at], row) for at, row in alone.items() if at[0] == 0)
    serving = Serving(path, replace(config, n_seq_max=len(tokens)), tokens, lengths, number, planted)
    with serving.stack:
        try:
            RULES[name](serving)
        except (RefusedError, EngineError) as why:
            return Answer({}, rounding, str(why))
    errors: dict[int, float] = {}
    for (seq, at), row in serving.logits.items():
        errors[seq] = max(errors.get(seq, 0.0), relative_error(row, alone[seq, at]))
    return Answer(errors, rounding)


def by_itself(session: Session, seq: int, tokens: np.ndarray, n_prompt: int) -> Logits:
    """Logits of a sequence by itself: so many tokens in one call, then one a call."""
    session.clear()
    logits = {(seq, n_prompt): session.prefill({0: tokens[:n_prompt]})[0][0]}
    for at in range(n_prompt, len(tokens)):
        session.decode({0: int(tokens[at])})
        logits[seq, at + 1] = session.logits()
    return logits


def run(cell: Hybrid, path: Path, stage: Callable[[str], None]) -> Measured:
    """Checks: `error`, the largest relative error of any logits against the sequence alone, with its `tolerance` and
    `rounding`; `wrong`, how many sequences are beyond the tolerance; `refused`, the engine said that it cannot. Series:
    `error` by sequence.

    A refusal is no wrong answer. Where a fault is planted, the answer is valid if it shows.
    """
    library.capture_log([])
    n = cell.n_threads
    config = SessionConfig(N_CTX, n_threads=n, n_gpu_layers=cell.n_gpu_layers)
    with tempfile.TemporaryDirectory() as folder:
        stage("writing the file")
        file = architectures.write(cell.model, Path(folder), cell.form)
        if cell.dtype != "F32":
            library.quantize(file, file.with_suffix(".quantized"), KINDS[cell.dtype])
            file = file.with_suffix(".quantized")
        digest = tensors.read_sha256(file)
        stage(cell.question)
        answer = ask(cell.question, cell.number, file, config, cell.seed, cell.planted, cell.longer)
    errors, refused = list(answer.error.values()), bool(answer.refused)
    limit = tolerance(cell.question, answer.rounding, cell.dtype, gpu=cell.n_gpu_layers != 0)
    wrong = sum(error > limit for error in errors)
    checks: dict[str, float | bool] = {"refused": refused, "rounding": answer.rounding, "tolerance": limit}
    checks |= {"error": max(errors), "wrong": float(wrong)} if errors else {}
    valid = refused or bool(wrong) == cell.planted
    return Measured(checks=checks, series={"error": errors}, file_sha256=digest, valid=valid)


RUNS = {Hybrid: run}
