"""Joules per token by phase and meter, less the machine's idle power: frames in, estimates out.

Joules per token are those counted in a timed part, less the idle power of its block times its seconds, over its tokens.
The gaps between calls count too: the machine takes power in them. `most` is the bound known without a meter: the power
limit less the idle power, times the seconds of a token.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from llama_meter import stats
from plamo_study.read.usable import usable
from plamo_study.stats.estimates import NS

STEP_S = {"RAPL": 0.01, "NVML": 0.2, "IOReport": 0.1}  # in which a meter is updated, at most; NVML: seen on an H200
LEAST = 5  # steps of the shortest timed part
BOARD = "NVML"  # the meter of a GPU alone
CELL = ["machine", "build", "model", "dtype", "n_threads", "n_gpu_layers", "workload", "n_prompt", "n_gen", "n_seq"]
PER_TOKEN = [*CELL, "meter", "watts", "idle", "joules", "least_s", "most"]


def idle(rows: pd.DataFrame) -> pd.DataFrame:
    """Idle power by machine, block and meter: `machine`, `block`, `meter`, `watts`."""
    used = usable(rows[rows["workload"] == "idle"])
    quiet = _powers(used[used["status"] == "ok"])
    return quiet.groupby(["machine", "block", "meter"], as_index=False)["watts"].median()


def per_token(rows: pd.DataFrame) -> pd.DataFrame:
    """A line per CELL and `meter`: `watts`, `idle` (W) and `joules` (per token) as estimates over blocks, `least_s`
    (the shortest timed part), and `most` (J per token): the bound by the power limit, NaN where none is known.

    Left out: rows whose timed part is shorter than LEAST of the meter's steps, rows of blocks without an idle row, and
    an NVIDIA board's joules while the processor computed.
    """
    if not rows["joules"].map(bool).any():  # no meter: most machines
        return pd.DataFrame(columns=PER_TOKEN)
    used = usable(rows[rows["workload"].isin(["prefill", "decode"])])
    powers = _powers(used[used["status"] == "ok"])
    powers["step_s"] = powers["meter"].map(lambda meter: STEP_S[meter.split()[0]])
    both = powers[powers["timed_s"] >= LEAST * powers["step_s"]].merge(
        idle(rows), on=["machine", "block", "meter"], suffixes=("", "_idle")
    )
    both["joules_token"] = (both["watts"] - both["watts_idle"]) * both["timed_s"] / both["tokens"]
    entries = []
    for key, group in both.groupby([*CELL, "meter"], sort=False):
        entry: dict[str, Any] = dict(zip([*CELL, "meter"], key, strict=True))
        limit = float(group["limit_w"].max())
        token_s, quiet = float(group["token_s"].median()), float(group["watts_idle"].median())
        entry |= {"watts": stats.median(group["watts"].tolist()), "idle": stats.median(group["watts_idle"].tolist())}
        least_s = float(group["timed_s"].min())
        joules, off = stats.median(group["joules_token"].tolist()), float(group["step_s"].max()) / least_s
        entry |= {
            "joules": replace(joules, low=joules.low * (1 - off), high=joules.high * (1 + off)),
            "least_s": least_s,
        }
        entries.append(entry | {"most": (limit - quiet) * token_s})
    return pd.DataFrame(entries, columns=PER_TOKEN)


def _powers(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per row and meter: CELL, `block`, `meter`, `watts`, `limit_w`, `timed_s`, `token_s`
    and `tokens`."""
    entries = [
        {name: getattr(row, name) for name in (*CELL, "block", "timed_s")}
        | {"meter": meter, "watts": joules / row.timed_s, "limit_w": row.limits_w.get(meter)}
        | {"token_s": _token_s(row), "tokens": _tokens(row)}
        for row in rows.itertuples()
        for meter, joules in row.joules.items()
        if not meter.startswith(BOARD) or row.n_gpu_layers or row.workload == "idle"
    ]
    powers = pd.DataFrame(
        entries, columns=[*CELL, "block", "timed_s", "meter", "watts", "limit_w", "token_s", "tokens"]
    )
    return powers.astype({"limit_w": float})


def _tokens(row: Any) -> int:
    """Tokens of the timed part."""
    return sum(map(len, row.samples_ns)) * row.n_seq * (row.n_prompt if row.workload == "prefill" else 1)


def _token_s(row: Any) -> float:
    """Seconds per token, over the tokens of all prompts or of one step."""
    samples = np.concatenate([np.asarray(sample, dtype=float) for sample in row.samples_ns]) / NS
    return float(np.median(samples)) / (row.n_seq * (row.n_prompt if row.workload == "prefill" else 1))
