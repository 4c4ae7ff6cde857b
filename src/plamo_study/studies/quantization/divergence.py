"""Divergence of one model's predictions from another's: NumPy on logits, rows are positions, columns the vocabulary.

Definitions are those of llama-perplexity (`--kl-divergence`), which rounds the reference to 16 bits first; nothing is
rounded here. Nothing here depends on models, chunks or intervals. Rows with non-finite logits give NaN.
"""

import numpy as np

QUANTILES = (0.5, 0.9, 0.99, 0.999)  # of the divergences of all tokens
GRID = tuple(  # probabilities at which their distribution is stored: evenly spaced in the middle, in ln(1 - p) above
    np.unique(np.round([*np.linspace(0.3, 0.7, 17), *(1 - np.geomspace(0.3, 1e-4, 40)), *QUANTILES, 1.0], 6)).tolist()
)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities (n, v) float32 of logits (n, v) float32: x - max - ln(sum(exp(x - max))), row by row."""
    with np.errstate(all="ignore"):
        shifted = np.subtract(logits, logits.max(axis=1, keepdims=True), dtype=np.float32)
        shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def nll(log_q: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Negative log-likelihood (n,) float64, nats, of the tokens (n,) that followed."""
    return -_of_targets(log_q, targets)


def kl_divergence(log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """KL(p || q) = sum(p (ln p - ln q)), (n,) float64, nats, p the reference; p = 0 adds nothing.

    llama-perplexity leaves out tokens with less than exp(-16) under the reference: each below 1.2e-7.
    """
    p = np.exp(log_p)
    with np.errstate(all="ignore"):
        terms = p * (log_p - log_q)
        sums = terms.sum(axis=1)
    if not np.isfinite(sums).all():
        sums = np.where((p == 0) & ~np.isnan(log_q), 0, terms).sum(axis=1)
    return sums.astype(np.float64)


def same_top(log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """Whether both give the same token the highest probability, (n,) bool; False where q is NaN."""
    top = log_q.argmax(axis=1)  # NumPy treats a NaN as the largest
    return (log_p.argmax(axis=1) == top) & ~np.isnan(np.take_along_axis(log_q, top[:, None], axis=1)[:, 0])


def delta_p(log_p: np.ndarray, log_q: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Change q - p of the probability of the token that followed, (n,) float64, in [-1, 1]."""
    return np.exp(_of_targets(log_q, targets)) - np.exp(_of_targets(log_p, targets))


def _of_targets(log_q: np.ndarray, targets: np.ndarray) -> np.ndarray:
    return np.take_along_axis(log_q, np.asarray(targets)[:, None], axis=1)[:, 0].astype(np.float64)
