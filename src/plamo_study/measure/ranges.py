"""The numeric range of a model's activations, asked for and judged: a probe runs in a process of its own.

What it measures, range_probe.py says.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from gguf import GGMLQuantizationType

from plamo_study.errors import StudyError
from plamo_study.measure import machine, texts
from plamo_study.measure.cells import Ranges
from plamo_study.measure.process import work
from plamo_study.measure.rows import Measured
from plamo_study.measure.worker import Job
from plamo_study.models import casts

TIME_S, BYTES_PER_S, TOKENS_PER_S = 120.0, 50e6, 2.0  # time limit of a file's probe: start, reading it, evaluating


def probe_file(
    path: Path, text: Path, n_prompt: int = 512, n_gen: int = 32, n_gpu_layers: int = 0, n_threads: int = 0
) -> Measured:
    """Probe a file over the first tokens of a text in a separate process; a short text is used whole.

    Raises StudyError when the engine refuses, crashes or hangs, and for an unusable text.
    """
    if not path.is_file():
        raise StudyError(str(path), "no such file", "plamo-study models list")
    if n_prompt < 1 or n_gen < 0:
        raise StudyError(f"{n_prompt} + {n_gen} tokens", "a text has a prompt", "--n-prompt 512 --n-gen 32")
    longest = len(texts.read(text)) + 1  # a token has at least one byte, except BOS
    n_prompt, n_gen = min(n_prompt, longest), min(n_gen, longest)
    threads = n_threads or machine.performance_cores()
    cell = Ranges(n_prompt=n_prompt, n_gen=n_gen, text=str(text), n_threads=threads)
    cell = msgspec.structs.replace(cell, n_gpu_layers=n_gpu_layers, flash_attn="off")  # which hides kqv
    seconds = TIME_S + path.stat().st_size / BYTES_PER_S + (n_prompt + n_gen) / TOKENS_PER_S
    outcome = work(Job(cell=cell, path=str(path.resolve())), seconds, workload="plamo_study.measure.range_probe")
    if outcome.failure is not None:
        why = outcome.failure.why
        mend = f"plamo-study models check {path}"
        raise StudyError(str(path), f"cannot be probed ({outcome.failure.stage}: {why})", mend)
    return outcome.measured


def worst(found: Any, backends: Sequence[str]) -> dict[str, dict[str, Any]]:
    """For each backend, the product of `InputRanges.found` that comes closest to a limit, or passes it furthest.

    Columns: kind, layer, dtype, path, cast, of, number, limit, factor, fits. A prompt's numbers are compared with both
    paths, because its last few tokens can be few enough for vector kernels.
    """
    closest: dict[str, dict[str, Any]] = {}
    for (phase, kind, layer), seen in found.items():
        numbers = {"largest": seen.largest, "output": seen.output}
        numbers |= {f"sum of {n}": value for n, value in seen.sums.items()}
        dtype = casts.met(kind, GGMLQuantizationType(seen.weight_type).name)
        for backend in backends:
            for path in casts.PATHS if phase == "prompt" else ("mat-vec",):
                verdict = casts.verdict(backend, dtype, path, numbers)
                if verdict and verdict.factor > closest.get(backend, {"factor": 0.0})["factor"]:
                    place = {
                        "kind": kind,
                        "layer": layer,
                        "dtype": dtype,
                        "path": path,
                        "number": numbers[verdict.cast.of],
                    }
                    limit = {"cast": verdict.cast.cast, "of": verdict.cast.of, "limit": verdict.cast.limit}
                    closest[backend] = place | limit | {"factor": verdict.factor, "fits": verdict.fits}
    return closest
