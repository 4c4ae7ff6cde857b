"""Tables for readers: headings with units, estimates with intervals, everything rounded here."""

import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from html import escape
from typing import Any

import pandas as pd
from IPython.display import Markdown

from llama_meter.stats import CONFIDENCE, Estimate
from plamo_study.read.usable import NOISY
from plamo_study.show import theme

Formatter = Callable[[Any], str]
Format = Formatter | str
Columns = Mapping[str, tuple[str, Format]]  # name -> (heading, format spec or function)
NOT_AVAILABLE = "n/a"
WIDEST = 8  # most columns shown at once; a wider table is shown whole in a fold below
ASSUMED = "* Rests on assumptions, which the models table names."
MARKUP = re.compile(r"[`*<&|]|(?<=\])\(|~(?=~)|(?<=~)~|_(?=_)|(?<=_)_")  # Markdown, in the middle of a line
TEX = str.maketrans({"$": "\uff04", "\\": "\uff3c"})  # full-width forms, which TeX ignores
FAR = 0.03  # relative difference between a ratio and its numbers' quotient that needs no remark
PAIRED = (
    "Ratios are medians over pairs of the same block; in round brackets the quotient of the medians beside them, where "
    f"it is more than {100 * FAR:.0f} % off."
)
Ratios = Mapping[str, tuple[str, str]]  # column of paired ratios -> columns of the two numbers beside it


class Table:
    """A table that looks the same in JupyterLab, on GitHub, in a terminal and in a diff.

    `frame` is what it shows; `numbers` holds the unrounded values behind it, where they were given.
    """

    def __init__(self, frame: pd.DataFrame, note: str = ""):
        starred = frame.astype(str).apply(lambda column: column.str.contains(r"\w\*")).any(axis=None)
        self.frame, self.numbers = frame, frame
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


def table(data: pd.DataFrame, columns: Columns, note: str = "", ratios: Ratios | None = None) -> Table:
    """Select, title and format columns: name -> (heading, format spec or function); `note` is printed under it.

    Where all intervals of a column have one level other than 95 %, the heading states it once. `ratios` that are far
    from the quotient of their two numbers, columns of `data` too, are shown with it, and the note states so once.
    """
    if data.empty:
        return Table(pd.DataFrame({"": [theme.NOTHING]}))
    shown, far = {}, False
    for name, (heading, how) in columns.items():
        level, values = _shared_level(data[name]), list(data[name])
        if level < CONFIDENCE:
            heading = f"{heading}, {level:.0%} interval"
            values = [replace(v, level=CONFIDENCE) if isinstance(v, Estimate) else v for v in values]
        shown[heading] = [show(value, how) for value in values]
        if name in (ratios or {}):
            first, second = (data[column] for column in (ratios or {})[name])
            alone = shown[heading]
            shown[heading] = list(map(partial(with_quotient, how=how), values, map(divided, first, second)))
            far |= shown[heading] != alone
    return Table(pd.DataFrame(shown), " ".join(filter(None, (note, PAIRED if far else ""))))


def divided(first: Any, second: Any) -> float:
    """The quotient of two values, NaN where one is missing."""
    above, below = (value.value if isinstance(value, Estimate) else value for value in (first, second))
    return above / below if above is not None and below else math.nan


def is_far(ratio: Any, quotient: float) -> bool:
    """Whether a paired ratio and the quotient of the numbers beside it differ by more than FAR."""
    value = ratio.value if isinstance(ratio, Estimate) else math.nan
    return max(value, quotient) > (1 + FAR) * min(value, quotient) if value == value else False


def with_quotient(ratio: Any, quotient: float, how: Format) -> str:
    """A ratio as text, followed by the quotient of the numbers beside it where that differs."""
    said = show(quotient, how)
    differs = is_far(ratio, quotient) and said != show(ratio.value, how)
    return show(ratio, how) + (f" ({said})" if differs else "")


def _shared_level(values: Iterable[Any]) -> float:
    """The common level of all intervals among `values`; 95 % where there are several or none."""
    levels = {v.level for v in values if isinstance(v, Estimate) and not math.isnan(v.low)}
    return levels.pop() if len(levels) == 1 else CONFIDENCE


def folded(summary: str, *tables: Table) -> Markdown:
    """Tables for referees, folded behind one line that a click opens; `summary` is that line."""
    shown = "\n".join(table._repr_html_() for table in tables)
    block = "\n".join(filter(str.strip, shown.splitlines()))  # a blank line would end the fold on a published page
    return Markdown(f"<details><summary>{summary}</summary>\n{block}\n</details>")


def show(value: Any, how: Format) -> str:
    """One value as text: an estimate with its interval, n/a for a missing value."""
    number = value.value if isinstance(value, Estimate) else value
    if number is None or (isinstance(number, float) and math.isnan(number)):
        return NOT_AVAILABLE
    if callable(how):
        return how(value)
    return format(value, how) if how else str(value)


def noise(variation: float) -> str:
    """A coefficient of variation, marked where the cell is noisy."""
    return f"{variation:.0%}" + (" noisy" if variation > NOISY else "")


def scaled(factor: float, spec: str) -> Formatter:
    """A formatter for a number or an estimate in another unit."""

    def in_unit(value: float | Estimate) -> str:
        moved = value.scaled(factor) if isinstance(value, Estimate) else value * factor
        return format(moved, spec)

    return in_unit


def significant(digits: int = 3, factor: float = 1.0) -> Formatter:
    """A formatter with `digits` significant digits of the value, and as many decimals for the interval."""

    def rounded(value: float | Estimate) -> str:
        middle = abs(value.value if isinstance(value, Estimate) else value) * factor
        places = max(digits - 1 - math.floor(math.log10(middle)), 0) if middle and math.isfinite(middle) else 0
        return scaled(factor, f",.{places}f")(value)

    return rounded
