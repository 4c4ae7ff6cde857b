"""One request of one model recorded operator by operator and written as a trace: what `plamo-study trace` does.

The trace is in the Chrome trace event format, which Perfetto and chrome://tracing open: "Trace Event Format",
docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. It is an object with `traceEvents`, complete
events ("X") with `ts` and `dur` in microseconds, metadata events ("M"); a viewer nests complete events of one thread by
time, so every range precedes what it contains.
"""

import gzip
import json
import os
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from llama_meter.cells import Trace
from llama_meter.disk import growing
from llama_meter.engine.spans import Node, Operand, Phase, Span, Timeline
from llama_meter.errors import StudyError, offer_check
from llama_meter.measure import bench, checking, files, machine, plan
from llama_meter.measure.process import Outcome, work
from llama_meter.measure.worker import Job
from llama_meter.models import recipes
from llama_meter.models.expected import read_spec
from llama_meter.models.finding import blocking
from llama_meter.models.header import read
from llama_meter.rows import Measured
from llama_meter.workloads import operators

Event = dict[str, Any]
PID = TID = 1
NS_PER_US = 1000
SUFFIXES = (".json", ".json.gz")
LIMIT_S = 1800.0
NOTE = (
    "Every node is computed and waited for alone. Backends that fuse or overlap nodes cannot do so while recorded: "
    "GPUs much, the CPU only an RMS norm with the product after it. The overhead says how far off absolute times are. "
    "Leave the machine alone: threads wait for each other after every node, so other work stretches small nodes most."
)

Made = Callable[[str, int, int], None]


# ---------------------------------------------------------------- recording


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
    offload = -1 if bench.engine_facts()["gpu_offload"] else 0
    return work(
        Job(cell=plan.change(cell, n_gpu_layers=offload), path=str(path)),
        LIMIT_S,
        workload="llama_meter.workloads.timeline",
    )


def about(cell: Trace, path: Path, measured: Measured) -> dict[str, Any]:
    """Metadata of a trace: file, engine, set-up, what recording cost, and how to read it."""
    engine = bench.engine_facts()
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
    findings = blocking(checking.check(path, gate=False))
    if findings and not os.environ.get(files.ACCEPT):
        raise StudyError(
            str(path), f"must not be measured: {findings[0].evidence}", f"{findings[0].mend}; or {files.ACCEPT}=WORDS"
        )
    spec, _ = read_spec(header)
    if spec is None:
        raise StudyError(str(path), "does not state its shape", offer_check(path))
    if n_tokens > spec.context_length:
        why = f"{n_tokens} tokens do not fit the model's context of {spec.context_length}"
        raise StudyError(str(path), why, "choose a shorter prompt or fewer steps")
    return path


# ---------------------------------------------------------------- the trace


def document(timeline: Timeline, title: str, about: dict[str, Any]) -> dict[str, Any]:
    """The trace as a JSON object. `title` names the process, `about` becomes the trace's `otherData`.

    Ranges: REQUEST contains PREFILL and DECODE_STEP n, which contain LAYER n. Operators are in their layer, or directly
    in their phase if they belong to none. Categories: request, phase, layer, operator, and recording (callbacks),
    engine (prepare, finish). Arguments of an operator: class, operation, layer, shapes, types, bytes, FLOPs.
    """
    events = [_named("process_name", title), _named("thread_name", "one request")]
    events.append(_complete("REQUEST", "request", timeline.start, timeline.end, timeline.start))
    for phase in timeline.phases:
        events += _phase(phase, timeline)
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": about}


def check_out(path: Path) -> None:
    """StudyError unless a trace can be written there."""
    if not path.name.endswith(SUFFIXES):
        raise StudyError(str(path), "is not a trace file name", f"end it in {' or '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise StudyError(str(path), "its folder does not exist", f"mkdir -p {path.parent}")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise StudyError(str(path), "cannot be written", "choose a file in a folder that you can write to")


def write(path: Path, trace: dict[str, Any]) -> None:
    """Write a trace, compressed when the name ends in .gz; nothing is left half-written."""
    check_out(path)
    data = json.dumps(trace, separators=(",", ":")).encode()
    with growing(path) as partial:
        partial.write_bytes(gzip.compress(data, mtime=0) if path.name.endswith(".gz") else data)


def _phase(phase: Phase, timeline: Timeline) -> Iterator[Event]:
    zero = timeline.start
    yield _complete(phase.name, "phase", phase.start, phase.end, zero)
    for layer, group in groupby(_with_layers(phase, timeline.nodes), key=lambda pair: pair[1]):
        spans = [span for span, _ in group]
        if layer is not None:
            yield _complete(f"LAYER {layer}", "layer", spans[0].start, spans[-1].end, zero)
        for span in spans:
            yield _span(span, layer, timeline)


def _with_layers(phase: Phase, nodes: tuple[Node, ...]) -> list[tuple[Span, int | None]]:
    """Every span with its layer. A node that names none belongs to the layer of the nodes around it, if that is one.

    The callbacks that record a layer's nodes belong to the layer as well, except the last.
    """
    layers = [operators.layer(nodes[span.node]) if span.kind == "operator" else None for span in phase.spans]
    last: dict[int, int] = {layer: at for at, layer in enumerate(layers) if layer is not None}
    pairs: list[tuple[Span, int | None]] = []
    current: int | None = None
    for at, span in enumerate(phase.spans):
        if layers[at] is not None:
            current = layers[at]
        inside = current is not None and at <= last[current] and span.kind in ("operator", "callback")
        pairs.append((span, current if inside else None))
    return pairs


def _span(span: Span, layer: int | None, timeline: Timeline) -> Event:
    if span.kind != "operator":
        category = "recording" if span.kind == "callback" else "engine"
        return _complete(span.kind, category, span.start, span.end, timeline.start)
    node = timeline.nodes[span.node]
    n_bytes, n_flops = operators.moved_bytes(node), operators.flops(node)
    arguments = {
        "class": operators.operator_class(node),
        "op": node.op,
        "layer": layer,
        "result": _operand(node.result),
        "sources": [_operand(source) for source in node.sources],
        "bytes": round(n_bytes),
        "flops": round(n_flops),
        "GB/s": round(n_bytes / max(span.duration, 1), 3),
        "GFLOP/s": round(n_flops / max(span.duration, 1), 3),
    }
    name = f"{node.op} {node.result.name}".strip()
    return _complete(name, "operator", span.start, span.end, timeline.start, arguments)


def _operand(operand: Operand) -> str:
    shape = " x ".join(map(str, operand.shape))
    return f"{operand.name} {operand.dtype} [{shape}]"


def _complete(name: str, category: str, start: int, end: int, zero: int, arguments: Event | None = None) -> Event:
    times = {"ts": (start - zero) / NS_PER_US, "dur": (end - start) / NS_PER_US}
    event = {"name": name, "cat": category, "ph": "X", **times, "pid": PID, "tid": TID}
    return event | ({"args": arguments} if arguments else {})


def _named(what: str, name: str) -> Event:
    return {"name": what, "ph": "M", "pid": PID, "tid": TID, "args": {"name": name}}
