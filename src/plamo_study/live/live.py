"""What a user is told while something is measured: what to know beforehand, how far it is, and a gate that failed.

The command line prints these lines. In a notebook one line is replaced by the next, and one remains.
"""

import logging
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from itertools import chain
from math import nan
from statistics import median
from typing import Any

from llama_meter import paths
from llama_meter.cells import AnyCell, Decode, Gate, OnModel, Prefill
from llama_meter.engine import builds
from llama_meter.errors import FAILED_GATE, NotJudgedError, StudyError
from llama_meter.measure import files, machine, runner
from llama_meter.measure.asked import Sweep
from llama_meter.measure.plan import Plan
from llama_meter.models import given, header, recipes
from llama_meter.rows import Row
from plamo_study.studies.your_machine import at_hand

LONG = 5.0  # minutes: of what may take longer more is said beforehand
NAMED = 3  # cells of those that there was no time for
EVERY_S = 0.5  # between two lines that replace one another
NOT_FINITE = 1e300  # an error of this size stands for logits that are no numbers
SLOWS = {  # what of a machine's state makes its times slow
    "power_source": {"battery": "on battery: plug it in", "ac": "on mains power"},
    "power_mode": {"low": "Low Power Mode is on: turn it off", "powersave": "the clock's governor is powersave"},
    "thermal": {"nominal": "cool"} | dict.fromkeys(("moderate", "heavy", "trapping"), "hot: let it cool down"),
    "memory_pressure": dict.fromkeys(("warning", "critical"), "short of memory: close other programs"),
}


OnBytes = Callable[[str, int, int], None]  # a file, its bytes so far, and all of them


# ---------------------------------------------------------------- beforehand


def beforehand(plans: Sequence[Plan], minutes: float) -> list[str]:
    """What to know before plans are measured for so many minutes; 0: as long as they take.

    When it ends at the latest, and what is to be built; of what may take longer than LONG also its files and the disk,
    and what slows this machine, as far as it says.
    """
    if not plans:
        return []
    end = (datetime.now(UTC) + timedelta(minutes=minutes)).astimezone()  # from the instant: the night may change clocks
    day = "" if end.date() == datetime.now().date() else f"{end:%a} "
    said = [f"Measures for {_long(60 * minutes)} at most, until {day}{end:%H:%M}."] if minutes else []
    if minutes >= LONG or not (minutes or all(planned.scale == "mini" for planned in plans)):
        said += [_files(plans), _state()]
    said += [
        f"`plamo-study engine build {name}` first: {studies} {'needs' if ',' not in studies else 'need'} it"
        for name, studies in _unbuilt(plans).items()
    ]
    return [line for line in said if line]


def _long(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} seconds"
    return f"{minutes} minutes" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def _files(plans: Sequence[Plan]) -> str:
    """The files at hand with their sizes, and those to be written against the room on the disk."""
    every = dict.fromkeys(file for planned in plans for file in files.needed(planned))
    here = {path.name: path.stat().st_size for file in every if (path := recipes.model_path(*file)).exists()}
    here |= {given.FILES[file].path.name: given.FILES[file].n_bytes for file in every if file in given.FILES}
    lacking = at_hand.lacking(plans)
    said = [f"{name} ({_size(n_bytes)})" for name, n_bytes in here.items()]
    said = said[:4] + ([f"{len(said) - 4} more"] if len(said) > 4 else [])
    line = f"Files: {', '.join(said)}." if said else ""
    if lacking:
        need = sum(lacking.values())
        disk = next(folder for folder in (paths.MODELS, *paths.MODELS.parents) if folder.exists())
        free = shutil.disk_usage(disk).free
        line += f" {len(lacking)} to be written: {_size(need)} of {_size(free)} free."
        line += " That is too little: free some space." if need > free else ""
    return line.strip()


def _size(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:.1f} GB" if n_bytes >= 1e8 else f"{n_bytes / 1e6:.1f} MB"


def _state() -> str:
    """What of this machine's state bears on its times, as far as it says."""
    state = machine.state()
    said = [words for name, wordings in SLOWS.items() if (words := wordings.get(getattr(state, name)))]
    said += ["leave the lid open: closed, it sleeps"] if machine.sleeps_when_closed() else []
    return f"This machine: {'; '.join(said)}." if said else ""


def _unbuilt(plans: Sequence[Plan]) -> dict[str, str]:
    """The builds that plans need and that are not here, each with the studies that need it."""
    lacking: dict[str, list[str]] = {}
    for planned in plans:
        try:
            if planned.program:
                builds.program(planned.program)
        except StudyError:
            lacking.setdefault(planned.program, []).append(planned.study)
    return {name: ", ".join(dict.fromkeys(studies)) for name, studies in lacking.items()}


