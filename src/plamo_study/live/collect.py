"""Rows for a notebook, of one study or of all: recorded on the reference machine, or live, measured here."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from llama_meter import journal
from llama_meter.engine import builds
from llama_meter.errors import NOT_MEASURED, StudyError
from llama_meter.journal import LOCAL, REFERENCE, journal_path
from llama_meter.measure import bench, files, plan, runner, watch
from llama_meter.measure.asked import NOTHING, Sweep
from llama_meter.measure.identity import renewed
from plamo_study.live import budget, live
from plamo_study.plans import registry as studies
from plamo_study.read import frame
from plamo_study.read.recording import Recording, check_device, check_source, of_rows

MORE = "give more minutes (--minutes, or -p minutes), or measure when the machine is idle: what was measured is kept"
LIVE = "-p source live (papermill), or plamo-study run, which is live by default"
ON_GPU = {"GGML_CUDA=ON", "GGML_VULKAN=ON"}  # options of builds that are made for a GPU
DEVICE = "PLAMO_STUDY_DEVICE"  # environment variable, which kernels inherit


def collect(
    study: str,
    source: str = "recorded",
    scale: str = "mini",
    minutes: float = 0,
    device: str = "auto",
    asked: Sweep = NOTHING,
) -> Recording:
    """The rows of a study: `recorded` reads the tracked journal, `live` first measures here what is missing.

    `scale`: that of the notebook; a study that is always shown at mini is collected at mini. `minutes`: time for
    measuring all that the notebook of this study shows; 0: as long as its plans take. If that is too short for all,
    the first cells of its plan are measured. A live study that there was no time for has no rows, and one line says
    what measures it. `device`: where live measures, one of DEVICES; recorded rows are shown as they are. `asked`: files
    and values that a user asked for; these are measured, so the source is live.

    Raises
    ------
    StudyError
        Unknown study, source, scale or device, a GPU asked for where there is none, nothing recorded at this scale, or
        values asked for of recorded rows.

    """
    check_source(source)
    check_device(device)
    if asked != NOTHING and source != "live":
        raise StudyError(f"source {source!r}", "files and values of your own are measured, not recorded", LIVE)
    at = studies.shown_at(study, scale) if study in studies.STUDIES else scale
    at = plan.scale_of(at, asked)
    summary, why = _measured(study, scale, at, minutes, device, asked) if source == "live" else (None, "")
    if why:
        _say(f"*{study} was not measured here: {why}. To measure it, {MORE}.*")
        return Recording(frame.frame([], {}), {}, study, at, source, lacks=why)
    path = journal_path(study, at, LOCAL if summary else REFERENCE)
    records = renewed(journal.read(path))
    rows = summary.rows if summary else journal.latest_rows(records)
    if not rows:
        raise StudyError(str(path), "holds no rows", f"plamo-study measure {study} --scale {at}")
    found = of_rows(rows, records, study, source, at)
    return replace(found, left_out=summary.left_out if summary else ())


def _measured(
    study: str, scale: str, at: str, minutes: float, device: str, asked: Sweep
) -> tuple[runner.Summary | None, str]:
    """Summary of a live study, or why there was no time for it.

    Where the time is too short for all that its finding needs, the first half of it is tried, and so on to the first
    cell on a file. What would be enough for all is said before anything is measured.
    """
    base = studies.shown_at(study, scale) if study in studies.STUDIES else scale
    planned, share = build(study, base, device, asked), budget.of_study(study, scale, minutes, asked)
    if share == budget.LEFT_OUT:
        return None, f"it must be measured whole, and {minutes:g} minutes are too few for the whole page"
    on_files = {cell for cell in planned.cells if cell.files} or set(planned.cells)
    least, enough = next(n for n, cell in enumerate(planned.cells, 1) if cell in on_files), ""
    with live.line(study) as line:
        line.begin(live.beforehand([live.Ahead(planned, share)]))
        while True:
            try:
                summary = measure(planned, journal_path(study, at, LOCAL), line.progress, minutes=share)
            except runner.NoTimeError as error:
                needed = min(planned.needed, len(planned.cells))
                most = budget.enough(minutes, share, error.needed_s)
                enough = enough or f"{error.why}. {most} minutes would be enough"
                if studies.STUDIES[study].whole or needed <= least:
                    return None, enough
                planned = replace(planned, needed=max(needed // 2, least))
                continue
            if not any(row.refuses or row.cell in on_files for row in summary.rows):
                return None, enough or lacking(summary)
            for row in summary.unexpected:
                line.refuse(row)
            for said in live.unseen(planned, summary, asked):
                line.fail(said, NOT_MEASURED)
            line.end(summary, live.no_time(planned, summary, asked))
            return summary, ""


def lacking(summary: runner.Summary) -> str:
    """Why a finding lacks rows: how many processes did not run in time, and how many were disturbed."""
    hit = len(watch.disturbed(summary.rows))
    disturbed = f", and {hit} of the {len(summary.rows)} that ended were disturbed" if hit else ""
    return f"the time was up before {summary.lacking} processes that its finding needs had ended{disturbed}"


def _say(what: str) -> None:
    """Show a line in the notebook."""
    from IPython.display import Markdown, display  # slow to import, and the command line does not need it

    display(Markdown(what))


def build(study: str, scale: str, device: str = "auto", asked: Sweep = NOTHING) -> plan.Plan:
    """The plan of a study for the engine and machine at hand, and a device; "auto": the one that `--device` named.

    `asked`: files and values of a user's own, for a study that varies them.
    """
    if study not in studies.STUDIES:
        raise StudyError(f"study {study!r}", f"unknown; known: {', '.join(studies.STUDIES)}", "plamo-study run")
    plan.check_scale(scale)
    device = os.environ.get(DEVICE, "auto") if device == "auto" else device
    gpu, found = _offloads(os.environ.get("LLAMA_CPP_LIB_PATH", ""), device), studies.STUDIES[study]
    return found.plan(scale, gpu=gpu, sweep=asked) if asked != NOTHING else found.plan(scale, gpu=gpu)


@cache
def _offloads(engine: str, device: str) -> bool:
    """Whether layers go to a GPU: the engine in use is asked in a process of its own, once.

    StudyError for an unknown device, where a GPU is asked for and the engine has none, and for a build made for a GPU
    that finds none: its rows would be a CPU's under a GPU's name.
    """
    check_device(device)
    if device == "cpu":
        return False
    facts = bench.engine_facts()
    if facts["gpu_offload"]:
        return True
    if device == "gpu":
        why = "the engine in use was built without a GPU backend, or sees no GPU"
        raise StudyError("device gpu", why, "plamo-study engine list, or the device cpu or auto")
    if set(facts.get("options", ())) & ON_GPU:
        why = "was built for a GPU and finds none: it would measure the CPU"
        raise StudyError(f"engine {engine}", why, "nvidia-smi or vulkaninfo, which must list one; or the device cpu")
    return False


def measure(
    planned: plan.Plan,
    path: Path,
    on_progress: runner.OnProgress | None = None,
    retry_failed: bool = False,
    beside: Sequence[Path] = (),
    minutes: float = 0,
) -> runner.Summary:
    """Write the models a plan needs and measure what its journal lacks, other builds of the engine beside it.

    `minutes`: for measuring; writing models is not counted. StudyError where a program that it needs is not built.
    """
    prepare(planned, minutes)
    return runner.sweep(planned, path, on_progress, retry_failed, beside, minutes)


def prepare(planned: plan.Plan, minutes: float, on_bytes: Callable[[str, int, int], None] | None = None) -> None:
    """Write the models that a plan lacks, once it is clear that it can be measured; as `measure` does."""
    if planned.program:
        builds.program(planned.program)
    files.check_released(planned)
    runner.check_time(planned, minutes)
    files.make_models(planned, on_bytes)
