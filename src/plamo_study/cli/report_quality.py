"""Output of the quality command: one table per model on stdout. Nothing is computed here."""

import pandas as pd
from rich.table import Table
from rich.text import Text

from plamo_study.analysis.stats import Estimate
from plamo_study.cli.terminal import Terminal

COLUMNS = {  # header -> column of studies/quality/analysis.py's table, format, factor
    "perplexity": ("perplexity", ".4g", 1.0),
    "bits per byte": ("bits_per_byte", ".4f", 1.0),
    "KLD": ("kld", ".2g", 1.0),
    "KLD 99 %": ("kld_99", ".2g", 1.0),
    "same top, %": ("same_top", ".1f", 100.0),
    "RMS Δp, %": ("rms_dp", ".2f", 100.0),
    "loops, %": ("loops", ".0f", 100.0),
}


def quality(table: pd.DataFrame) -> None:
    """Print every file's figures against its reference, with 95 % intervals clustered by chunk."""
    for (model, text), group in table.groupby(["model", "text"]):
        shown = Table("file", "MB", *COLUMNS, title=f"{model} on {text}")
        for line in group.to_dict("records"):
            values = (_told(line[column], form, factor) for column, form, factor in COLUMNS.values())
            invalid = "" if line["valid"] else f" {line['not_finite']} tokens not finite"
            shown.add_row(Text.assemble(line["file"], (invalid, "red")), f"{line['file_bytes'] / 1e6:,.1f}", *values)
        Terminal().print(shown)


def _told(estimate: Estimate, form: str, factor: float) -> str:
    return "" if pd.isna(estimate.value) else f"{estimate.scaled(factor):{form}}"
