"""The command that finds fragile tensors in a user's own files: `plamo-study models scan`."""

# Modules that load SciPy are imported by the command: the others start a second sooner.

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llama_meter.errors import StudyError
from plamo_study.cli import report
from plamo_study.cli.options import Engine, Json, use_engine
from plamo_study.cli.terminal import Grid, Terminal, echo

if TYPE_CHECKING:
    import pandas as pd

HOURS = 24 * 3600.0  # a long scan of large files on a CPU is not a hang


def scan(
    reference: Annotated[Path, typer.Argument(help="the F32, F16 or BF16 GGUF file")],
    candidate: Annotated[Path, typer.Argument(help="the same model quantized, e.g. by models quantize")],
    text: Annotated[str, typer.Option(help="a UTF-8 text typical of the model's use, or one of data/corpus")],
    chunk: Annotated[int, typer.Option(min=4, max=1 << 20, help="tokens of a chunk; its second half is scored")] = 512,
    chunks: Annotated[int, typer.Option(min=1, help="chunks of the text; more of them, narrower intervals")] = 16,
    gpu: Annotated[bool, typer.Option("--gpu", help="offload all layers")] = False,
    engine: Engine = None,
    json: Json = False,
) -> None:
    """Find the tensor classes and layers that quantization damages most, and the cost of keeping them.

    Evaluates some four models per class and layer, composed in memory; nothing is written. Each line: damage (KL
    divergence to the reference, 0.001 nats per token) of the point quantized alone, its excess over what size and
    role explain, the verdict, and what keeping the point avoids and costs.
    """
    from llama_meter.cells import Scan
    from llama_meter.measure import machine, process, texts
    from llama_meter.measure.worker import Job
    from llama_meter.workloads import fragility as workload
    from plamo_study.laws import fragility

    use_engine(engine)
    if (n := len(texts.read(text))) < chunk:  # every token is at least one byte
        raise StudyError(f"text {text!r}", f"has {n} bytes, one chunk takes {chunk} tokens", texts.LONGER)
    threads, offload = machine.performance_cores(), -1 if gpu else 0
    cell = Scan(n_ctx=chunk, n_chunks=chunks, text=text, n_threads=threads, n_gpu_layers=offload)
    job = Job(cell=cell, path=str(reference), others=[str(candidate)])
    outcome = process.work(job, HOURS, workload=workload.__name__)
    report.leave_unless_ok(outcome, f"scanning {candidate.name}")
    scanned = fragility.Scanned(reference.name, "reference", candidate.name, outcome.measured.series)
    joined = fragility.fragility([scanned]).merge(fragility.damage([scanned]).drop(columns="dropped"))
    _json(joined) if json else _show(joined)
    raise typer.Exit(0 if outcome.measured.valid else 1)


def _json(joined: "pd.DataFrame") -> None:
    for line in joined.to_dict("records"):
        echo(line)


def _show(joined: "pd.DataFrame") -> None:
    shown = Grid("point", "damage", "excess", "verdict", "avoided if kept", "extra MB", "bits per weight per 0.01 nats")
    for r in joined.itertuples():
        numbers = (f"{r.dropped.scaled(1e3):.3g}", f"{r.excess:.2f}", r.verdict, f"{r.avoided.scaled(1e3):.3g}")
        shown.add(r.point, *numbers, f"{r.extra_bytes / 1e6:,.2f}", f"{r.price.scaled(0.01):.3g}")
    Terminal().print(shown)
