"""Measure llama.cpp on PLaMo models. Exit codes: 0 done, 1 something failed, 2 wrong usage."""

# Modules that load Jupyter or SciPy are imported by the commands that need them: the others start a second sooner.

# ruff: noqa: E402 # what would break the imports is refused before them
from llama_meter import surroundings

surroundings.prepare()

import json as jsonlib
import os
import sys
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.text import Text

from llama_meter import journal, paths
from llama_meter.disk import check_out
from llama_meter.engine import builds as engines
from llama_meter.errors import StudyError
from llama_meter.limits import defect
from llama_meter.measure import checking, files
from llama_meter.measure.request import NOTHING, Request, sweep
from llama_meter.models import check as checks, header, recipes, tensors
from llama_meter.models.check import blocking
from llama_meter.serve import server
from plamo_study import live
from plamo_study.cli import cluster
from plamo_study.cli.terminal import Terminal, alone, bar, console, grid, guarded, short, shown
from plamo_study.studies import registry

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
models = typer.Typer(no_args_is_help=True, help="Model files: fetch, check and quantize them.")
app.add_typer(models, name="models")
builds = typer.Typer(no_args_is_help=True, help="Builds of llama.cpp by name: corrected ones, and releases.")
app.add_typer(builds, name="engine")

MINUTES = 5.0  # for measuring a machine's page, or all studies at mini
DAY_S = 86_400.0
STYLES = {"blocking": "red", "warning": "yellow", "note": ""}
LIMIT = "including gates, anchors and repeats; a cell still running at the end is cut, and the next call measures it"


Engine = Annotated[
    str | None, typer.Option(help="a build of `plamo-study engine list`, or a folder with llama.cpp's shared libraries")
]
Device = Annotated[
    str,
    typer.Option(help="cpu, gpu, or auto: on a GPU where the engine has one, and on its host's CPU beside it"),
]
Files = Annotated[
    list[str] | None,
    typer.Option("--file", metavar="GGUF", help="measure this file instead of the study's models; may be repeated"),
]


Replace = Annotated[bool, typer.Option("--force", help="replace an existing file")]


class Format(StrEnum):
    """What a notebook becomes."""

    html = "html"
    markdown = "markdown"


def main() -> None:
    """Run the command line."""
    guarded(lambda: app(joined_parameters(sys.argv[1:])))


def joined_parameters(arguments: list[str]) -> list[str]:
    """Write papermill's `-p NAME VALUE` as the single word that a repeatable option needs: `-p NAME=VALUE`."""
    joined, rest = [], iter(arguments)
    for word in rest:
        joined.append(word)
        if word == "-p":
            name = next(rest, "")
            joined.append(name if "=" in name else f"{name}={next(rest, '')}")
    return joined


def _values(
    parameter: list[str] | None, file: list[str] | None, engine: str | None, **options: object
) -> dict[str, str]:
    """What options and `-p` say, as parameters of a notebook; the engine is a setting.

    Raises StudyError for a build that is not here, and what an option and a parameter say differently.
    """
    if engine is not None:
        os.environ["LLAMA_CPP_LIB_PATH"] = str(engines.resolve(engine))
    options = {name: value for name, value in options.items() if value is not None}
    values = {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in options.items()}
    if file and not all(file):
        raise StudyError("--file ''", "names no file", "name a .gguf file")
    if file:
        values["files"] = msgspec.json.encode(file).decode()
    for text in parameter or []:
        name, _, value = text.partition("=")
        if not name.isidentifier():
            raise StudyError(f"-p {text}", "is not NAME VALUE", "plamo-study run -p source recorded")
        if values.get(name, value) not in (value, "auto"):
            raise StudyError(f"-p {name} {value}", "an option says something else", "give one of the two")
        values[name] = value
    return values


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
            help=f"minutes for measuring, {LIMIT}; 0: what the plans take. By default {MINUTES:g}, with scale shape 0",
        ),
    ] = None,
    engine: Engine = None,
    device: Device = "auto",
    file: Files = None,
) -> None:
    """Describe this machine with your files, or with the study's models of full size, and publish every page."""
    from plamo_study.cli import notebooks as cli_notebooks  # loads Jupyter and SciPy

    if file and scale:
        raise StudyError("--file", "has the size it has", "omit --scale")
    if minutes is None:
        minutes = MINUTES if scale in (None, "mini") else 0.0
    values = _values(None, file, engine, scale=scale, minutes=minutes, device=device)
    raise typer.Exit(cli_notebooks.every_page(values) if scale else cli_notebooks.at_hand(values))


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
        float | None, typer.Option(min=0, help=f"minutes for measuring, {LIMIT}; by default no limit")
    ] = None,
    engine: Engine = None,
    device: Device = "auto",
    file: Files = None,
    force: Annotated[bool, typer.Option("--force", help="execute notebooks again even if nothing changed")] = False,
) -> None:
    """Execute notebooks with papermill into reports/; live ones measure what is missing."""
    from plamo_study.cli import notebooks as cli_notebooks  # loads Jupyter and SciPy

    values = _values(parameter, file, engine, scale=scale, minutes=minutes, device=device)
    raise typer.Exit(cli_notebooks.run(notebooks or [], values, force))


