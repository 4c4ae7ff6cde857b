"""What a row of replicas measured, all of its processes together: for `measurements`."""

from collections.abc import Iterator, Mapping
from itertools import chain, pairwise
from math import nan
from typing import Any

import numpy as np

NS = 1e9


def replicas(row: Mapping[str, Any]) -> Iterator[tuple[str, str, float, np.ndarray]]:
    """(metric, unit, median, samples) of a row.

    "throughput": tokens a second, from the common start to the last token, prompts included. "ttft": of every sequence,
    since that start. "step": of every process, in which each of its sequences gets a token. "itl_max": the longest gap
    between two tokens of a sequence, waits for others' prompts included. "ready": from the first start until all had
    loaded. Bytes of all processes: "grown" (their memory after loading, less that before), "mapped" (pages of the file
    in it) and "own" (weights elsewhere, as the engine says); what the system does not tell is left out.
    Where a process is killed: "finished" (requests) and "got" (tokens of each of its sequences).
    """
    if row["killed"] >= 0:
        found = {"finished": ("requests", [row["checks"]["finished"]])}
        found["got"] = ("tokens", [len(row["samples_ns"][row["killed"]]) + 1])
    else:
        ends = [first + sum(steps) for first, steps in zip(row["prefill_ns"], row["samples_ns"], strict=True)]
        came = [each.token_ns for each in row["requests"] if each.token_ns]
        n_tokens = row["n_processes"] * row["n_seq"] * (row["n_gen"] + 1)
        gaps = [after - before for each in came for before, after in pairwise(each)]
        found = {
            "throughput": ("tokens/s", [n_tokens / max(ends) * NS]),
            "ttft": ("s", [each[0] / NS for each in came]),
            "step": ("s", [each / NS for each in chain(*row["samples_ns"])]),
            "itl_max": ("s", [max(gaps) / NS]),
            "ready": ("s", [max(row["series"]["start"]) + row["load_ns"] / NS]),
        }
        found |= {name: ("B", [value]) for name, value in memory(row).items() if value == value}
    for metric, (unit, samples) in found.items():
        yield metric, unit, float(np.median(samples)), np.array(samples, float)


def memory(row: Mapping[str, Any]) -> dict[str, float]:
    """Bytes of all processes: `grown`, `mapped`, `own`; NaN for what the system does not tell.

    Private pages stand in where it reports no shares (macOS), which hides the mapped ones.
    """
    series = row["series"]
    share = "pss" if "pss" in series else "private"
    after, before = (sum(series.get(name, [nan])) for name in (share, f"before {share}"))
    mapped = sum(series["mapped"]) if series["mapped"] else nan
    return {"grown": after - before, "mapped": mapped, "own": row["n_processes"] * row["checks"]["own_bytes"]}
