"""The command that records one request operator by operator: `plamo-study trace`."""

# Modules that load SciPy are imported by the command: the others start a second sooner.

from pathlib import Path
from typing import Annotated

import typer

from llama_meter import disk
from llama_meter.rows import Measured
from llama_meter.workloads import timed_request as tracing
from plamo_study.cli import report
from plamo_study.cli.options import Accept, Engine, Json, Replace, Scale, accept_findings, use_engine
from plamo_study.cli.terminal import Grid, Terminal, echo


def trace(
    model: Annotated[str, typer.Argument(metavar="MODEL_OR_FILE", help="a registered model, or a .gguf file")],
    scale: Scale = "mini",
    dtype: Annotated[str, typer.Option("--type", help="of a registered model: F16, Q8_0, ...; none: by scale")] = "",
    prompt: Annotated[int, typer.Option(help="tokens of the prompt, drawn at random")] = 256,
    gen: Annotated[int, typer.Option(help="decode steps after it")] = 16,
    out: Annotated[Path, typer.Option(help="where to write the trace: .json or .json.gz")] = Path("trace.json.gz"),
    force: Replace = False,
    engine: Engine = None,
    accept: Accept = None,
    json: Json = False,
) -> None:
    """Record one request operator by operator, in the format that ui.perfetto.dev and chrome://tracing open.

    Prints the share of time by operator class and the cost of recording, relative to the same request without it.
    """
    from llama_meter.workloads.timeline import timeline_of

    use_engine(engine)
    accept_findings(accept)
    tracing.check_out(out)
    disk.check_out(out, force)
    with report.bytes_progress() as progress:
        cell, path = tracing.chosen(
            model, scale, dtype, prompt, gen, lambda file, done, total: progress(file)(done, total)
        )
    outcome = tracing.record(cell, path)
    report.leave_unless_ok(outcome, f"recording {path.name}")
    measured = outcome.measured
    title = path.name.removesuffix(".gguf")
    tracing.write(out, tracing.document(timeline_of(measured), title, tracing.about(cell, path, measured)))
    if json:
        shown = {"file": path.name, "trace": str(out), "checks": measured.checks, "series": measured.series}
        echo(shown)
    else:
        _show(measured, gen)
    report.console.print(f"wrote {report.short(out)}: open it at ui.perfetto.dev")
    raise typer.Exit(0 if measured.valid else 1)


def _show(measured: Measured, n_gen: int) -> None:
    """Print the share of time by class in both phases, the cost of recording, and every failed check."""
    from llama_meter.workloads.operators import CLASSES
    from plamo_study.laws import timeline as study

    works = {(entry["phase"], entry["class"]): entry for entry in study.of_series(measured.series, n_gen)}
    phases = [phase for phase in study.PHASES if f"{phase}/recorded" in measured.series]
    for phase in phases:
        by_class = {name: works[phase, name] for name in CLASSES if (phase, name) in works}
        total = sum(work["ns"] for work in by_class.values())
        shown = Grid(phase, "share", "us" if phase == "prefill" else "us / step", "GB/s", "GFLOP/s", "nodes")
        for name in CLASSES:
            if name in by_class or name == "other":
                shown.add(name, *_columns(by_class.get(name), total))
        Terminal().print(shown)
    for phase in phases:
        cost = study.cost(measured.series, measured.checks, phase)
        ratio, own = cost["recorded"] / cost["plain"], cost["callback"] / cost["recorded"]
        empty = cost["floor"] / cost["recorded"]
        said = f"{phase}: recorded in {ratio:.2f} times the plain time; {own:.1%} of it is the recorder's callback, "
        report.console.print(f"{said}{empty:.1%} what nodes take that compute nothing", soft_wrap=True)
    for name in (name for name, value in measured.checks.items() if value is False):
        report.console.print(f"did not hold: {name}", style="red")
    report.console.print(tracing.NOTE, soft_wrap=True)


def _columns(work: dict[str, float] | None, total: float) -> list[str]:
    if work is None:
        return ["0.0%", *[""] * 4]
    rates = (work["bytes"] / work["ns"], work["flops"] / work["ns"])
    numbers = [f"{rate:,.1f}" if rate else "" for rate in rates]
    return [f"{work['ns'] / total:.1%}", f"{work['ns'] / 1e3:,.1f}", *numbers, f"{work['nodes']:.0f}"]
