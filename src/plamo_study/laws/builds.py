"""Builds of the engine against one another: what a step of several sequences and a chunk of a prompt take on each."""

import pandas as pd

from llama_meter import stats
from plamo_study.read import metrics
from plamo_study.read.usable import STOCK, usable
from plamo_study.stats.estimates import NS, median_sample, paired_ratio

HYBRID = "plamo-2-1b"
CORRECT, FLAT = "corrected", "corrected-projections"


def curves(rows: pd.DataFrame) -> dict[tuple[str, str], pd.DataFrame]:
    """Step seconds by (build, model): a frame with a row per number of sequences and a column per block."""
    steps = usable(rows)
    steps = steps[(steps["workload"] == "decode") & (steps["policy"] == "shared")]
    steps = steps.assign(seconds=steps["samples_ns"].map(median_sample) / NS)
    return {
        (str(build), str(model)): group.pivot_table(index="n_seq", columns="block", values="seconds")
        for (build, model), group in steps.groupby(["build", "model"])
    }


def by_size(rows: pd.DataFrame) -> pd.DataFrame:
    """Chunks of every size without decoding: `model`, `how` ("stock", "stock, no flash attention", or a build),
    `n_chunk`, `call` (seconds, the median over the prompt) and `ratio`, stock with flash attention over it."""
    chunks = full_chunks(rows)
    usual = {(model, n): taken for (model, how, n), taken in chunks.items() if how == STOCK}
    return pd.DataFrame(
        [
            {"model": model, "how": how, "n_chunk": n, "call": stats.median(taken.tolist())}
            | {"ratio": None if how == STOCK else paired_ratio(usual[model, n], taken)}
            for (model, how, n), taken in chunks.items()
        ]
    )


def full_chunks(rows: pd.DataFrame) -> dict[tuple[str, str, int], pd.Series]:
    """Seconds of a full chunk by block, by model, how it was computed, and its tokens."""
    chunks: dict[tuple[str, str, int], dict[int, float]] = {}
    good = usable(rows)
    good = good[(good["workload"] == "arrival") & (good["status"] == "ok")]
    for row in good.to_dict("records"):
        if not row["n_seq"]:
            how = row["build"] + (", no flash attention" if row["flash_attn"] == "off" else "")
            (seconds,) = (value for metric, _, value, _ in metrics.arrival(row) if metric == "chunk")
            chunks.setdefault((row["model"], how, int(row["n_chunk"])), {})[row["block"]] = seconds
    return {key: pd.Series(chunks[key]) for key in sorted(chunks, key=lambda key: not key[1].startswith(STOCK))}
