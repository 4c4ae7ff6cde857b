"""Rounds of speculation: draft, save, verify in one call, accept, take back; each token is checked.

The target first continues each prompt alone, one token per call: the reference. The generated text follows it, so that
cost can be measured at any acceptance; the check is on the token that verification would have chosen at each position.

A rejected end of a draft is removed in one of three ways. `tail` removes it if the engine can: keys and values always,
a recurrent state only in builds that keep the states of the last positions. Otherwise it falls back to `part`, the
cheapest way in an engine as released. `full` saves the whole sequence before each draft, restores it, and evaluates the
accepted tokens again. `part` does the same with the part that cannot be removed token by token.

A drafter gets the tokens so far, the last of which no model has evaluated yet, and returns at most k tokens that it
expects next: an oracle with a chosen acceptance rate, lookup in the text itself, or a smaller model. It does not use
the target.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from llama_meter.cells import TERMS, Speculate
from llama_meter.engine import library
from llama_meter.engine.session import EngineError, Part, Session
from llama_meter.measure import phases
from llama_meter.oracle.compare import relative_error

clock = time.perf_counter_ns
Draft = Callable[[np.ndarray, int], np.ndarray]  # tokens so far (n,), k: the draft (at most k,) int32
STRATA = 8  # draws per evenly spread group
LONGEST, SHORTEST = 4, 2  # tokens at the end of a text that are searched for earlier in it


class Reference:
    """A prompt with the target's greedy continuation of `n` tokens, one per call: `tokens` including the prompt.

    Row i of `logits` (n, n_vocab) chose token n_prompt + i; `state` is that of the prompt.
    """

    def __init__(self, session: Session, prompt: np.ndarray, n: int):
        session.clear()
        first = session.prefill({0: prompt})[0]
        self.state, self.n_prompt = session.read_state(0), len(prompt)
        self.logits = np.concatenate([first, phases.greedy(session, int(first[0].argmax()), n - 1)])
        self.tokens = np.concatenate([prompt, self.logits.argmax(axis=1)]).astype(np.int32)

    def expected(self, at: int) -> np.ndarray:
        """Logits (n_vocab,) that chose token `at`."""
        return np.asarray(self.logits[at - self.n_prompt])


class Loop:
    """Rounds of speculation on sequences of one session, and their records."""

    def __init__(self, cell: Speculate, session: Session, references: dict[int, Reference], drafts: dict[int, Draft]):
        self.cell, self.session, self.references, self.drafts = cell, session, references, drafts
        can_remove = not session.is_recurrent or session.n_rollback >= cell.n_draft
        self.removes = cell.back == "tail" and cell.n_draft > 0 and can_remove
        self.part: Part = "everything" if cell.back == "full" else "fixed"
        self.saved: dict[int, tuple[np.ndarray, int]] = {}  # state, and the number of tokens in it
        several = len(references) > 1 and cell.n_draft > 0  # tokens of several sequences
        self.apart = several and session.is_recurrent and "D2" not in library.corrects()
        self.at = {seq: reference.n_prompt for seq, reference in references.items()}  # certain tokens, without the last
        self.rounds: list[dict[str, int]] = []  # nanoseconds by term
        self.counts: dict[str, list[int]] = {"drafted": [], "accepted": [], "sequence": []}
        self.others: list[tuple[int, int, int]] = []  # sequence, token's position, token chosen instead
        self.error = 0.0
        self.begin()

    def begin(self) -> None:
        """Let every sequence hold its prompt, and nothing else."""
        self.session.clear()
        for seq, reference in self.references.items():
            self.session.set_state(seq, reference.state, reference.n_prompt)

    def run(self, n_gen: int) -> None:
        """Run rounds until one sequence has `n_gen` new tokens."""
        while max(self.at[seq] - reference.n_prompt for seq, reference in self.references.items()) < n_gen:
            self.round()

    def round(self) -> None:
        """Draft, save, verify, accept and take back, once for every sequence."""
        self.rounds.append(dict.fromkeys(TERMS, 0))
        with self._spent("draft"):
            drafted = {seq: self._draft(seq) for seq in self.references}
        for seq in (seq for seq, draft in drafted.items() if len(draft) and not self.removes):
            with self._spent("save"):
                self.saved[seq] = self.session.read_state(seq, self.part), self.session.n_past[seq]
        certain = {seq: self.references[seq].tokens[self.at[seq]] for seq in drafted}
        columns = {seq: np.array([certain[seq], *draft], dtype=np.int32) for seq, draft in drafted.items()}
        with self._spent("verify"):
            logits = self.verify(columns)
            chosen = {seq: rows.argmax(axis=1) for seq, rows in logits.items()}
        right = {seq: self._agreed(seq, draft, logits[seq], chosen[seq]) for seq, draft in drafted.items()}
        for seq, draft in drafted.items():
            n = right[seq]
            for name, value in (("drafted", len(draft)), ("accepted", n), ("sequence", seq)):
                self.counts[name].append(value)
            if n < len(draft):
                self._take_back(seq, columns[seq], n + 1)

    @contextmanager
    def _spent(self, term: str) -> Iterator[None]:
        """Context manager that adds the time spent inside to a term of the last round."""
        start = clock()
        yield
        self.rounds[-1][term] += clock() - start

    def _draft(self, seq: int) -> np.ndarray:
        if not self.cell.n_draft:
            return np.empty(0, np.int32)
        return self.drafts[seq](self.references[seq].tokens[: self.at[seq] + 1], self.cell.n_draft)

    def verify(self, columns: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Logits by sequence at the last certain token and at each token of the draft: in one call, or in a call per
        sequence if the engine mixes up sequences with several tokens in one call."""
        if not self.apart:
            return self.session.evaluate(columns.items(), slice(None))
        parts = columns.items()
        return {seq: self.session.evaluate([(seq, part)], slice(None))[seq].copy() for seq, part in parts}

    def _agreed(self, seq: int, draft: np.ndarray, logits: np.ndarray, chosen: np.ndarray) -> int:
        """Number of draft tokens equal to the reference; records verification's other choices up to the next token."""
        reference, at = self.references[seq], self.at[seq]
        agree = draft == reference.tokens[at + 1 : at + 1 + len(draft)]
        n = len(draft) if agree.all() else int(agree.argmin())
        for i, token in enumerate(chosen[: n + 1].tolist(), at + 1):
            if token != reference.tokens[i]:
                self.others.append((seq, i, token))
        self.error = max(self.error, relative_error(logits[n], reference.expected(at + 1 + n)))
        self.at[seq] += n + 1
        return n

    def _take_back(self, seq: int, columns: np.ndarray, n_right: int) -> None:
        """Keep the first `n_right` of the columns just evaluated."""
        with self._spent("restore"):
            if not self.removes:
                self.session.set_state(seq, *self.saved[seq], self.part)
            elif not self.session.remove_tail(seq, self.session.n_past[seq] - len(columns) + n_right):
                raise EngineError(f"llama.cpp did not take back {len(columns) - n_right} tokens of sequence {seq}")
        if not self.removes:
            with self._spent("replay"):
                self.session.evaluate([(seq, columns[:n_right])])


