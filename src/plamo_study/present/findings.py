"""What a page says of the rows it shows: findings, lines with numbers in them, and questions with their verdicts."""

import math
from collections.abc import Iterable

import pandas as pd
from IPython.display import Markdown

from plamo_study.analysis.stats import Estimate
from plamo_study.present.tables import Table, escaped, significant

MARKS = {"holds": "yes", "does not hold": "no", "inconclusive": "inconclusive"}
FEW = 3  # processes below which an interval says nothing, and there is no verdict


def finding(*lines: str, otherwise: str = "") -> Markdown:
    """Lines with numbers in them, as the rows have it, in bold; several become a list.

    `otherwise`: what is said where there are none: what was not measured, and the command that measures it.
    """
    said = [f"**{line}**" for line in lines]
    if not said:
        return Markdown(otherwise and f"*Not measured here. {otherwise}*")
    return Markdown(said[0] if len(said) == 1 else "\n".join(f"- {line}" for line in said))


def name(text: str) -> str:
    """A model's or file's name inside a finding."""
    return escaped(text)


def number(value: float) -> str:
    """A number of a finding, with two or three digits: 0.57, 5.3, 27.3, 1,700."""
    if not math.isfinite(value) or not value:
        return f"{value:g}"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{round(value, digits):,.{max(digits - (abs(value) < 10), 0)}f}"


def question(
    sentence: str, found: pd.DataFrame, above: float = math.nan, below: float = math.nan, why: str = ""
) -> pd.DataFrame:
    """A question of each line of `found`: is its `estimate` above, or below, a threshold that matters to a reader?

    `why`: why the threshold is this one, set before the rows are read. Columns question, of, estimate, asked, verdict.
    """
    sought = f"above {above:g}" if above == above else f"below {below:g}"

    def verdict(estimate: Estimate) -> str:
        if estimate.n < FEW or math.isnan(estimate.low):
            return "inconclusive"
        return MARKS[estimate.above(above) if above == above else estimate.below(below)]

    return pd.DataFrame(
        {
            "question": [sentence] * len(found),
            "of": found.get("file", found.get("model", pd.Series([""] * len(found)))).tolist(),
            "estimate": found["estimate"].tolist(),
            "asked": [f"{sought}{f', {why}' if why else ''}"] * len(found),
            "verdict": [verdict(estimate) for estimate in found["estimate"]],
        }
    )


def questions(asked: Iterable[pd.DataFrame]) -> Table:
    """All questions of a section or a page in one table."""
    frame = pd.concat([*asked, pd.DataFrame(columns=["question", "of", "estimate", "asked", "verdict"])])
    number = significant(3)
    shown = frame.assign(estimate=[number(each) for each in frame["estimate"]])
    return Table(shown.rename(columns={"estimate": "measured", "verdict": "answer"}))
