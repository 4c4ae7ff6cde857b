"""Quantized files, made by llama.cpp in a worker, since it can abort or hang.

It is in measure/ because it starts a process that drives the engine, which models/ may not. The types are in
models/recipes.py; the worker knows no recipes: types are llama.cpp's numbers.
"""

import re
from pathlib import Path

import msgspec

from llama_meter.disk import growing
from llama_meter.errors import MORE_MEMORY, StudyError, offer_check, says_memory
from llama_meter.measure import machine
from llama_meter.measure.process import work
from llama_meter.models import recipes
from llama_meter.models.recipes import Recipe
from llama_meter.models.synthetic import Progress
from llama_meter.rows import Failure, Measured

TIME_S, BYTES_PER_S = 600.0, 1e6  # time limit: a start, and the slowest type on a slow core
TENSOR = re.compile(r"\[ *(\d+)/ *(\d+)\]")  # llama.cpp's log: this tensor is being written
REFUSED = re.compile(r"(?<=failed to quantize: ).*|(?<=error loading model: ).*")


class Quantizing(msgspec.Struct, frozen=True, kw_only=True):
    """The quantizer's arguments; it writes `out`."""

    source: str
    out: str
    file_type: int
    patterns: list[tuple[str, int]]
    metadata: dict[str, int]
    n_threads: int


def quantize(source: Path, out: Path, recipe: Recipe, progress: Progress | None = None) -> Path:
    """Write `source`, quantized by llama.cpp as the recipe says, to `out` and return it; a failure leaves no file.

    `progress` is called with (bytes done, total bytes) of `source`, as the share of its tensors that are done. Raises
    StudyError wherever `recipes.check_source` does, when `out` is `source` or the disk is too full, and when the
    quantizer refuses, aborts, or does not end in time.
    """
    recipes.check_source(source, recipe)
    if out.resolve() == source.resolve():
        raise StudyError(str(out), "is the source itself", "name another file with --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    size, n_threads = source.stat().st_size, machine.performance_cores()
    file_type, patterns, metadata = recipes.quantizer_arguments(recipe)

    def follow(log: str) -> None:
        if progress and (tensors := TENSOR.findall(log)):
            progress(size * int(tensors[-1][0]) // int(tensors[-1][1]), size)

    with growing(out) as partial:
        job = Quantizing(
            source=str(source),
            out=str(partial),
            file_type=file_type,
            patterns=patterns,
            metadata=metadata,
            n_threads=n_threads,
        )
        outcome = work(job, TIME_S + size / BYTES_PER_S, workload=__name__, on_log=follow)
        if outcome.failure:
            raise _refusal(source, out, outcome.failure)
    if progress:
        progress(size, size)
    return out


def _refusal(source: Path, out: Path, failure: Failure) -> StudyError:
    log = "\n".join([failure.message, *failure.log_tail])
    why = next((match[0].strip() for match in [REFUSED.search(log)] if match), failure.why)
    if says_memory(log):
        return StudyError(str(source), f"there is not enough memory ({why})", MORE_MEMORY)
    if "iostream error" in why:  # llama.cpp's only message for a failed write
        return StudyError(str(out), f"cannot be written ({why})", f"free space in {out.parent}")
    ended = f"ended with {failure.signal}" if failure.signal else "refused"
    return StudyError(str(source), f"the engine {ended}: {why}", offer_check(source))


def _quantize(job: Quantizing) -> Measured:
    """In the worker: do the job; the parent follows the log on stderr."""
    from llama_meter.engine import library  # the engine, which only the worker loads

    library.log_to_stderr()
    library.quantize(Path(job.source), Path(job.out), job.file_type, job.patterns, job.metadata, job.n_threads)
    return Measured()


RUNS = {Quantizing: _quantize}
