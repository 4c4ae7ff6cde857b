"""One request of one model recorded operator by operator and written as a trace: what `plamo-study trace` does."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plamo_study.errors import StudyError
from plamo_study.measure import checking, files, machine, plan, runner
from plamo_study.measure.cells import Trace
from plamo_study.measure.process import Outcome, work
from plamo_study.measure.rows import Measured
from plamo_study.measure.worker import Job
from plamo_study.models import recipes
from plamo_study.models.expected import read_spec
from plamo_study.models.finding import blocking
from plamo_study.models.header import read

LIMIT_S = 1800.0
NOTE = (
    "Every node is computed and waited for alone. Backends that fuse or overlap nodes cannot do so while recorded: "
    "GPUs much, the CPU only an RMS norm with the product after it. The overhead says how far off absolute times are. "
    "Leave the machine alone: threads wait for each other after every node, so other work stretches small nodes most."
)

Made = Callable[[str, int, int], None]


def chosen(
    model: str, scale: str, dtype: str, n_prompt: int, n_gen: int, made: Made | None = None
) -> tuple[Trace, Path]:
    """The cell to record and its model file; a missing synthetic file is made first.

    `model`: a registered name, which `scale` and `dtype` complete, or the path of a GGUF file. `made` is given (file,
    bytes done, total bytes). Raises StudyError for an unknown model, a file that must not be measured, and token
    counts that do not fit.
    """
    if n_prompt < 1 or n_gen < 0:
        raise StudyError(f"{n_prompt} + {n_gen} tokens", "a request has a prompt", "--prompt 64 --gen 8")
    cell = Trace(n_prompt=n_prompt, n_gen=n_gen, n_threads=machine.performance_cores())
    if model.endswith(".gguf") or Path(model).is_file():
        return plan.change(cell, model=Path(model).name), _checked(Path(model), n_prompt + n_gen)
    plan.check_scale(scale)
    cell = plan.change(cell, model=model, scale=scale, dtype=dtype or plan.DTYPE[scale])
    path = recipes.model_path(model, scale, cell.dtype)
    plan.check_cell(cell)
    files.make_models(plan.Plan("trace", scale, (cell,), (), cell, 1, 0, LIMIT_S), made)
    return cell, _checked(path, n_prompt + n_gen) if scale == "weights" else path


def record(cell: Trace, path: Path) -> Outcome:
    """Record the request in a process of its own, offloaded where the engine can."""
    offload = -1 if runner.engine_facts()["gpu_offload"] else 0
    return work(
        Job(cell=plan.change(cell, n_gpu_layers=offload), path=str(path)), LIMIT_S, worker=f"{__package__}.worker"
    )


def about(cell: Trace, path: Path, measured: Measured) -> dict[str, Any]:
    """Metadata of a trace: file, engine, set-up, what recording cost, and how to read it."""
    engine = runner.engine_facts()
    plain, recorded = (
        {
            phase: measured.series[f"{phase}/{what}"]
            for phase in ("prefill", "decode")
            if f"{phase}/{what}" in measured.series
        }
        for what in ("plain", "recorded")
    )
    return {
        "file": path.name,
        "engine": f"{engine['binding']}, llama.cpp {engine['commit']}, libraries {engine['sha256'][:12]}",
        "prompt_tokens": cell.n_prompt,
        "decode_steps": cell.n_gen,
        "threads": cell.n_threads,
        "offloaded": engine["gpu_offload"],
        "plain_ns": plain,
        "recorded_ns": recorded,
        "empty_node_ns": measured.checks["floor_ns"],
        "note": NOTE,
    }


def _checked(path: Path, n_tokens: int) -> Path:
    """The path; StudyError unless its file exists, may be measured, and has room for `n_tokens` tokens."""
    header = read(path)
    found = blocking(checking.check(path, gate=False))
    if found and not os.environ.get(files.ACCEPT):
        raise StudyError(str(path), f"must not be measured: {found[0].evidence}", f"{found[0].mend}; or --accept WORDS")
    spec, _ = read_spec(header)
    if spec is None:
        raise StudyError(str(path), "does not state its shape", f"plamo-study models check {path}")
    if n_tokens > spec.context_length:
        why = f"{n_tokens} tokens do not fit the model's context of {spec.context_length}"
        raise StudyError(str(path), why, "choose a shorter prompt or fewer steps")
    return path
