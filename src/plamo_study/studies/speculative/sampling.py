"""Exact rejection sampling: tokens from accepted and corrected drafts follow the target's distribution exactly.

Leviathan et al. 2023, "Fast inference from transformers via speculative decoding", algorithm 1: a token drawn from the
draft's distribution q is kept with probability min(1, p / q); otherwise one is drawn from max(p - q, 0), normalized.
"""

import numpy as np


def probabilities(logits: np.ndarray, temperature: float) -> np.ndarray:
    """Softmax of logits (..., n_vocab) at a temperature above 0, float64."""
    scaled = logits.astype(np.float64) / temperature
    scaled -= scaled.max(axis=-1, keepdims=True)
    weights = np.exp(scaled)
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def one_hot(tokens: np.ndarray, n_vocab: int) -> np.ndarray:
    """Distributions (k, n_vocab) of a deterministic drafter's tokens (k,): n-grams, or a greedy model."""
    return np.eye(n_vocab)[tokens]


def verified(draft: np.ndarray, drafted: np.ndarray, target: np.ndarray, rng: np.random.Generator) -> tuple[int, int]:
    """Number of tokens of a draft (k,) that are kept, and the token after them.

    `drafted`: the distributions (k, n_vocab) they were drawn from; `target`: the target's, (k + 1, n_vocab), the last
    one after the whole draft.
    """
    for i, token in enumerate(draft.tolist()):
        p, q = target[i], drafted[i]
        if rng.random() * q[token] >= p[token]:
            left = np.maximum(p - q, 0)
            return i, int(rng.choice(len(p), p=left / left.sum()))
    return len(draft), int(rng.choice(target.shape[1], p=target[-1]))
