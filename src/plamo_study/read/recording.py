"""The recorded rows of a study: where they lie, and how they become a frame."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_meter import journal
from llama_meter.errors import StudyError
from llama_meter.journal import LOCAL, OTHERS, REFERENCE, journal_path
from llama_meter.measure import defects
from llama_meter.rows import Cell, Record, Row
from plamo_study.read import frame, judged
from plamo_study.studies import registry

if TYPE_CHECKING:
    import pandas as pd

CUDA = "cuda"  # the build of `engine build` that is the released engine with this backend
SOURCES = ("recorded", "live")
ONE_MACHINE_S = ("your-machine",)  # studies whose recorded rows only their own page shows
DEVICES = ("auto", "cpu", "gpu")  # auto: on the GPU where the engine has one, and on its host's CPU beside it


@dataclass(frozen=True)
class Recording:
    """The rows of one study at one scale, all of one machine, the facts they refer to, and their source.

    `left_out`: cells for which there was no time; `lacks`: why a live study has no rows at all.
    """

    rows: "pd.DataFrame"
    facts: dict[str, dict[str, Any]]
    study: str
    scale: str
    source: str
    left_out: tuple[Cell, ...] = ()
    lacks: str = ""


def of_one_machine(rows: Sequence[Row]) -> list[Row]:
    """The rows of the machine that was measured last: blocks, drifts and ratios of two machines must never mix."""
    last = max(rows, key=lambda row: row.started).machine
    return [row for row in rows if row.machine == last]


def framed(rows: Sequence[Row], path: Path) -> tuple["pd.DataFrame", dict[str, dict[str, Any]]]:
    """The frame of a sweep's rows, and the facts of its journal."""
    facts = frame.facts(journal.read(path))
    return frame.frame(rows, facts), facts


def check_source(source: str) -> None:
    """Raise StudyError for an unknown source of rows."""
    if source not in SOURCES:
        raise StudyError(f"source {source!r}", f"unknown; known: {', '.join(SOURCES)}", "plamo-study run --source live")


def check_device(device: str) -> None:
    """StudyError for an unknown device."""
    if device not in DEVICES:
        raise StudyError(f"device {device!r}", f"known: {', '.join(DEVICES)}", "--device auto")


def read(study: str, source: str, scale: str, machine: str = "", device: str = "auto") -> Recording | None:
    """The rows of a study recorded here, of `machine` or else the machine measured last; None where there are none.

    `device`: which of the live rows, as for `of_device`.
    """
    records = _records(study, source, scale)
    rows = [row for row in journal.latest_rows(records) if row.machine == machine or not machine]
    rows = of_device(rows, device) if source == "live" else rows
    return of_rows(rows, records, study, source, scale) if rows else None


def recorded(study: str, source: str, scale: str, device: str) -> Recording:
    """The tracked rows of a study, at the scale at which a notebook of `scale` shows it.

    Raises StudyError for an unknown source or device, and where nothing is recorded.
    """
    check_source(source)
    check_device(device)
    at = registry.shown_at(study, scale)
    if (recording := read(study, source, at)) is None:
        path = journal_path(study, at, REFERENCE)
        raise StudyError(str(path), "holds no rows", f"plamo-study measure {study} --scale {at}")
    return recording


def of_device(rows: Sequence[Row], device: str) -> list[Row]:
    """The rows that a page about a device shows: for "cpu", none of a GPU; for "gpu", all or, if no GPU ran one, none.

    Simulations ran on neither, and stay.
    """
    on_cpu = [row for row in rows if not getattr(row.cell, "n_gpu_layers", 0)]
    if device == "cpu":
        return on_cpu
    alone = len(on_cpu) == len(rows) and any(row.engine for row in rows)
    return [] if device == "gpu" and alone else list(rows)


def elsewhere(recording: Recording) -> list[Recording]:
    """The rows of the same study recorded here on other machines, a recording for each."""
    where = recording.study, recording.source, recording.scale
    records, own = _records(*where), set(recording.rows["machine"])
    return [of_rows(rows, records, *where) for machine, rows in by_machine(records).items() if machine not in own]


def added(study: str, scale: str, board: str = "") -> list[Recording]:
    """The rows of a study in data/measured/others, a recording for each machine.

    `board`: only those of the first machine that has this GPU.
    """
    records = journal.read(journal_path(study, scale, OTHERS))
    recordings = [of_rows(rows, records, study, "live", scale) for rows in by_machine(records).values()]
    if board:
        recordings = [recording for recording in recordings if board in _boards(recording)][:1]
    return [replace(recording, rows=as_released(recording.rows)) for recording in recordings]


def _boards(recording: Recording) -> list[str]:
    machines = (recording.facts.get(name, {}) for name in recording.rows["machine"].unique())
    return [gpu["chip"] for machine in machines for gpu in machine.get("gpus", ())]


def machines_of(study: str, scale: str) -> dict[str, dict[str, Any]]:
    """The facts, by id, of the machines that have rows of a study recorded or measured here: the reference's first."""
    machines: dict[str, dict[str, Any]] = {}
    for source in SOURCES:
        records = _records(study, source, scale)
        named = {row.machine for row in records if isinstance(row, Row)}
        machines |= {name: fact for name, fact in frame.facts(records).items() if name in named}
    return machines


def as_released(rows: "pd.DataFrame") -> "pd.DataFrame":
    """A frame in which the released engine has one name, whether its CUDA backend was installed or built beside it."""
    return rows.assign(build=rows["build"].replace(CUDA, defects.build_name(())))


def by_machine(records: list[Record]) -> dict[str, list[Row]]:
    """The latest rows of a journal's records, apart by machine."""
    apart: dict[str, list[Row]] = {}
    for row in journal.latest_rows(records):
        apart.setdefault(row.machine, []).append(row)
    return apart


def _records(study: str, source: str, scale: str) -> list[Record]:
    path = journal_path(study, scale, LOCAL if source == "live" else REFERENCE)
    return journal.read(path)


def of_rows(rows: Sequence[Row], records: Sequence[Record], study: str, source: str, scale: str) -> Recording:
    """A recording of these rows of a journal's records, reduced to the machine measured last."""
    facts = frame.facts(records)
    framed = judged.judged(frame.frame(of_one_machine(rows), facts), facts, records, scale, source == "live")
    return Recording(framed, facts, study, scale, source)
