"""The peak of a processor from its instructions and its clock, and a measured kernel's share of it.

peak = cores x operations per core and cycle x clock, a multiply-add counted as two. The operations are published
figures (data/published/hardware.toml). Where no clock was recorded with the rows, the peak is unknown; the highest
clock the processor is sold with then bounds it. Only processors in that file are covered, and no GPU.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from plamo_study.analysis.ceilings import Kernel, Rate

INSTRUCTIONS = {"F32": "F32", "F16": "F32", "BF16": "BF16"}  # weights -> instruction; blocks of integers: INT8
Entry = Mapping[str, Any]


@dataclass(frozen=True)
class Peak:
    """Operations per second: the `value` at a recorded clock, or None with `why`; `most`: at the highest clock sold."""

    value: float | None
    most: float | None
    why: str


def peak(
    cores: Sequence[Entry], machine: Entry, engine: Entry, n_threads: int, dtype: str, clock: float | None
) -> Peak:
    """The peak of `n_threads` cores for the instruction that multiplies a type of weights; `clock` in Hz.

    `cores` is the [[core]] part of hardware.toml, `machine` and `engine` are facts.
    """
    unit = INSTRUCTIONS.get(dtype, "INT8")
    core = next((core for core in cores if core["chip"] == machine["chip"]), None)
    if core is None:
        return Peak(None, None, "no figure for this processor")
    if unit not in core["per_cycle"] or core["needs"][unit] not in engine["build"]:
        return Peak(None, None, f"no figure for its {unit} instruction")
    per_second = min(n_threads, machine["performance_cores"]) * core["per_cycle"][unit]
    if clock is None:
        return Peak(None, per_second * core["highest_clock"], "no clock recorded")
    return Peak(per_second * clock, per_second * clock, "")


def clock(rows: pd.DataFrame) -> float | None:
    """Median clock in Hz of the rows that recorded one (`mhz`, where the system reports it), else None."""
    told = rows["mhz"].dropna() if "mhz" in rows else pd.Series(dtype=float)
    return float(np.median(told)) * 1e6 if len(told) else None


def table(kernels: Mapping[Kernel, Rate], peaks: Mapping[str, Peak]) -> pd.DataFrame:
    """Kernels of one place, the fastest first: `name`, `best` and `usual` FLOP/s, shares `of_fastest` and `of_peak`.

    `of_peak` is None where no clock was recorded, with `why`; `at_least` is then the share of the peak at the highest
    clock, a lower bound. `peaks` by tensor type.
    """
    ordered = sorted(kernels.items(), key=lambda item: -item[1].best)
    entries = []
    for kernel, rate in ordered:
        found = peaks[kernel.dtype]
        entry: dict[str, Any] = {"name": kernel.name, "best": rate.best, "usual": rate.usual, "why": found.why}
        entry |= {"of_fastest": rate.best / ordered[0][1].best}
        entry |= {"of_peak": rate.best / found.value if found.value else None}
        entries.append(entry | {"at_least": rate.best / found.most if found.most else None})
    return pd.DataFrame(entries)
