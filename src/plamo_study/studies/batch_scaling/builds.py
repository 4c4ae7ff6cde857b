"""The builds and models that notebook 03 compares, and the chain of curves between them."""

import pandas as pd

from plamo_study.studies.batch_scaling import analysis

HYBRID, MATCHED, LARGE = "plamo-2-1b", "plamo-3-matched", "plamo-3-nict-2b"
CORRECT, FLAT = "corrected", "corrected-projections"
PROJECTIONS, OTHERS = "split projections", "mixed prompts and misplaced states"
ARCHITECTURE, SIZE = "architecture", "size"


def names(rows: pd.DataFrame) -> tuple[str, str, str]:
    """The hybrid, the matched and the large model as these rows name them (with a star where a shape is assumed)."""
    found = {str(name).rstrip("*"): str(name) for name in rows["model"].unique()}
    hybrid, matched, large = (found.get(name, name) for name in (HYBRID, MATCHED, LARGE))
    return hybrid, matched, large


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
