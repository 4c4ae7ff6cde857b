"""The batching law against the engine: predicted and observed outcome of every replayed configuration, per build."""

from typing import Any

import pandas as pd

from plamo_study.analysis.batching_law import Engine, replay
from plamo_study.limits import LAW_TOLERANCE

WRONG = LAW_TOLERANCE  # relative error of logits from which a sequence counts as wrong
HYBRID = "plamo2"  # the architecture whose graph has the defects
ASKED = {"identity": ("/0", "/1", "/2", "/3"), "isolation": ("isolation_error",), "bystander": ("/3",)}

Facts = dict[str, dict[str, Any]]


def defects(model: dict[str, Any], engine: dict[str, Any]) -> Engine:
    """The defects a model meets in a build: none on attention alone, else those the build does not say it corrects."""
    hybrid, corrected = model["shape"]["arch"] == HYBRID, engine.get("corrects", ())
    return Engine(mixes_tokens=hybrid and "D2" not in corrected, misplaces_states=hybrid and "D3" not in corrected)


def checked(rows: pd.DataFrame, facts: Facts) -> pd.DataFrame:
    """Replay rows with `predicted` and `observed` outcome, and `exact`: the same sequences wrong, call by call.

    A worker that ended in another way than the law knows is observed under its status (hang, killed, error).
    """
    found = rows[(rows["workload"] == "replay") & (rows["status"] != "starved")]
    entries = []
    for row in found.to_dict("records"):
        engine = defects(facts[row["model"]], facts[row["engine"]])
        predicted = replay(row["calls"], row["n_seq"], row["n_ubatch"], engine)
        wrong = _wrong(row) if row["status"] == "ok" else None
        observed = row["status"] if wrong is None else "wrong" if any(wrong) else "right"
        exact = predicted.outcome == observed and (wrong is None or predicted.wrong == wrong)
        entries.append({"predicted": predicted.outcome, "observed": observed, "exact": exact})
    return pd.concat([found.reset_index(drop=True), pd.DataFrame(entries)], axis=1)


def confusion(table: pd.DataFrame) -> pd.DataFrame:
    """Configurations counted by build, model, predicted and observed outcome; `exact` of them to the sequence."""
    groups = table.groupby(["build", "model", "predicted", "observed"])["exact"]
    return groups.agg(configurations="size", exact="sum").reset_index()


def three_tests(rows: pd.DataFrame) -> pd.DataFrame:
    """Identity, isolation and bystander per build and model: the largest relative `error` of the logits asked about.

    NaN where the engine did not get that far.
    """
    found = rows[rows["label"].isin(ASKED)]
    entries = []
    for row in found.to_dict("records"):
        wanted = [error for name, error in row["checks"].items() if name.endswith(ASKED[row["label"]])]
        error = max(wanted, default=float("nan"))
        entries.append({"build": row["build"], "model": row["model"], "test": row["label"], "error": error})
    return pd.DataFrame(entries)


def packed_map(table: pd.DataFrame) -> pd.DataFrame:
    """Of `checked` rows the map of packed prompts: columns build, n_prompt, n_batch, n_seq, predicted, observed."""
    found = table[table["label"] == "map"]
    return found[["build", "n_prompt", "n_batch", "n_seq", "predicted", "observed"]].reset_index(drop=True)


def first_aborts(table: pd.DataFrame) -> pd.DataFrame:
    """Per build and n_batch of the map the smallest number of sequences that aborts, `predicted` and `observed`."""
    entries = []
    for (build, n_batch), group in packed_map(table).groupby(["build", "n_batch"]):
        entry: dict[str, Any] = {"build": build, "n_batch": n_batch}
        for column in ("predicted", "observed"):
            aborting = group[group[column] == "abort"]["n_seq"]
            entry[column] = int(aborting.min()) if len(aborting) else None
        entries.append(entry)
    return pd.DataFrame(entries)


def _wrong(row: dict[str, Any]) -> list[frozenset[int]]:
    """The sequences whose logits were wrong, call by call."""
    wrong: list[set[int]] = [set() for _ in row["calls"]]
    for name, error in row["checks"].items():
        call, _, seq = name.partition("/")
        if seq and not error < WRONG:
            wrong[int(call)].add(int(seq))
    return [frozenset(seqs) for seqs in wrong]
