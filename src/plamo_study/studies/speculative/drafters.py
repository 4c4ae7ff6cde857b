"""Who drafts: an oracle whose drafts are right as often as asked for, what the text says already, or a smaller model.

A drafter is asked with the tokens so far, the last of which nobody has evaluated yet, and answers with at most k tokens
that it expects next. It knows nothing of the target.
"""

from collections.abc import Callable, Iterator

import numpy as np

from plamo_study.engine.session import Session
from plamo_study.errors import StudyError

Draft = Callable[[np.ndarray, int], np.ndarray]  # tokens so far (n,), k: the draft (at most k,) int32
STRATA = 8  # draws that together are spread evenly
LONGEST, SHORTEST = 4, 2  # tokens of the end of a text that are looked for earlier in it


def forced(known: np.ndarray, counts: Iterator[int], n_vocab: int) -> Draft:
    """Drafts of a text that is `known`: as many right tokens as `counts` says, and then wrong ones."""

    def draft(tokens: np.ndarray, k: int) -> np.ndarray:
        found = known[len(tokens) : len(tokens) + k].copy()
        right = min(next(counts), len(found))
        found[right:] = (found[right:] + 1) % n_vocab
        return found

    return draft


def accepted(rate: float, k: int, rng: np.random.Generator, strata: int = STRATA) -> Iterator[int]:
    """How many of k drafted tokens are right: each with this probability, none after the first that is wrong.

    Drawn in strata, so that the tokens of one answer are right nearly as often as asked for; one stratum: independent.
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
    """What followed the last time that the text ended as it does now (prompt lookup); nothing where it never did."""
    for n in range(min(LONGEST, len(tokens) - 1), SHORTEST - 1, -1):
        windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], n)
        at = np.flatnonzero((windows == tokens[-n:]).all(axis=1))
        if len(at):
            return np.array(tokens[at[-1] + n : at[-1] + n + k])
    return np.array(tokens[:0])


class Model:
    """A model that drafts greedily, one token a step, in a context of its own.

    Before its first drafted token it keeps its state, and it goes back to it when it is asked again: its own draft is
    evaluated in several calls, and what an engine keeps of recurrent states reaches back over one.
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
        """Evaluate what is new of the text, and go on from there."""
        session = self.session
        if session.n_past[0] > self._n_held:
            self._go_back()
        logits = session.prefill({0: tokens[self._n_held :]})[0][-1]
        self._n_held = len(tokens)
        if session.is_recurrent and k > 1:
            self._state = session.read_state(0, "fixed")
        found = [int(logits.argmax())]
        while len(found) < k:
            session.decode({0: found[-1]})
            found.append(int(session.logits().argmax()))
        return np.array(found, dtype=np.int32)

    def _go_back(self) -> None:
        if self._state is not None:
            self.session.set_state(0, self._state, self._n_held, "fixed")
        elif not self.session.remove_tail(0, self._n_held):
            raise StudyError("the draft model", "keeps what it drafted", "draft with another model")


def check_vocabulary(target: Session, draft: Session) -> None:
    """StudyError unless both models name every token alike."""
    if target.n_vocab != draft.n_vocab:
        why = f"has {draft.n_vocab} tokens, the target {target.n_vocab}: a drafted id would mean another text"
        raise StudyError("the draft model's vocabulary", why, "draft with a model of the target's vocabulary")
    if differ := [token for token in range(target.n_vocab) if target.piece(token) != draft.piece(token)]:
        first = differ[0]
        why = (
            f"differs at {len(differ)} tokens; {first} is {draft.piece(first)!r}, the target's {target.piece(first)!r}"
        )
        raise StudyError("the draft model's vocabulary", why, "draft with a model of the target's vocabulary")
