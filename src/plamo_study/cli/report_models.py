"""Output of the commands on model files: tables on stdout, notes on stderr."""

import json
from pathlib import Path

import typer
from rich.text import Text

from llama_meter.disk import plain
from llama_meter.models import inventory, registry, snapshots
from llama_meter.models.finding import Finding
from llama_meter.models.registry import ModelSpec
from plamo_study.cli.report import console, short
from plamo_study.cli.terminal import Grid, Terminal

STYLES = {"blocking": "red", "warning": "yellow", "note": ""}


def models(entries: list[inventory.Entry], as_json: bool) -> None:
    """Print the registry with the local files."""
    if as_json:
        typer.echo(json.dumps([inventory.as_dict(entry) for entry in entries]))
        return
    columns = ("model", "scale", "parameters", "here", "MB", "SHA-256", "findings", "release")
    shown = Grid(*columns, leave=("MB", "SHA-256", "parameters", "release"))
    assumed = {}
    for entry in entries:
        spec = entry.spec
        terms = (entry.licence, "gated" if entry.gated else "", entry.pin) if spec.scale == "weights" else ()
        start, release = (spec.name, spec.scale, f"{spec.n_params / 1e6:,.0f} M"), ", ".join(filter(None, terms))
        for file in entry.files:
            verdict = file.checked or "not checked"
            shown.add(*start, file.kind, f"{file.size / 1e6:,.1f}", file.sha256[:8] or "unknown", verdict, release)
        if not entry.files:
            shown.add(*start, "nothing", "", "", "", release)
        if spec.assumptions:
            assumed[spec.name] = " ".join(spec.assumptions)
    Terminal().print(shown)
    for name, said in assumed.items():
        Terminal().print(f"assumed of {name}: {said}", soft_wrap=True)


def fetched(name: str, folder: Path) -> None:
    """Print what was fetched; where it is unpinned, say so, and print the lines that would pin it."""
    snapshot, hub = snapshots.read(folder), registry.hub(name)
    assert snapshot is not None
    size = f"{len(snapshot.files)} files, {snapshot.size / 1e9:,.2f} GB, every one verified"
    console.print(f"{short(folder)}: {size}", soft_wrap=True)
    if not snapshots.pins(hub, snapshot.revision):
        said = f"UNPINNED: what came was recorded in {snapshots.RECORD}. To pin it, add this to data/models.toml:"
        console.print(said, style="bold yellow", soft_wrap=True)
        typer.echo(plain(snapshots.toml(name, snapshot)))


def made(path: Path, spec: ModelSpec) -> None:
    """Print a written file, and the assumptions about its shape."""
    assumed = f" (assumed: {' '.join(spec.assumptions)})" if spec.assumptions else ""
    console.print(
        f"{short(path)}: {path.stat().st_size / 1e6:,.1f} MB, {'trained' if spec.trained else 'synthetic'}{assumed}",
        soft_wrap=True,
    )


def written(path: Path) -> None:
    """Print a written file with its size."""
    console.print(f"{short(path)}: {path.stat().st_size / 1e6:,.1f} MB", soft_wrap=True)


def findings(path: Path, entries: list[Finding]) -> None:
    """Print a check's findings, worst first; text from outside is never read as markup."""
    shown = Grid("severity", "code", "evidence", "mend", title=Text(short(path)))
    for finding in entries:
        severity = Text(finding.severity, style=STYLES[finding.severity])
        shown.add(severity, finding.code, Text(finding.evidence), Text(finding.mend))
    Terminal().print(shown if entries else Text(f"{short(path)}: nothing found"))
