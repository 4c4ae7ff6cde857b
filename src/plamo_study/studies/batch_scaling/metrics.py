"""What processes measured that share sequences out. Loads neither engine nor pandas."""

from collections.abc import Iterator, Mapping
from itertools import chain
from math import nan
from typing import Any

import numpy as np

from plamo_study.read.metrics import NS, Measured, first_tokens, gaps, stamps, throughput


def replicas(row: Mapping[str, Any]) -> Iterator[Measured]:
    """Processes that share sequences out, all of them together.

    "throughput", prompts included, and "ttft": since the common start. "step": of every process, in which each of its
    sequences gets a token. "itl_max". "ready": from the first start until all had loaded. Bytes as in `memory`. Where a
    process is killed: "finished" (requests) and "got" (tokens of each of its sequences).
    """
    if row["killed"] >= 0:
        measured = {"finished": ("requests", [row["checks"]["finished"]])}
        measured["got"] = ("tokens", [len(row["samples_ns"][row["killed"]]) + 1])
    else:
        arrived, tokens = stamps([request for request in row["requests"] if request.token_ns])
        measured = {
            "throughput": ("tokens/s", [throughput(arrived, tokens) * NS]),
            "ttft": ("s", list(first_tokens(arrived, tokens) / NS)),
            "step": ("s", [ns / NS for ns in chain(*row["samples_ns"])]),
            "itl_max": ("s", [gaps(tokens).max() / NS]),
            "ready": ("s", [max(row["series"]["start"]) + row["load_ns"] / NS]),
        }
        measured |= {name: ("B", [value]) for name, value in memory(row).items() if value == value}
    for metric, (unit, samples) in measured.items():
        yield metric, unit, float(np.median(samples)), np.array(samples, float)


def memory(row: Mapping[str, Any]) -> dict[str, float]:
    """Bytes of all processes of a row of replicas; NaN for what the system does not tell.

    `grown`: their memory after loading, less that before; `mapped`: pages of the file in it; `own`: weights elsewhere,
    as the engine says. Private pages stand in where the system reports no shares (macOS), which hides the mapped ones.
    """
    series = row["series"]
    share = "pss" if "pss" in series else "private"
    after, before = (sum(series.get(name, [nan])) for name in (share, f"before {share}"))
    mapped = sum(series["mapped"]) if series["mapped"] else nan
    return {"grown": after - before, "mapped": mapped, "own": row["n_processes"] * row["checks"]["own_bytes"]}


QUANTITIES = {"replicas": replicas}
