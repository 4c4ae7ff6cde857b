"""Conversations and the five moves that go on from them, in tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llama_meter.cells import SLOTS

MOVES = ("appended", "rendered anew", "regenerated", "edited", "other chat")
LAST, ROUND = 64, 128  # tokens of a question; of a question and its answer
MARK = "\nUSER:"  # begins a question
CUT = 2  # tokens that an answer lacks when it is rendered anew
SETTINGS: dict[str, dict[str, Any]] = {  # what keeps a conversation, and how
    "llama-server": {},
    "without checkpoints": {"n_checkpoints": 0},
    "with 2 checkpoints": {"n_checkpoints": 2},
    "questions not marked": {"marked": False},
    "after another chat": {"away": True},
    "the same, --cache-ram 0": {"away": True, "cache_mib": 0},
    "saved slot, restored": {"away": True, "reuse": "saved"},
    "4 slots": {"n_seq": SLOTS},
    "4 slots, 3 neighbours": {"n_seq": SLOTS, "n_clients": SLOTS},
    "llama-cpp-python": {"reuse": "bindings"},
    "states of our own": {"reuse": "states"},
}


@dataclass(frozen=True)
class Conversation:
    """A system prompt, questions and answers, and a last question.

    `tokens`: (n,) int32. `spare`: (n + LAST,) int32, other tokens that moves take. `mark`: those that begin a question.
    """

    tokens: np.ndarray
    spare: np.ndarray
    mark: np.ndarray

    def after(self, move: str, answer: np.ndarray) -> np.ndarray:
        """The prompt of a move, where `answer` (n_gen,) was given to the conversation."""
        n, system = len(self.tokens), questions(len(self.tokens))[0]
        following = np.concatenate([self.mark, self.spare[: LAST - len(self.mark)]])
        if move == "appended":
            return np.concatenate([self.tokens, answer, following])
        if move == "rendered anew":
            return np.concatenate([self.tokens, answer[CUT:], following])
        if move == "regenerated":
            return self.tokens
        if move == "edited":
            return np.concatenate([self.tokens[: n - LAST], following])
        other = marked(self.spare[:n], self.mark)
        return np.concatenate([self.tokens[:system], other[system:]])


def questions(n: int) -> list[int]:
    """Where the questions of a conversation of `n` tokens begin; before the first stands a quarter of it, or more."""
    rounds = (3 * n // 4 - LAST) // ROUND
    return list(range(n - LAST - ROUND * rounds, n, ROUND))


def points(n: int, n_gen: int) -> list[int]:
    """Tokens after which we keep a state: the system prompt, before and after the last question, and the answer."""
    return sorted({questions(n)[0], n - LAST, n - 1, n + n_gen - 1})


def marked(tokens: np.ndarray, mark: np.ndarray) -> np.ndarray:
    """Tokens (n,) with a mark where each question begins."""
    made = tokens.copy()
    for start in questions(len(made)):
        made[start : start + len(mark)] = mark
    return made


def drawn(text: np.ndarray, mark: np.ndarray, n: int, rng: np.random.Generator) -> Conversation:
    """A conversation of `n` tokens out of a text (n_text,), which is read from random places, in a circle."""
    first, second = (np.roll(text, -int(rng.integers(len(text)))) for _ in range(2))
    return Conversation(marked(np.resize(first, n), mark), np.resize(second, n + LAST), mark)


def common(tokens: Sequence[int] | np.ndarray, others: Sequence[int] | np.ndarray) -> int:
    """How many tokens two sequences have in common from their beginning."""
    shorter = min(len(tokens), len(others))
    differ = np.flatnonzero(np.asarray(tokens)[:shorter] != np.asarray(others)[:shorter])
    return int(differ[0]) if len(differ) else shorter
