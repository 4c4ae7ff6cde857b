"""The commands on servers: build llama-server, start one, probe any server."""

import json as jsonlib
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from llama_meter.disk import check_out, growing
from llama_meter.engine import server_build
from llama_meter.measure import machine
from llama_meter.serve import server as servers
from plamo_study.cli import report
from plamo_study.cli.guard import interruptible
from plamo_study.cli.options import Replace, finite
from plamo_study.cli.terminal import Terminal

app = typer.Typer(no_args_is_help=True)
DAY_S = 86_400.0


@app.callback()
def main() -> None:
    """Servers: build llama-server, start one, load one."""
    interruptible()


@app.command()
def build(
    engine: Annotated[str, typer.Argument(help="stock, or a build of `engine list`")] = server_build.STOCK,
    patched: Annotated[bool, typer.Option("--patched", help="with our patch for waiting threads")] = False,
) -> None:
    """Compile llama-server from the locked sources, once for all engines; builds the engine too if it is missing."""
    with report.building("llama-server") as on_step:
        begin = time.monotonic()
        binary, spent = server_build.build(engine, on_step, patched)
        wall = time.monotonic() - begin
    for part, seconds in sorted(spent.items(), key=lambda pair: -pair[1]):
        report.console.print(f"  {part}: {seconds:.0f} s of compilers")
    said = f"built in {wall:.0f} s" if spent else "is here already"
    report.console.print(f"llama-server {said}: {report.short(binary)}, on {engine}")


@app.command()
def start(
    model: Annotated[Path, typer.Argument(help="a GGUF file")],
    engine: Annotated[str, typer.Option(help="stock, or a build of `engine list`")] = server_build.STOCK,
    python: Annotated[bool, typer.Option("--python", help="llama_cpp.server, one request at a time")] = False,
    slots: Annotated[int, typer.Option(min=1)] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="tokens of each slot")] = 2048,
) -> None:
    """Start a server on a free loopback port and print its address; Ctrl-C ends it."""
    kind: servers.Kind = "llama_cpp.server" if python else "llama-server"
    threads, libraries = machine.performance_cores(), server_build.libraries(engine)
    setup = servers.Setup(kind, model, slots, tokens, threads, libraries=libraries)
    with servers.started(setup) as running:
        typer.echo(running.url)
        try:
            running.process.wait()
        except KeyboardInterrupt:
            return
        report.console.print(running.ended(1.0))
        raise typer.Exit(1)


def probe(
    url: Annotated[str, typer.Argument(help="URL of any OpenAI-compatible server, e.g. http://127.0.0.1:8080")],
    model: Annotated[str, typer.Option(help="model name on the server; by default the one that is loaded")] = "",
    prompt_tokens: Annotated[int, typer.Option(min=1, max=1_000_000, help="tokens of your usual prompt")] = 256,
    output_tokens: Annotated[int, typer.Option(min=2, max=100_000, help="tokens of its answer")] = 32,
    concurrency: Annotated[int, typer.Option(min=1, max=1000, help="concurrent requests")] = 2,
    rate: Annotated[
        float, typer.Option(min=0, max=1000, callback=finite, help="requests per second instead; 0: keep `concurrency`")
    ] = 0.0,
    seconds: Annotated[float, typer.Option(min=1, max=DAY_S, callback=finite, help="approximate limit")] = 120.0,
    watch: Annotated[
        float,
        typer.Option(
            min=0, max=DAY_S, callback=finite, help="first watch your own traffic at /metrics for this many seconds"
        ),
    ] = 0.0,
    yes: Annotated[bool, typer.Option("--yes", help="allow requests to a server that is not on this machine")] = False,
    json: Annotated[bool, typer.Option("--json", help="the report as JSON on stdout")] = False,
    html: Annotated[Path | None, typer.Option(help="write the report as an HTML page")] = None,
    force: Replace = False,
) -> None:
    """Check a server's answers under load, and which phase limits its traffic. API key: PROBE_API_KEY."""
    from llama_meter.serve import page, probe as probing, traffic
    from llama_meter.serve.client import Target
    from llama_meter.serve.meeting import Ask

    if html:
        check_out(html, force)
    ask = Ask(Target(url, model), prompt_tokens, output_tokens, concurrency, rate, seconds)
    ask = probing.prepared(ask, yes, report.console.print)
    own = traffic.watched(ask.target, watch) if watch else None
    probed = msgspec.structs.replace(probing.probe(ask, report.console.print), traffic=own)
    if html:
        with growing(html) as partial:
            partial.write_text(page.html(probed), encoding="utf-8")
    if json:
        typer.echo(jsonlib.dumps(msgspec.to_builtins(probed)))  # NaN stays NaN
    else:
        Terminal().print(page.text(probed), soft_wrap=True)
