"""The commands on builds of llama.cpp: build one by name, list them."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from llama_meter.disk import plain
from llama_meter.engine import builds as engines
from llama_meter.measure import defects, plan
from llama_meter.models import embedded, registry
from llama_meter.workloads import architectures
from plamo_study.cli import report
from plamo_study.cli.terminal import Grid, Terminal, echo

app = typer.Typer(no_args_is_help=True, help="Builds of llama.cpp by name: corrected ones, and releases.")


@app.command()
def build(
    name: Annotated[str, typer.Argument(help="name from `engine list`, e.g. corrected or 0.3.20; releases: all")],
) -> None:
    """Compile a build: the locked sources with patches, whose other libraries are the installed ones, or a release."""
    for engine in engines.named([name], here=False):
        with report.building(engine) as on_step:
            path, made = engines.build(engine, on_step)
        said, use = "built" if made else "is here already", f"; use it with --engine {engine} or --beside {engine}"
        uses = "" if "program" in engines.definition(engine) else use
        report.console.print(f"{engine} {said}: {report.short(path)}{uses}")


@app.command()
def add(
    release: Annotated[str, typer.Argument(help="a version of llama-cpp-python, e.g. 0.3.36")],
    reference: Annotated[bool, typer.Option(help="write to the tracked journal of the reference machine")] = False,
) -> None:
    """Add a release: note the hash of its sources, compile it, and ask it notebook 17's questions."""
    from plamo_study.laws import history  # frames take seconds to load

    if engines.pin(release):
        report.console.print(f"{release} is noted in {report.short(engines.RELEASES)}")
    build(release)
    beside = [engines.resolve(release)]
    summary = report.measure(history.STUDY, "mini", report.place(reference), beside=beside)
    report.console.print(f"{release}: {history.known().get(release, 'gave no answer')}")
    raise typer.Exit(0 if summary.well else 1)


@app.command()
def test(name: Annotated[str, typer.Argument(help="an existing build, e.g. corrected")]) -> None:
    """Run the upstream reports' tests on the released engine and on a build: before and after."""
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        written = [architectures.write(model, Path(folder)) for model in engines.definition(name).get("models", [])]
        for run in engines.test(name, written or _embedded_models()):
            runs.append(run)
            Terminal().print(f"{run.test} on {run.build}: {'passes' if run.passed else 'FAILS'}")
            typer.echo(plain(run.said), nl=False)
    as_reported = all(run.passed == (run.build != "stock") for run in runs)
    raise typer.Exit(0 if as_reported else 1)


@app.command()
def server(
    binary: Annotated[Path, typer.Argument(help="a llama-server of the same release")],
    build: Annotated[str | None, typer.Option(help="build whose libllama it loads; none: its own")] = None,
    model: Annotated[int, typer.Option(min=0, max=1, help="embedded model: 0 PLaMo 2, 1 PLaMo 3")] = 0,
    slots: Annotated[int, typer.Option(min=1, help="parallel sequences of the server")] = 4,
    at_once: Annotated[list[int] | None, typer.Option(help="requests at once; repeatable, 4 when not given")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="rounds of that many requests")] = 12,
    reference: Annotated[bool, typer.Option(help="keep the result as the reference machine's")] = False,
) -> None:
    """Send prompts to a llama-server alone, then several at once: do the answers stay the same, and does it survive?"""
    from llama_meter.serve import concurrency  # loads what asks over HTTP

    folder = engines.resolve(build) if build else None
    runs = []
    for n in at_once or [4]:
        run = concurrency.serve(binary, _embedded_models()[model], build or "stock", folder, slots, n, rounds)
        runs.append(run)
        end = "lives" if run.exit is None else f"ended with {run.exit} in round {run.rounds_done + 1}: {run.said}"
        differ = f"{run.changed} of {run.answers} answers changed ({run.near_ties} more at near-ties)"
        typer.echo(f"{run.build}, {run.model}, {slots} slots, {n} at once: {differ}; the server {plain(end)}")
    if reference:
        concurrency.record(runs)


def _embedded_models() -> list[Path]:
    return [embedded.make(registry.spec(name, "mini"), embedded.SOURCE) for name in plan.MODELS]


@app.command("list")
def list_engines(json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """List every build that can be made, whether it exists here, what it corrects, and what it answered."""
    from plamo_study.laws import history  # frames take seconds to load

    answered = history.known()
    entries = [entry.__dict__ | {"answered": answered.get(entry.name, "")} for entry in engines.entries()]
    if json:
        echo(entries)
        return
    shown = Grid("engine", "here", "corrects", "what it answered", "what it is")
    for entry in entries:
        corrects = ", ".join(defects.name(code) for code in entry["corrects"]) or "nothing"
        shown.add(entry["name"], entry["here"], corrects, entry["answered"] or "not asked", entry["description"])
    Terminal().print(shown)
