"""The commands on model files: list, make, fetch, check, quantize."""

# Modules that load the hub's client are imported by the command that needs them: the others start a second sooner.

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from llama_meter.disk import check_out
from llama_meter.measure import checking, plan, quantizing
from llama_meter.models import (
    header,
    recipes,
    registry,
    repair as repairs,
    synthetic,
)
from llama_meter.models.finding import blocking
from plamo_study.cli import report, report_models
from plamo_study.cli.options import Engine, Json, Replace, Scale, use_engine
from plamo_study.cli.terminal import echo

app = typer.Typer(no_args_is_help=True, help="Model files: list, make, fetch, check and quantize them.")


@app.command("list")
def list_models(json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """List every known model and scale: parameters, files here, assumptions."""
    report_models.models(json)


@app.command()
def make(
    scale: Scale = "mini",
    dtype: Annotated[list[str] | None, typer.Option(help="F32, F16, BF16 or Q8_0")] = None,
    model: Annotated[list[str] | None, typer.Option(help="only these models")] = None,
) -> None:
    """Write the synthetic files that are missing."""
    plan.check_scale(scale)
    for name in model or plan.MODELS:
        for kind in dtype or [plan.DTYPE[scale]]:
            with report.bytes_progress() as progress:
                made = synthetic.make(name, scale, kind, progress=progress(f"{name} {scale} {kind}"))
            report_models.made(made, registry.spec(name, scale))


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
    sha256: Annotated[str, typer.Option(metavar="HEX", help="expected SHA-256 of FILE, 64 hex digits")] = "",
    force: Replace = False,
    gate: Annotated[bool, typer.Option(help="let the engine load and decode it, in a separate process")] = True,
    engine: Engine = None,
    json: Json = False,
) -> None:
    """Check whether a file can be measured; exit code 1 for a blocking finding."""
    use_engine(engine)
    if repair is not None:
        check_out(repair, force)
        for change in repairs.repair(file, repair, rope_theta, sha256):
            report.console.print(change, markup=False)
        file, sha256 = repair, ""
    findings = checking.check(file, sha256, gate)
    if json:
        for finding in findings:
            echo({"file": str(file)} | asdict(finding))
    else:
        report_models.findings(file, findings)
    raise typer.Exit(1 if blocking(findings) else 0)


@app.command()
def quantize(
    source: Annotated[Path, typer.Argument(help="an F32, F16 or BF16 GGUF file")],
    recipe: Annotated[str | None, typer.Option(metavar="NAME", help="a recipe, e.g. Q4_0-ssm_out-F16")] = None,
    file_type: Annotated[str | None, typer.Option("--type", metavar="TYPE", help="a plain type, e.g. Q4_K_M")] = None,
    keep: Annotated[
        list[str] | None, typer.Option(metavar="KIND=TYPE", help="another type for a kind of tensor, e.g. ssm_out=BF16")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="default: beside SOURCE, named by the recipe")] = None,
    force: Replace = False,
    requantize: Annotated[bool, typer.Option("--requantize", help="accept a source that is already quantized")] = False,
    json: Json = False,
) -> None:
    """Quantize a file with llama.cpp's own quantizer, by type or recipe, with exceptions per kind of tensor."""
    chosen = recipes.chosen(recipe, file_type, keep or [])
    header.check_path(source)
    target = recipes.default_out(source, chosen) if out is None else out
    check_out(target, force)
    with report.bytes_progress() as progress:
        quantizing.quantize(source, target, chosen, progress(target.name), requantize)
    report_models.written(target)
