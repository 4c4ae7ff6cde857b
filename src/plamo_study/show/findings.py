"""What a page says of the rows it shows: findings, lines with numbers in them, and questions with their answers.

    finding(*(f"{name(r.file)} reads {number(r.value)} tokens a second." for r in rate.itertuples()))
    questions(
        question("Does a written token cost more than ten read ones?", ratio, above=10, why="then answers decide"),
    )

The same cell is true of any rows. A threshold is set from what a reader would do differently, before rows are read. The
questions of one table are a family: an answer other than "inconclusive" needs an interval on one side of the threshold
and a p-value that survives the correction for all of them. Below three processes no interval is printed, and so there
is no other answer either: two values can agree by chance.
"""

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
from IPython.display import Markdown

from llama_meter.stats import Estimate
from plamo_study.show.tables import Table, escaped, significant
from plamo_study.stats.estimates import NUMBERS, claim, family

ANSWERS = {"holds": "yes", "does not hold": "no", "inconclusive": "inconclusive"}
NUMERIC = {"estimate", "first", "second", "noise", *NUMBERS}
Line = dict[str, Any]


class Finding(Markdown):
    """Lines with numbers in them, in bold; several become a list. `about` becomes metadata of the output."""

    def __init__(self, lines: Sequence[str], otherwise: str = "", band: str = "", about: Line | None = None):
        words = [f"**{line}**" for line in lines] or ([f"*Not measured here. {otherwise}*"] if otherwise else [""])
        text = words[0] if len(words) == 1 else "\n".join(f"- {line}" for line in words)
        super().__init__(band + text, metadata=about)


def finding(*lines: str, otherwise: str = "") -> Finding:
    """Lines with numbers in them. `otherwise`: what is shown where there are none: the command that measures it."""
    return Finding(lines, otherwise)


def name(text: str) -> str:
    """A model's or file's name inside a finding."""
    return escaped(text)


def number(value: float) -> str:
    """A number of a finding, with two or three digits: 0.57, 5.3, 27.3, 1,700."""
    if not math.isfinite(value) or not value:
        return f"{value:g}"
    digits = 2 - math.floor(math.log10(abs(value))) - (abs(value) < 10)
    return f"{round(value, digits):,.{max(digits, 0)}f}"


def question(sentence: str, data: pd.DataFrame, why: str = "", **threshold: Any) -> list[Line]:
    """A question about each line of `data`, as `estimate` and `compare` return it; the threshold as `claim` takes it.

    `why`: why the threshold is this one.
    """
    lines = []
    for row in data.to_dict("records"):
        of = ", ".join(str(value) for key, value in row.items() if key not in NUMERIC)
        lines.append(claim(sentence, of, row["estimate"], **threshold) | {"why": why})
    return lines


def questions(*lines: Sequence[Line]) -> Table:
    """All questions of a section in one table."""
    every = [line for several in lines for line in several]
    whys = [f"{line['wanted']}{', ' * bool(line['why'])}{line['why']}" for line in every]
    shown = family(every).rename(columns={"claim": "question", "model": "of"})
    shown = shown.assign(measured=shown["estimate"].map(figure), asked=whys, answer=shown["verdict"].map(ANSWERS))
    note = "" if every else "Nothing that a question is about was measured here."
    return Table(shown[["question", "of", "measured", "asked", "answer"]], note)


def figure(estimate: Estimate | None) -> str:
    """An estimate as text; where processes are few, their range; "" for none."""
    return significant(estimate) if estimate is not None else ""
