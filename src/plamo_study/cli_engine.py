"""The commands on builds of llama.cpp: build one by name, list them."""

import json as jsonlib
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from plamo_study import engines, report
from plamo_study.measure import defects

app = typer.Typer(no_args_is_help=True, help="Builds of llama.cpp: the corrected ones by name.")


@app.command()
def build(name: Annotated[str, typer.Argument(help="as `engine list` names it, e.g. corrected")]) -> None:
    """Patch the locked sources of llama.cpp and compile libllama; the other libraries are the installed ones."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=report.console) as bar:
        task = bar.add_task(f"{name}: starting", total=None)

        def on_step(what: str, done: int, steps: int) -> None:
            said = f"{what}, {done} of {steps}" if steps else what
            bar.update(task, description=f"{name}: {said}", completed=done, total=steps or None)

        path, made = engines.build(name, on_step)
    said = "built" if made else "is here already"
    report.console.print(f"{name} {said}: {report.short(path)}; use it with --engine {name} or --beside {name}")


@app.command("list")
def list_engines(json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Every build that can be made, whether it is here, and what it corrects."""
    entries = [entry.__dict__ for entry in engines.entries()]
    if json:
        typer.echo(jsonlib.dumps(entries))
        return
    shown = Table("engine", "here", "corrects", "what it is")
    for entry in entries:
        corrects = ", ".join(defects.name(code) for code in entry["corrects"]) or "nothing"
        shown.add_row(entry["name"], entry["here"], corrects, entry["description"])
    Console().print(shown)
