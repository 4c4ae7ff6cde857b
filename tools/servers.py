"""Long and paired loads of servers, each run once for a page.

    python tools/servers.py soak --minutes 6 --hold 30 --patched   # stopped meanwhile: does it recover?
    python tools/servers.py crowd                                  # what does a token take beside those who wait?
    python tools/servers.py beside aip/bin/aiperf                  # our client and AIPerf on the same server
    python tools/servers.py drafts                                 # llama-server's speculation beside our loop

They need `plamo-study server build` first. `--reference` keeps a result as the reference machine's.
"""

from pathlib import Path
from typing import Annotated

import typer
from trials import (
    beside as beside_runs,
    crowd as crowd_runs,
    drafts as draft_runs,
    soak as soak_runs,
)

from llama_meter.engine import library
from llama_meter.measure import plan
from llama_meter.models import synthetic
from plamo_study.cli import report
from plamo_study.cli.guard import guarded, interruptible
from plamo_study.cli.options import finite
from plamo_study.cli.server import DAY_S
from plamo_study.laws import drafting

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)


@app.callback()
def main() -> None:
    """Load servers for long, or beside one another."""
    interruptible()


@app.command()
def beside(
    aiperf: Annotated[Path, typer.Argument(help="the program aiperf, installed in an environment of its own")],
    scale: Annotated[str, typer.Option(help="mini or shape")] = "mini",
    rounds: Annotated[int, typer.Option(min=3, help="runs of each client at each load")] = 6,
    reference: Annotated[bool, typer.Option(help="keep the result as the reference machine's")] = False,
) -> None:
    """Load llama-server with our client and with AIPerf in turn: do they say the same of it?"""
    comparison = beside_runs.compare(_attention(scale), scale, aiperf, rounds)
    report.console.print(f"kept: {report.short(beside_runs.write(comparison, report.place(reference)))}")


@app.command()
def crowd(
    rounds: Annotated[int, typer.Option(min=3, help="servers of each kind")] = 4,
    reference: Annotated[bool, typer.Option(help="keep the result as the reference machine's")] = False,
) -> None:
    """Let requests wait at llama-server as released and patched, in turn: what does a token take beside them?"""
    comparison = crowd_runs.compare(_attention("mini"), rounds)
    report.console.print(f"kept: {report.short(crowd_runs.write(comparison, report.place(reference)))}")


@app.command()
def drafts(
    rounds: Annotated[int, typer.Option(min=3, help="runs of each")] = 6,
    reference: Annotated[bool, typer.Option(help="keep the result as the reference machine's")] = False,
) -> None:
    """Let llama-server and our loop speculate with the same drafts in turn: what is accepted, and how fast?"""
    _quiet()
    comparison = draft_runs.compare(rounds)
    report.console.print(f"kept: {report.short(drafting.write(comparison, report.place(reference)))}")


@app.command()
def soak(
    minutes: Annotated[int, typer.Option(min=1)] = 30,
    rate: Annotated[
        float, typer.Option(min=0, callback=finite, help="requests a second; 0: 80 % of the knee that was found here")
    ] = 0,
    hold: Annotated[
        float,
        typer.Option(min=0, max=DAY_S, callback=finite, help="stop the server for so many seconds: does it recover?"),
    ] = 0,
    patched: Annotated[bool, typer.Option("--patched", help="the server of `server build --patched`")] = False,
    scale: Annotated[str, typer.Option(help="mini or shape")] = "mini",
    reference: Annotated[bool, typer.Option(help="keep the result as the reference machine's")] = False,
) -> None:
    """Load llama-server for half an hour: is every request accounted for, and does memory stay what it is?"""
    place = report.place(reference)
    result = soak_runs.run(_attention(scale), scale, rate or soak_runs.sustained(scale, place), minutes, hold, patched)
    report.console.print(f"kept: {report.short(soak_runs.write(result, place))}")


def _quiet() -> None:
    """The engine's own words stay out of the terminal."""
    library.capture_log([])


def _attention(scale: str) -> Path:
    """The file of the model that no server mixes up, made where it is not here."""
    plan.check_scale(scale)
    _quiet()
    return synthetic.make(plan.MODELS[1], scale, plan.DTYPE[scale])


if __name__ == "__main__":
    guarded(app)
