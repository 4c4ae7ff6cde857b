"""The commands on servers: build llama-server, start one, probe anybody's."""

import json as jsonlib
import os
import signal
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from plamo_study.cli import report
from plamo_study.cli.options import Replace, finite
from plamo_study.cli.terminal import Terminal
from plamo_study.engine import server_build
from plamo_study.errors import StudyError
from plamo_study.growing import check_out, growing
from plamo_study.measure import machine, server as servers

app = typer.Typer(no_args_is_help=True)
KEY = "PROBE_API_KEY"  # environment: sent to the server that is probed, and shown nowhere
DAY_S = 86_400.0


@app.callback()
def main() -> None:
    """Servers: build llama-server, start one, load one."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or a server would outlive the command that started it


@app.command()
def build(
    engine: Annotated[str, typer.Argument(help="stock, or a build of `engine list`")] = server_build.STOCK,
    patched: Annotated[bool, typer.Option("--patched", help="with our patch of how its threads wait")] = False,
) -> None:
    """Compile llama-server from the locked sources, once for all engines; the engine too where it is not here."""
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
    model: Annotated[Path, typer.Argument(help="a GGUF")],
    engine: Annotated[str, typer.Option(help="stock, or a build of `engine list`")] = server_build.STOCK,
    python: Annotated[bool, typer.Option("--python", help="llama_cpp.server, one request at a time")] = False,
    slots: Annotated[int, typer.Option(min=1)] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="of each slot")] = 2048,
) -> None:
    """Start a server on a free port of loopback, print its address, and end it with Ctrl-C."""
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


@app.command()
def trial(
    runs: Annotated[int, typer.Option(min=1, help="servers probed of each kind")] = 20,
    reference: Annotated[bool, typer.Option(help="keep the result as the reference machine's")] = False,
) -> None:
    """Probe servers that are known to be wrong and to be right, each many times: is the probe right about them?"""
    from plamo_study.measure import plan
    from plamo_study.models import embedded, registry
    from plamo_study.studies.serving import trial as trials

    hybrid, attention = plan.MODELS
    place, found = report.place(reference), []
    for name, engine in ((hybrid, server_build.STOCK), (hybrid, "corrected"), (attention, server_build.STOCK)):
        path = embedded.make(registry.spec(name, "mini"), embedded.SOURCE)
        found.append(trials.run(name, path, engine, runs, _say))
        kept = trials.keep(place, found)
    report.console.print(f"kept: {report.short(kept)}")


@app.command()
def beside(
    aiperf: Annotated[Path, typer.Argument(help="the program aiperf, installed in an environment of its own")],
    scale: Annotated[str, typer.Option(help="mini or shape")] = "mini",
    rounds: Annotated[int, typer.Option(min=3, help="runs of each client at each load")] = 6,
    reference: Annotated[bool, typer.Option(help="keep the result as the reference machine's")] = False,
) -> None:
    """Load llama-server with our client and with AIPerf in turn: do they say the same of it?"""
    from plamo_study.studies.serving import beside as besides

    found = besides.compare(_attention(scale), scale, aiperf, rounds)
    report.console.print(f"kept: {report.short(besides.write(found, report.place(reference)))}")


@app.command()
def crowd(
    rounds: Annotated[int, typer.Option(min=3, help="servers of each kind")] = 4,
    reference: Annotated[bool, typer.Option(help="keep the result as the reference machine's")] = False,
) -> None:
    """Let requests wait at llama-server as released and patched, in turn: what does a token take beside them?"""
    from plamo_study.studies.serving import crowd as crowds

    found = crowds.compare(_attention("mini"), rounds)
    report.console.print(f"kept: {report.short(crowds.write(found, report.place(reference)))}")


@app.command()
def drafts(
    rounds: Annotated[int, typer.Option(min=3, help="runs of each")] = 6,
    reference: Annotated[bool, typer.Option(help="keep the result as the reference machine's")] = False,
) -> None:
    """Let llama-server and our loop speculate with the same drafts in turn: what is accepted, and how fast?"""
    from plamo_study.studies.speculative import beside, served

    _quiet()
    found = served.compare(rounds)
    report.console.print(f"kept: {report.short(beside.write(found, report.place(reference)))}")


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
    from plamo_study.studies.serving import soak as soaks

    place = report.place(reference)
    found = soaks.run(_attention(scale), scale, rate or soaks.sustained(scale, place), minutes, hold, patched)
    report.console.print(f"kept: {report.short(soaks.write(found, place))}")


def probe(
    url: Annotated[str, typer.Argument(help="of any OpenAI-compatible server, e.g. http://127.0.0.1:8080")],
    model: Annotated[str, typer.Option(help="its name there; by default the first that the server lists")] = "",
    prompt_tokens: Annotated[int, typer.Option(min=1, max=1_000_000, help="of your usual request")] = 256,
    output_tokens: Annotated[int, typer.Option(min=2, max=100_000, help="of its answer")] = 32,
    concurrency: Annotated[int, typer.Option(min=1, max=1000, help="requests at a time")] = 2,
    rate: Annotated[
        float, typer.Option(min=0, max=1000, callback=finite, help="requests per second instead; 0: as many at a time")
    ] = 0.0,
    seconds: Annotated[float, typer.Option(min=1, max=DAY_S, callback=finite, help="at most, about")] = 120.0,
    watch: Annotated[
        float,
        typer.Option(
            min=0, max=DAY_S, callback=finite, help="first look at /metrics so many seconds: your own traffic"
        ),
    ] = 0.0,
    yes: Annotated[bool, typer.Option("--yes", help="the server is not on this machine, and may be asked")] = False,
    json: Annotated[bool, typer.Option("--json", help="the report as JSON on stdout")] = False,
    html: Annotated[Path | None, typer.Option(help="write the report as a page")] = None,
    force: Replace = False,
) -> None:
    """Are a server's answers right under load, and which phase binds its traffic? A key: PROBE_API_KEY."""
    from plamo_study.studies.serving import page, probe as probing, traffic
    from plamo_study.studies.serving.client import Target

    address = probing.check_url(url)
    if html:
        check_out(html, force)
    key = os.environ.get(KEY, "")
    if not (key.isascii() and key.isprintable()):
        raise StudyError(KEY, "holds what no header can carry", f"export {KEY}=... in letters, digits and signs")
    target = Target(address, model, key=key)
    ask = probing.Ask(target, prompt_tokens, output_tokens, concurrency, rate, seconds)
    budget = ask.budget()
    cost = f"at most {budget.requests} requests, {budget.tokens:,} tokens, about {budget.seconds:.0f} s"
    report.console.print(f"{address}: {cost}")
    if not (yes or probing.is_loopback(address)):
        raise StudyError(address, f"is not this machine, and it would get {cost}", "the same with --yes, if you may")
    own = traffic.watched(target, watch) if watch else None
    found = msgspec.structs.replace(probing.probe(ask, _say), traffic=own)
    if html:
        with growing(html) as partial:
            partial.write_text(page.html(found), encoding="utf-8")
    if json:
        typer.echo(jsonlib.dumps(msgspec.to_builtins(found)))  # in which NaN stands as such
    else:
        Terminal().print(page.text(found), soft_wrap=True)


def _say(line: str) -> None:
    report.console.print(line)


def _quiet() -> None:
    """The engine's own words stay out of the terminal."""
    from plamo_study.engine import library

    library.capture_log([])


def _attention(scale: str) -> Path:
    """The file of the model that no server mixes up, made where it is not here."""
    from plamo_study.measure import plan
    from plamo_study.models import synthetic

    plan.check_scale(scale)
    _quiet()
    return synthetic.make(plan.MODELS[1], scale, plan.DTYPE[scale])
