"""Rows for a notebook: recorded ones of the reference machine, or live ones measured here."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from plamo_study.errors import StudyError
from plamo_study.measure import files, journal, plan, runner
from plamo_study.measure.recording import LOCAL, REFERENCE, Recording, check_source, journal_path, of_rows
from plamo_study.studies import budget, registry as studies


def collect(study: str, source: str = "recorded", scale: str = "mini", minutes: float = 0) -> Recording:
    """The rows of a study: `recorded` reads the tracked journal, `live` first measures here what is missing.

    `minutes`: time for measuring what the notebook of this study shows; 0: as long as its plans take.

    Raises
    ------
    StudyError
        Unknown study, source or scale, or nothing recorded at this scale.

    """
    check_source(source)
    own = budget.of_study(study, scale, minutes) if source == "live" else budget.LEFT_OUT
    live = own != budget.LEFT_OUT
    path = journal_path(study, scale, LOCAL if live else REFERENCE)
    summary = measure(build(study, scale), path, minutes=own) if live else None
    records = journal.read(path)
    rows = summary.rows if summary else journal.latest_rows(records)
    if not rows:
        raise StudyError(str(path), "holds no rows", f"plamo-study run {study} --scale {scale} -p source live")
    found = of_rows(rows, records, study, "live" if live else "recorded", scale)
    return replace(found, left_out=summary.left_out if summary else ())


def build(study: str, scale: str) -> plan.Plan:
    """The plan of a study for the engine and machine at hand."""
    if study not in studies.STUDIES:
        raise StudyError(f"study {study!r}", f"unknown; known: {', '.join(studies.STUDIES)}", "plamo-study run")
    plan.check_scale(scale)
    return studies.STUDIES[study].plan(scale, gpu=runner.engine_facts()["gpu_offload"])


def measure(
    planned: plan.Plan,
    path: Path,
    on_progress: runner.OnProgress | None = None,
    retry_failed: bool = False,
    beside: Sequence[Path] = (),
    minutes: float = 0,
) -> runner.Summary:
    """Write the models a plan needs and measure what its journal lacks, other builds of the engine beside it."""
    files.make_models(planned)
    return runner.sweep(planned, path, on_progress, retry_failed, beside, minutes)
