"""The files a plan runs on: synthetic ones are written, quantized ones made from these by llama.cpp in a worker.

Quantizing starts a process that drives the engine, since it can abort or hang. The worker knows no recipes: types are
llama.cpp's numbers.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from llama_meter.cells import Comparison
from llama_meter.disk import growing
from llama_meter.errors import MORE_MEMORY, StudyError, offer_check, says_memory
from llama_meter.measure import machine
from llama_meter.measure.plan import Plan
from llama_meter.measure.process import work
from llama_meter.models import recipes, registry, synthetic, tensors
from llama_meter.models.header import read
from llama_meter.models.recipes import Recipe
from llama_meter.models.synthetic import Progress
from llama_meter.models.tensors import TensorInfo
from llama_meter.rows import Failure, Measured

NOT_SHAPE = ("name", "scale", "trained", "values", "weights")
UNCOUNTED = {  # words in the keys of a header: what makes the bytes of a token other than its size and keys say
    "sliding_window": "its windows are its own",
    "ssm": "its states are its own",
    "wkv": "its states are its own",
    "shortconv": "its states are its own",
    "kda": "its states are its own",
    "kv_lora_rank": "it keeps its keys compressed",
    "expert_used_count": "a mixture of experts reads some of its weights",  # last: its cache is like others
}
SUMMED = ("count", "n_elements", "n_bytes")
SOURCE = "F16"  # type that the quantizer makes others from
TIME_S, BYTES_PER_S = 600.0, 1e6  # time limit: a start, and the slowest type on a slow core
TENSOR = re.compile(r"\[ *(\d+)/ *(\d+)\]")  # llama.cpp's log: this tensor is being written
REFUSED = re.compile(r"(?<=failed to quantize: ).*|(?<=error loading model: ).*")


def make_models(plan: Plan, progress: Callable[[str, int, int], None] | None = None) -> None:
    """Write the files a plan needs and lacks. `progress` is called with (file, bytes done, total bytes).

    Raises StudyError for an unknown type or recipe, and wherever the synthetic writer or the quantizer does.
    """
    for name, scale, dtype in needed(plan):
        if scale == registry.FILE_SCALE:
            continue
        path = recipes.model_path(name, scale, dtype)
        on_bytes = partial(progress, path.name) if progress else None
        if dtype in registry.DTYPES:  # the quantizer makes all others from these
            synthetic.make(name, scale, dtype, progress=on_bytes)
        elif source := _source_of(path, name, scale):
            quantize(source, path, recipes.by_name(dtype), progress=on_bytes)


def needed(plan: Plan) -> list[tuple[str, str, str]]:
    """(model, scale, type or recipe) of every file a plan's cells run on or compare."""
    files = [file for cell in plan.every_cell for file in cell.files]
    compared = [cell for cell in plan.every_cell if isinstance(cell, Comparison)]
    files += [(cell.model, cell.scale, name) for cell in compared for name in cell.candidates]
    return list(dict.fromkeys(files))


def _source_of(path: Path, name: str, scale: str) -> Path | None:
    """The source to quantize a file from; None where the file exists and is not older than its source."""
    source = recipes.model_path(name, scale, SOURCE)
    if path.exists() and not (source.exists() and source.stat().st_mtime > path.stat().st_mtime):
        return None
    return source if source.exists() else synthetic.make(name, scale, SOURCE)


# ---------------------------------------------------------------- quantized


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


# ---------------------------------------------------------------- what rows say of them


def model_fact(name: str, scale: str, dtype: str) -> dict[str, Any]:
    """The facts that all rows of a model share: identity, shape, assumptions, findings, and its tensors by kind."""
    if scale == registry.FILE_SCALE:
        return _of_request(name, dtype)
    path = recipes.model_path(name, scale, dtype)
    spec = registry.spec(name, scale)
    fact = {
        "name": name,
        "scale": scale,
        "dtype": dtype,
        "synthetic": not spec.trained,
        "sha256": tensors.sha256(path),
        "file_bytes": path.stat().st_size,
        "n_params": spec.n_params,
        "assumptions": list(spec.assumptions),
        "shape": _shape(spec),
        "tensors": by_kind(tensors.tensor_table(path)),
    }
    return fact | ({"trained": True} if spec.trained else {})


