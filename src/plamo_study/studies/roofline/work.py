"""A cell of kind "trace": one request recorded operator by operator, between the same request unrecorded.

Requests alternate, unrecorded first and last, on two contexts of one model in one process, so that a recording is
compared with its neighbours. Both contexts warm up with a short request. Sums go into the row.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from llama_meter.cells import Trace
from llama_meter.engine import library
from llama_meter.engine.session import Session, SessionConfig
from llama_meter.engine.timeline import ADDS_UP, Recorder, Timeline, clock, request
from llama_meter.limits import FIRST_TOKEN
from llama_meter.measure import watch
from llama_meter.measure.proof import tolerance
from llama_meter.oracle.compare import relative_error
from llama_meter.rows import Measured, passed
from plamo_study.studies.roofline import operators

WARM_PROMPT, WARM_STEPS = 16, 2
COUNTED = {"bytes": "n_bytes", "flops": "n_flops", "nodes": "nodes"}  # of one recording: all count the same


@dataclass
class Requests:
    """Repetitions of one request. `plain`: time stamps of the unrecorded ones, one more than the `timelines`.

    `logits`: of all, in order.
    """

    plain: list[list[int]] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)
    logits: list[list[np.ndarray]] = field(default_factory=list)


def run(cell: Trace, path: Path, stage: Callable[[str], None]) -> Measured:
    """Record `cell.repetitions` requests of `n_prompt` tokens and `n_gen` steps, each between two unrecorded ones.

    `series`: nanoseconds per recording, and bytes, FLOPs and nodes of one, by "phase/class/quantity".
    """
    library.capture_log([])
    room = cell.n_prompt + cell.n_gen
    start = clock()
    with Session(path, SessionConfig.of(cell, room)) as session, Recorder(session) as recorder:
        load_ns = clock() - start
        tokens = np.random.default_rng(cell.seed).integers(FIRST_TOKEN, session.n_vocab, room, np.int32)
        short = tokens[:WARM_PROMPT], tokens[WARM_PROMPT:][:WARM_STEPS]
        request(session, *short)
        recorder.record(*short)
        stage("record")
        done = _requests(cell, session, recorder, tokens)
        evaluated = session.n_evaluated == recorder.n_evaluated == room
    checks = _checks(cell, done) | {"evaluated": evaluated}
    return Measured(
        samples_ns=[np.diff(stamps[1:]).tolist() or [stamps[1] - stamps[0]] for stamps in done.plain],
        prefill_ns=[stamps[1] - stamps[0] for stamps in done.plain],
        load_ns=load_ns,
        n_evaluated=room * cell.repetitions,
        checks=checks,
        series=_sums(done.timelines),
        valid=passed(checks),
    )


def _requests(cell: Trace, session: Session, recorder: Recorder, tokens: np.ndarray) -> Requests:
    prompt, following = tokens[: cell.n_prompt], tokens[cell.n_prompt :]
    done = Requests()
    for number in range(2 * cell.repetitions + 1):
        if number % 2:
            timeline, logits = recorder.record(prompt, following)
            done.timelines.append(timeline)
        else:
            with watch.timed():
                stamps, logits = request(session, prompt, following)
            done.plain.append(stamps)
        done.logits.append(logits)
    return done


def _checks(cell: Trace, done: Requests) -> dict[str, float | bool]:
    """Whether recording changes logits, and whether spans fill their phases and phases the wall time."""
    pairs = [(row, first) for rows in done.logits for row, first in zip(rows, done.logits[0], strict=True)]
    error = max(relative_error(row, first) for row, first in pairs)
    phases = [sum(phase.duration for phase in t.phases) / t.duration for t in done.timelines]
    spans = [sum(s.duration for s in p.spans) / p.duration for t in done.timelines for p in t.phases]
    off = max(abs(1 - share) for share in (*phases, *spans))
    checks: dict[str, float | bool] = {"finite": all(bool(np.isfinite(row).all()) for row, _ in pairs)}
    if cell.n_gpu_layers == 0:
        checks["same_bits"] = all(np.array_equal(row, first) for row, first in pairs)
    else:  # a GPU fuses nodes when not recorded, and rounds differently
        checks["same_result"] = error <= tolerance(cell)
    return checks | {"recorded_error": error, "adds_up": off <= ADDS_UP, "off_wall": off}


def _sums(timelines: list[Timeline]) -> dict[str, list[float]]:
    series: dict[str, list[float]] = {}
    rows = [operators.sums(timeline) for timeline in timelines]
    for kind, first in rows[0].items():
        for name, work in first.items():
            series[f"{kind}/{name}/ns"] = [row[kind][name].ns for row in rows]
            if work.nodes:
                series |= {f"{kind}/{name}/{what}": [getattr(work, name_of)] for what, name_of in COUNTED.items()}
    return series


RUNS = {Trace: run}
