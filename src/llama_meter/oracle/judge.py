"""The engine compared with the oracle part by part, and the errors of planted faults on the same scale.

Rounding grows through a model: activations of a Q8_0 file are rounded to 8 bits before every product, and on random
weights the logits of a correct engine end up a few per cent off. So every part is judged separately: the oracle gets
the part's input from the engine, and the part's contribution is compared. Its error is that of one or two products.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from llama_meter.oracle.compare import relative_error
from llama_meter.oracle.faults import OF_ATTENTION, OF_MAMBA
from llama_meter.oracle.forward import Oracle


@dataclass
class Judged:
    """The oracle's own `logits` (n_tokens, n_vocab); relative errors of the engine's parts, one per layer, and head.

    With `parts_only`, `logits` holds the input of the first layer instead.

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
    parts_only: bool = False,
) -> Judged:
    """Judge one text. `sums`: the engine's residual sums by (layer, "mixer" or "feed-forward"), (n_tokens, hidden).

    `parts_only`: every part of every layer and the head, without the oracle's own logits and planted faults, in a third
    of the time.

    Raises KeyError for a part that the engine did not report.
    """
    free = forced = oracle.embedded(tokens)
    judged, planted = Judged(free), set[int]() if parts_only else _first_and_last(oracle)
    for layer in range(oracle.n_layer):
        for part, adds in (("mixer", oracle.mixed), ("feed-forward", oracle.fed)):
            added, seen = adds(layer, forced), sums[layer, part]
            judged.parts.setdefault(part, []).append(relative_error(seen - forced, added))
            if part == "mixer" and layer in planted:
                _plant(oracle, layer, forced, added, judged.faults)
            free = free if parts_only else free + adds(layer, free)
            forced = seen
    judged.head = relative_error(engine_logits, oracle.head(forced))
    judged.logits = judged.logits if parts_only else oracle.head(free)
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
    """Judge a long text at some of its positions: every part of every layer there, and the head.

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
