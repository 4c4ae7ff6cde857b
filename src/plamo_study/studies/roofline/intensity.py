"""Arithmetic intensity of both phases, and the balance point of a machine.

Intensity is FLOPs per byte moved, balance is FLOPs per second over bytes per second: below its balance a machine waits
for memory. Both come from `roofline`; peaks of other parts are published figures, not measured here.
"""

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

from llama_meter import paths
from plamo_study.arithmetic import roofline
from plamo_study.arithmetic.roofline import Ceilings, Model

Models = Mapping[str, Model]
DEPTH = 384.0  # default decode depth: the mean depth of the decode cell of chapter 1
LONGEST = 1 << 16  # tokens or sequences up to which a turning point is searched
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


def intensity(model: Model, n_tokens: int, depth: float = 0, n_seq: int = 1, **how: Any) -> float:
    """FLOPs per byte of evaluating `n_tokens` new tokens of each sequence; the rest as `roofline.parts` takes it."""
    flops, moved = roofline.work(roofline.parts(model, n_tokens, depth, n_seq, **how))
    return flops / moved


def curve(models: Models, sizes: Sequence[int] = SIZES) -> pd.DataFrame:
    """Intensity by tokens in a pass: a prompt of `n` tokens (one micro-batch of any length), or `n` sequences.

    Columns model, phase, n and intensity.
    """
    entries = []
    for name, model in models.items():
        for n in sizes:
            prompt = intensity(model, n, n_ubatch=n)
            steps = intensity(model, 1, DEPTH, n, n_ubatch=n)
            entries.append({"model": name, "phase": "prefill, one prompt", "n": n, "intensity": prompt})
            entries.append({"model": name, "phase": "decode, many sequences", "n": n, "intensity": steps})
    return pd.DataFrame(entries)


def turning(model: Model, balance: float) -> tuple[float, float]:
    """(prompt tokens, sequences decoded together) from which a pass is compute-bound; infinite where none is.

    Any number of columns is allowed; the micro-batch is as long as the prompt.
    """
    by_prompt = _first(lambda n: intensity(model, n, n_ubatch=n) >= balance)
    by_batch = _first(lambda n: intensity(model, 1, DEPTH, n, n_ubatch=n) >= balance)
    return by_prompt, by_batch


def parts() -> list[dict[str, Any]]:
    """Parts with their published bandwidth, memory and peaks by type, each with its sources."""
    entries: list[dict[str, Any]] = tomllib.loads((paths.PUBLISHED / "hardware.toml").read_text("utf-8"))["part"]
    return entries


def machines(here: Mapping[str, Ceilings], name: str) -> pd.DataFrame:
    """This machine with each kernel of `here`, and other parts as published, by balance point (FLOPs/byte).

    Columns name, dtype (this machine's: the kernel), compute (FLOP/s), bandwidth (B/s), balance, by (its source).
    """
    entries: list[dict[str, Any]] = [
        {"name": name, "dtype": kernel, "compute": limit.matmul, "bandwidth": limit.read, "by": "measured"}
        for kernel, limit in here.items()
    ]
    for part in parts():
        for kind, peak in part["peak"].items():
            entry = {"name": part["name"], "dtype": kind, "compute": peak, "bandwidth": part["bandwidth"]}
            entries.append(entry | {"by": part["peak_by"]})
    table = pd.DataFrame(entries)
    return table.assign(balance=table["compute"] / table["bandwidth"]).sort_values("balance", ignore_index=True)


def _first(reached: Callable[[int], bool]) -> float:
    """Smallest n up to `LONGEST` at which a monotone condition becomes true; infinite if it never does."""
    if not reached(LONGEST):
        return math.inf
    low, high = 0, LONGEST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return float(high)
