"""Tables for readers: one heading and one format a column, estimates with intervals, everything rounded here.

table(estimate(steps, by="model n_seq", work="n_seq"), "model n_seq estimate", estimate="tokens/s")
"""

import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import pandas as pd
from IPython.display import Markdown

from llama_meter.stats import Estimate
from plamo_study.read.frame import NOISY
from plamo_study.show.theme import NOTHING
from plamo_study.stats.estimates import names_of

Format = Callable[[Any], str] | str
NOT_AVAILABLE = "n/a"
WIDEST = 8  # most columns shown at once; a wider table is shown whole in a fold below
ASSUMED = "* Rests on assumptions, which the models table names."
MARKUP = re.compile(r"[`*<&|]|(?<=\])\(|~(?=~)|(?<=~)~|_(?=_)|(?<=_)_")  # Markdown, in the middle of a line
TEX = str.maketrans({"$": "\uff04", "\\": "\uff3c"})  # full-width forms, which TeX ignores


def significant(value: float | Estimate) -> str:
    """Three significant digits of the value, and as many decimals for the interval."""
    middle = abs(value.value if isinstance(value, Estimate) else value)
    places = max(2 - math.floor(math.log10(middle)), 0) if middle and math.isfinite(middle) else 0
    return format(value, f",.{places}f")


def noise(variation: float) -> str:
    """A coefficient of variation, marked where the cell is noisy."""
    return f"{variation:.0%}" + (" noisy" if variation > NOISY else "")


LABELS: dict[str, tuple[str, Format]] = {  # column -> heading, format; others bear their own name, floats three digits
    "dtype": ("type", ""),
    "n_prompt": ("prompt tokens", ",d"),
    "depth": ("depth", ",g"),
    "n_gen": ("tokens generated", ",d"),
    "n_out": ("output tokens", ",d"),
    "n_seq": ("sequences", "d"),
    "n_threads": ("threads", "d"),
    "per_second": ("requests/s", "g"),
    "n": ("processes", "d"),
    "value": ("value", significant),
    "estimate": ("measured", significant),
    "share": ("share", ".0%"),
    "miss": ("times off", ".2f"),
    "noise": ("variation", noise),
    "error": ("largest relative error", ".1e"),
    "limit": ("limit", ".1e"),
    "rounding": ("rounding, at most", ".1e"),
    "largest_right": ("largest error", ".1e"),
    "smallest_wrong": ("smallest error", ".1e"),
    "bits": ("bits per weight", ".2f"),
    "same_top": ("same top-1", ".2%"),
    "p_adjusted": ("corrected p", ".2g"),
    "factor": ("factor", ".2g"),
}


class Table:
    """A table that looks the same in JupyterLab, on GitHub, in a terminal and in a diff; `frame` is what it shows."""

    def __init__(self, frame: pd.DataFrame, note: str = ""):
        starred = frame.astype(str).apply(lambda column: column.str.contains(r"\w\*")).any(axis=None)
        self.frame = frame
        self.notes = [text for text in (note, ASSUMED if starred else "") if text]

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>{escape(literal(note), quote=False)}</p>" for note in self.notes)
        shown, n = _html(self.frame.iloc[:, :WIDEST]) + notes, len(self.frame.columns)
        if n <= WIDEST:
            return shown
        return f"{shown}<details><summary>All {n} columns</summary>{_html(self.frame)}</details>"

    def _repr_markdown_(self) -> str:
        lines = [self.frame.columns.tolist(), ["---"] * len(self.frame.columns), *self.frame.to_numpy().tolist()]
        rows = ["| " + " | ".join(_in_code_or_not(str(cell)) for cell in line) + " |" for line in lines]
        return "\n".join(rows) + "".join("\n\n" + _in_code_or_not(note) for note in self.notes)

    def __repr__(self) -> str:
        return "\n".join([self.frame.to_string(index=False), *self.notes])


def _html(frame: pd.DataFrame) -> str:
    shown = frame.map(lambda cell: literal(cell) if isinstance(cell, str) else cell)
    return shown.rename(columns=lambda name: literal(str(name))).to_html(index=False, border=0, justify="left")


def literal(text: str) -> str:
    """A text from any source as one line, without invisible characters and characters that TeX interprets."""
    seen = (letter.isprintable() or unicodedata.category(letter) == "Zs" for letter in text)
    return "".join(letter if ok else " " for letter, ok in zip(text, seen, strict=True)).translate(TEX)


def escaped(text: str) -> str:
    """A text from any source for a Markdown sentence, such as a starred name or a server's message, free of markup."""
    return MARKUP.sub(r"\\\g<0>", literal(text))


def _in_code_or_not(text: str) -> str:
    """The same for a table, where a text may contain code."""
    return escaped(text).replace(r"\`", "`")


def label(name: str) -> str:
    """The heading of a column, its own name where LABELS has none."""
    return LABELS[name][0] if name in LABELS else name.replace("_", " ")


def table(
    data: pd.DataFrame, columns: str | Sequence[str] = (), note: str = "", otherwise: str = "", **headings: str
) -> Table:
    """A table of some columns, headed and formatted by LABELS: a list of names, or one string separated by blanks.

    `note` is printed under it. `otherwise`: what is said instead where there are no lines. `headings` rename columns of
    this one table.
    """
    names = names_of(columns) or [name for name in data if name not in ("value", "low", "high", "noise")]
    if data.empty:
        return Table(pd.DataFrame({"": [otherwise or note or NOTHING]}))
    shown = {}
    for name in names:
        heading, how = LABELS.get(name, (label(name), _format(data[name])))
        shown[headings.get(name, heading)] = [_shown(value, how) for value in data[name]]
    return Table(pd.DataFrame(shown), note)


def _format(column: pd.Series) -> Format:
    """The format of a column without a label: three digits for floats and estimates, everything else unchanged."""
    estimates = column.map(lambda value: isinstance(value, Estimate)).any()
    return significant if estimates or pd.api.types.is_float_dtype(column) else ""


def _shown(value: Any, how: Format) -> str:
    """One value as text: an estimate with its interval, n/a for a missing value."""
    number = value.value if isinstance(value, Estimate) else value
    if number is None or (isinstance(number, float) and math.isnan(number)):
        return NOT_AVAILABLE
    if callable(how):
        return how(value)
    return format(value, how) if how else str(value)


def folded(summary: str, *tables: Table) -> Markdown:
    """Tables for referees, folded behind one line that a click opens; `summary` is that line."""
    shown = "\n".join(table._repr_html_() for table in tables)
    block = "\n".join(filter(str.strip, shown.splitlines()))  # a blank line would end the fold on a published page
    return Markdown(f"<details><summary>{summary}</summary>\n{block}\n</details>")