@app.command()
def measure(
    name: Annotated[str, typer.Argument(metavar="STUDY", help="study, e.g. 01-phase-asymmetry")],
    scale: Annotated[str, typer.Option(help="mini (embedded, seconds) or shape (full-size random weights)")] = "mini",
    minutes: Annotated[
        float,
        typer.Option(min=0, help=f"minutes for measuring, {LIMIT}; 0: what the plan takes"),
    ] = 0,
    reference: Annotated[bool, typer.Option(help="write to the tracked journal of the reference machine")] = False,
    retry_failed: Annotated[bool, typer.Option(help="repeat rows that failed or came out wrong")] = False,
    engine: Engine = None,
    device: Device = "auto",
    beside: Annotated[
        list[str] | None,
        typer.Option(help="another build to compare in the same blocks, by name or folder; releases: all built here"),
    ] = None,
    file: Files = None,
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
    varied = sweep(**_values(parameter, file, engine))
    request = Request.of({"device": device, "minutes": minutes})
    if varied != NOTHING and name in registry.STUDIES and not registry.varies(name):
        raise StudyError(f"study {name}", "takes no files or values of yours", "measure your-machine, with --file")
    others = [engines.resolve(build) for build in engines.named(beside or [])]
    planned = live.build(name, scale, request.device, varied)
    path = journal.journal_path(name, planned.scale, journal.REFERENCE if reference else journal.LOCAL)
    with cluster.connected(scheduler) if scheduler else nullcontext() as elsewhere, shown(name) as line:
        how = {"retry_failed": retry_failed, "beside": others, "elsewhere": elsewhere}
        summary = live.measure(planned, path, line, varied, request.minutes, **how)
    console.print(f"{len(summary.rows)} rows, {len(summary.failed)} failed or wrong ({short(path)})")
    raise typer.Exit(0 if summary.well else 1)


@app.command()
def publish(
    notebooks: Annotated[
        list[Path] | None, typer.Argument(help="executed notebooks, whoever executed them; none: all in reports/")
    ] = None,
    form: Annotated[
        Format,
        typer.Option("--format", help="html: an offline page each; markdown: a folder each, with its figures"),
    ] = Format.html,
    out: Annotated[
        Path | None, typer.Option(help="folder to write into; default: reports/ for pages, here for articles")
    ] = None,
    author: Annotated[str, typer.Option(help="your name, for the page and its citation")] = "",
) -> None:
    """Make offline HTML pages or Markdown articles of executed notebooks; nothing is executed or measured."""
    from plamo_study.cli import notebooks as cli_notebooks  # loads Jupyter and SciPy

    into = out or (paths.REPORTS if form is Format.html else Path())
    of_reports = paths.REPORTS.is_dir() and (not notebooks or into.resolve() == paths.REPORTS)
    with alone(paths.REPORTS) if of_reports else nullcontext():
        cli_notebooks.publish(notebooks, form.value, into, " ".join(author.split()))


@app.command()
def probe(
    url: Annotated[str, typer.Argument(help="URL of any OpenAI-compatible server, e.g. http://127.0.0.1:8080")],
    model: Annotated[str, typer.Option(help="model name on the server; by default the only one that it lists")] = "",
    prompt_tokens: Annotated[int, typer.Option(min=1, max=1_000_000, help="tokens of your usual prompt")] = 256,
    output_tokens: Annotated[int, typer.Option(min=2, max=100_000, help="tokens of its answer")] = 32,
    concurrency: Annotated[int, typer.Option(min=1, max=1000, help="concurrent requests")] = 2,
    rate: Annotated[
        float, typer.Option(min=0, max=1000, help="requests per second instead; 0: keep `concurrency`")
    ] = 0.0,
    seconds: Annotated[float, typer.Option(min=1, max=DAY_S, help="approximate limit")] = 120.0,
    json: Annotated[bool, typer.Option("--json", help="the report as JSON on stdout")] = False,
) -> None:
    """Check a server's answers under load, and which phase limits its traffic. API key: PROBE_API_KEY."""
    from llama_meter.serve import probe as probing
    from llama_meter.serve.client import Target

    target = Target(probing.address(url), model, key=os.environ.get(probing.KEY, ""))
    usual = probing.Setting(concurrency, prompt_tokens, output_tokens, rate)
    console.print(f"{target.url}: about {seconds:.0f} s")
    probed = probing.probe(target, usual, seconds, console.print)
    if json:
        typer.echo(jsonlib.dumps(msgspec.to_builtins(probed)))  # NaN stays NaN
    else:
        Terminal().print(probing.text(probed), soft_wrap=True)


@builds.command()
def build(
    name: Annotated[
        str, typer.Argument(help="name from `engine list`, e.g. corrected or 0.3.20; releases: all; or llama-server")
    ],
) -> None:
    """Compile a build: the locked sources with patches, whose other libraries are the installed ones, or a release."""
    if name == server.BINARY:
        with bar(name) as on_step:
            binary = server.build(on_step)
        console.print(f"{name} is built: {short(binary)}")
        return
    for engine in engines.named([name], here=False):
        with bar(engine) as on_step:
            path, made = engines.build(engine, on_step)
        uses = "" if "program" in engines.definition(engine) else f"; use it with --engine or --beside {engine}"
        console.print(f"{engine} {'built' if made else 'is here already'}: {short(path)}{uses}")


@builds.command("list")
def list_engines() -> None:
    """List every build that can be made, whether it exists here, and what it corrects."""
    table = grid("engine", "here", "corrects", "what it is")
    for name, definition in engines.definitions().items():
        corrects = ", ".join(defect(code) for code in definition["corrects"]) or "nothing"
        table.add_row(name, engines.state(name), corrects, definition["description"])
    Terminal().print(table)


@models.command()
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


@models.command()
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


@models.command()
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
    with bar("writing") as update:
        files.quantize(source, target, chosen, lambda done, total: update(target.name, done, total))
    console.print(f"{short(target)}: {target.stat().st_size / 1e6:,.1f} MB", soft_wrap=True)


if __name__ == "__main__":
    main()
