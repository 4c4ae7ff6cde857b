"""The command that probes a server."""

import json as jsonlib
import os
from typing import Annotated

import msgspec
import typer

from plamo_study.cli import report
from plamo_study.cli.options import finite
from plamo_study.cli.terminal import Terminal

DAY_S = 86_400.0


def probe(
    url: Annotated[str, typer.Argument(help="URL of any OpenAI-compatible server, e.g. http://127.0.0.1:8080")],
    model: Annotated[str, typer.Option(help="model name on the server; by default the only one that it lists")] = "",
    prompt_tokens: Annotated[int, typer.Option(min=1, max=1_000_000, help="tokens of your usual prompt")] = 256,
    output_tokens: Annotated[int, typer.Option(min=2, max=100_000, help="tokens of its answer")] = 32,
    concurrency: Annotated[int, typer.Option(min=1, max=1000, help="concurrent requests")] = 2,
    rate: Annotated[
        float, typer.Option(min=0, max=1000, callback=finite, help="requests per second instead; 0: keep `concurrency`")
    ] = 0.0,
    seconds: Annotated[float, typer.Option(min=1, max=DAY_S, callback=finite, help="approximate limit")] = 120.0,
    json: Annotated[bool, typer.Option("--json", help="the report as JSON on stdout")] = False,
) -> None:
    """Check a server's answers under load, and which phase limits its traffic. API key: PROBE_API_KEY."""
    from llama_meter.serve import probe as probing
    from llama_meter.serve.client import Target
    from llama_meter.serve.phase import Setting

    target = Target(probing.address(url), model, key=os.environ.get(probing.KEY, ""))
    usual = Setting(concurrency, prompt_tokens, output_tokens, rate)
    report.console.print(f"{target.url}: {probing.cost(usual)}, about {seconds:.0f} s")
    probed = probing.probe(target, usual, seconds, report.console.print)
    if json:
        typer.echo(jsonlib.dumps(msgspec.to_builtins(probed)))  # NaN stays NaN
    else:
        Terminal().print(probing.text(probed), soft_wrap=True)
