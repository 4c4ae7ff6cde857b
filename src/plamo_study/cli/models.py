"""The commands on model files: list, fetch, check, quantize. Tables go to stdout, notes to stderr."""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from llama_meter import paths
from llama_meter.disk import check_out
from llama_meter.errors import StudyError
from llama_meter.measure import checking, files
from llama_meter.models import check as checks, header, recipes, registry, tensors
from llama_meter.models.check import blocking
from plamo_study.cli.terminal import BYTES, Terminal, bar, console, grid, short

STYLES = {"blocking": "red", "warning": "yellow", "note": ""}
Replace = Annotated[bool, typer.Option("--force", help="replace an existing file")]
app = typer.Typer(no_args_is_help=True, help="Model files: list, fetch, check and quantize them.")


@app.command("list")
def list_models() -> None:
    """List every known model and scale: parameters, files here, assumptions."""
    specs = registry.load().values()
    shown = grid("model", "scale", "parameters", "file here", "MB")
    for spec in specs:
        start = (spec.name, spec.scale, f"{spec.n_params / 1e6:,.0f} M")
        here = [
            (path.name, f"{path.stat().st_size / 1e6:,.1f}")
            for path in sorted(paths.MODELS.glob(f"{spec.name}.{spec.scale}.*.gguf"))
        ]
        for name, size in here or [("nothing", "")]:
            shown.add_row(*start, name, size)
    Terminal().print(shown)
    for name, text in {spec.name: " ".join(spec.assumptions) for spec in specs if spec.assumptions}.items():
        Terminal().print(f"assumed of {name}: {text}", soft_wrap=True)


@app.command()
def fetch(
    repository: Annotated[str, typer.Argument(help="on Hugging Face, e.g. mmnga/plamo-2-1b-gguf")],
    name: Annotated[str, typer.Argument(metavar="FILE", help="of its files")],
    revision: Annotated[str, typer.Option(help="commit, branch or tag")] = "main",
    sha256: Annotated[str, typer.Option(metavar="HEX", help="expected SHA-256, 64 hex digits")] = "",
) -> None:
    """Download one file of a repository and print its path and hash; an interrupted download goes on."""
    from huggingface_hub import errors, hf_hub_download  # a second of loading, which the others do not need

    folder = paths.MODELS / "hub" / repository.replace("/", "--")
    try:
        path = Path(hf_hub_download(repository, name, revision=revision, local_dir=folder))
    except errors.GatedRepoError as error:
        raise StudyError(repository, "is gated", "accept its licence on its page, then set HF_TOKEN") from error
    except Exception as error:  # the hub's client, its transport and its store each raise their own kinds
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise StudyError(f"{repository} {name}", why, "check both names and the network") from error
    digest = tensors.read_sha256(path)
    if sha256 and digest != sha256.lower():
        raise StudyError(str(path), f"its SHA-256 is {digest}, not {sha256}", "delete it and fetch it again")
    typer.echo(f"{path}  {digest}")


@app.command()
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a GGUF file")],
    repair: Annotated[
        Path | None, typer.Option(metavar="OUT", help="write FILE to OUT with corrected metadata, and check OUT")
    ] = None,
    force: Replace = False,
) -> None:
    """Check whether a file can be measured; exit code 1 for a blocking finding."""
    if repair is not None:
        check_out(repair, force)
        console.print(checks.repair(file, repair), markup=False)
        file = repair
    findings = checking.check(file)
    table = grid("severity", "code", "evidence", "mend", title=Text(short(file)))
    for finding in findings:
        severity = Text(finding.severity, style=STYLES[finding.severity])
        table.add_row(severity, finding.code, Text(finding.evidence), Text(finding.mend))
    Terminal().print(table if findings else Text(f"{short(file)}: nothing found"))
    raise typer.Exit(1 if blocking(findings) else 0)


@app.command()
def quantize(
    source: Annotated[Path, typer.Argument(help="an F32, F16 or BF16 GGUF file")],
    file_type: Annotated[
        str,
        typer.Option(
            "--type", metavar="TYPE", help="e.g. Q4_K_M, or with another type for a kind of tensor: Q4_0-ssm_out-F16"
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="default: beside SOURCE, named by the recipe")] = None,
    force: Replace = False,
) -> None:
    """Quantize a file with llama.cpp's own quantizer."""
    chosen = recipes.by_name(file_type)
    header.check_path(source)
    target = recipes.default_out(source, chosen) if out is None else out
    check_out(target, force)
    with bar("writing", BYTES) as update:
        files.quantize(source, target, chosen, lambda done, total: update(target.name, done, total))
    console.print(f"{short(target)}: {target.stat().st_size / 1e6:,.1f} MB", soft_wrap=True)
