"""One finding of a check: its severity, the evidence and the remedy."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from llama_meter.disk import plain

Severity = Literal["blocking", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("blocking", "warning", "note")
AGAIN = "fetch or convert the file again"
SHOWN = 4  # names listed before the rest is only counted


@dataclass(frozen=True)
class Finding:
    """`blocking`: numbers from this file are meaningless; `warning`: they may be; `note`: for information.

    `code` is stable, for scripts; `evidence` and `mend` are sentences for people.
    """

    severity: Severity
    code: str
    evidence: str
    mend: str


def block(code: str, why: str, mend: str = AGAIN) -> Finding:
    """A finding that forbids using the file."""
    return Finding("blocking", code, why, mend)


def blocking(findings: Iterable[Finding]) -> list[Finding]:
    """The findings that forbid using the file."""
    return [finding for finding in findings if finding.severity == "blocking"]


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """The findings by descending severity, otherwise in their order."""
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def listed(names: Iterable[object]) -> str:
    """The first few of many names, and how many there are."""
    shown = [printable(name) for name in names]
    rest = f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    return ", ".join(shown[:SHOWN]) + rest


def printable(value: object, longest: int = 80) -> str:
    """Text from an untrusted file, truncated and without control characters."""
    text = value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
    text = plain(text[:longest], kept="")
    return text[:longest] + ("…" if len(text) > longest else "")
