"""Time of the engine's matrix products at the number of columns a pass has: the roofline knows only many.

A pass of few tokens has few columns, and a kernel built for many does not reach its rate there. Kernel times measured
by number of columns give the time of all products of a pass, each tensor type with its own kernel.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from plamo_study.analysis.ceilings import by_type, weighty
from plamo_study.analysis.roofline import NO_MATMUL, Model

MAMBA = ("ssm_in", "ssm_x", "ssm_dt", "ssm_out")
SPAN = 4  # between measured numbers of columns at most this many times apart, times are interpolated
Known = Mapping[str, Mapping[int, float]]  # tensor type -> number of columns -> seconds per weight


def seconds(model: Model, shape: Mapping[str, Any], known: Known, projections_apart: bool) -> float | None:
    """Seconds of all matrix products of a pass; None where a kernel was not measured near that number of columns.

    `shape` has tokens, n_seq, together and n_ubatch. `projections_apart`: the Mamba projections of several sequences
    are one product each, as in stock builds (split projections, D4).
    """
    tokens, n_seq, together = int(shape["tokens"]), int(shape["n_seq"]), bool(shape["together"])
    streams, length = (1, n_seq * tokens) if together else (n_seq, tokens)
    passes = [min(length - start, shape["n_ubatch"]) for start in range(0, length, shape["n_ubatch"])]
    apart = projections_apart and together
    mamba, blocks, head = (_amounts(model, kinds) for kinds in _kinds(model))
    work = [(blocks, columns, streams) for columns in passes] + [(head, n_seq if together else 1, streams)]
    work += [(mamba, tokens, n_seq)] if apart else [(mamba, columns, streams) for columns in passes]
    spent = [
        times * elements * _per_weight(known.get(dtype, {}), columns)
        for amounts, columns, times in work
        for dtype, elements in amounts.items()
    ]
    return None if np.isnan(spent).any() else float(sum(spent))


def _kinds(model: Model) -> tuple[list[str], list[str], list[str]]:
    """Kinds of tensors that are (Mamba projections, other matrices of the blocks, the output head)."""
    matrices = [kind for kind in model["tensors"] if kind not in NO_MATMUL and not kind.endswith("_norm")]
    head = "output" if "output" in model["tensors"] else "token_embd"
    return [k for k in matrices if k in MAMBA], [k for k in matrices if k not in MAMBA], [head]


def _amounts(model: Model, kinds: Iterable[str]) -> dict[str, float]:
    """Number of weights by tensor type, without types that hold almost none of the file."""
    known, found = weighty(by_type(model)), dict[str, float]()
    for kind in kinds:
        tensors = model["tensors"][kind]
        for dtype, part in tensors.get("by_type", {tensors["type"]: tensors}).items():
            if dtype in known:
                found[dtype] = found.get(dtype, 0.0) + part["n_elements"]
    return found


def _per_weight(known: Mapping[int, float], columns: int) -> float:
    """Seconds per weight at `columns` columns; proportional beyond the last measured number, NaN far from any."""
    at = sorted(known)
    below, above = max((n for n in at if n <= columns), default=0), min((n for n in at if n >= columns), default=0)
    if below and not above:
        return known[below] * columns / below if columns <= SPAN * below else float("nan")
    if not below or above > SPAN * below:
        return float("nan")
    return float(np.interp(columns, (below, above), (known[below], known[above]))) if above > below else known[below]