# ---------------------------------------------------------------- what went wrong


def trouble(row: Row) -> str:
    """What is wrong with a row; of a gate, also what follows from it and what to do."""
    if row.failure and row.failure.message.startswith(f"{NotJudgedError.__name__}: "):
        role = row.failure.message.split(": ", 2)[2].partition(";")[0]
        return f"{row.cell.files[0][0]} in {row.cell.files[0][2]} is {role}"
    said = f"{row.status} in {row.failure}" if row.failure else f"wrong result: {_wrong(row)}"
    if not isinstance(row.cell, Gate):
        return f"{named(row.cell)}: {said}"
    return (
        f"gate of {row.cell.model} in {row.cell.dtype}: {said}. Nothing is timed with this file. {_instead(row.cell)}"
    )


def _wrong(row: Row) -> str:
    """What disagrees, with its relative error; all checks where that is not known."""
    differ = [
        name.removesuffix("_agrees") for name, agrees in row.checks.items() if name.endswith("_agrees") and not agrees
    ]
    errors = {name: row.checks.get(f"{name}_error", nan) for name in differ}
    if "finite" in differ or any(error > NOT_FINITE for error in errors.values()):
        return "its logits are not finite"
    return ", ".join(f"{name} off by {error:.2g}" for name, error in errors.items()) or str(row.checks)


def _instead(gate: Gate) -> str:
    """What to do about a file whose gate failed; where `ssm_out` meets too narrow a type, the file to measure."""
    path, base = recipes.model_path(*gate.files[0]), gate.dtype.partition("-")[0]
    if _overflows(gate):
        asked = f"--type {base} --keep ssm_out=BF16"
        return (
            f"Metal casts the input of ssm_out to F16, where it may overflow. Measure the file with ssm_out in "
            f"BF16, as the published study did: `plamo-study models quantize SOURCE.gguf {asked}`"
        )
    return f"`plamo-study models check '{path.name}'` looks for the cause"


def _overflows(gate: Gate) -> bool:
    """Whether Metal casts the input of a file's `ssm_out` to F16, and its gate ran there."""
    if not (gate.n_gpu_layers and machine.MACOS):
        return False
    try:
        tensors = header.read(recipes.model_path(*gate.files[0])).tensors
    except (OSError, StudyError):
        return False
    return any(header.type_name(tensor) != "BF16" for tensor in tensors if tensor.name.endswith("ssm_out.weight"))


def speed(row: Row) -> str:
    """A row's tokens a second and its verdict, in words; empty for a row that times no prompt and no step."""
    if row.status != "ok" or row.anchor or not isinstance(row.cell, Prefill | Decode):
        return ""
    each, times = 1, row.samples_ns  # of steps
    if isinstance(row.cell, Prefill):  # read in one call or several
        each, times = row.cell.n_prompt, [[sum(sample)] for sample in times]
    taken = median(chain(*times)) / 1e9
    judged = {True: "right", False: "wrong", None: "as its first process"}[row.valid]
    return f"{named(row.cell)}: {each * row.cell.n_seq / taken:,.1f} tokens/s, {judged}"


def named(cell: AnyCell) -> str:
    """A cell in words."""
    what = cell.workload
    if isinstance(cell, OnModel):
        together = f" × {cell.shape[0]}" if cell.shape[0] > 1 else ""
        what = f"{cell.model} {cell.dtype} {what} {cell.shape[1]}+{cell.shape[2]}{together}"
    return f"{what} ({cell.n_threads} threads)"


def no_time(planned: Plan, summary: runner.Summary, asked: Sweep) -> str:
    """The cells for which there was no time, and the command that measures them; empty where there are none."""
    if not summary.left_out:
        return ""
    few, rest = summary.left_out[:NAMED], len(summary.left_out) - NAMED
    names = ", ".join([named(cell) for cell in few] + ([f"{rest} more"] if rest > 0 else []))
    return f"No time for {len(summary.left_out)} of {len(planned.cells)} cells ({names}): {_goes_on(planned, asked)}"


def unseen(planned: Plan, summary: runner.Summary, asked: Sweep) -> list[str]:
    """Each file of a user's own that nothing is said about, why, and the command that measures it."""
    judged = {file for row in summary.rows if isinstance(row.cell, Gate) for file in row.cell.files}
    return [
        f"{file[0]} in {file[2]} {'is right' if file in judged else 'was not judged'}, and there was no time to "
        f"{'time' if file in judged else 'judge'} it: nothing of it is measured. {_goes_on(planned, asked)}"
        for file in summary.unseen
    ]


