"""The commands on builds of llama.cpp: build one by name, list them."""

from typing import Annotated

import typer

from llama_meter.engine import builds as engines
from llama_meter.limits import defect
from llama_meter.serve import server
from plamo_study.cli.terminal import Terminal, bar, console, grid, short

app = typer.Typer(no_args_is_help=True, help="Builds of llama.cpp by name: corrected ones, and releases.")


@app.command()
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
        uses = (
            "" if "program" in engines.definition(engine) else f"; use it with --engine {engine} or --beside {engine}"
        )
        console.print(f"{engine} {'built' if made else 'is here already'}: {short(path)}{uses}")


@app.command("list")
def list_engines() -> None:
    """List every build that can be made, whether it exists here, and what it corrects."""
    shown = grid("engine", "here", "corrects", "what it is")
    for name, definition in engines.definitions().items():
        corrects = ", ".join(defect(code) for code in definition["corrects"]) or "nothing"
        shown.add_row(name, engines.state(name), corrects, definition["description"])
    Terminal().print(shown)
