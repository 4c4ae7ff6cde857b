"""Measure a study here, for a notebook or a command, and say meanwhile how far it is and what goes wrong.

In a notebook one line is replaced by the next, and one remains. The command line shows the same lines.
"""

import logging
import os
import shlex
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import chain
from math import nan
from pathlib import Path
from statistics import median
from typing import Any

from llama_meter import journal
from llama_meter.cells import Decode, Gate, Prefill, named
from llama_meter.engine import builds
from llama_meter.errors import FAILED_GATE, NOT_MEASURED, NotJudgedError, StudyError
from llama_meter.journal import LOCAL, REFERENCE, journal_path
from llama_meter.limits import NOT_FINITE
from llama_meter.measure import files, runner, watch
from llama_meter.measure.plan import Plan, check_scale
from llama_meter.measure.request import NOTHING, Request, Sweep
from llama_meter.models import recipes, registry as models
from llama_meter.rows import Row
from llama_meter.serve import server
from plamo_study.read import frame
from plamo_study.read.recording import Recording, of_rows, recorded
from plamo_study.studies import registry

MORE = "give more minutes (--minutes, or -p minutes), or measure when the machine is idle: what was measured is kept"
UNMEASURED = "was not measured here"
ON_GPU = {"GGML_CUDA=ON", "GGML_VULKAN=ON"}  # options of builds that are made for a GPU
WHOLE = 2.0  # minutes of a study that is meaningless in part, below which it is shown as recorded
EVERY_S = 0.5  # between two lines that replace one another


class Line:
    """One line of a notebook about a study, replaced while it is measured. Outside of a kernel nothing is shown."""

    def __init__(self, study: str):
        self.study, self.shown, self.handle = study, 0.0, None
        ipython = sys.modules.get("IPython")
        self.kernel: Any = getattr(ipython.get_ipython() if ipython else None, "kernel", None)

    def say(self, text: str, at_once: bool = True, row: str = "") -> None:
        """Show a text in place of the last one; unless `at_once`, not sooner than EVERY_S after it.

        `row`: what was measured just now, which stays on a terminal.
        """
        if not (at_once or row or time.monotonic() - self.shown > EVERY_S):
            return
        self.shown = time.monotonic()
        self.show(text, row)

    def show(self, text: str, row: str = "") -> None:
        """Show a text in place of the last one, now."""
        if not self.kernel:
            return
        from IPython.display import Markdown, display  # slow to import, and the command line does not need it

        if self.handle:
            self.handle.update(Markdown(text), metadata={"row": row} if row else {})
        else:
            self.handle = display(Markdown(text), display_id=True)

    def fail(self, text: str, name: str) -> None:
        """Show an error of this cell, of a `name` in `runs.GOES_ON`: papermill goes on, and exits with 1 for it."""
        if self.kernel:
            error = {"ename": name, "evalue": text, "traceback": [text]}
            self.kernel.send_response(self.kernel.iopub_socket, "error", error)
        else:
            logging.getLogger(__name__).error(text)


def collect(study: str, request: Request) -> Recording:
    """The rows of a study: of the tracked journal, or live, after what is missing was measured here.

    A study of a notebook has an equal share of its minutes; where it is too short for all, the first cells of its plan
    are measured. A live study that there was no time for has no rows, or the recorded ones where it is meaningless in
    part, and one line says so.

    Raises StudyError for an unknown study, a GPU requested where there is none, and nothing recorded at this scale.
    """
    scale = request.scale
    if request.source != "live":
        return recorded(study, scale)
    planned, line = build(study, registry.shown_at(study, scale), request.device, request.sweep), Line(study)
    path, whole = journal_path(study, planned.scale, LOCAL), registry.STUDIES[study].whole
    share = request.minutes / max(len(registry.of_notebook(study, scale, request.sweep.files)), 1)
    if whole and 0 < share < WHOLE:
        why = f"it must be measured whole, and {request.minutes:g} minutes are too few for the whole page"
    else:
        summary = measure(planned, path, line, request.sweep if registry.varies(study) else NOTHING, minutes=share)
        why = "" if says_something(planned, summary) and not (whole and summary.lacking) else lacking(summary)
    if not why:
        of = of_rows(summary.rows, journal.read(path), study, "live", planned.scale)
        return replace(of, left_out=summary.left_out)
    if whole and journal.stored(journal_path(study, planned.scale, REFERENCE)):
        line.say(f"*{study} is shown as recorded: {why}.*")
        return recorded(study, scale)
    line.say(f"*{study} {UNMEASURED}: {why}.*")
    return Recording(frame.frame([], {}), {}, study, planned.scale, "live", lacks=why)


