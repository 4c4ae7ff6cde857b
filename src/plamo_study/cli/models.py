"""The commands on model files: list, fetch, check, quantize."""

# Modules that load the hub's client are imported by the command that needs them: the others start a second sooner.

from pathlib import Path
from typing import Annotated

import typer

from llama_meter.disk import check_out
from llama_meter.measure import checking, quantizing
from llama_meter.models import (
    header,
    recipes,
    repair as repairs,
)
from llama_meter.models.finding import blocking
from plamo_study.cli import report, report_models
from plamo_study.cli.options import Replace

app = typer.Typer(no_args_is_help=True, help="Model files: list, fetch, check and quantize them.")


@app.command("list")
def list_models() -> None:
    """List every known model and scale: parameters, files here, assumptions."""
    report_models.models()


@app.command()
def fetch(
    repository: Annotated[str, typer.Argument(help="on Hugging Face, e.g. mmnga/plamo-2-1b-gguf")],
    name: Annotated[str, typer.Argument(metavar="FILE", help="of its files")],
    revision: Annotated[str, typer.Option(help="commit, branch or tag")] = "main",
    sha256: Annotated[str, typer.Option(metavar="HEX", help="expected SHA-256, 64 hex digits")] = "",
) -> None:
    """Download one file of a repository and print its path and hash; an interrupted download goes on."""
    from llama_meter.models import fetch as hub

    path, found = hub.fetch(repository, name, revision, sha256)
    typer.echo(f"{path}  {found}")


@app.command()
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a GGUF file")],
    repair: Annotated[
        Path | None, typer.Option(metavar="OUT", help="write FILE to OUT with corrected metadata, and check OUT")
    ] = None,
    rope_theta: Annotated[float | None, typer.Option(help="with --repair: the rotary base of its config.json")] = None,
    force: Replace = False,
) -> None:
    """Check whether a file can be measured; exit code 1 for a blocking finding."""
    if repair is not None:
        check_out(repair, force)
        for change in repairs.repair(file, repair, rope_theta):
            report.console.print(change, markup=False)
        file = repair
    findings = checking.check(file)
    report_models.findings(file, findings)
    raise typer.Exit(1 if blocking(findings) else 0)


@app.command()
def quantize(
    source: Annotated[Path, typer.Argument(help="an F32, F16 or BF16 GGUF file")],
    file_type: Annotated[
        str, typer.Option("--type", metavar="TYPE", help="a type or a recipe, e.g. Q4_K_M or Q4_0-ssm_out-F16")
    ],
    keep: Annotated[
        list[str] | None, typer.Option(metavar="KIND=TYPE", help="another type for a kind of tensor, e.g. ssm_out=BF16")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="default: beside SOURCE, named by the recipe")] = None,
    force: Replace = False,
) -> None:
    """Quantize a file with llama.cpp's own quantizer, by type or recipe, with exceptions per kind of tensor."""
    chosen = recipes.recipe(file_type, keep or [])
    header.check_path(source)
    target = recipes.default_out(source, chosen) if out is None else out
    check_out(target, force)
    with report.bytes_progress() as progress:
        quantizing.quantize(source, target, chosen, progress(target.name))
    report_models.written(target)
