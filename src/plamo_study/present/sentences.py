"""Sentences in which two numbers and their ratio stand together: one way to write them, and one way to check them.

They are written `R times ... (A against B unit)`, with or without intervals. `contradictions` reads a text as a reader
does: it takes the printed figures, divides, and names every ratio that does not come out.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from plamo_study.analysis.stats import Estimate
from plamo_study.present.tables import significant

NUMBER = r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"
INTERVAL = r"(?: \[[^\]]*\]| \(n = \d+\))?"
QUOTIENT = re.compile(
    rf"(?P<ratio>{NUMBER}){INTERVAL} times\b[^|\n();]*\((?P<first>{NUMBER}){INTERVAL} against (?P<second>{NUMBER})"
)

CLOSE = 1.5  # times off that a prediction may be


def is_close(ratio: float) -> bool:
    """Whether what was measured over what was predicted is within CLOSE times, either way."""
    return 1 / CLOSE <= ratio <= CLOSE


def unless(ratio: Estimate) -> str:
    """What is said of a ratio whose interval holds 1."""
    return ", which is inconclusive" if ratio.above(1.0) == "inconclusive" else ""


def closeness(ratios: Sequence[Estimate]) -> tuple[int, str]:
    """How many of these are within CLOSE times, and in words how many of them with their whole interval."""
    near = [ratio for ratio in ratios if is_close(ratio.value)]
    sure = sum(ratio.within(1 / CLOSE, CLOSE) == "holds" for ratio in near)
    return len(near), f"{sure} of these with the whole interval"


@dataclass(frozen=True)
class Quotient:
    """A ratio and its two numbers as a text prints them; `passage` is where."""

    passage: str
    ratio: str
    first: str
    second: str

    def divides(self) -> bool:
        """Whether some numbers that round to the printed ones have a quotient that rounds to the printed ratio."""
        (low, high), (first, most), (least, second) = map(_rounded, (self.ratio, self.first, self.second))
        return low * least <= most and first <= high * second


def quotient(ratio: Estimate, first: Estimate, second: Estimate, unit: str, spec: str = ".2f") -> tuple[str, str]:
    """The two halves of such a sentence: "4.78 [4.54, 5.10] times", "(129 [127, 132] against 27.0 [25.9, 28.2] t/s)".

    Raises ValueError where `ratio` is not `first` over `second`, so that no page can contradict itself.
    """
    divided = first.value / second.value
    if not math.isclose(ratio.value, divided, rel_tol=1e-6):
        raise ValueError(f"a ratio of {ratio.value:g} beside numbers whose quotient is {divided:g}")
    return f"{ratio:{spec}} times", f"({significant(3)(first)} against {significant(3)(second)} {unit})"


def quotients(text: str) -> Iterator[Quotient]:
    """Every ratio of a text that has its two numbers beside it."""
    for match in QUOTIENT.finditer(text):
        yield Quotient(match[0], match["ratio"], match["first"], match["second"])


def contradictions(text: str) -> list[str]:
    """The passages whose printed numbers do not divide to the ratio printed with them."""
    return [found.passage for found in quotients(text) if not found.divides()]


def _rounded(number: str) -> tuple[float, float]:
    """The smallest and the largest number that is printed like this."""
    mantissa, _, exponent = number.replace(",", "").partition("e")
    power = int(exponent or 0)
    value, unit = float(mantissa) * 10.0**power, 10.0 ** (power - len(mantissa.partition(".")[2]))
    return value - unit / 2, value + unit / 2
