"""The batching law against the engine: predicted and observed outcome of every replayed configuration."""

from typing import Any

import pandas as pd

from plamo_study.analysis.batching_law import CORRECT, STOCK, replay

WRONG = 0.02  # relative error of logits from which a sequence counts as wrong: above rounding, below any defect seen
HYBRID = "plamo2"  # the architecture whose graph has the defects


def checked(rows: pd.DataFrame, models: dict[str, dict[str, Any]]) -> pd.DataFrame:
    """Replay rows with `predicted` and `observed` outcome, and `exact`: the same sequences wrong, call by call.

    A worker that ended in another way than the law knows is observed under its status (hang, killed, error).
    """
    found = rows[rows["workload"] == "replay"]
    entries = []
    for row in found.to_dict("records"):
        engine = STOCK if models[row["model"]]["shape"]["arch"] == HYBRID else CORRECT
        predicted = replay(row["calls"], row["n_seq"], row["n_ubatch"], engine)
        wrong = _wrong(row) if row["status"] == "ok" else None
        observed = row["status"] if wrong is None else "wrong" if any(wrong) else "right"
        exact = predicted.outcome == observed and (wrong is None or predicted.wrong == wrong)
        entries.append({"predicted": predicted.outcome, "observed": observed, "exact": exact})
    return pd.concat([found.reset_index(drop=True), pd.DataFrame(entries)], axis=1)


def confusion(table: pd.DataFrame) -> pd.DataFrame:
    """Configurations counted by model, predicted and observed outcome; `exact` of them to the sequence."""
    groups = table.groupby(["model", "predicted", "observed"])["exact"]
    return groups.agg(configurations="size", exact="sum").reset_index()


def _wrong(row: dict[str, Any]) -> list[frozenset[int]]:
    """The sequences whose logits were wrong, call by call."""
    wrong: list[set[int]] = [set() for _ in row["calls"]]
    for name, error in row["checks"].items():
        call, _, seq = name.partition("/")
        if seq and not error < WRONG:
            wrong[int(call)].add(int(seq))
    return [frozenset(seqs) for seqs in wrong]
