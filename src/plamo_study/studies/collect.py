"""Rows for a notebook: recorded ones of the reference machine, or live ones measured here."""

from collections.abc import Sequence
from pathlib import Path

from plamo_study.errors import StudyError
from plamo_study.measure import files, journal, plan, runner
from plamo_study.measure.recording import LOCAL, REFERENCE, Recording, check_source, journal_path, of_rows
from plamo_study.studies import registry as studies


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
    return of_rows(rows, records, study, source, scale)


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
) -> runner.Summary:
    """Write the models a plan needs and measure what its journal lacks, other builds of the engine beside it."""
    files.make_models(planned)
    return runner.sweep(planned, path, on_progress, retry_failed, beside)
