"""Rows for a notebook: recorded ones of the reference machine, or live ones measured here."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from plamo_study import paths
from plamo_study.errors import StudyError
from plamo_study.measure import files, frame, journal, plan, runner, studies
from plamo_study.measure.rows import Row

REFERENCE, LOCAL = "reference", "local"
SOURCES = ("recorded", "live")


@dataclass(frozen=True)
class Recording:
    """The rows of one study at one scale, all of one machine, the facts they refer to, and where they came from."""

    rows: pd.DataFrame
    facts: dict[str, dict[str, Any]]
    study: str
    scale: str
    source: str


def journal_path(study: str, scale: str, place: str) -> Path:
    """Where a study's journal lies: data/measured/<place>/<study>.<scale>.jsonl."""
    return paths.MEASURED / place / f"{study}.{scale}.jsonl"


def collect(
    study: str, source: str = "recorded", scale: str = "mini", on_progress: runner.OnProgress | None = None
) -> Recording:
    """The rows of a study: `recorded` reads the tracked journal, `live` first measures here what is missing.

    Raises
    ------
    StudyError
        Unknown study, source or scale, or nothing recorded at this scale.

    """
    check_source(source)
    path = journal_path(study, scale, LOCAL if source == "live" else REFERENCE)
    measured = measure(build(study, scale), path, on_progress).rows if source == "live" else None
    records = journal.read(path)
    rows = journal.latest_rows(records) if measured is None else measured
    if not rows:
        raise StudyError(str(path), "holds no rows", f"plamo-study run {study} --scale {scale} -p source live")
    facts = frame.facts(records)
    return Recording(frame.frame(of_one_machine(rows), facts), facts, study, scale, source)


def of_one_machine(rows: Sequence[Row]) -> list[Row]:
    """The rows of the machine that was measured last: blocks, drifts and ratios of two machines must never mix."""
    last = max(rows, key=lambda row: row.started).machine
    return [row for row in rows if row.machine == last]


def framed(summary: runner.Summary, path: Path) -> tuple[pd.DataFrame, dict[str, dict[str, Any]]]:
    """The frame of a sweep's rows, and the facts of its journal."""
    facts = frame.facts(journal.read(path))
    return frame.frame(summary.rows, facts), facts


def check_source(source: str) -> None:
    """StudyError unless rows can come from there."""
    if source not in SOURCES:
        raise StudyError(f"source {source!r}", f"unknown; known: {', '.join(SOURCES)}", "plamo-study run --source live")


def build(study: str, scale: str) -> plan.Plan:
    """The plan of a study for the engine and machine at hand."""
    if study not in studies.STUDIES:
        raise StudyError(f"study {study!r}", f"unknown; known: {', '.join(studies.STUDIES)}", "plamo-study run")
    plan.check_scale(scale)
    return studies.STUDIES[study](scale, gpu=runner.engine_facts()["gpu_offload"])


def measure(
    planned: plan.Plan,
    path: Path,
    on_progress: runner.OnProgress | None = None,
    retry_failed: bool = False,
    beside: Sequence[Path] = (),
) -> runner.Summary:
    """Write the models a plan needs and measure what its journal lacks, other builds of the engine beside it."""
    files.make_models(planned)
    return runner.sweep(planned, path, on_progress, retry_failed, beside)
