"""Drafters: an oracle with a chosen acceptance rate, lookup in the text itself, or a smaller model.

A drafter gets the tokens so far, the last of which no model has evaluated yet, and returns at most k tokens
that it expects next. It does not use the target.
"""

from collections.abc import Callable, Iterator

import numpy as np

from llama_meter.engine.session import Session
from llama_meter.errors import StudyError

Draft = Callable[[np.ndarray, int], np.ndarray]  # tokens so far (n,), k: the draft (at most k,) int32
STRATA = 8  # draws per evenly spread group
LONGEST, SHORTEST = 4, 2  # tokens at the end of a text that are searched for earlier in it


def forced(text: np.ndarray, counts: Iterator[int], n_vocab: int) -> Draft:
    """Drafter for a known `text`: each draft has the number of right tokens given by `counts`, then wrong ones."""

    def draft(tokens: np.ndarray, k: int) -> np.ndarray:
        guess = text[len(tokens) : len(tokens) + k].copy()
        right = min(next(counts), len(guess))
        guess[right:] = (guess[right:] + 1) % n_vocab
        return guess

    return draft


def accepted(rate: float, k: int, rng: np.random.Generator, strata: int = STRATA) -> Iterator[int]:
    """Numbers of right tokens in drafts of k: each right with probability `rate`, none after the first wrong one.

    Drawn in strata, so that the share in one answer is close to `rate`; with one stratum draws are independent.
    """
    reached = rate ** np.arange(1, k + 1)  # how likely the first n are all right
    while True:
        for place in (rng.permutation(strata) + rng.random(strata)) / strata:
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


class Model:
    """A model that drafts greedily, one token per step, in its own context.

    It saves its state before the first drafted token, and restores it for the next draft: its own draft is
    evaluated in several calls, and an engine can take recurrent states back over only one.
    """

    def __init__(self, session: Session):
        self.session = session
        self._state: np.ndarray | None = None
        self._n_held = 0

    def clear(self) -> None:
        """Forget the text."""
        self.session.clear()
        self._state, self._n_held = None, 0

    def __call__(self, tokens: np.ndarray, k: int) -> np.ndarray:
        """Evaluate the new part of the text and draft `k` tokens after it, (k,) int32."""
        session = self.session
        if session.n_past[0] > self._n_held:
            self._go_back()
        logits = session.prefill({0: tokens[self._n_held :]})[0][-1]
        self._n_held = len(tokens)
        if session.is_recurrent and k > 1:
            self._state = session.read_state(0, "fixed")
        guess = [int(logits.argmax())]
        while len(guess) < k:
            session.decode({0: guess[-1]})
            guess.append(int(session.logits().argmax()))
        return np.array(guess, dtype=np.int32)

    def _go_back(self) -> None:
        if self._state is not None:
            self.session.set_state(0, self._state, self._n_held, "fixed")
        elif not self.session.remove_tail(0, self._n_held):
            raise StudyError("the draft model", "keeps what it drafted", "draft with another model")


def check_vocabulary(target: Session, draft: Session) -> None:
    """StudyError unless both models have the same text for every token."""
    if target.n_vocab != draft.n_vocab:
        why = f"has {draft.n_vocab} tokens, the target {target.n_vocab}: a drafted id would mean another text"
        raise StudyError("the draft model's vocabulary", why, "draft with a model of the target's vocabulary")
    if differ := [token for token in range(target.n_vocab) if target.piece(token) != draft.piece(token)]:
        first = differ[0]
        why = (
            f"differs at {len(differ)} tokens; {first} is {draft.piece(first)!r}, the target's {target.piece(first)!r}"
        )
        raise StudyError("the draft model's vocabulary", why, "draft with a model of the target's vocabulary")
