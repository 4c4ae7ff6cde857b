"""The files a plan runs on: synthetic ones are written, released ones must be here and free of blocking findings.

PLAMO_STUDY_ACCEPT (`--accept WORDS`) lets a released file with blocking findings through; its words enter the rows.
"""

import os
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from plamo_study.errors import StudyError
from plamo_study.measure.checking import check
from plamo_study.measure.plan import Plan
from plamo_study.models import registry, synthetic, tensors
from plamo_study.models.expected import read_spec
from plamo_study.models.finding import Finding, blocking
from plamo_study.models.header import read

ACCEPT = "PLAMO_STUDY_ACCEPT"


def make_models(plan: Plan, progress: Callable[[str, int, int], None] | None = None) -> None:
    """Write the synthetic files a plan needs and lacks. `progress` is told (file, bytes done, bytes in all)."""
    for name, scale, dtype in dict.fromkeys((c.model, c.scale, c.dtype) for c in plan.cells if c.model):
        file = registry.model_path(name, scale, dtype).name
        if scale != "weights":
            synthetic.make(name, scale, dtype, progress=partial(progress, file) if progress else None)


def model_fact(name: str, scale: str, dtype: str) -> dict[str, Any]:
    """What every row of a model shares: identity, shape, assumptions, findings, and its tensors by kind.

    Raises StudyError for a released file that is not here, or that has a blocking finding which nobody accepted.
    """
    path = registry.model_path(name, scale, dtype)
    spec, found = _released(name, path) if scale == "weights" else (registry.spec(name, scale), [])
    accepted = os.environ.get(ACCEPT, "") if blocking(found) else ""
    words = (
        [f"blocking findings ({', '.join(f.code for f in blocking(found))}) accepted: {accepted}"] if accepted else []
    )
    shape = {k: v for k, v in asdict(spec).items() if isinstance(v, int | float | str) and k not in ("name", "scale")}
    fact = {
        "name": name,
        "scale": scale,
        "dtype": dtype,
        "synthetic": scale != "weights",
        "sha256": tensors.sha256(path),
        "file_bytes": path.stat().st_size,
        "n_params": spec.n_params,
        "assumptions": [*spec.assumptions, *words],
        "shape": shape,
        "tensors": _by_kind(path),
    }
    return fact | ({"findings": [finding.code for finding in found]} if scale == "weights" else {})


def _by_kind(path: Path) -> dict[str, dict[str, Any]]:
    kinds: dict[str, dict[str, Any]] = {}
    for tensor in tensors.tensor_table(path):
        kind = kinds.setdefault(f"{tensor.kind}", {"type": tensor.dtype, "count": 0, "n_elements": 0, "n_bytes": 0})
        kind["count"] += 1
        kind["n_elements"] += tensor.n_elements
        kind["n_bytes"] += tensor.n_bytes
    return kinds


def _released(name: str, path: Path) -> tuple[registry.ModelSpec, list[Finding]]:
    """The shape a released file states, and what a check finds in it without the engine; the study has its own gate."""
    if not path.is_file():
        how = f"plamo-study models fetch {name}, then models convert {name}, then models quantize"
        raise StudyError(str(path), "is not here: released weights are not brought along", how)
    found = check(path, gate=False)
    if blocking(found) and not os.environ.get(ACCEPT):
        worst = blocking(found)[0]
        raise StudyError(str(path), f"must not be measured: {worst.evidence}", f"{worst.mend}; or --accept WORDS")
    spec, _ = read_spec(read(path))
    if spec is None:
        raise StudyError(str(path), "does not state its shape", f"plamo-study models check {path}")
    return spec, found
