"""Joules a token by phase and meter, the machine's idle power taken off: frames in, estimates out.

Joules a token are power times the seconds of a token: (joules / seconds of the timed part - idle power) x s/token. Each
row is set beside the idle power of its own block. Before that stands what could be said without a meter: no more than
the power limit allows, at most as much as its watts less those of an idle machine.
"""

from typing import Any

import numpy as np
import pandas as pd

from plamo_study.analysis import stats
from plamo_study.analysis.timing import NS
from plamo_study.analysis.usable import usable

LEAST_S = {"RAPL": 0.05, "NVML": 1.0, "IOReport": 0.5}  # of a timed part: a meter is brought up to date in steps
CELL = ["machine", "model", "dtype", "n_threads", "n_gpu_layers", "workload", "n_prompt", "n_gen", "n_seq"]


def idle(rows: pd.DataFrame) -> pd.DataFrame:
    """Watts of doing nothing: `machine`, `block`, `meter`, `watts`."""
    used = usable(rows)
    quiet = _powers(used[(used["workload"] == "idle") & (used["status"] == "ok")])
    return quiet.groupby(["machine", "block", "meter"], as_index=False)["watts"].median()


def per_token(rows: pd.DataFrame) -> pd.DataFrame:
    """A line for each CELL and `meter`: `watts`, `idle` (W) and `joules` (a token) as estimates over blocks, `least_s`
    (the shortest timed part), and `most` (J a token): what the power limit allows, NaN where none is told.

    Rows whose timed part is shorter than the meter's step are left out, and those of blocks without an idle row.
    """
    used = usable(rows)
    used = used[used["workload"].isin(["prefill", "decode"]) & (used["status"] == "ok")]
    powers = _powers(used)
    least = powers["meter"].map(lambda meter: LEAST_S[meter.split()[0]])
    both = powers[powers["timed_s"] >= least].merge(
        idle(rows), on=["machine", "block", "meter"], suffixes=("", "_idle")
    )
    both["joules_token"] = (both["watts"] - both["watts_idle"]) * both["token_s"]
    entries = []
    for key, group in both.groupby([*CELL, "meter"], sort=False):
        entry: dict[str, Any] = dict(zip([*CELL, "meter"], key, strict=True))
        limit = float(group["limit_w"].max())
        token_s, quiet = float(group["token_s"].median()), float(group["watts_idle"].median())
        entry |= {"watts": stats.median(group["watts"].tolist()), "idle": stats.median(group["watts_idle"].tolist())}
        entry |= {"joules": stats.median(group["joules_token"].tolist()), "least_s": float(group["timed_s"].min())}
        entries.append(entry | {"most": (limit - quiet) * token_s})
    return pd.DataFrame(entries, columns=[*CELL, "meter", "watts", "idle", "joules", "least_s", "most"])


def _powers(rows: pd.DataFrame) -> pd.DataFrame:
    """A line a row and meter: CELL, `block`, `meter`, `watts`, `limit_w`, `timed_s` and `token_s`."""
    entries = [
        {name: getattr(row, name) for name in (*CELL, "block", "timed_s")}
        | {"meter": meter, "watts": joules / row.timed_s, "limit_w": row.limits_w.get(meter), "token_s": _token_s(row)}
        for row in rows.itertuples()
        for meter, joules in row.joules.items()
    ]
    found = pd.DataFrame(entries, columns=[*CELL, "block", "timed_s", "meter", "watts", "limit_w", "token_s"])
    return found.astype({"limit_w": float})


def _token_s(row: Any) -> float:
    """Seconds of a token: of all prompts' tokens, or of one step's."""
    samples = np.concatenate([np.asarray(sample, dtype=float) for sample in row.samples_ns]) / NS
    return float(np.median(samples)) / (row.n_seq * (row.n_prompt if row.workload == "prefill" else 1))
