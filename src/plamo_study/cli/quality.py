"""The command that judges types and recipes on a text: `plamo-study models quality`."""

# Modules that load SciPy are imported by the command: the others start a second sooner.

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from llama_meter import journal
from llama_meter.measure import bench
from plamo_study.cli import report
from plamo_study.cli.options import Engine, Scale, use_engine
from plamo_study.cli.terminal import Terminal, grid
from plamo_study.read import recording

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = {  # header -> column of laws/quality.py's table, format, factor
    "perplexity": ("perplexity", ".4g", 1.0),
    "bits per byte": ("bits_per_byte", ".4f", 1.0),
    "KLD": ("kld", ".2g", 1.0),
    "KLD 99 %": ("kld_99", ".2g", 1.0),
    "same top, %": ("same_top", ".1f", 100.0),
    "RMS Δp, %": ("rms_dp", ".2f", 100.0),
    "loops, %": ("loops", ".0f", 100.0),
}


def quality(
    text: Annotated[str, typer.Argument(help="a text of data/corpus, or any UTF-8 file")] = "python-heldout",
    scale: Scale = "mini",
    engine: Engine = None,
) -> None:
    """Compare every type and recipe with F16 on a text: perplexity, KL divergence, loops."""
    from plamo_study.laws import quality as figures
    from plamo_study.plans import quality as plan_quality

    use_engine(engine)
    planned = plan_quality.quality(scale, bench.engine_facts()["gpu_offload"], text)
    path = journal.journal_path(planned.study, planned.scale, journal.LOCAL)
    summary = report.sweep(planned, path)
    table = figures.table(recording.framed(summary.rows, path)[0])
    if not table.empty:
        _show(table)
    raise typer.Exit(1 if summary.unexpected else 0)


def _show(table: "pd.DataFrame") -> None:
    """Every file's figures against its reference, one table per model, with 95 % intervals clustered by chunk."""
    for (model, text), group in table.groupby(["model", "text"]):
        shown = grid("file", "MB", *COLUMNS, title=f"{model} on {text}")
        for line in group.to_dict("records"):
            values = (_formatted(line[column], form, factor) for column, form, factor in COLUMNS.values())
            invalid = "" if line["valid"] else f" {line['not_finite']} tokens not finite"
            shown.add_row(Text.assemble(line["file"], (invalid, "red")), f"{line['file_bytes'] / 1e6:,.1f}", *values)
        Terminal().print(shown)


def _formatted(estimate: Any, form: str, factor: float) -> str:
    return f"{estimate.scaled(factor):{form}}" if estimate.value == estimate.value else ""
