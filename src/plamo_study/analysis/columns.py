"""What the engine's matrix product takes at the number of columns a pass has, measured: the roofline knows only many.

A pass of few tokens has few columns, and a kernel built for many does not reach its rate there. From the kernel's own
rates by columns follows the time of all products of a pass. Between measured numbers the time is interpolated.
"""

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd

from plamo_study.analysis import roofline
from plamo_study.analysis.roofline import Model

MAMBA = ("ssm_in", "ssm_x", "ssm_dt", "ssm_out")
Key = tuple[str, int, int, str]  # machine, threads, layers on a GPU, type
Rates = dict[Key, dict[int, float]]


def rates(frames: Iterable[pd.DataFrame]) -> Rates:
    """Median FLOP/s of the engine's matrix product by machine, threads, device and type, and there by columns."""
    found: dict[Key, dict[int, list[float]]] = {}
    names = ["machine", "n_threads", "n_gpu_layers", "dtype", "size", "n_flops", "samples_ns"]
    for rows in frames:
        cells = rows[(rows["workload"] == "matmul") & (rows["status"] == "ok") & (rows["n_flops"] > 0)]
        cells = cells[cells["label"] == ""]  # labelled ones are the kernels of single types (notebook 04)
        for *where, size, flops, samples in cells[names].itertuples(index=False):
            rate = flops * 1e9 / float(np.median(list(chain(*samples))))
            found.setdefault(tuple(where), {}).setdefault(round(flops / (2 * size**2)), []).append(rate)
    return {
        key: {columns: float(np.median(values)) for columns, values in sorted(group.items())}
        for key, group in found.items()
        if len(group) > 1
    }


def seconds(model: Model, shape: Mapping[str, Any], known: Mapping[int, float], projections_apart: bool) -> float:
    """Seconds of all matrix products of a pass; `shape` has tokens, n_seq, together and n_ubatch.

    `projections_apart`: the Mamba projections of several sequences are one product each, as in stock builds (D4).
    """
    tokens, n_seq, together = int(shape["tokens"]), int(shape["n_seq"]), bool(shape["together"])
    streams, length = (1, n_seq * tokens) if together else (n_seq, tokens)
    mamba = sum(model["tensors"].get(kind, {"n_elements": 0})["n_elements"] for kind in MAMBA)
    blocks, head = roofline.matmul_weights(model) - mamba, roofline.head_weights(model)
    passes = [min(length - start, shape["n_ubatch"]) for start in range(0, length, shape["n_ubatch"])]
    spent = streams * sum(_product(blocks, columns, known) for columns in passes)
    spent += streams * _product(head, n_seq if together else 1, known)
    if projections_apart and together:
        return spent + n_seq * _product(mamba, tokens, known)
    return spent + streams * sum(_product(mamba, columns, known) for columns in passes)


def _product(elements: float, columns: float, known: Mapping[int, float]) -> float:
    """Seconds of a product of so many weights and columns: interpolated, and in proportion beyond the last."""
    at = np.array(list(known))
    times = at / np.array(list(known.values()))
    if columns > at[-1]:
        return float(2 * elements * times[-1] * columns / at[-1])
    return float(2 * elements * np.interp(columns, at, times))
