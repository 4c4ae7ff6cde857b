"""Output of the commands on model files: tables on stdout, notes on stderr."""

from pathlib import Path

from rich.text import Text

from llama_meter import paths
from llama_meter.models import registry
from llama_meter.models.finding import Finding
from plamo_study.cli.report import console, short
from plamo_study.cli.terminal import Terminal, grid

STYLES = {"blocking": "red", "warning": "yellow", "note": ""}


def models() -> None:
    """Print the registry with the local files."""
    specs = registry.load().values()
    shown = grid("model", "scale", "parameters", "file here", "MB")
    for spec in specs:
        start = (spec.name, spec.scale, f"{spec.n_params / 1e6:,.0f} M")
        files = sorted(paths.MODELS.glob(f"{spec.name}.{spec.scale}.*.gguf"))
        for path in files:
            shown.add_row(*start, path.name, f"{path.stat().st_size / 1e6:,.1f}")
        if not files:
            shown.add_row(*start, "nothing", "")
    Terminal().print(shown)
    for name, said in {spec.name: " ".join(spec.assumptions) for spec in specs if spec.assumptions}.items():
        Terminal().print(f"assumed of {name}: {said}", soft_wrap=True)


def written(path: Path) -> None:
    """Print a written file with its size."""
    console.print(f"{short(path)}: {path.stat().st_size / 1e6:,.1f} MB", soft_wrap=True)


def findings(path: Path, entries: list[Finding]) -> None:
    """Print a check's findings, worst first; text from outside is never read as markup."""
    shown = grid("severity", "code", "evidence", "mend", title=Text(short(path)))
    for finding in entries:
        severity = Text(finding.severity, style=STYLES[finding.severity])
        shown.add_row(severity, finding.code, Text(finding.evidence), Text(finding.mend))
    Terminal().print(shown if entries else Text(f"{short(path)}: nothing found"))
