"""Two answers to one prompt: where they part, and whether rounding may have done it.

An answer given under load is compared with the one that its prompt gets alone. Both are greedy, so their texts should
match. But batches of different shapes round differently, and between two nearly equally likely tokens rounding
decides: such a difference proves nothing. If the server gives log probabilities, the gap of the two at the first
differing token reveals it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from llama_meter.measure.tolerance import near_tie
from llama_meter.serve.client import Answer

SAME = -1.0  # in rows, the first differing token of two answers that do not differ


@dataclass(frozen=True)
class Difference:
    """First differing token of two answers (from 0; -1: none), and the likeliest token's lead there alone, in nats."""

    token: int
    gap: float

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding may decide at that token; False without log probabilities."""
        return bool(near_tie(self.gap))


def difference(alone: Answer, answer: Answer) -> Difference | None:
    """First difference from the answer alone, or None. A broken-off answer is compared as far as it got.

    The gap is NaN where the server gave no log probabilities.
    """
    text, said = alone.text, answer.text
    if answer.failure:
        text = text[: len(said)]
    if text == said:
        return None
    at = next((i for i, (a, b) in enumerate(zip(text, said, strict=False)) if a != b), min(len(text), len(said)))
    token = _token_at(alone.tokens or alone.texts, at)
    return Difference(token, alone.gaps[token] if token < len(alone.gaps) else float("nan"))


def _token_at(pieces: Sequence[str], character: int) -> int:
    """Index of the token that contains a character of the text."""
    length = 0
    for number, piece in enumerate(pieces):
        length += len(piece)
        if character < length:
            return number
    return max(len(pieces) - 1, 0)
