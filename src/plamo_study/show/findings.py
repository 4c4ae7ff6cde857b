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

from llama_meter.errors import StudyError
from plamo_study.show.tables import Table, escaped, significant
from plamo_study.stats import estimates
from plamo_study.stats.estimates import NUMBERS

FINDINGS = "plamo_study_findings"  # key of an output's metadata with its lines, for documents
METADATA = "plamo_study_claims"  # the same of questions and answers
ANSWERS = {"holds": "yes", "does not hold": "no", "inconclusive": "inconclusive"}
NUMERIC = {"estimate", "first", "second", "noise", *NUMBERS}
Line = dict[str, Any]


class Finding(Markdown):
    """Lines with numbers in them, in bold. Its output also holds them as data, for documents."""

    def __init__(self, lines: Sequence[str], otherwise: str = "", band: str = "", about: Line | None = None):
        self.lines, self.about = list(lines), about or {}
        said = [f"**{line}**" for line in lines] or ([f"*Not measured here. {otherwise}*"] if otherwise else [""])
        super().__init__(band + (said[0] if len(said) == 1 else "\n".join(f"- {line}" for line in said)))

    def _repr_markdown_(self) -> Any:
        return self.data, {FINDINGS: self.lines, **self.about}


def finding(*lines: str, otherwise: str = "") -> Finding:
    """Lines with numbers in them; several become a list.

    `otherwise`: what is said where there are none: the command that measures it.
    """
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


def question(
    sentence: str,
    data: pd.DataFrame,
    above: float | None = None,
    below: float | None = None,
    between: tuple[float, float] | None = None,
    why: str = "",
) -> list[Line]:
    """A question about each line of `data`, as `estimate` and `compare` return it; one threshold.

    `why`: why the threshold is this one. Raises StudyError unless there is exactly one threshold.
    """
    given = [threshold for threshold in (above, below, between) if threshold is not None]
    if len(given) != 1:
        raise StudyError(f"question {sentence!r}", f"has {len(given)} thresholds", "give one of above, below, between")
    lines = []
    for row in data.to_dict("records"):
        of, estimate = ", ".join(str(value) for key, value in row.items() if key not in NUMERIC), row["estimate"]
        if above is not None:
            line = estimates.above(sentence, of, estimate, above)
        elif below is not None:
            line = estimates.below(sentence, of, estimate, below)
        else:
            line = estimates.within(sentence, of, estimate, *(between or (0, 0)))
        lines.append(line | {"why": why})
    return lines


class Questions(Table):
    """The questions of a section or a page. Its output also holds them as data, for tests and documents."""

    def __init__(self, lines: list[Line]):
        family = estimates.family(lines).to_dict("records") if lines else []
        self.lines = [
            {
                "claim": line["claim"],
                "of": line["model"],
                "figure": figure(line),
                "needed": line["wanted"],
                "why": why,
                "verdict": ANSWERS[line["verdict"]],
            }
            for line, why in zip(family, [line["why"] for line in lines], strict=True)
        ]
        shown = pd.DataFrame([{"": "Nothing that a question is about was measured here."}])
        if lines:
            whys = [f"{line['wanted']}{', ' * bool(line['why'])}{line['why']}" for line in lines]
            heads = {"claim": "question", "of": "of", "figure": "measured", "asked": "asked", "verdict": "answer"}
            shown = pd.DataFrame(self.lines).assign(asked=whys)[[*heads]].rename(columns=heads)
        super().__init__(shown)

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, str], dict[str, Any]]:
        data = {"text/html": self._repr_html_(), "text/markdown": self._repr_markdown_(), "text/plain": repr(self)}
        return data, {METADATA: self.lines}


def questions(*asked: Sequence[Line]) -> Questions:
    """All questions of a section in one table."""
    return Questions([line for lines in asked for line in lines])


def figure(line: Line) -> str:
    """A line's estimate as text; where processes are few, their range."""
    return significant(3)(line["estimate"]) if line["estimate"] is not None else ""
