"""The harness held against what it should do, and our figures beside those of other tools.

python tools/selfcheck.py                                      # what the harness costs: seconds
python tools/selfcheck.py --coverage --reference               # how often every interval holds the truth
python tools/selfcheck.py --disturb --reference                # the watch against planted busy processes
python tools/selfcheck.py --likwid-bench /usr/bin/likwid-bench # ceilings; likewise --llama-bench, --perplexity
"""

from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from crosscheck import selfcheck as costs
from rich.table import Table
from rich.text import Text

from llama_meter.measure import plan
from plamo_study.cli import report
from plamo_study.cli.guard import guarded
from plamo_study.cli.options import Engine, Scale, use_engine
from plamo_study.cli.terminal import Terminal, echo


def selfcheck(
    scale: Scale = "mini",
    llama_bench: Annotated[
        Path | None, typer.Option(help="a llama-bench to compare rates with, run interleaved")
    ] = None,
    batched_bench: Annotated[
        Path | None, typer.Option(help="a llama-batched-bench to compare batched rates with, run interleaved")
    ] = None,
    perplexity: Annotated[
        Path | None, typer.Option(help="a llama-perplexity to compare quality figures, time and disk with")
    ] = None,
    likwid_bench: Annotated[Path | None, typer.Option(help="a likwid-bench to run beside our ceilings")] = None,
    disturb: Annotated[
        bool, typer.Option(help="only hold the watch against busy processes planted beside 40 short sweeps")
    ] = False,
    reference: Annotated[bool, typer.Option(help="keep that comparison as the reference machine's")] = False,
    rounds: Annotated[int, typer.Option(min=2, max=10_000, help="interleaved rounds of that comparison")] = 20,
    coverage: Annotated[bool, typer.Option(help="only simulate how often every interval holds the truth")] = False,
    studies: Annotated[
        int, typer.Option(min=100, max=1_000_000, help="simulated studies per estimator, noise and size")
    ] = 4000,
    engine: Engine = None,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """What the harness itself costs, and whether its rates agree with those of llama.cpp's own tools."""
    place = report.place(reference)
    if coverage:
        lines = costs.covered(studies, place)
        echo(lines) if json else _show_coverage(lines)
        raise typer.Exit(1 if any(line["judged"] == "wrong" for line in lines) else 0)
    use_engine(engine)
    plan.check_scale(scale)
    if disturb:
        checks = costs.disturbed(place, 0)
    else:
        checks = costs.selfcheck(scale, llama_bench, batched_bench, rounds, perplexity)
    if likwid_bench:
        checks += costs.ceilings(scale, likwid_bench, rounds, place)
    echo(checks) if json else _show(checks)
    raise typer.Exit(0 if all(check.ok for check in checks) else 1)


def _show(checks: list[costs.Check]) -> None:
    """The harness's own costs, measured beside what is wanted."""
    shown = Table("check", "measured", "wanted", "verdict")
    for check in checks:
        shown.add_row(check.name, check.measured, check.wanted, "ok" if check.ok else Text("not met", "red"))
    Terminal().print(shown)


def _show_coverage(lines: list[dict[str, Any]]) -> None:
    """How often each interval held the truth, by estimator and number of units; what is promised and broken is red."""
    for estimator, group in pd.DataFrame(lines).groupby("estimator", sort=False):
        noises = group["noise"].unique()
        shown = Table("n", "called", *noises, title=str(estimator))
        for n, of_size in group.groupby("n"):
            cells = [
                Text(f"{line['covers']:.1%}", "red" if line["judged"] == "wrong" else "")
                for line in of_size.to_dict("records")
            ]
            shown.add_row(str(n), f"{of_size['level'].iloc[0]:.0%}", *cells)
        Terminal().print(shown)


if __name__ == "__main__":
    guarded(lambda: typer.run(selfcheck))
