"""Chunks of a prompt with nobody else there, by their size: frames in, estimates out.

For notebook 13 and the reports to llama.cpp; notebook 06 computes in its own cells from `measurements`.
"""

from typing import Any

import pandas as pd

from plamo_study.analysis import stats, timing
from plamo_study.analysis.usable import usable
from plamo_study.studies.chunked import calls

STOCK = "stock"


def by_size(rows: pd.DataFrame) -> pd.DataFrame:
    """Chunks of every size without decoding: `model`, `how` ("stock", "stock, no flash attention", or a build),
    `n_chunk`, `call` (seconds, the median over the prompt) and `ratio`, stock with flash attention over it."""
    found = full_chunks(rows)
    usual = {(model, n): taken for (model, how, n), taken in found.items() if how == STOCK}
    return pd.DataFrame(
        [
            {"model": model, "how": how, "n_chunk": n, "call": stats.median(taken.tolist())}
            | {"ratio": None if how == STOCK else timing.paired_ratio(usual[model, n], taken)}
            for (model, how, n), taken in found.items()
        ]
    )


def full_chunks(rows: pd.DataFrame) -> dict[tuple[str, str, int], pd.Series]:
    """Seconds of a full chunk by block, by model, how it was computed, and its tokens."""
    found: dict[tuple[str, str, int], dict[int, float]] = {}
    for row in _arrivals(usable(rows)):
        if not row["n_seq"]:
            how = row["build"] + (", no flash attention" if row["flash_attn"] == "off" else "")
            (seconds,) = (value for metric, _, value, _ in calls.arrival(row) if metric == "chunk")
            found.setdefault((row["model"], how, int(row["n_chunk"])), {})[row["block"]] = seconds
    return {key: pd.Series(found[key]) for key in sorted(found, key=lambda key: not key[1].startswith(STOCK))}


def _arrivals(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of arrivals that succeeded."""
    return rows[(rows["workload"] == "arrival") & (rows["status"] == "ok")].to_dict("records")
