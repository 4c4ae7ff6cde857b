"""What processes measured that share sequences out. Loads neither engine nor pandas."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from plamo_study.read.metrics import Measured, stamps, throughput


def replicas(row: Mapping[str, Any]) -> Iterator[Measured]:
    """Processes that share sequences out, all of them together.

    "throughput", prompts included, since the common start. Bytes: "mapped", pages of the file in memory, where the
    system tells; "own", weights elsewhere, as the engine says. Where a process is killed: "finished" requests.
    """
    if row["killed"] >= 0:
        measured = {"finished": ("requests", row["checks"]["finished"])}
    else:
        rate = throughput(*stamps([request for request in row["requests"] if request.token_ns]))
        measured = {"throughput": ("tokens/s", rate), "own": ("B", row["n_processes"] * row["checks"]["own_bytes"])}
        if row["series"]["mapped"]:
            measured["mapped"] = ("B", sum(row["series"]["mapped"]))
    for metric, (unit, value) in measured.items():
        yield metric, unit, float(value), np.array([value], float)


QUANTITIES = {"replicas": replicas}
