"""Is `plamo-study probe` right? Servers known to be right or wrong, probed, and the confusion table.

    python tools/probed.py                # some sixty servers, 15 s each and up to a minute
    python tools/probed.py --most 4       # the first ones

It needs `plamo-study server build`, `plamo-study engine build corrected` and `plamo-study engine build architectures`.
`--reference` keeps the result as the reference machine's.
"""

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from trials import probed as runs

from llama_meter.engine import library
from llama_meter.measure import result_file
from plamo_study.cli import report
from plamo_study.cli.guard import guarded
from plamo_study.cli.terminal import Terminal
from plamo_study.laws import serving
from plamo_study.read.results import PROBED


def probed(
    most: Annotated[int, typer.Option(min=0, help="servers; 0: all")] = 0,
    reference: Annotated[bool, typer.Option(help="keep the result as the reference machine's")] = False,
) -> None:
    """Start servers that are known to be right or wrong, probe each, and count."""
    library.capture_log([])
    place, servers = report.place(reference), list(runs.known())
    with tempfile.TemporaryDirectory() as folder:
        result = runs.run(servers[: most or None], Path(folder), place, report.console.print)
    counted = serving.confusion(result.servers)
    shown = Table("known to be", *(f"probed {name}" for name in counted.columns[1:-1]), "errors")
    for line in counted.to_dict("records"):
        shown.add_row(*(format(value, ".0%") if name == "errors" else str(value) for name, value in line.items()))
    Terminal().print(shown)
    report.console.print(f"kept: {report.short(result_file.path(place, PROBED))}")


if __name__ == "__main__":
    guarded(lambda: typer.run(probed))
