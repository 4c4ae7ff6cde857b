"""Measure llama.cpp on PLaMo models. Exit codes: 0 done, 1 something failed, 2 wrong usage."""

# Modules that load Jupyter or SciPy are imported by the commands that need them: the others start a second sooner.

import sys
from contextlib import nullcontext
from typing import Annotated

import msgspec
import typer

from llama_meter.engine import builds as engines
from llama_meter.errors import StudyError
from llama_meter.measure.asked import NOTHING, sweep
from plamo_study.cli import (
    engine as cli_engine,
    models as cli_models,
    probe as cli_probe,
    publishing as cli_publishing,
    report,
)
from plamo_study.cli.guard import guarded
from plamo_study.cli.options import (
    LIMIT,
    Device,
    Engine,
    Files,
    Force,
    Minutes,
    Repair,
    Scale,
    finite,
    may_repair,
    use_device,
    use_engine,
)
from plamo_study.run import cluster, parameters
from plamo_study.studies import registry as studies
from plamo_study.studies.your_machine import at_hand

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
app.add_typer(cli_models.app, name="models")
app.add_typer(cli_engine.app, name="engine")
app.command("probe")(cli_probe.probe)
app.command("publish")(cli_publishing.publish)

MINUTES = 5.0  # for measuring all studies at mini


def main() -> None:
    """Run the command line."""
    guarded(lambda: app(report.joined_parameters(sys.argv[1:])))


@app.command()
def study(
    scale: Annotated[
        str | None,
        typer.Option(help="run every notebook live instead, at this scale: mini (embedded, minutes) or shape (hours)"),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0,
            callback=finite,
            help=f"minutes for measuring, {LIMIT}; 0: what the plans take. By default {at_hand.MINUTES:g}, or with a "
            f"scale {MINUTES:g} at mini, else what the plans take",
        ),
    ] = None,
    engine: Engine = None,
    device: Device = "auto",
    file: Files = None,
    repair: Repair = False,
) -> None:
    """Describe this machine with your files, or with the study's models of full size, and publish every page."""
    from plamo_study.cli import notebooks as cli_notebooks  # loads Jupyter and SciPy

    use_engine(engine)
    use_device(device)
    may_repair(repair)
    if file and scale:
        raise StudyError("--file", "has the size it has", "omit --scale")
    if scale is None:
        raise typer.Exit(cli_notebooks.at_hand(minutes, file or []))
    usual = MINUTES if scale == "mini" else 0.0
    within = usual if minutes is None else minutes
    asked = cli_notebooks.Asked([], "live", scale, {}, within, published=True)
    raise typer.Exit(cli_notebooks.execute(asked))


@app.command()
def run(
    notebooks: Annotated[list[str] | None, typer.Argument(help="numbers, names or paths; none means all")] = None,
    scale: Annotated[
        str | None, typer.Option(help="mini or shape; default: mini; recorded rows: the page's scale")
    ] = None,
    parameter: Annotated[
        list[str] | None,
        typer.Option(
            "-p",
            metavar="NAME VALUE",
            help="a notebook parameter; `source recorded` reads the tracked rows instead of measuring here",
        ),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0, callback=finite, help=f"minutes for measuring, {LIMIT}; by default no limit")
    ] = None,
    engine: Engine = None,
    device: Device = "auto",
    file: Files = None,
    repair: Repair = False,
    force: Force = False,
) -> None:
    """Measure what is missing, then execute notebooks with papermill into reports/."""
    from plamo_study.cli import notebooks as cli_notebooks  # loads Jupyter and SciPy

    may_repair(repair)
    use_engine(engine)
    values = dict(report.name_and_value(text) for text in parameter or [])
    if file:
        values["files"] = _one_of("files", msgspec.json.encode(file).decode(), values) or ""
    use_device(_one_of("device", None if device == "auto" else device, values) or "auto")
    source = values.pop("source", "live")
    scale = _one_of("scale", scale, values) or ("mini" if source == "live" else None)
    text = _one_of("minutes", None if minutes is None else f"{minutes:g}", values) or "0"
    within = float(cli_notebooks.parameters.convert("minutes", text, "float"))
    parameters.typed(minutes=within)
    asked = cli_notebooks.Asked(notebooks or [], source, scale, values, within, force=force)
    raise typer.Exit(cli_notebooks.execute(asked))


def _one_of(name: str, option: str | None, values: dict[str, str]) -> str | None:
    """An option, or the notebook parameter of the same name, which is removed from `values`: both mean the same."""
    given = values.pop(name, None)
    if option is not None and given is not None and option != given:
        raise StudyError(f"-p {name} {given}", f"--{name} {option} says something else", "give one of the two")
    return option if given is None else given


@app.command()
def measure(
    name: Annotated[str, typer.Argument(metavar="STUDY", help="study, e.g. 01-phase-asymmetry")],
    scale: Scale = "mini",
    minutes: Minutes = 0,
    reference: Annotated[bool, typer.Option(help="write to the tracked journal of the reference machine")] = False,
    retry_failed: Annotated[bool, typer.Option(help="repeat rows that crashed, hung or were killed")] = False,
    engine: Engine = None,
    device: Device = "auto",
    beside: Annotated[
        list[str] | None,
        typer.Option(help="another build to compare in the same blocks, by name or folder; releases: all built here"),
    ] = None,
    file: Files = None,
    repair: Repair = False,
    parameter: Annotated[
        list[str] | None,
        typer.Option("-p", metavar="NAME VALUE", help="what to vary, such as n_seq 1-16 or type_k q8_0"),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(help="address of a Dask scheduler; its workers simulate, and you trust them"),
    ] = None,
) -> None:
    """Measure a study without its notebook; completed cells are skipped."""
    use_engine(engine)
    use_device(device)
    may_repair(repair)
    values = dict(report.name_and_value(text) for text in parameter or [])
    asked = sweep(**values, **({"files": file} if file else {}))
    if asked != NOTHING and not studies.varies(name):
        raise StudyError(f"study {name}", "takes no files or values of yours", "measure your-machine, with --file")
    builds = [engines.resolve(build) for build in engines.named(beside or [])]
    with cluster.connected(scheduler) if scheduler else nullcontext() as elsewhere:
        summary = report.measure(
            name,
            scale,
            report.place(reference),
            asked,
            announces=not scheduler,
            retry_failed=retry_failed,
            beside=builds,
            minutes=minutes,
            elsewhere=elsewhere,
        )
    raise typer.Exit(0 if summary.well else 1)


if __name__ == "__main__":
    main()
