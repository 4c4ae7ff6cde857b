"""Sentences with two numbers and their ratio: one form to write them, and one check of them.

They are written `R times ... (A against B unit)`, with or without intervals. The ratio is the median of paired ratios
and the numbers are medians, so they need not divide to it: where they differ much, their quotient is printed with them.
`contradictions` reads a text as a reader does: it divides the printed figures, and returns every passage that differs
without saying so.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from plamo_study.analysis.stats import Estimate
from plamo_study.present.tables import FAR, divided, is_far, significant

NUMBER = r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"
INTERVAL = r"(?: \[[^\]]*\]| \(n = \d+\))?"
DIVIDE = "these divide to"
QUOTIENT = re.compile(
    rf"(?P<ratio>{NUMBER}){INTERVAL} times\b[^|\n();]*\((?P<first>{NUMBER}){INTERVAL} against (?P<second>{NUMBER})"
    rf"(?:{INTERVAL}[^|\n();]*; {DIVIDE} (?P<said>{NUMBER}))?"
)

CLOSE = 1.5  # largest accepted factor between prediction and measurement


def is_close(ratio: float) -> bool:
    """Whether the ratio of measured to predicted is within a factor of CLOSE, either way."""
    return 1 / CLOSE <= ratio <= CLOSE


def unless(ratio: Estimate) -> str:
    """The remark on a ratio whose interval contains 1; empty for others."""
    return ", which is inconclusive" if ratio.above(1.0) == "inconclusive" else ""


@dataclass(frozen=True)
class Quotient:
    """A ratio and its two numbers as printed in a text: in `passage`; `said`: the quotient the text gives for them."""

    passage: str
    ratio: str
    first: str
    second: str
    said: str | None

    def divides(self) -> bool:
        """Whether numbers with these printed forms divide to the stated quotient, or else to the ratio within FAR."""
        (low, high), (first, most), (least, second) = map(_rounded, (self.said or self.ratio, self.first, self.second))
        far = 1.0 if self.said else 1 + FAR
        return low * least <= most * far and first <= high * second * far


def quotient(ratio: Estimate, first: Estimate, second: Estimate, unit: str, spec: str = ".2f") -> tuple[str, str]:
    """The halves of such a sentence: "4.78 [4.54, 5.10] times" and "(129 [127, 132] against 27.0 [25.9, 28.2] t/s)"."""
    both = f"{significant(3)(first)} against {significant(3)(second)} {unit}{beside(ratio, first, second, spec)}"
    return f"{ratio:{spec}} times", f"({both})"


def beside(ratio: Estimate, first: Estimate, second: Estimate, spec: str = ".2f") -> str:
    """The remark where the quotient of two numbers is far from their ratio."""
    said = format(divided(first, second), spec)
    return f"; {DIVIDE} {said}" if is_far(ratio, divided(first, second)) and said != format(ratio.value, spec) else ""


def among(estimate: Estimate, what: str) -> str:
    """The remark on a selected estimate: among how many, and that its interval holds for all of them."""
    if estimate.among < 2:
        return ""
    return f"chosen among {estimate.among} {what} after measuring; the interval holds for all of them"


def quotients(text: str) -> Iterator[Quotient]:
    """Every ratio in a text with its two numbers beside it."""
    for match in QUOTIENT.finditer(text):
        yield Quotient(match[0], match["ratio"], match["first"], match["second"], match["said"])


def contradictions(text: str) -> list[str]:
    """The passages whose printed numbers divide to something other than their ratio, and which do not say so."""
    return [found.passage for found in quotients(text) if not found.divides()]


def _rounded(number: str) -> tuple[float, float]:
    """The smallest and the largest number with this printed form."""
    mantissa, _, exponent = number.replace(",", "").partition("e")
    power = int(exponent or 0)
    value, unit = float(mantissa) * 10.0**power, 10.0 ** (power - len(mantissa.partition(".")[2]))
    return value - unit / 2, value + unit / 2
