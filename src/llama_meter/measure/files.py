"""The files a plan runs on: synthetic ones are written, quantized ones made from the best source available.

Released files, or sources to make them from, must be here and free of blocking findings.

PLAMO_STUDY_ACCEPT (`--accept WORDS`) admits a released file with blocking findings; the words enter the rows.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from llama_meter.cells import Comparison
from llama_meter.errors import StudyError, offer, offer_check
from llama_meter.measure import quantizing
from llama_meter.measure.checking import check
from llama_meter.measure.plan import Plan
from llama_meter.models import given, noted, recipes, registry, synthetic, tensors
from llama_meter.models.expected import read_spec
from llama_meter.models.finding import Finding, blocking
from llama_meter.models.header import read
from llama_meter.models.tensors import TensorInfo

ACCEPT = "PLAMO_STUDY_ACCEPT"
NOT_SHAPE = ("name", "scale", "trained", "values", "weights")
SUMMED = ("count", "n_elements", "n_bytes")
SOURCES = {"mini": ("F16",), "shape": ("F16",), "weights": ("F32", "BF16", "F16")}  # to quantize from, the best first


def make_models(plan: Plan, progress: Callable[[str, int, int], None] | None = None) -> None:
    """Write the files a plan needs and lacks. `progress` is called with (file, bytes done, total bytes).

    Raises StudyError for an unknown type or recipe, and wherever the synthetic writer or the quantizer does. A released
    model without any file here is left to `model_fact`.
    """
    for name, scale, dtype in needed(plan):
        if scale == registry.GIVEN:
            continue
        path = recipes.model_path(name, scale, dtype)
        tell = partial(progress, path.name) if progress else None
        if scale != "weights" and dtype in registry.DTYPES:  # the quantizer makes all others from these
            synthetic.make(name, scale, dtype, progress=tell)
        elif source := _source_of(path, name, scale):
            quantizing.quantize(source, path, recipes.by_name(dtype), progress=tell)


def check_released(plan: Plan) -> None:
    """StudyError for the first released file of a plan that is not here and has no source: before time is asked for."""
    for name, scale, dtype in needed(plan):
        path = recipes.model_path(name, scale, dtype)
        if scale == "weights" and not path.exists() and _source_of(path, name, scale) is None:
            raise _absent(name, path)


def needed(plan: Plan) -> list[tuple[str, str, str]]:
    """(model, scale, type or recipe) of every file a plan's cells run on or compare."""
    files = [file for cell in plan.asked for file in cell.files]
    compared = [cell for cell in plan.asked if isinstance(cell, Comparison)]
    files += [(cell.model, cell.scale, name) for cell in compared for name in cell.candidates]
    return list(dict.fromkeys(files))


def _source_of(path: Path, name: str, scale: str) -> Path | None:
    """The source to quantize a file from; None where the file exists and is not older than its source.

    A released file is kept whatever its age: it may have been made elsewhere.
    """
    sources = [recipes.model_path(name, scale, dtype) for dtype in SOURCES[scale]]
    source = next((file for file in sources if file.exists()), None)
    if path.exists() and not (source and scale != "weights" and source.stat().st_mtime > path.stat().st_mtime):
        return None
    if source is None and scale != "weights":
        return synthetic.make(name, scale, SOURCES[scale][0])
    return source if source != path else None


def model_fact(name: str, scale: str, dtype: str) -> dict[str, Any]:
    """The facts that all rows of a model share: identity, shape, assumptions, findings, and its tensors by kind.

    Raises StudyError for a released file that is not here, or that has a blocking finding that was not accepted.
    """
    if scale == registry.GIVEN:
        return _given(name, dtype)
    path = recipes.model_path(name, scale, dtype)
    spec, findings = _released(name, path) if scale == "weights" else (registry.spec(name, scale), [])
    accepted = os.environ.get(ACCEPT, "") if blocking(findings) else ""
    words = (
        [f"blocking findings ({', '.join(f.code for f in blocking(findings))}) accepted: {accepted}"]
        if accepted
        else []
    )
    fact = {
        "name": name,
        "scale": scale,
        "dtype": dtype,
        "synthetic": scale != "weights" and not registry.spec(name, scale).trained,
        "sha256": noted.sha256(path),
        "file_bytes": path.stat().st_size,
        "n_params": spec.n_params,
        "assumptions": [*spec.assumptions, *words],
        "shape": _shape(spec),
        "tensors": by_kind(tensors.tensor_table(path)),
    }
    extra = {"findings": [finding.code for finding in findings]} if scale == "weights" else {}
    return fact | extra | ({"trained": True} if spec.trained else {})


def _shape(spec: registry.ModelSpec) -> dict[str, Any]:
    return {k: v for k, v in asdict(spec).items() if isinstance(v, int | float | str) and k not in NOT_SHAPE}


def _given(name: str, dtype: str) -> dict[str, Any]:
    """The facts of a file given by path; where it lies is nobody's business."""
    file = given.FILES[name, registry.GIVEN, dtype]
    table = [tensor for part in file.parts for tensor in tensors.table_of(read(part))]
    return {
        "name": name,
        "scale": registry.GIVEN,
        "dtype": dtype,
        "synthetic": False,
        "sha256": file.sha256,
        "file_bytes": file.n_bytes,
        "n_params": file.spec.n_params,
        "assumptions": [],
        "shape": _shape(file.spec),
        "tensors": by_kind(table),
        "findings": [finding.code for finding in file.findings],
        **({"like": like} if (like := _same_shape(file.spec)) else {}),
    }


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


def _released(name: str, path: Path) -> tuple[registry.ModelSpec, list[Finding]]:
    """The shape a released file states, and the findings of a check without the engine; the study has its own gate."""
    if not path.is_file():
        raise _absent(name, path)
    findings = check(path, gate=False)
    if blocking(findings) and not os.environ.get(ACCEPT):
        worst = blocking(findings)[0]
        raise StudyError(str(path), f"must not be measured: {worst.evidence}", f"{worst.mend}; or {ACCEPT}=WORDS")
    spec, _ = read_spec(read(path))
    if spec is None:
        raise StudyError(str(path), "does not state its shape", offer_check(path))
    return spec, findings


def _absent(name: str, path: Path) -> StudyError:
    how = offer(f"models fetch {name}") + f", then models convert {name}, then models quantize"
    return StudyError(str(path), "is not here: released weights are not brought along", how)


def planned_fact(name: str, scale: str, dtype: str) -> dict[str, Any]:
    """The fact of any registered model and type, without its file: `name`, `dtype`, `shape` and `tensors`.

    `tensors`: kind -> type, count, n_elements, n_bytes. `dtype` is a GGML type (F16, Q8_0, Q4_0 ...); norms and the
    scalars of the scan stay F32, as in every file. Raises StudyError for a model or scale that is not registered.
    """
    spec = registry.spec(name, scale)
    shape = {key: value for key, value in asdict(spec).items() if isinstance(value, int | float | str)}
    return {"name": name, "dtype": dtype, "shape": shape, "tensors": by_kind(tensors.planned_table(spec, dtype))}
