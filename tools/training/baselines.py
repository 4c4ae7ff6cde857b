"""Baselines that a trained model must beat on the same split: byte n-grams, and two compressors for orientation.

All figures are bits per byte of the held-out text.
"""

import lzma
import zlib

import numpy as np
from numpy.typing import NDArray

N_BYTES = 256


def ngram(train: bytes, held_out: bytes, orders: tuple[int, ...] = (1, 3, 5)) -> dict[int, float]:
    """Bits per byte of interpolated byte n-gram models, by their order n, counted in `train`.

    Witten-Bell smoothing (1991, doi:10.1109/18.87000), each order falling back on the next shorter one and the first
    on equal chances: p_n(c|h) = (count(h c) + kinds(h) · p_{n-1}(c|h')) / (count(h) + kinds(h)), where kinds(h) is
    the number of different bytes seen after h.
    """
    p = np.full(len(held_out), 1 / N_BYTES)
    found = {}
    for n in range(1, max(orders) + 1):
        p = _interpolated(_Counts(train, n), _grams(held_out, n), p)
        if n in orders:
            found[n] = float(-np.log2(p).mean())
    return found


def compressors(held_out: bytes) -> dict[str, float]:
    """Bits per byte of the held-out text alone, compressed at the highest level, without training text."""
    packed = {"xz": lzma.compress(held_out, preset=9 | lzma.PRESET_EXTREME), "zlib": zlib.compress(held_out, 9)}
    return {name: 8 * len(data) / len(held_out) for name, data in packed.items()}


class _Counts:
    """Counts of every n-gram in a text, and of the different bytes that follow each history."""

    def __init__(self, text: bytes, n: int):
        self.grams, self.counts = np.unique(_grams(text, n), return_counts=True)
        self.histories, first, self.kinds = np.unique(self.grams >> np.uint64(8), return_index=True, return_counts=True)
        self.totals = np.add.reduceat(self.counts, first)


def _interpolated(counts: _Counts, asked: NDArray[np.uint64], shorter: NDArray[np.float64]) -> NDArray[np.float64]:
    """Probabilities of the last bytes of the n-grams asked for, from those at order n - 1."""
    history = asked >> np.uint64(8)
    seen = _look_up(counts.grams, counts.counts, asked)
    total, kinds = (_look_up(counts.histories, values, history) for values in (counts.totals, counts.kinds))
    return np.where(total > 0, (seen + kinds * shorter) / np.maximum(total + kinds, 1), shorter)


def _grams(text: bytes, n: int) -> NDArray[np.uint64]:
    """The last n bytes at every position as one number; zeros precede the text."""
    values = np.frombuffer(bytes(n - 1) + text, np.uint8).astype(np.uint64)
    grams = np.zeros(len(text), np.uint64)
    for i in range(n):
        grams = grams << np.uint64(8) | values[i : i + len(text)]
    return grams


def _look_up(keys: NDArray[np.uint64], values: NDArray[np.int64], asked: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The value of every key asked for, 0 where there is none."""
    at = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
    return np.where(keys[at] == asked, values[at], 0)
