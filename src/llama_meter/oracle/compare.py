"""The distance between two sets of logits, and whether it is rounding or a different computation."""

import sys
from dataclasses import dataclass

import numpy as np

NOT_FINITE = sys.float_info.max  # the error when a number is not finite: JSON has no infinity, max() no NaN


@dataclass(frozen=True)
class Agreement:
    """Verdict over a set of positions; relative error as in `relative_error`, counts in positions.

    `top1_checked` positions have a clear winner in the oracle.
    `ok`: the error is within the tolerance, and the engine has the same winner at each of these.
    """

    max_relative_error: float
    top1_checked: int
    ok: bool


def relative_error(a: np.ndarray, b: np.ndarray) -> float:
    """Largest ‖a − b‖₂ / ‖b‖₂ over positions; a and b are (n_positions, n_vocab) or (n_vocab,), b the reference.

    Unrelated logits of equal size give √2. Measured per position, so that one wrong position among many shows; by the
    Euclidean norm, because a ratio of largest entries depends on two single logits. NOT_FINITE when a logit is not
    finite. Raises ValueError when the shapes differ.
    """
    if np.shape(a) != np.shape(b):
        raise ValueError(f"logits of shape {np.shape(a)} and {np.shape(b)} do not match")
    a, b = np.atleast_2d(a).astype(np.float64), np.atleast_2d(b).astype(np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return NOT_FINITE
    return float(np.max(np.linalg.norm(a - b, axis=-1) / np.linalg.norm(b, axis=-1)))


def agreement(engine_logits: np.ndarray, oracle_logits: np.ndarray, tolerance: float = 5e-3) -> Agreement:
    """Compare the engine's logits with the oracle's, both (n_positions, n_vocab) or (n_vocab,).

    Top-1 is compared where the oracle's margin (first minus second logit, over the largest magnitude of the position)
    is above the tolerance; elsewhere rounding may decide. Logits that are not finite never agree.
    """
    engine, oracle = np.atleast_2d(engine_logits), np.atleast_2d(oracle_logits)
    error = relative_error(engine, oracle)
    second, first = np.partition(oracle, -2, axis=-1)[:, -2:].T
    clear = first - second > tolerance * np.abs(oracle).max(axis=-1)
    same = np.isfinite(engine).all(axis=-1) & (engine.argmax(axis=-1) == oracle.argmax(axis=-1))
    return Agreement(error, int(np.sum(clear)), ok=error <= tolerance and bool(np.all(same[clear])))
