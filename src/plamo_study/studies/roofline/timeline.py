"""Where the time of a phase goes, operator class by operator class.

Every function takes the frame of a study's rows, "trace" cells among them, and estimates over processes. Shares are of
the time spent computing nodes: the recorder's own time is left out.
"""

from typing import Any

import numpy as np
import pandas as pd

from llama_meter import stats
from plamo_study.read.frame import main_rows
from plamo_study.studies.roofline.operators import CLASSES

PHASES = ("prefill", "decode")
QUANTITIES = ("ns", "bytes", "flops", "nodes")


def works(rows: pd.DataFrame) -> pd.DataFrame:
    """Every class of every phase of every row: model, block, phase, class, ns, bytes, flops, nodes.

    Of one prefill, or one mean decode step; `ns` is the median over the row's recordings.
    """
    entries = []
    for row in _traces(rows).to_dict("records"):
        of_row = {"model": row["model"], "block": row["block"]}
        entries += [of_row | entry for entry in of_series(row["series"], row["n_gen"])]
    return pd.DataFrame(entries, columns=["model", "block", "phase", "class", *QUANTITIES])


def of_series(series: dict[str, list[float]], n_gen: int) -> list[dict[str, Any]]:
    """The works of one row, from its series: phase, class, ns, bytes, flops, nodes of one prefill or mean step."""
    entries = []
    for phase, name in dict.fromkeys(tuple(key.split("/")[:2]) for key in series if key.count("/") == 2):
        per = n_gen if phase == "decode" else 1
        counted = {what: series.get(f"{phase}/{name}/{what}", [0.0]) for what in QUANTITIES}
        entries.append(
            {"phase": phase, "class": name} | {what: float(np.median(values)) / per for what, values in counted.items()}
        )
    return entries


def shares(rows: pd.DataFrame, by: dict[str, tuple[str, ...]]) -> pd.DataFrame:
    """Per model and phase the `share` of the operator time that each group of classes takes, such as GROUPS.

    Groups that a model lacks are left out.
    """
    traced, entries = works(rows), []
    traced = traced[traced["class"].isin(CLASSES)]
    for (model, phase), group in traced.groupby(["model", "phase"]):
        total = group.groupby("block")["ns"].sum()
        for name, classes in by.items():
            part = group[group["class"].isin(classes)].groupby("block")["ns"].sum().reindex(total.index, fill_value=0.0)
            if part.any():
                share = stats.median((part / total).tolist())
                entries.append({"model": model, "phase": phase, "class": name, "share": share})
    return pd.DataFrame(entries, columns=["model", "phase", "class", "share"])


def _traces(rows: pd.DataFrame) -> pd.DataFrame:
    traced = main_rows(rows)
    return traced[traced["workload"] == "trace"]
