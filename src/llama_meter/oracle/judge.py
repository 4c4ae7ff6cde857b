"""The engine compared with the oracle part by part, and the errors of planted faults on the same scale.

Rounding grows through a model: activations of a Q8_0 file are rounded to 8 bits before every product, and on random
weights the logits of a correct engine end up a few per cent off. So every part is judged separately: the oracle gets
the part's input from the engine, and the part's contribution is compared. Its error is that of one or two products.

Each fault is an oracle with one error of a wrong engine, to validate a gate's tolerance. One at a boundary is in the
middle of the text, where a micro-batch could end. The first five are defects found in llama.cpp; their effects on
several sequences are planted into one text.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from llama_meter.oracle import layers
from llama_meter.oracle.compare import relative_error
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


@dataclass
class Judged:
    """The oracle's own `logits` (n_tokens, n_vocab); relative errors of the engine's parts, one per layer, and head.

    Of `judge_at`, `logits` holds the input of the first layer instead, and there are no faults.

    `faults`: by name, a part's error with this fault, in the first and the last layer of its kind.
    """

    logits: np.ndarray
    head: float = 0.0
    parts: dict[str, list[float]] = field(default_factory=dict)
    faults: dict[str, list[float]] = field(default_factory=dict)


def judge(
    oracle: Oracle,
    tokens: np.ndarray,
    sums: Mapping[tuple[int, str], np.ndarray],
    engine_logits: np.ndarray,
) -> Judged:
    """Judge one text. `sums`: the engine's residual sums by (layer, "mixer" or "feed-forward"), (n_tokens, hidden).

    Raises KeyError for a part that the engine did not report.
    """
    free = forced = oracle.embedded(tokens)
    judged, planted = Judged(free), _first_and_last(oracle)
    for layer in range(oracle.n_layer):
        for part, adds in (("mixer", oracle.mixed), ("feed-forward", oracle.fed)):
            added, seen = adds(layer, forced), sums[layer, part]
            judged.parts.setdefault(part, []).append(relative_error(seen - forced, added))
            if part == "mixer" and layer in planted:
                _plant(oracle, layer, forced, added, judged.faults)
            free = free + adds(layer, free)
            forced = seen
    judged.head = relative_error(engine_logits, oracle.head(forced))
    judged.logits = oracle.head(free)
    return judged


def _first_and_last(oracle: Oracle) -> set[int]:
    kinds = [[i for i in range(oracle.n_layer) if oracle.is_mamba(i) == mamba] for mamba in (True, False)]
    return {layer for layers in kinds if layers for layer in (layers[0], layers[-1])}


def _plant(oracle: Oracle, layer: int, x: np.ndarray, right: np.ndarray, faults: dict[str, list[float]]) -> None:
    for name, faulty in (OF_MAMBA if oracle.is_mamba(layer) else OF_ATTENTION).items():
        with np.errstate(all="ignore"):
            faults.setdefault(name, []).append(relative_error(faulty(oracle).mixed(layer, x), right))


def judge_at(
    oracle: Oracle,
    tokens: np.ndarray,
    sums: Mapping[tuple[int, str], np.ndarray],
    engine_logits: np.ndarray,
    at: np.ndarray,
) -> Judged:
    """Judge a text at some of its positions: every part of every layer there, and the head, in a third of the time.

    `sums` as for `judge`; those of the last layer hold the positions `at` alone: the engine computes no others there.
    `engine_logits`: (n_positions, n_vocab). Parts chain from the embedding to the logits, and a part's input at all
    earlier positions is the engine's own, so a fault that begins anywhere shows in the part where it begins.

    Raises KeyError for a part that the engine did not report.
    """
    forced = oracle.embedded(tokens)
    judged = Judged(forced)
    for layer in range(oracle.n_layer):
        for part, added in (("mixer", oracle.mixed), ("feed-forward", oracle.fed)):
            seen = sums[layer, part]
            before = forced if len(forced) == len(at) else forced[at]
            right = added(layer, forced, at) if part == "mixer" else added(layer, before, at)
            after = seen if len(seen) == len(at) else seen[at]
            judged.parts.setdefault(part, []).append(relative_error(after - before, right))
            forced = seen
    judged.head = relative_error(engine_logits, oracle.head(after, at))
    return judged