def build(study: str, scale: str, device: str = "auto", sweep: Sweep = NOTHING) -> Plan:
    """The plan of a study for the engine and machine at hand, and a device.

    `sweep`: files and values of a user's own, for a study that varies them.
    """
    if study not in registry.STUDIES:
        raise StudyError(f"study {study!r}", f"unknown; known: {', '.join(registry.STUDIES)}", "plamo-study run")
    check_scale(scale)
    gpu, planned = _offloads(os.environ.get("LLAMA_CPP_LIB_PATH", ""), device), registry.plan(study)
    return planned(scale, gpu=gpu, sweep=sweep) if registry.varies(study) else planned(scale, gpu=gpu)


@cache
def _offloads(engine: str, device: str) -> bool:
    """Whether layers go to a GPU: the engine in use is asked in a process of its own, once.

    StudyError where a GPU is requested and the engine has none, and for a build made for a GPU that finds none: its
    rows would be a CPU's under a GPU's name.
    """
    if device == "cpu":
        return False
    facts = runner.engine_facts()
    if facts["gpu_offload"]:
        return True
    if device == "gpu" or set(facts.get("options", ())) & ON_GPU:
        why = "has no GPU backend, or finds no GPU: it would measure the CPU"
        raise StudyError(f"engine {engine or 'in use'}", why, "nvidia-smi must list one; or give the device cpu")
    return False


def measure(
    planned: Plan, path: Path, line: Line, sweep: Sweep = NOTHING, minutes: float = 0.0, **how: Any
) -> runner.Summary:
    """Write the files that a plan lacks, measure what its journal lacks, and say all of it in `line`.

    `minutes` are for measuring: writing files is not counted. `sweep`: what of the plan a user chose. `how`: as for
    `runner.sweep`. Raises UnmeasuredError for a program that the plan needs, and StudyError for a disk too small.
    """
    before, began, study = [until(minutes)] if minutes else [], time.monotonic(), planned.study
    refused = set[str]()
    if planned.program:
        server.program() if planned.program == server.BINARY else builds.program(planned.program)
    for text in before:
        line.say(text)

    def on_bytes(file: str, done: int, total: int) -> None:
        line.say(f"*{study}: writing {file}, {done / max(total, 1):.0%}*", at_once=False)

    def refuse(row: Row | None) -> None:
        if row and row.refuses and (text := trouble(row)) not in refused:
            refused.add(text)
            line.fail(text, FAILED_GATE)

    def on_progress(event: runner.Progress) -> None:
        refuse(event.row)
        left = f", about {_long(event.remaining_s)} left" if event.remaining_s else ""
        now = f"*{study}: {event.done} of {event.total}, {named(event.task.cell)}{left}*"
        line.say("  \n".join([*before, now]), at_once=False, row=speed(event.row) if event.row else "")

    try:
        files.make_models(planned, on_bytes)
        summary = runner.sweep(planned, path, on_progress, minutes=minutes, **how)
    except BaseException:
        line.say(f"*{study}: not measured to its end. What was measured is kept: run it again.*")
        raise
    for row in summary.rows:
        refuse(row)
    unseen = [f"no time was left for {file[0]} in {file[2]}: {_goes_on(planned, sweep)}" for file in summary.unseen]
    for text in (*unseen, *_failed(planned, summary)):
        line.fail(text, NOT_MEASURED)
    done = f"*{study}: all rows were measured before.*"
    if summary.measured:
        done = f"*{study}: {summary.measured} processes measured here in {_long(time.monotonic() - began)}.*"
    lacks = f"{lacking(summary).capitalize()}; {MORE}." if summary.lacking else ""
    line.say(" ".join(filter(None, (done, lacks, _no_time(planned, summary, sweep)))))
    return summary


def says_something(planned: Plan, summary: runner.Summary) -> bool:
    """Whether anything was measured with a file, where a plan has any, or a file was refused."""
    on_files = {cell for cell in planned.cells if cell.files} or set(planned.cells)
    return any(row.refuses or row.cell in on_files for row in summary.rows)


