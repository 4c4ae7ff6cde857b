"""What requests measured that one file read and another wrote. Loads neither engine nor pandas."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from plamo_study.read.metrics import NS, Measured


def relay(row: Mapping[str, Any]) -> Iterator[Measured]:
    """Requests that one file read and another wrote: seconds of "reading", "saving", "loading", "writing", and of all,
    "request"; to load the files before, "first load" and "second load"; bytes of a "state", and of what the process
    grew by with the "first file" and with the "second file"."""
    times = np.array(row["samples_ns"], float) / NS
    for name, samples in zip(("reading", "saving", "loading", "writing"), times.T, strict=True):
        yield name, "s", float(np.median(samples)), samples
    yield "request", "s", float(np.median(times.sum(axis=1))), times.sum(axis=1)
    grown = np.diff(row["series"]["resident"]).tolist()
    for name, value in zip(("state", "first file", "second file"), (row["n_bytes"], *grown), strict=False):
        yield name, "B", float(value), np.array([value], float)
    for name, value in zip(("first load", "second load"), row["series"].get("load", []), strict=False):
        yield name, "s", float(value), np.array([value], float)


QUANTITIES = {"relay": relay}
