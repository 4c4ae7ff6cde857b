"""What requests measured that one file read and another wrote. Loads neither engine nor pandas."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from plamo_study.read.metrics import NS, Measured


def relay(row: Mapping[str, Any]) -> Iterator[Measured]:
    """Seconds of a whole "request": reading, saving, loading and writing."""
    times = np.array(row["samples_ns"], float).sum(axis=1) / NS
    yield "request", "s", float(np.median(times)), times


QUANTITIES = {"relay": relay}
