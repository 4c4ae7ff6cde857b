"""A probe's report as text and as a page; the key that was used is in neither."""

from math import isnan

from llama_meter.models.finding import printable
from llama_meter.serve.phase import LEVERS, Binding, Interval
from llama_meter.serve.probe import Report
from llama_meter.serve.right import Rightness
from llama_meter.serve.traffic import Traffic

CHANGED = {"prompt": "a longer prompt", "output": "a longer answer", "load": "more load"}
PAGE = """<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>Probe of {{ report.url }}</title>
<style>body { font: 16px/1.5 sans-serif; max-width: 46em; margin: 2em auto; padding: 0 1em }
td, th { text-align: left; padding: .2em 1em .2em 0 }</style>
<h1>Probe of {{ report.url }}</h1>
{% for title, lines in parts %}<h2>{{ title }}</h2>
<table>{% for name, value in lines %}<tr><th>{{ name }}</th><td>{{ value }}</td></tr>
{% endfor %}</table>
{% endfor %}</html>
"""
Lines = list[tuple[str, str]]


def text(report: Report) -> str:
    """One page for a terminal."""
    said = []
    for title, lines in _parts(report):
        said += [title, *(f"  {name}: {value}" for name, value in lines), ""]
    return "\n".join(said)


def html(report: Report) -> str:
    """A self-contained HTML page of a report."""
    from jinja2 import Environment  # only here: text needs none

    return Environment(autoescape=True).from_string(PAGE).render(report=report, parts=_parts(report))


def _parts(report: Report) -> list[tuple[str, Lines]]:
    spent = f"{report.requests} requests in {report.seconds:.0f} s"
    server: Lines = [
        ("address", report.url),
        ("kind", report.server),
        ("model", printable(report.model)),
        ("asked", spent),
    ]
    server += [("ignored", ", ".join(report.ignored))] if report.ignored else []
    right, phase = report.right, report.phase
    parts = [
        ("The server", server),
        (f"Is it right under load? {right.verdict}.", _right(right)),
        (f"Which phase binds? {phase.verdict}.", _phase(phase)),
    ]
    return [*parts, ("Your own traffic", _traffic(report.traffic))] if report.traffic else parts


def _traffic(own: Traffic) -> Lines:
    asked = f"{own.prompt_tokens:,.0f} tokens of prompts, {own.output_tokens:,.0f} of answers"
    shares = [(f"share of the server's time, {phase}", f"{share:.0%}") for phase, share in own.shares.items()]
    most = max(own.shares, key=lambda phase: own.shares[phase])
    return [(f"in {own.seconds:g} s", asked), *shares, ("what helps", LEVERS[most])]  # type: ignore[index] # a phase


def _right(right: Rightness) -> Lines:
    counts = f"{right.compared} compared, {right.other} other, {right.near_ties} near-ties, {right.failed} failed"
    copies = f"{right.identical} asked beside copies of their prompt, at most {right.distinct} distinct at once"
    judged = "by log probabilities" if right.log_probabilities else "by repetition"
    lines = [("why", right.why), ("would miss", right.misses), ("answers", counts)]
    return [*lines, *([("identical prompts", copies)] if right.identical else []), ("judged", judged)]


def _phase(phase: Binding) -> Lines:
    lines = [("why", phase.why), ("what helps", phase.lever)]
    lines += [
        (f"1 % {CHANGED[name]}", f"{_shown(value)} % longer") for name, value in phase.elasticities.items()
    ]  # fmt: skip
    lines += [(f"share of a request, {name}", _shown(value, ".0%")) for name, value in phase.shares.items()]
    lines += [(name, f"{value * 1e3:.1f} ms") for name, value in phase.seconds.items()]
    return [*lines, ("client late by", f"{phase.late_s * 1e3:.2f} ms now and then")]


def _shown(value: Interval, spec: str = ".2f") -> str:
    return "n/a" if isnan(value.value) else format(value, spec)
