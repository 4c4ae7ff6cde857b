"""Study 03's claims, each an estimate against a threshold: holds, does not hold, or inconclusive."""

from typing import Any

import pandas as pd

from plamo_study.analysis.claims import above, below, family, within
from plamo_study.analysis.stats import Estimate
from plamo_study.studies.batch_scaling import analysis

HYBRID, MATCHED, LARGE = "plamo-2-1b", "plamo-3-matched", "plamo-3-nict-2b"
CORRECT, FLAT = "corrected", "corrected-projections"
ALIKE = 0.05  # two speeds are called equal within this margin
PUBLISHED = 0.15  # and a factor of another machine is called found here within this one
PROJECTIONS, OTHERS = "split projections", "mixed prompts and misplaced states"
ARCHITECTURE, SIZE = "architecture", "size"
TWO = "two sequences write fewer tokens in all than one"
LAG = "hybrid as released against attention of equal bytes"
CORRECTED_LAG = "corrected hybrid against attention of equal bytes"
Said = dict[str, dict[int, float]]  # model -> number of sequences -> times the rate of one, as somebody published


def names(rows: pd.DataFrame) -> tuple[str, str, str]:
    """The hybrid, the matched and the large model as these rows name them (with a star where a shape is assumed)."""
    found = {str(name).rstrip("*"): str(name) for name in rows["model"].unique()}
    hybrid, matched, large = (found.get(name, name) for name in (HYBRID, MATCHED, LARGE))
    return hybrid, matched, large


def pairs(rows: pd.DataFrame) -> dict[str, tuple[analysis.Curve, analysis.Curve]]:
    """Which curves are compared: a correction of the engine against none, and the hybrid against equal bytes."""
    hybrid, matched, _ = names(rows)
    return {
        corrected(PROJECTIONS): ((FLAT, hybrid), (CORRECT, hybrid)),
        corrected(OTHERS): ((CORRECT, hybrid), (analysis.STOCK, hybrid)),
        CORRECTED_LAG: ((FLAT, hybrid), (analysis.STOCK, matched)),
        LAG: ((analysis.STOCK, hybrid), (analysis.STOCK, matched)),
    }


def corrected(defect: str) -> str:
    """What a comparison with and without a correction is called."""
    return f"{defect} corrected"


def chain(rows: pd.DataFrame) -> dict[str, analysis.Curve]:
    """From the large attention model to the hybrid as released: size, then architecture, then what the engine does."""
    hybrid, matched, large = names(rows)
    stock = analysis.STOCK
    return {
        "large attention": (stock, large),
        SIZE: (stock, matched),
        ARCHITECTURE: (FLAT, hybrid),
        PROJECTIONS: (CORRECT, hybrid),
        OTHERS: (stock, hybrid),
    }


def claims(rows: pd.DataFrame, said: Said | None = None) -> pd.DataFrame:
    """The claims of every family; columns of `claims.family`."""
    return pd.concat(families(rows, said), ignore_index=True)


def families(rows: pd.DataFrame, said: Said | None = None) -> list[pd.DataFrame]:
    """One table of claims a question, corrected for its number of models or of sequences.

    `said`: the factors a source published. What was not measured is not claimed.
    """
    compared = analysis.compared(rows, pairs(rows))
    tables = [second_sequence(rows), family(_found_here(rows, said or {}))]
    for what, group in compared.groupby("what", sort=False):
        tables.append(family([_about(str(what), row["n_seq"], row["ratio"]) for row in group.to_dict("records")]))
    return [known for known in tables if len(known)]


def second_sequence(rows: pd.DataFrame) -> pd.DataFrame:
    """Whether two sequences write fewer tokens than one, model by model; one family."""
    return family([below(TWO, model, factor, 1.0) for (model, n), factor in _factors(rows).items() if n == 2])


def _found_here(rows: pd.DataFrame, said: Said) -> list[dict[str, Any]]:
    factors = _factors(rows)
    return [
        within(
            f"{n} sequences write {factor:.2f} times as many tokens as one, as on an M4 Pro",
            model,
            factors[model, n],
            factor / (1 + PUBLISHED),
            factor * (1 + PUBLISHED),
        )
        for model in rows["model"].unique()
        for n, factor in said.get(str(model).rstrip("*"), {}).items()
        if (model, n) in factors
    ]


def _factors(rows: pd.DataFrame) -> dict[tuple[str, int], Estimate]:
    """Times the rate of one sequence, by model and number of sequences, of the engine as released."""
    data = analysis.scaling(rows)
    data = data[data["build"] == analysis.STOCK]
    return {(row["model"], int(row["n_seq"])): row["factor"] for row in data.to_dict("records")}


def _about(what: str, n: int, ratio: Estimate) -> dict[str, Any]:
    if what.startswith(OTHERS):
        return within(f"{what}: {n} sequences run as fast as without", "", ratio, 1 / (1 + ALIKE), 1 + ALIKE)
    if what.startswith(PROJECTIONS):
        return above(f"{what}: {n} sequences run faster than without", "", ratio, 1.0)
    return below(f"{what}: {n} sequences run slower", "", ratio, 1.0)
