"""The claims of a page: a sentence written by hand, the estimate behind it, and its threshold.

    claim = Claims("01-phase-asymmetry", source)
    claim("reading is at least four times as fast as writing", ratio, above=4)
    claim.table()

On recorded rows a test requires every claim to hold, so prose cannot become outdated. On a reader's own rows (`source`
is "live") the table shows the reference machine's figure beside this machine's. All claims of a page are one family: a
verdict other than "inconclusive" needs an interval on one side of the threshold and a p-value that survives the
correction for all.
"""

import math
from collections.abc import Sized
from typing import Any

import nbformat
import pandas as pd

from plamo_study import paths
from plamo_study.analysis import claims
from plamo_study.analysis.estimates import NUMBERS
from plamo_study.analysis.stats import Estimate
from plamo_study.errors import StudyError
from plamo_study.present.tables import Table, significant

METADATA = "plamo_study_claims"  # key of an output's metadata with the page's claims, for tests and documents
FEW = 3  # processes; below, no interval is printed
MARKS = {"holds": "✓", "does not hold": "✗", "inconclusive": "?"}
Line = dict[str, Any]


class Claims:
    """The claims of a page, in order."""

    def __init__(self, notebook: str, source: str):
        self.notebook, self.source = notebook, source
        self._stated: dict[str, list[Line]] = {}  # by sentence: rerunning a cell adds no second claim

    def __call__(
        self,
        sentence: str,
        found: pd.DataFrame | bool,
        above: float | None = None,
        below: float | None = None,
        between: tuple[float, float] | None = None,
    ) -> "Verdicts":
        """Claim a sentence for every line of `found`, as `estimate` and `compare` return it, or as a plain fact.

        Raises StudyError unless there is exactly one threshold (none for a plain fact).
        """
        asked = [each for each in (above, below, between) if each is not None]
        if isinstance(found, bool):
            lines = [_untested(sentence, "", "holds" if found else "does not hold")]
        elif len(asked) != 1:
            why = f"has {len(asked)} thresholds"
            raise StudyError(f"claim {sentence!r}", why, "give one of above=, below= and between=")
        elif found.empty:  # as in a live run out of time: nothing is claimed, and the table says so
            lines = [_untested(sentence, "not measured", "inconclusive")]
        else:
            lines = [self._line(sentence, row, above, below, between) for row in found.to_dict("records")]
        self._stated[sentence] = lines
        return Verdicts(lines)

    def fact(self, sentence: str, holds: Any, of: Sized | None = None) -> "Verdicts":
        """Claim a plain fact about some lines; without lines, nothing is claimed.

        `holds`: whether it holds, or a series of booleans that must all be true. `of`: the lines, by default `holds`.
        """
        if not len(holds if of is None else of):
            return self(sentence, pd.DataFrame(), above=0)
        return self(sentence, bool(holds.all() if isinstance(holds, pd.Series) else holds))

    def _line(
        self, sentence: str, row: Line, above: float | None, below: float | None, between: tuple[float, float] | None
    ) -> Line:
        other = {"estimate", "first", "second", "noise", *NUMBERS}
        of = ", ".join(str(value) for name, value in row.items() if name not in other)
        if above is not None:
            return claims.above(sentence, of, row["estimate"], above)
        if below is not None:
            return claims.below(sentence, of, row["estimate"], below)
        return claims.within(sentence, of, row["estimate"], *(between or (0, 0)))

    def checked(self) -> list[Line]:
        """Every claimed line, with p-value and verdict corrected for the whole page."""
        return _corrected(self._stated)

    def table(self) -> "Checked":
        """All claims with their verdicts; for a reader's own rows, beside the reference machine's figures."""
        return Checked(self.checked(), _reference(self.notebook) if self.source == "live" else None)


class Verdicts:
    """The verdicts of a claim, shown under its sentence."""

    def __init__(self, lines: list[Line]):
        self.lines, self._said = lines, [*map(_said, lines)]

    def _repr_markdown_(self) -> str:
        return "  \n".join(self._said)

    def __repr__(self) -> str:
        return "\n".join(self._said)


class Checked(Table):
    """The table of a page's claims. Its output also holds them as data, for tests and documents."""

    def __init__(self, lines: list[Line], reference: dict[tuple[str, str], str] | None = None):
        self.lines = lines
        shown = []
        for line in lines:
            entry = {"claim": line["claim"], "of": line["model"]}
            if reference is not None:
                entry["reference machine"] = reference.get(_what(line), "")
            entry["measured" if reference is None else "on this machine"] = figure(line)
            shown.append(entry | {"needed": line["wanted"], "verdict": line["verdict"]})
        note = f"{len(lines)} claims, one family: p-values after Benjamini and Hochberg's correction, at 5 %."
        super().__init__(pd.DataFrame(shown), note)

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, str], dict[str, Any]]:
        data = {"text/html": self._repr_html_(), "text/markdown": self._repr_markdown_(), "text/plain": repr(self)}
        return data, {METADATA: [_plain(line) for line in self.lines]}


def stated(notebook: nbformat.NotebookNode) -> list[Line]:
    """The claims in the outputs of an executed notebook: `claim`, `of`, `figure`, `needed` and `verdict` of each."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [line for output in outputs for line in output.get("metadata", {}).get(METADATA, [])]


def _reference(notebook: str) -> dict[tuple[str, str], str]:
    """The figures of the reference machine, from the committed notebook."""
    path = paths.NOTEBOOKS / f"{notebook}.ipynb"
    lines = stated(nbformat.read(path, as_version=4))
    return {_what(line | {"model": line["of"]}): line["figure"] for line in lines}


def _what(line: Line) -> tuple[str, str]:
    """Key of a line: its sentence and model, without the star of assumed shapes, which embedded models lack."""
    return line["claim"], line["model"].replace("*", "")


def _corrected(stated: dict[str, list[Line]]) -> list[Line]:
    """All lines as one family."""
    lines = [line for each in stated.values() for line in each]
    tested = iter(claims.family([line for line in lines if line["p"] is not None]).to_dict("records"))
    return [line if line["p"] is None else next(tested) for line in lines]


def _untested(sentence: str, wanted: str, verdict: str) -> Line:
    """A line without an estimate, and so without a p-value."""
    return {"claim": sentence, "model": "", "estimate": None, "wanted": wanted, "p": None, "verdict": verdict}


def _plain(line: Line) -> Line:
    own = {"claim": line["claim"], "of": line["model"], "figure": figure(line), "needed": line["wanted"]}
    return own | {"verdict": line["verdict"]}


def few(found: Estimate) -> bool:
    """Whether an estimate rests on too few processes for an interval to be printed; a share has an exact one."""
    return found.n < FEW and bool(found.units) and not found.success


def figure(line: Line) -> str:
    """A line's estimate as text; where processes are few, their range."""
    found: Estimate | None = line["estimate"]
    if found is None:
        return ""
    if few(found):  # the range, and the number of processes
        least, most = (each(found.units) for each in (min, max))
        least, most = (math.exp(least), math.exp(most)) if found.in_logs else (least, most)
        return f"{least:.3g} to {most:.3g} ({found.n} processes)"
    return significant(3)(found)


def _said(line: Line) -> str:
    of = f"{line['model']}: " if line["model"] else ""
    shown = f" ({of}{figure(line)}, needed {line['wanted']})" if line["estimate"] else ""
    return f"{MARKS[line['verdict']]} {line['claim']}{shown}"