def lacking(summary: runner.Summary) -> str:
    """Why a finding lacks rows: how many processes did not run in time, and how many were disturbed."""
    hit = len(watch.disturbed(summary.rows))
    disturbed = f", and {hit} of the {len(summary.rows)} that ended were disturbed" if hit else ""
    return f"the time was up before {summary.lacking} processes that its finding needs had ended{disturbed}"


def until(minutes: float) -> str:
    """When measuring for so many minutes ends at the latest."""
    end = (datetime.now(UTC) + timedelta(minutes=minutes)).astimezone()  # from the instant: the night may change clocks
    day = "" if end.date() == datetime.now().date() else f"{end:%a} "
    return f"Measures for {_long(60 * minutes)} at most, until {day}{end:%H:%M}."


def _long(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} seconds"
    return f"{minutes} minutes" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


# ---------------------------------------------------------------- what went wrong


def trouble(row: Row) -> str:
    """What is wrong with a row; of a gate, also what follows from it and what to do."""
    if row.failure and row.failure.message.startswith(f"{NotJudgedError.__name__}: "):
        role = row.failure.message.split(": ", 2)[2].partition(";")[0]
        return f"{row.cell.files[0][0]} in {row.cell.files[0][2]} is {role}"
    wrong = f"{row.status} in {row.failure}" if row.failure else f"wrong result: {_wrong(row)}"
    if not isinstance(row.cell, Gate):
        return f"{named(row.cell)}: {wrong}"
    name = recipes.model_path(*row.cell.files[0]).name
    which = f"gate of {row.cell.model} in {row.cell.dtype}"
    return f"{which}: {wrong}. Nothing is timed with this file: `plamo-study models check '{name}'` looks for the cause"


def _wrong(row: Row) -> str:
    """What disagrees, with its relative error; all checks where that is not known."""
    differ = [
        name.removesuffix("_agrees") for name, agrees in row.checks.items() if name.endswith("_agrees") and not agrees
    ]
    errors = {name: row.checks.get(f"{name}_error", nan) for name in differ}
    if "finite" in differ or any(error > NOT_FINITE for error in errors.values()):
        return "its logits are not finite"
    return ", ".join(f"{name} off by {error:.2g}" for name, error in errors.items()) or str(row.checks)


def speed(row: Row) -> str:
    """A row's tokens a second and its verdict, in words; empty for a row that times no prompt and no step."""
    if row.status != "ok" or row.anchor or not isinstance(row.cell, Prefill | Decode):
        return ""
    each, times = 1, row.samples_ns  # of steps
    if isinstance(row.cell, Prefill):  # read in one call or several
        each, times = row.cell.n_prompt, [[sum(sample)] for sample in times]
    taken = median(chain(*times)) / 1e9
    verdict = {True: "right", False: "wrong", None: "as its first process"}[row.valid]
    return f"{named(row.cell)}: {each * row.cell.n_seq / taken:,.1f} tokens/s, {verdict}"


def _failed(planned: Plan, summary: runner.Summary) -> list[str]:
    """A sentence about rows that failed and are no answer, and the command that measures them anew, if any did."""
    rows = [row for row in summary.unexpected if not row.refuses]
    which = "--file FILE" if planned.scale == models.FILE_SCALE else f"--scale {planned.scale}"
    how = f"`plamo-study measure {planned.study} {which} --retry-failed` measures them anew"
    return [f"{len(rows)} rows failed, such as {trouble(rows[0])}: {how}"] if rows else []


def _no_time(planned: Plan, summary: runner.Summary, sweep: Sweep) -> str:
    """How many cells there was no time for, and the command that measures them; empty where there are none."""
    if not summary.left_out:
        return ""
    return f"No time for {len(summary.left_out)} of {len(planned.cells)} cells: {_goes_on(planned, sweep)}"


def _goes_on(planned: Plan, sweep: Sweep) -> str:
    """The command that measures what a plan lacks; files by their names, as pages are published."""
    chosen = [f"--file {shlex.quote(models.FILES[file].path.name)}" for file in sweep.files]
    chosen = chosen or [f"--scale {planned.scale}"]
    values = [f"-p {name} {text}" for name, text in sweep.texts().items() if name != "draft_file"]
    values += [f"-p draft_file {shlex.quote(models.FILES[file].path.name)}" for file in sweep.draft_file]
    return f"`{' '.join(['plamo-study measure', planned.study, *chosen, *values])}` goes on, for as long as it takes"
