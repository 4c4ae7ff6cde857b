"""Study 03: what evaluating several sequences together buys, per build of the engine, model and number of sequences.

The step time of a process is the median of its steps; estimates are over processes, comparisons paired by block. What
is fitted and compared are the `curves` of the study's rows.
"""

import pandas as pd

from plamo_study.analysis import stats
from plamo_study.analysis.timing import NS, median_sample, paired_ratio
from plamo_study.analysis.usable import usable

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
