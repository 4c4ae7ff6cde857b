"""The batching law against the engine: predicted and observed outcome of every replayed configuration, per build."""

from typing import Any

import pandas as pd

from llama_meter.errors import StudyError
from llama_meter.limits import ROUNDINGS
from plamo_study.studies.right_answers.law import Engine, replay

HYBRID = "plamo2"  # the architecture whose graph has the defects
REPLAYS = ("replay", "isolation")
ASKED = {"identity": ("/0", "/1", "/2", "/3"), "isolation": ("isolation_error",), "bystander": ("/3",)}

Facts = dict[str, dict[str, Any]]


def defects(model: dict[str, Any], engine: dict[str, Any]) -> Engine:
    """Defects of a build for a model: none for attention alone, else those that the build does not claim to correct."""
    hybrid, corrected = model["shape"]["arch"] == HYBRID, engine.get("corrects", ())
    return Engine(mixes_tokens=hybrid and "D2" not in corrected, misplaces_states=hybrid and "D3" not in corrected)


def rounding(rows: pd.DataFrame) -> float:
    """Largest error between two correct computations, over all processes of the rows.

    Measured without a batch: one sequence alone, cut into calls in several ways (measure/proof.py). Raises StudyError
    if no row has it, as in rows recorded before it was measured.
    """
    replayed = rows[rows["workload"].isin(REPLAYS)]
    errors = [checks["rounding"] for checks in replayed["checks"] if "rounding" in checks]
    if not errors:
        raise StudyError(
            "rows of the law",
            "record no rounding error",
            "plamo-study measure 04-batching-law",
        )
    return float(max(errors))


def limit(rows: pd.DataFrame) -> float:
    """The relative error beyond which a sequence is wrong: `ROUNDINGS` times the largest rounding error."""
    return ROUNDINGS * rounding(rows)


def checked(rows: pd.DataFrame, facts: Facts) -> pd.DataFrame:
    """Replay rows with `predicted` and `observed` outcome, and `exact`: the same sequences wrong, call by call.

    For a run that aborts, `exact` covers the calls before the abort, which must be in the call the law names. `judged`:
    whether there were logits to decide by; rows recorded before checks were kept per call have none after an abort.
    `foretold`: the sequences the law calls wrong, call by call. A worker that ends in a way the law does not cover is
    observed as its status.
    """
    replays = rows[(rows["workload"] == "replay") & (rows["status"] != "starved")]
    most = limit(rows)
    entries = []
    for row in replays.to_dict("records"):
        engine = defects(facts[row["model"]], facts[row["engine"]])
        predicted = replay(row["calls"], row["n_seq"], row["n_ubatch"], engine)
        ok, judged = row["status"] == "ok", bool(row["checks"])
        wrong = _wrong(row, most) if judged else []
        observed = row["status"] if not ok else "wrong" if any(wrong) else "right"
        exact = predicted.outcome == observed and (not judged or predicted.wrong == wrong)
        entry = {"predicted": predicted.outcome, "observed": observed, "exact": exact, "judged": judged}
        entries.append({**entry, "foretold": predicted.wrong})
    return pd.concat([replays.reset_index(drop=True), pd.DataFrame(entries)], axis=1)


def separation(table: pd.DataFrame) -> pd.DataFrame:
    """Gap between right and wrong: per build and model, the errors of sequences by what the law says of them.

    `limit` is that of all rows; `right` and `wrong` count sequences after calls, `largest_right` and
    `smallest_wrong` are relative errors (NaN where there is none).
    """
    most = limit(table)
    entries = []
    for (build, model), group in table.groupby(["build", "model"]):
        errors: dict[bool, list[float]] = {True: [], False: []}
        for checks, foretold in zip(group["checks"], group["foretold"], strict=True):
            for (call, seq), error in _errors(checks):
                if call < len(foretold):
                    errors[seq in foretold[call]].append(error)
        own = [checks["rounding"] for checks in group["checks"] if "rounding" in checks]
        entry = {"build": build, "model": model, "rounding": max(own, default=float("nan")), "limit": most}
        entry |= {"right": len(errors[False]), "largest_right": max(errors[False], default=float("nan"))}
        entries.append(entry | {"wrong": len(errors[True]), "smallest_wrong": min(errors[True], default=float("nan"))})
    return pd.DataFrame(entries)


def three_tests(rows: pd.DataFrame) -> pd.DataFrame:
    """Identity, isolation and bystander per build and model: the largest relative `error` of the logits tested.

    NaN if the engine did not get that far; a test fails above `limit`.
    """
    asked, most = rows[rows["question"].isin(ASKED)], limit(rows)
    entries = []
    for row in asked.to_dict("records"):
        wanted = [error for name, error in row["checks"].items() if name.endswith(ASKED[row["question"]])]
        error = max(wanted, default=float("nan"))
        entry = {"build": row["build"], "model": row["model"], "test": row["question"], "error": error}
        entries.append({**entry, "limit": most})
    return pd.DataFrame(entries)


def packed_map(table: pd.DataFrame) -> pd.DataFrame:
    """The map of packed prompts from `checked` rows: columns build, n_tokens, n_batch, n_seq, predicted, observed."""
    packed = table[table["question"] == "map"]
    return packed[["build", "n_tokens", "n_batch", "n_seq", "predicted", "observed"]].reset_index(drop=True)


def first_aborts(table: pd.DataFrame) -> pd.DataFrame:
    """Smallest number of sequences that aborts, per build and n_batch of the map: `predicted` and `observed`."""
    entries = []
    for (build, n_batch), group in packed_map(table).groupby(["build", "n_batch"]):
        entry: dict[str, Any] = {"build": build, "n_batch": n_batch}
        for column in ("predicted", "observed"):
            aborting = group[group[column] == "abort"]["n_seq"]
            entry[column] = int(aborting.min()) if len(aborting) else None
        entries.append(entry)
    return pd.DataFrame(entries, columns=["build", "n_batch", "predicted", "observed"])


def _wrong(row: dict[str, Any], limit: float) -> list[frozenset[int]]:
    """The sequences whose logits were wrong, call by call, up to the call that aborted."""
    wrong: list[set[int]] = [set() for _ in row["calls"]]
    last = len(wrong) - 1
    errors = _errors(row["checks"])
    if row["status"] != "ok":
        last = max((call for (call, _), _ in errors), default=-1)
        while last + 1 < len(wrong) and not any(n for _, n in row["calls"][last + 1]):
            last += 1  # a call in which sequences only leave has no logits
    for (call, seq), error in errors:
        if not error <= limit:
            wrong[call].add(seq)
    return [frozenset(seqs) for seqs in wrong[: last + 1]]


def _errors(checks: dict[str, Any]) -> list[tuple[tuple[int, int], float]]:
    """((call, sequence), relative error) of a replay's checks."""
    named = [(name.partition("/"), error) for name, error in checks.items()]
    return [((int(call), int(seq)), error) for (call, _, seq), error in named if seq]