def _goes_on(planned: Plan, asked: Sweep) -> str:
    """The command that measures what a plan lacks; files by their names, as pages are published."""
    chosen = [f"--file {shlex.quote(given.FILES[file].path.name)}" for file in asked.files]
    scale = [] if asked.files else [f"--scale {planned.scale}"]
    how = " ".join(["plamo-study measure", planned.study, *scale, *chosen, *asked.options()])
    return f"`{how}` goes on, for as long as it takes"


def left(seconds: float) -> str:
    """The time that is left, in words; empty where nothing says it yet."""
    if not seconds:
        return ""
    return f"about {seconds / 60:.0f} min left" if seconds > 90 else f"about {seconds:.0f} s left"


# ---------------------------------------------------------------- who listens


class Listener:
    """Whoever is told how a plan is measured. This one says nothing."""

    def begin(self, before: list[str]) -> None:
        """What to know beforehand."""

    def writing(self) -> AbstractContextManager[OnBytes | None]:
        """While files are written; gives what listens to their bytes."""
        return nullcontext()

    def measuring(self) -> AbstractContextManager[None]:
        """While the sweep runs."""
        return nullcontext()

    def progress(self, event: runner.Progress) -> None:
        """What the sweep does now."""

    def refuse(self, row: Row) -> None:
        """A gate failed, now or in an earlier call."""

    def fail(self, text: str, name: str) -> None:
        """What else is wrong, and its `name` in `run.runs.GOES_ON`."""

    def end(self, summary: runner.Summary, no_time: str) -> None:
        """The rows of the plan, and for what there was no time."""


class Line(Listener):
    """One line of a notebook, replaced while something is measured. Outside of a kernel nothing is shown."""

    def __init__(self, study: str):
        self.study, self.began, self.shown, self.said = study, time.monotonic(), 0.0, set[str]()
        self.kernel, self.handle = _kernel(), None
        self.before: list[str] = []

    def say(self, text: str, at_once: bool = True) -> None:
        """Show a text in place of the last one; unless `at_once`, not sooner than EVERY_S after it."""
        if not self.kernel or not (at_once or time.monotonic() - self.shown > EVERY_S):
            return
        from IPython.display import Markdown, display  # slow to import, and the command line does not need it

        self.shown = time.monotonic()
        if self.handle:
            self.handle.update(Markdown(text))
        else:
            self.handle = display(Markdown(text), display_id=True)

    def begin(self, before: list[str]) -> None:
        """Say what is to be known beforehand; it stays above the progress, and goes with it."""
        self.before = before
        if before:
            self.say("  \n".join(before))

    def progress(self, event: runner.Progress) -> None:
        """Say what the sweep does now, and a gate that failed, at once."""
        if event.row:
            self.refuse(event.row)
        now = f"{self.study}: {event.done} of {event.total}, {named(event.task.cell)}"
        now = ", ".join(filter(None, (now, left(event.remaining_s))))
        self.say("  \n".join([*self.before, f"*{now}*"]), at_once=False)

    def refuse(self, row: Row) -> None:
        """Say of a gate that failed what follows."""
        if row.refuses:
            self.fail(trouble(row), FAILED_GATE)

    def fail(self, text: str, name: str) -> None:
        """Say something once, as an error of this cell of a `name` in `run.runs.GOES_ON`.

        Papermill writes the whole notebook, and exits with 1 because of it.
        """
        if text in self.said:
            return
        self.said.add(text)
        if self.kernel:
            error = {"ename": name, "evalue": text, "traceback": [text]}
            self.kernel.send_response(self.kernel.iopub_socket, "error", error)
        else:
            logging.getLogger(__name__).error(text)

    def end(self, summary: runner.Summary, no_time: str) -> None:
        """Leave one line behind: what was measured, and for what there was no time."""
        if not (self.handle or no_time):
            return
        said = f"{self.study}: all rows were measured before."
        if summary.measured:
            took = _long(time.monotonic() - self.began) if time.monotonic() - self.began > 90 else "moments"
            said = f"{self.study}: {summary.measured} processes measured here in {took}."
        self.say(f"*{said}* {no_time}".strip())


@contextmanager
def line(study: str) -> Iterator[Line]:
    """A line for as long as something is measured; it says so where that is interrupted."""
    shown = Line(study)
    try:
        yield shown
    except BaseException:
        if shown.handle:
            shown.say(f"*{study}: not measured to its end. What was measured is kept: run the cell again.*")
        raise


def _kernel() -> Any:
    """The kernel that runs this notebook; None outside of one."""
    import sys

    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return getattr(shell, "kernel", None)
