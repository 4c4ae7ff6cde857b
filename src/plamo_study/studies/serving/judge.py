"""Is an answer that others were given beside it the answer that its prompt gets alone?

Both are greedy, so they should be the same text. Batches of other shapes round differently, though, and where the two
likeliest tokens are nearly as likely, rounding decides: such a difference says nothing. It is told by the gap of the
two at the token where the answers part, where the server gives log probabilities; else by asking again, alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from plamo_study.measure.serving import NEAR_TIE
from plamo_study.studies.serving.client import Answer

SAME = -1.0


@dataclass(frozen=True)
class Difference:
    """Where two answers part: the token (from 0; -1: nowhere), and by how many nats the likeliest led there alone."""

    token: int
    gap: float

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding may decide at that token; never known without log probabilities."""
        return self.gap < NEAR_TIE


def difference(alone: Answer, answer: Answer) -> Difference | None:
    """Where an answer leaves what its prompt got alone; None where it does not, of one that broke off as far as it got.

    The gap is NaN where the server gave no log probabilities.
    """
    known, said = alone.text, answer.text
    if answer.failure:
        known = known[: len(said)]
    if known == said:
        return None
    at = next((i for i, (a, b) in enumerate(zip(known, said, strict=False)) if a != b), min(len(known), len(said)))
    token = _token_at(alone.tokens or alone.texts, at)
    return Difference(token, alone.gaps[token] if token < len(alone.gaps) else float("nan"))


def _token_at(pieces: Sequence[str], character: int) -> int:
    """The token that a character of the text belongs to."""
    length = 0
    for number, piece in enumerate(pieces):
        length += len(piece)
        if character < length:
            return number
    return max(len(pieces) - 1, 0)
