"""Arithmetic intensity of both phases, the balance point of a machine, and what faster parts would change.

Intensity is FLOPs per byte moved, balance is FLOPs per second over bytes per second: below its balance a machine waits
for memory. Both come from `roofline`; peaks of other parts are published figures, not measured here. What if: only the
machine's two ceilings or the model's bytes move in the roofline, and a faster machine may need other kernels.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from llama_meter.errors import StudyError
from plamo_study.arithmetic import roofline
from plamo_study.arithmetic.roofline import Ceilings, Model

Models = Mapping[str, Model]
DEPTH = 384.0  # default decode depth: the mean depth of the decode cell of chapter 1
PASSES = (("prefill of 512", 512, 0.0, 1), ("decode of 1", 1, DEPTH, 1), ("decode of 16", 1, DEPTH, 16))
CHANGES = ("times the compute", "times the bandwidth", "fewer bytes of weights")
CHANGED = (("prefill of 512", 512, 0.0, 1), ("decode of 1", 1, DEPTH, 1), ("decode of 8", 1, DEPTH, 8),
           ("decode of 32", 1, DEPTH, 32))  # fmt: skip
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


def machines(parts: Iterable[Mapping[str, Any]], here: Mapping[str, Ceilings], name: str) -> pd.DataFrame:
    """This machine with each kernel of `here`, and other parts as published, by balance point (FLOPs/byte).

    Columns name, dtype (this machine's: the kernel), compute (FLOP/s), bandwidth (B/s), memory (bytes), balance, by
    (its source), note.
    """
    entries: list[dict[str, Any]] = [
        {"name": name, "dtype": kernel, "compute": limit.matmul, "bandwidth": limit.read, "memory": None}
        | {"by": "measured", "note": "best samples"}
        for kernel, limit in here.items()
    ]
    for part in parts:
        for kind, peak in part["peak"].items():
            held = {key: part[key] for key in ("name", "bandwidth", "memory", "note")}
            entries.append({**held, "dtype": kind, "compute": peak, "by": part["peak_by"]})
    table = pd.DataFrame(entries)
    return table.assign(balance=table["compute"] / table["bandwidth"]).sort_values("balance", ignore_index=True)


def passes(models: Mapping[str, Model], limit: Ceilings) -> pd.DataFrame:
    """Per model and pass the seconds of `compute`, of reading `weights`, and of moving the `rest` (cache, state)."""
    entries = []
    for name, model in models.items():
        for what, tokens, depth, n_seq in CHANGED:
            account = roofline.parts(model, tokens, depth, n_seq)
            flops, moved = roofline.work(account)
            read = sum(part.bytes for part in account if part.name in roofline.PRODUCTS)
            seconds = {
                "compute": flops / limit.matmul,
                "weights": read / limit.read,
                "rest": (moved - read) / limit.read,
            }
            entries.append({"model": name, "pass": what, **seconds})
    return pd.DataFrame(entries)


def gains(models: Mapping[str, Model], limit: Ceilings, factor: float = 2.0) -> pd.DataFrame:
    """Speedup of each pass by each change by `factor`: `overlap` and `sum`, the band's two ends.

    Columns model, pass, change, overlap (compute hides memory or the other way round), sum (neither hides the other).
    """
    if not 0 < factor < math.inf:
        raise StudyError(f"factor {factor:g}", "must be finite and above 0", "-p factor 2")
    entries = []
    for row in passes(models, limit).to_dict("records"):
        before = (row["compute"], row["weights"] + row["rest"])
        for change in CHANGES:
            compute = row["compute"] / (factor if change == CHANGES[0] else 1)
            memory = (before[1] if change == CHANGES[0] else before[1] / factor if change == CHANGES[1]
                      else row["weights"] / factor + row["rest"])  # fmt: skip
            gain = {"overlap": max(before) / max(compute, memory), "sum": sum(before) / (compute + memory)}
            entries.append({"model": row["model"], "pass": row["pass"], "change": change, **gain})
    return pd.DataFrame(entries)


def _first(reached: Callable[[int], bool]) -> float:
    """Smallest n up to `LONGEST` at which a monotone condition becomes true; infinite if it never does."""
    if not reached(LONGEST):
        return math.inf
    low, high = 0, LONGEST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return float(high)
