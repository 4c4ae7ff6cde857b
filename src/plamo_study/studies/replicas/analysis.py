"""What several processes write over one, and how often they hold the weights; for the levers. Frames in, estimates out.

Notebook 07 computes in its own cells from `measurements`.
"""

from math import nan
from typing import Any

import pandas as pd

from plamo_study.analysis import timing
from plamo_study.analysis.files import Facts, files
from plamo_study.analysis.usable import usable
from plamo_study.studies.replicas import measures

KIND = ["model", "dtype", "use_mmap"]
CELL = [*KIND, "n_processes", "n_seq"]


def over_one(rows: pd.DataFrame, facts: Facts) -> pd.DataFrame:
    """One line per cell whose prompts were read one by one: CELL, `total` sequences, `against_one`, `copies`.

    `against_one`: tokens a second over those of one process with as many sequences, paired by block; None without it.
    `copies`: weights in memory, mapped or own, over the file's bytes; NaN where the system does not tell.
    """
    found, known, entries = _by_cell(usable(rows)), files(rows, facts), []
    for key, own in found.items():
        entry: dict[str, Any] = dict(zip(CELL, key, strict=True))
        entry["total"] = entry["n_processes"] * entry["n_seq"]
        one = found.get((*key[:-2], 1, entry["total"]))
        entry["against_one"] = timing.paired_ratio(own["throughput"], one["throughput"]) if one is not None else None
        held = own["mapped"].median() + own["own"].median() if "mapped" in own else nan
        entries.append(entry | {"copies": held / int(known[entry["model"], entry["dtype"]]["file_bytes"])})
    return pd.DataFrame(entries, columns=[*CELL, "total", "against_one", "copies"])


def _by_cell(used: pd.DataFrame) -> dict[tuple[Any, ...], pd.DataFrame]:
    """Medians of each cell's metrics by block."""
    own = used[(used["workload"] == "replicas") & (used["status"] == "ok") & (used["killed"] < 0)]
    lines = [
        {name: row[name] for name in (*CELL, "block")}
        | {metric: value for metric, _, value, _ in measures.replicas(row)}
        for row in own[own["policy"] == "per_sequence"].to_dict("records")
    ]
    every = pd.DataFrame(lines, columns=None if lines else [*CELL, "block"])
    return {key: group.groupby("block").median(numeric_only=True) for key, group in every.groupby(CELL, sort=False)}
