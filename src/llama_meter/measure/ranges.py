"""The numeric range of a model's activations, asked for and judged: a probe runs in a process of its own.

What it measures, workloads/range_probe.py says. The gate's findings cover the few tokens that it evaluates;
`plamo-study models ranges` takes a longer text, which may reach further.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from gguf import GGMLQuantizationType

from llama_meter.cells import Ranges
from llama_meter.errors import StudyError, offer, offer_check
from llama_meter.measure import machine, texts
from llama_meter.measure.process import work
from llama_meter.measure.worker import Job
from llama_meter.models import casts
from llama_meter.models.finding import Finding
from llama_meter.rows import Measured

TIME_S, BYTES_PER_S, TOKENS_PER_S = 120.0, 50e6, 2.0  # time limit of a file's probe: start, reading it, evaluating
NUMBERS = {"largest": "the largest input", "output": "the largest result"}  # others: "the sum of 32 inputs in a row"


def probe_file(
    path: Path, text: Path, n_prompt: int = 512, n_gen: int = 32, n_gpu_layers: int = 0, n_threads: int = 0
) -> Measured:
    """Probe a file over the first tokens of a text in a separate process; a short text is used whole.

    Raises StudyError when the engine refuses, crashes or hangs, and for an unusable text.
    """
    if not path.is_file():
        raise StudyError(str(path), "no such file", offer("models list"))
    if n_prompt < 1 or n_gen < 0:
        raise StudyError(f"{n_prompt} + {n_gen} tokens", "a text has a prompt", "--n-prompt 512 --n-gen 32")
    longest = len(texts.read(text)) + 1  # a token has at least one byte, except BOS
    n_prompt, n_gen = min(n_prompt, longest), min(n_gen, longest)
    threads = n_threads or machine.performance_cores()
    cell = Ranges(n_prompt=n_prompt, n_gen=n_gen, text=str(text), n_threads=threads)
    cell = msgspec.structs.replace(cell, n_gpu_layers=n_gpu_layers, flash_attn="off")  # which hides kqv
    seconds = TIME_S + path.stat().st_size / BYTES_PER_S + (n_prompt + n_gen) / TOKENS_PER_S
    outcome = work(Job(cell=cell, path=str(path.resolve())), seconds, workload="llama_meter.workloads.range_probe")
    if outcome.failure is not None:
        mend = offer_check(path)
        raise StudyError(str(path), f"cannot be probed ({outcome.failure})", mend)
    return outcome.measured


def worst(products: Any, backends: Sequence[str]) -> dict[str, dict[str, Any]]:
    """For each backend, the product of `InputRanges.found` that comes closest to a limit, or passes it furthest.

    Columns: kind, layer, dtype, path, cast, of, number, limit, factor, fits. A prompt's numbers are compared with both
    paths, because its last few tokens can be few enough for vector kernels.
    """
    closest: dict[str, dict[str, Any]] = {}
    for (phase, kind, layer), seen in products.items():
        numbers = {"largest": seen.largest, "output": seen.output}
        numbers |= {f"sum of {n}": value for n, value in seen.sums.items()}
        dtype = casts.met(kind, GGMLQuantizationType(seen.weight_type).name)
        for backend in backends:
            for path in casts.PATHS if phase == "prompt" else ("mat-vec",):
                verdict = casts.verdict(backend, dtype, path, numbers)
                if verdict and verdict.factor > closest.get(backend, {"factor": 0.0})["factor"]:
                    cast = verdict.cast
                    place = {"kind": kind, "layer": layer, "dtype": dtype, "path": path, "number": numbers[cast.of]}
                    limit = {"cast": cast.cast, "of": cast.of, "limit": cast.limit}
                    closest[backend] = place | limit | {"factor": verdict.factor, "fits": verdict.fits}
    return closest


def findings(measured: Measured) -> list[Finding]:
    """A warning for each backend whose limit is passed; where its logits are not finite, the gate itself blocks."""
    ranges = measured.facts.get("ranges", {})
    passed = {backend: worst for backend, worst in ranges.items() if not worst["fits"]}
    return [Finding("warning", "range", _evidence(backend, worst), _mend(worst)) for backend, worst in passed.items()]


def nearest(measured: Measured) -> str:
    """How close the examined numbers came to a limit of any backend, as the end of a sentence."""
    ranges = measured.facts.get("ranges", {})
    if not ranges:
        return ""
    backend, worst = max(ranges.items(), key=lambda item: float(item[1]["factor"]))
    return f"; closest to a limit: {_where(worst)} on {backend}, {worst['number']:,.3g} of {worst['limit']:,.0f}"


def _evidence(backend: str, worst: dict[str, Any]) -> str:
    number = NUMBERS.get(worst["of"], f"the {worst['of']} inputs in a row")
    return (
        f"{number} of {_where(worst)} is {worst['number']:,.4g}; for {worst['dtype']} {backend} casts it to "
        f"{worst['cast']} ({worst['path']}), which overflows beyond {worst['limit']:,.0f}: {worst['factor']:.2g} times "
        f"too large (half-precision overflow, D5)"
    )


def _where(worst: dict[str, Any]) -> str:
    return f"{worst['kind']} in layer {worst['layer']}" if worst["layer"] >= 0 else str(worst["kind"])


def _mend(worst: dict[str, Any]) -> str:
    if worst["kind"] in casts.INSIDE:
        return "use a cache of type f32"
    return f"quantize again with --keep {worst['kind']}=bf16: {offer('models quantize')}"
