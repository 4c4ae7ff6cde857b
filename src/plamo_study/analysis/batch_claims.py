"""Study 03's claims, each an estimate against a threshold: holds, does not hold, or inconclusive."""

from typing import Any

import pandas as pd

from plamo_study.analysis import batch_scaling as study
from plamo_study.analysis.claims import above, below, family, within
from plamo_study.analysis.stats import Estimate

HYBRID, MATCHED, LARGE = "plamo-2-1b", "plamo-3-matched", "plamo-3-nict-2b"
CORRECT, FLAT = "corrected", "corrected-projections"
BATCHES = (4, 16)
ALIKE = 0.05  # two scaling factors or speeds are called equal within this margin


def pairs(rows: pd.DataFrame) -> dict[str, tuple[tuple[str, str], tuple[str, str]]]:
    """What the comparison takes apart: as the sources compare, by architecture, by size, and by what is corrected."""
    named = {str(name).rstrip("*"): str(name) for name in rows["model"].unique()}
    hybrid, matched, large = (named.get(name, name) for name in (HYBRID, MATCHED, LARGE))
    stock = study.STOCK
    return {
        "hybrid over attention, as the sources compare": ((stock, hybrid), (stock, large)),
        "architecture: hybrid over attention of equal bytes": ((stock, hybrid), (stock, matched)),
        "size: small attention over large": ((stock, matched), (stock, large)),
        "D2 and D3 corrected over stock": ((CORRECT, hybrid), (stock, hybrid)),
        "D4 corrected too, over D2 and D3 alone": ((FLAT, hybrid), (CORRECT, hybrid)),
    }


def claims(rows: pd.DataFrame) -> pd.DataFrame:
    """Columns: claim, estimate, wanted (the threshold in words) and verdict. What was not measured is not claimed."""
    entries = []
    factors = study.scaling(rows)
    factors = factors[(factors["build"] == study.STOCK) & (factors["n_seq"] == max(BATCHES))]
    for row in factors.to_dict("records"):
        entries.append(
            above(f"{row['n_seq']} sequences decode faster in all than one", row["model"], row["factor"], 1.0)
        )
    ratios = study.compared(rows, pairs(rows)).set_index(["what", "n_seq"])["ratio"]
    for n in BATCHES:
        entries += [
            entry for what in pairs(rows) if (what, n) in ratios for entry in [_about(what, n, ratios[what, n])]
        ]
    return family(entries)


def _about(what: str, n: int, ratio: Estimate) -> dict[str, Any]:
    if what.startswith("size") or what.startswith("D2"):
        return within(f"{what}: the same scaling at {n} sequences", "", ratio, 1 / (1 + ALIKE), 1 + ALIKE)
    if what.startswith("D4"):
        return above(f"{what}: more scaling at {n} sequences", "", ratio, 1.0)
    return below(f"{what}: less scaling at {n} sequences", "", ratio, 1.0)