# ------------------------------------------------------------------ drafters


def forced(text: np.ndarray, counts: Iterator[int], n_vocab: int) -> Draft:
    """Drafter for a known `text`: each draft has the number of right tokens given by `counts`, then wrong ones."""

    def draft(tokens: np.ndarray, k: int) -> np.ndarray:
        guess = text[len(tokens) : len(tokens) + k].copy()
        right = min(next(counts), len(guess))
        guess[right:] = (guess[right:] + 1) % n_vocab
        return guess

    return draft


def accepted(rate: float, k: int, rng: np.random.Generator) -> Iterator[int]:
    """Numbers of right tokens in drafts of k: each right with probability `rate`, none after the first wrong one.

    Drawn in strata, so that the share in one answer is close to `rate`.
    """
    reached = rate ** np.arange(1, k + 1)  # how likely the first n are all right
    while True:
        for place in (rng.permutation(STRATA) + rng.random(STRATA)) / STRATA:
            yield int((place < reached).sum())


def evenly(k: int, rng: np.random.Generator) -> Iterator[int]:
    """Every number from 0 to k equally often, in random order."""
    while True:
        yield from rng.permutation(k + 1).tolist()


def lookup(tokens: np.ndarray, k: int) -> np.ndarray:
    """Prompt lookup: the tokens after the last earlier occurrence of the text's end; empty if there is none."""
    for n in range(min(LONGEST, len(tokens) - 1), SHORTEST - 1, -1):
        windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], n)
        at = np.flatnonzero((windows == tokens[-n:]).all(axis=1))
        if len(at):
            return np.array(tokens[at[-1] + n : at[-1] + n + k])
    return np.array(tokens[:0])


def by_model(session: Session) -> Draft:
    """Drafter for one text: a model that drafts greedily, one token per step, in its own context.

    It saves its state before the first drafted token, and restores it for the next draft: its own draft is
    evaluated in several calls, and an engine can take recurrent states back over only one.
    """
    session.clear()
    n_evaluated, state = 0, None  # tokens of the text, without a draft, and the state after them

    def draft(tokens: np.ndarray, k: int) -> np.ndarray:
        nonlocal n_evaluated, state
        if state is not None:
            session.set_state(0, state, n_evaluated, "fixed")
        else:
            session.remove_tail(0, n_evaluated)
        logits = session.prefill({0: tokens[n_evaluated:]})[0][-1]
        n_evaluated, state = len(tokens), session.read_state(0, "fixed") if session.is_recurrent and k > 1 else None
        guess = [int(logits.argmax())]
        while len(guess) < k:
            session.decode({0: guess[-1]})
            guess.append(int(session.logits().argmax()))
        return np.array(guess, dtype=np.int32)

    return draft
