"""Forward passes with one planted fault each: the errors of a wrong engine, to validate a gate's tolerance.

A fault at a boundary is in the middle of the text, where a micro-batch could end. The first five are defects found in
llama.cpp; their effects on several sequences are planted into one text.
"""

import numpy as np

from llama_meter.oracle import layers
from llama_meter.oracle.forward import Oracle

PIECES = 8  # calls into which split projections are cut
HALF = 65504.0  # the largest number of half precision


class LostRotation(Oracle):
    """D1: queries and keys without their positions."""

    def _rotated(self, x: np.ndarray, theta: float, at: np.ndarray) -> np.ndarray:
        return x


class MixedPrompts(Oracle):
    """D2: the tokens of two prompts interleaved before the scan."""

    def _ordered(self, zx: np.ndarray) -> np.ndarray:
        even = len(zx) // 2 * 2
        order = np.arange(even).reshape(2, -1).T.ravel()
        return np.concatenate([zx[order], zx[even:]])


class MisplacedStates(Oracle):
    """D3: the second half starts from an older state, not from the one written last."""

    def _scanned(self, x: np.ndarray, dt: np.ndarray, a: np.ndarray, B: np.ndarray, C: np.ndarray) -> np.ndarray:
        return _skipping(slice(len(x) // 4, len(x) // 2), x, dt, a, B, C)


class SplitProjections(Oracle):
    """D4: one product of many rows computed in pieces. Harmless: only the order of sums may differ."""

    def _projected(self, x: np.ndarray, name: str, at: np.ndarray | None = None) -> np.ndarray:
        pieces = [piece for piece in np.array_split(np.arange(len(x)), PIECES) if len(piece)]
        return np.concatenate([super(SplitProjections, self)._projected(x[piece], name, piece) for piece in pieces])


class HalfPrecisionOverflow(Oracle):
    """D5: an activation beyond half precision's range in a product of half precision."""

    def _gated(self, y: np.ndarray) -> np.ndarray:
        grown = y * np.float32(2 * HALF / np.abs(y).max())
        with np.errstate(over="ignore"):
            return grown.astype(np.float16).astype(np.float32)


class SwappedHeads(Oracle):
    """Heads 0 and 1 are swapped."""

    def _rotated(self, x: np.ndarray, theta: float, at: np.ndarray) -> np.ndarray:
        x = super()._rotated(x, theta, at)
        return _swapped(x) if x.shape[1] > 1 else x

    def _gated(self, y: np.ndarray) -> np.ndarray:
        return _swapped(y)


class LateState(Oracle):
    """Off by one: the second half starts without the first half's last token in its state or cache."""

    def _scanned(self, x: np.ndarray, dt: np.ndarray, a: np.ndarray, B: np.ndarray, C: np.ndarray) -> np.ndarray:
        return _skipping(slice(len(x) // 2 - 1, len(x) // 2), x, dt, a, B, C)

    def _visible(self, n_tokens: int, window: int | None, at: np.ndarray) -> np.ndarray:
        seen = super()._visible(n_tokens, window, at).copy()
        seen[at >= n_tokens // 2, n_tokens // 2 - 1] = False
        return seen


class FromPosition(Oracle):
    """A fault that begins at position `since`: the last layer skipped, or keys rotated by another base.

    Planted by tests and by the table of appendix A, never by a gate.
    """

    since, skips = 0, False

    def mixed(self, layer: int, x: np.ndarray, at: np.ndarray | None = None) -> np.ndarray:
        """As of any oracle, but for nothing from `since` on in the last layer."""
        return self._without(layer, super().mixed(layer, x, at), at)

    def fed(self, layer: int, x: np.ndarray, at: np.ndarray | None = None) -> np.ndarray:
        """The same of the feed-forward."""
        return self._without(layer, super().fed(layer, x, at), at)

    def _without(self, layer: int, added: np.ndarray, at: np.ndarray | None) -> np.ndarray:
        if not self.skips or layer < self.n_layer - 1:
            return added
        positions = np.arange(len(added)) if at is None else at
        return np.where((positions >= self.since)[:, None], np.float32(0), added)

    def _rotated(self, x: np.ndarray, theta: float, at: np.ndarray) -> np.ndarray:
        right = super()._rotated(x, theta, at)
        if self.skips or x.shape[1] == max(self._n_head):  # queries
            return right
        return np.where((at >= self.since)[:, None, None], super()._rotated(x, 1.5 * theta, at), right)


OF_MAMBA = {
    "mixed prompts": MixedPrompts,
    "misplaced states": MisplacedStates,
    "split projections": SplitProjections,
    "half-precision overflow": HalfPrecisionOverflow,
    "swapped heads": SwappedHeads,
    "state off by one": LateState,
}
OF_ATTENTION = {"lost rotation": LostRotation, "swapped heads": SwappedHeads, "state off by one": LateState}
HARMLESS = ("split projections",)


def _swapped(x: np.ndarray) -> np.ndarray:
    return x[:, [1, 0, *range(2, x.shape[1])]]


def _skipping(lost: slice, x: np.ndarray, dt: np.ndarray, a: np.ndarray, B: np.ndarray, C: np.ndarray) -> np.ndarray:
    """The scan, with its second half starting from a state without the first half's `lost` tokens."""
    rest = np.delete(np.arange(len(x)), lost)
    first, second = layers.scan(x, dt, a, B, C), layers.scan(x[rest], dt[rest], a, B[rest], C[rest])
    half = len(x) // 2
    return np.concatenate([first[:half], second[half - len(x) :]])
