"""Study 03: what evaluating several sequences together buys, per build of the engine, model and number of sequences.

The step time of a process is the median of its steps; estimates are over processes, comparisons paired by block. What
is fitted and compared are the `curves` of the study's rows.
"""

from typing import Any

import pandas as pd

from plamo_study.analysis import stats
from plamo_study.analysis.timing import NS, median_sample, paired_ratio
from plamo_study.analysis.usable import usable
from plamo_study.limits import RIGHT

Curve = tuple[str, str]  # (build, model)
Curves = dict[Curve, pd.DataFrame]

STOCK = "stock"


def curves(rows: pd.DataFrame) -> Curves:
    """Step seconds by (build, model): a frame with a row per number of sequences and a column per block."""
    found = usable(rows)
    found = found[(found["workload"] == "decode") & (found["policy"] == "shared")]
    found = found.assign(seconds=found["samples_ns"].map(median_sample) / NS)
    return {
        (str(build), str(model)): group.pivot_table(index="n_seq", columns="block", values="seconds")
        for (build, model), group in found.groupby(["build", "model"])
    }


def factor(curve: pd.DataFrame, n_seq: int) -> stats.Estimate:
    """How many times as many tokens a second `n_seq` sequences write together as one does."""
    return paired_ratio(curve.loc[1] * n_seq, curve.loc[n_seq])


def table_cells(rows: pd.DataFrame) -> pd.DataFrame:
    """The source's table: per policy and n_seq the aggregate decode `rate`, `prefill` rate, verdicts and failure text.

    `outcome` is valid, wrong or abort; the rate of a wrong computation is kept and marked, that of an abort is None.
    """
    found, entries = rows[(rows["workload"] == "decode") & ~rows["anchor"]], []
    for (build, model, policy, n_seq), group in found.groupby(["build", "model", "policy", "n_seq"]):
        done = group[group["status"] == "ok"]
        outcome = "valid" if group["verdict"].isin(RIGHT).all() else "wrong" if len(done) == len(group) else "abort"
        entry = {"build": build, "model": model, "policy": policy, "n_seq": n_seq, "outcome": outcome, "n": len(group)}
        entry |= {"n_prompt": group["n_prompt"].iloc[0], "n_gen": group["n_gen"].iloc[0], "rate": None, "prefill": None}
        entry |= {"error": max((c["second_path_error"] for c in done["checks"]), default=None)}
        entries.append(
            entry
            | {"failure": next(iter(sorted(set(group["failure"]))), "")}
            | (_rates(done) if len(done) == len(group) else {})
        )
    return pd.DataFrame(entries)


def _rates(done: pd.DataFrame) -> dict[str, Any]:
    """Aggregate decode and prefill rates (t/s) of cells that all did the same work."""
    first = done.iloc[0]
    steps, filled = ([sum(times[0]) / NS for times in done["samples_ns"]], [t[0] / NS for t in done["prefill_ns"]])
    generated, prompts = first["n_seq"] * len(first["samples_ns"][0]), first["n_prompt"] * first["n_seq"]
    return {"rate": stats.rate(generated, steps), "prefill": stats.rate(prompts, filled)}
