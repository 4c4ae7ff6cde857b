"""Findings on the numbers that enter a file's products, compared with the limits of the backends' casts.

They cover the few tokens the gate evaluates; `plamo-study models ranges` takes a longer text, which may reach further.
"""

from typing import Any

from plamo_study.measure.rows import Measured
from plamo_study.models import casts
from plamo_study.models.finding import Finding

NUMBERS = {"largest": "the largest input", "output": "the largest result"}  # others: "the sum of 32 inputs in a row"


def findings(measured: Measured) -> list[Finding]:
    """A warning for each backend whose limit is passed; where its logits are not finite, the gate itself blocks."""
    ranges = measured.facts.get("ranges", {})
    passed = {backend: worst for backend, worst in ranges.items() if not worst["fits"]}
    return [Finding("warning", "range", _evidence(backend, worst), _mend(worst)) for backend, worst in passed.items()]


def nearest(measured: Measured) -> str:
    """How close the examined numbers came to a limit of any backend, as the end of a sentence."""
    ranges = measured.facts.get("ranges", {})
    if not ranges:
        return ""
    backend, worst = max(ranges.items(), key=lambda item: float(item[1]["factor"]))
    return f"; closest to a limit: {_where(worst)} on {backend}, {worst['number']:,.3g} of {worst['limit']:,.0f}"


def _evidence(backend: str, worst: dict[str, Any]) -> str:
    number = NUMBERS.get(worst["of"], f"the {worst['of']} inputs in a row")
    return (
        f"{number} of {_where(worst)} is {worst['number']:,.4g}; for {worst['dtype']} {backend} casts it to "
        f"{worst['cast']} ({worst['path']}), which overflows beyond {worst['limit']:,.0f}: {worst['factor']:.2g} times "
        f"too large (half-precision overflow, D5)"
    )


def _where(worst: dict[str, Any]) -> str:
    return f"{worst['kind']} in layer {worst['layer']}" if worst["layer"] >= 0 else str(worst["kind"])


def _mend(worst: dict[str, Any]) -> str:
    if worst["kind"] in casts.INSIDE:
        return "use a cache of type f32"
    return f"quantize again with --keep {worst['kind']}=bf16: plamo-study models quantize"
