"""The headings and formats of every table and chart, and the table that uses them.

table(estimate(steps, by="model n_seq", work="n_seq"), "model n_seq estimate", estimate="tokens/s")
"""

from collections.abc import Sequence

import pandas as pd

from llama_meter.stats import Estimate
from plamo_study.show.tables import Format, Table, noise, show, significant
from plamo_study.show.theme import NOTHING
from plamo_study.stats.estimates import names_of

LABELS: dict[str, tuple[str, Format]] = {  # column -> heading, format
    "model": ("model", ""),
    "build": ("build", ""),
    "dtype": ("type", ""),
    "phase": ("phase", ""),
    "metric": ("metric", ""),
    "what": ("what", ""),
    "unit": ("unit", ""),
    "n_prompt": ("prompt tokens", ",d"),
    "depth": ("depth", ",g"),
    "n_gen": ("tokens generated", ",d"),
    "n_out": ("output tokens", ",d"),
    "n_seq": ("sequences", "d"),
    "n_threads": ("threads", "d"),
    "policy": ("policy", ""),
    "per_second": ("requests/s", "g"),
    "n": ("processes", "d"),
    "value": ("value", significant(3)),
    "low": ("from", significant(3)),
    "high": ("to", significant(3)),
    "estimate": ("measured", significant(3)),
    "first": ("first", significant(3)),
    "second": ("second", significant(3)),
    "share": ("share", ".0%"),
    "miss": ("times off", ".2f"),
    "noise": ("variation", noise),
    "error": ("largest relative error", ".1e"),
    "limit": ("limit", ".1e"),
    "rounding": ("rounding, at most", ".1e"),
    "largest_right": ("largest error", ".1e"),
    "smallest_wrong": ("smallest error", ".1e"),
    "verdict": ("verdict", ""),
    "bits": ("bits per weight", ".2f"),
    "ppl_ratio": ("perplexity over F16", ".4f"),
    "same_top": ("same top-1", ".2%"),
    "detectable": ("detectable change", ".2%"),
    "excess": ("excess over the others", ".2f"),
    "p_adjusted": ("corrected p", ".2g"),
    "p_avoided": ("corrected p", ".2g"),
    "factor": ("factor", ".2g"),
}


def label(name: str) -> str:
    """The heading of a column, its own name where LABELS has none."""
    return LABELS[name][0] if name in LABELS else name.replace("_", " ")


def table(
    data: pd.DataFrame, columns: str | Sequence[str] = (), note: str = "", otherwise: str = "", **headings: str
) -> Table:
    """A table of some columns, headed and formatted by LABELS: a list of names, or one string separated by blanks.

    `otherwise`: what is said instead where there are no lines. `headings` rename columns of this one table.
    `numbers` of the result is the frame behind it, unrounded.
    """
    names = names_of(columns) or [name for name in data if name not in ("value", "low", "high", "noise")]
    if data.empty:
        return Table(pd.DataFrame({"": [otherwise or note or NOTHING]}))
    shown = {}
    for name in names:
        heading, how = LABELS.get(name, (label(name), _format(data[name])))
        shown[headings.get(name, heading)] = [show(value, how) for value in data[name]]
    made = Table(pd.DataFrame(shown), note)
    made.numbers = data[names]
    return made


def _format(column: pd.Series) -> Format:
    """The format of a column without a label: three digits for floats, everything else unchanged."""
    return (
        significant(3)
        if pd.api.types.is_float_dtype(column) or column.map(lambda value: isinstance(value, Estimate)).any()
        else ""
    )