def digest(name: str, scale: str, dtype: str) -> str:
    """The hash of what lies in a file's place now: the one in its fact, unless it was replaced. StudyError for none."""
    parts = registry.FILES[name, scale, dtype].parts if scale == registry.FILE_SCALE else ()
    return tensors.sha256_of_parts(parts if len(parts) > 1 else [recipes.model_path(name, scale, dtype)])


def _shape(spec: registry.ModelSpec) -> dict[str, Any]:
    return {k: v for k, v in asdict(spec).items() if isinstance(v, int | float | str) and k not in NOT_SHAPE}


def _of_request(name: str, dtype: str) -> dict[str, Any]:
    """The facts of a file of a request; where it lies is nobody's business."""
    file = registry.FILES[name, registry.FILE_SCALE, dtype]
    table = [tensor for part in file.parts for tensor in tensors.table_of(read(part))]
    return {
        "name": name,
        "scale": registry.FILE_SCALE,
        "dtype": dtype,
        "synthetic": False,
        "sha256": file.sha256,
        "file_bytes": file.n_bytes,
        "n_params": file.spec.n_params,
        "assumptions": [],
        "shape": _shape(file.spec),
        "tensors": by_kind(table),
        "findings": list(file.findings),
        **({"uncounted": why} if (why := uncounted(file)) else {}),
        **({"like": like} if (like := _same_shape(file.spec)) else {}),
    }


def uncounted(file: registry.ModelFile) -> str:
    """Why the bytes and operations of a token are not computed for a file, or ""; of PLaMo they always are."""
    keys = [] if file.spec.arch in registry.ARCHS else read(file.parts[0]).fields
    words = {word for key in keys for word in key.split(".")}
    return next((why for word, why in UNCOUNTED.items() if word in words), "")


def _same_shape(spec: registry.ModelSpec) -> str:
    """The registered model of a file's shape, or "": others' figures of that model may stand beside it."""
    alike = ("arch", "hidden", "layers", "heads", "kv_heads", "ffn", "vocab", "mamba_heads")
    sizes = [getattr(spec, name) for name in alike]
    models = (model for (_, scale), model in registry.load().items() if scale == "shape")
    return next((model.name for model in models if [getattr(model, name) for name in alike] == sizes), "")


def by_kind(table: Iterable[TensorInfo]) -> dict[str, dict[str, Any]]:
    """Tensors summed by kind: type, count, n_elements, n_bytes; by type too where these differ."""
    kinds: dict[str, dict[str, Any]] = {}
    for tensor in table:
        kind = kinds.setdefault(f"{tensor.kind}", {"count": 0, "n_elements": 0, "n_bytes": 0, "by_type": {}})
        for sums in (kind, kind["by_type"].setdefault(tensor.dtype, dict.fromkeys(SUMMED, 0))):
            for name, value in zip(SUMMED, (1, tensor.n_elements, tensor.n_bytes), strict=True):
                sums[name] += value
    return {name: _named(kind) for name, kind in kinds.items()}


def _named(kind: dict[str, Any]) -> dict[str, Any]:
    types = kind.pop("by_type")
    return {"type": ", ".join(types), **kind} | ({"by_type": types} if len(types) > 1 else {})


def planned_fact(name: str, scale: str, dtype: str) -> dict[str, Any]:
    """The fact of any registered model and type, without its file: `name`, `dtype`, `shape` and `tensors`.

    `tensors`: kind -> type, count, n_elements, n_bytes. `dtype` is a GGML type (F16, Q8_0, Q4_0 ...); norms and the
    scalars of the scan stay F32, as in every file. Raises StudyError for a model or scale that is not registered.
    """
    spec = registry.spec(name, scale)
    return {"name": name, "dtype": dtype, "shape": _shape(spec), "tensors": by_kind(tensors.planned_table(spec, dtype))}
