"""A probe's report as text; the key that was used is not in it."""

from math import isnan

from llama_meter.models.finding import printable
from llama_meter.serve.phase import Binding, Interval
from llama_meter.serve.probe import Report
from llama_meter.serve.right import Rightness

CHANGED = {"prompt": "a longer prompt", "output": "a longer answer", "load": "more load"}
Lines = list[tuple[str, str]]


def text(report: Report) -> str:
    """One page for a terminal."""
    said = []
    for title, lines in _parts(report):
        said += [title, *(f"  {name}: {value}" for name, value in lines), ""]
    return "\n".join(said)


def _parts(report: Report) -> list[tuple[str, Lines]]:
    spent = f"{report.requests} requests in {report.seconds:.0f} s"
    server: Lines = [
        ("address", report.url),
        ("kind", report.server),
        ("model", printable(report.model)),
        ("asked", spent),
    ]
    right, phase = report.right, report.phase
    return [
        ("The server", server),
        (f"Is it right under load? {right.verdict}.", _right(right)),
        (f"Which phase binds? {phase.verdict}.", _phase(phase)),
    ]


def _right(right: Rightness) -> Lines:
    counts = f"{right.compared} compared, {right.other} other, {right.near_ties} near-ties, {right.failed} failed"
    copies = f"{right.identical} asked beside copies of their prompt, at most {right.distinct} distinct at once"
    judged = "by log probabilities" if right.log_probabilities else "by repetition"
    lines = [("why", right.why), ("would miss", right.misses), ("answers", counts)]
    return [*lines, *([("identical prompts", copies)] if right.identical else []), ("judged", judged)]


def _phase(phase: Binding) -> Lines:
    lines = [("why", phase.why), ("what helps", phase.lever)]
    lines += [(f"1 % {CHANGED[name]}", f"{_shown(value)} % longer") for name, value in phase.elasticities.items()]
    lines += [(f"share of a request, {name}", _shown(value, ".0%")) for name, value in phase.shares.items()]
    lines += [(name, f"{value * 1e3:.1f} ms") for name, value in phase.seconds.items()]
    return [*lines, ("client late by", f"{phase.late_s * 1e3:.2f} ms now and then")]


def _shown(value: Interval, spec: str = ".2f") -> str:
    return "n/a" if isnan(value.value) else format(value, spec)
