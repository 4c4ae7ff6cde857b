"""A recorded request in the Chrome trace event format, which Perfetto and chrome://tracing open.

Format: "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: an object with
`traceEvents`, complete events ("X") with `ts` and `dur` in microseconds, metadata events ("M"); a viewer nests complete
events of one thread by time, so every range precedes what it contains.
"""

import gzip
import json
import os
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from plamo_study.engine.spans import Node, Operand, Phase, Span, Timeline
from plamo_study.errors import StudyError
from plamo_study.growing import growing
from plamo_study.studies.timeline import operators

Event = dict[str, Any]
PID = TID = 1
NS_PER_US = 1000
SUFFIXES = (".json", ".json.gz")


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
    for layer, group in groupby(_with_layers(phase, timeline.nodes), key=lambda found: found[1]):
        spans = [span for span, _ in group]
        if layer is not None:
            yield _complete(f"LAYER {layer}", "layer", spans[0].start, spans[-1].end, zero)
        for span in spans:
            yield _span(span, layer, timeline)


def _with_layers(phase: Phase, nodes: tuple[Node, ...]) -> list[tuple[Span, int | None]]:
    """Every span with its layer. A node that names none belongs to the layer of the nodes around it, if that is one.

    The callbacks that record a layer's nodes belong to the layer as well, except the last.
    """
    known = [operators.layer(nodes[span.node]) if span.kind == "operator" else None for span in phase.spans]
    last: dict[int, int] = {layer: at for at, layer in enumerate(known) if layer is not None}
    found: list[tuple[Span, int | None]] = []
    current: int | None = None
    for at, span in enumerate(phase.spans):
        if known[at] is not None:
            current = known[at]
        inside = current is not None and at <= last[current] and span.kind in ("operator", "callback")
        found.append((span, current if inside else None))
    return found


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
