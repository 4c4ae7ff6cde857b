"""Which rows a speed may be taken from: right computations, outside windows in which the machine drifted."""

import pandas as pd

from plamo_study.limits import DRIFT_LIMIT

LEAST_BLOCKS = 2
NOISY = 0.10  # coefficient of variation between processes that marks a cell noisy


def usable(rows: pd.DataFrame) -> pd.DataFrame:
    """Valid rows of undrifted blocks, anchors and gates left out.

    Where fewer than two blocks are undrifted every block is kept: an honest wide interval beats no number, and
    `drifted` tells the reader.
    """
    plain = rows[~rows["anchor"] & rows["verdict"].isin(["valid", "n/a"])]
    steady = plain[plain["drift"] <= DRIFT_LIMIT]
    return steady if steady["block"].nunique() >= LEAST_BLOCKS else plain


def main_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Usable rows of the machine's main set-up: offloaded where it can be, at the full number of threads."""
    found = usable(rows)
    return found[
        (found["n_gpu_layers"] == found["n_gpu_layers"].min()) & (found["n_threads"] == found["n_threads"].max())
    ]


def model_names(rows: pd.DataFrame) -> list[str]:
    """The models of a frame, in alphabetical order."""
    return sorted(name for name in rows["model"].unique() if name)


def drifted(rows: pd.DataFrame) -> tuple[int, int]:
    """(blocks marked as drifted, blocks in all)."""
    blocks = rows[(rows["block"] >= 0) & ~rows["anchor"]].groupby("block")["drift"].max()
    return int((blocks > DRIFT_LIMIT).sum()), len(blocks)


def verdicts(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows counted by model, kind of cell and verdict; columns model, workload, and one per verdict."""
    counted = rows[rows["model"] != ""].groupby(["model", "workload", "verdict"]).size()
    return counted.unstack(fill_value=0).reset_index()


def anchors(rows: pd.DataFrame) -> pd.DataFrame:
    """The anchor series: columns order (0, 1, ...), step_ms (median step), relative (to the median anchor)."""
    found = rows[rows["anchor"] & (rows["status"] == "ok")].sort_values("block")
    steps = found["samples_ns"].map(lambda samples: float(pd.Series(samples[0]).median()) / 1e6)
    return pd.DataFrame({"order": found["block"], "step_ms": steps, "relative": steps / steps.median()}).reset_index(
        drop=True
    )
