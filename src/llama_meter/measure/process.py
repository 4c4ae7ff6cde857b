"""One worker process from spawn to outcome. Every end is an outcome; TimeUpError means that it did not end in time."""

import math
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from llama_meter import children, paths
from llama_meter.cells import AnyCell, Gate
from llama_meter.engine.bindings import described
from llama_meter.measure import machine, watch, worker
from llama_meter.rows import Evidence, Failure, Measured, Status, reported_checks

LOG_LINES = 20
MOST_LOG = 1 << 24  # bytes of a log that is read while the worker runs
BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")  # read when numpy is loaded
# Threads of the engine sleep while they wait for one another. Read by OpenMP alone: an engine built without it, as on a
# Mac, has threads of its own, which spin for a moment and then sleep.
YIELDING = {"OMP_WAIT_POLICY": "passive"}
BUILD_FOLDER = re.compile(  # where the engine was built: no row needs it
    r"(?<![\w./-])/\S*?(?:llama\.cpp/|(?=ggml/src/)|(?<=/)(?=[^/\s]+\.(?:cpp|c|h):\d))"
)
Late = Literal["hang", "starved", "stopped"]
SILENT: dict[Late | Literal["quota"], str] = {
    "hang": "no answer within the time limit",
    "starved": "no answer, but other programs kept it from computing",
    "stopped": "no answer, but it was stopped or the machine slept",
    "quota": "no answer, but a CPU quota kept it from computing",
}
KILLED = "another program killed it; where memory runs out, the system does: take a smaller file or a shorter context"
LOOKS = 12  # checks of a worker within its time limit, each costing this process some tens of microseconds
LOG_LOOK_S = 0.2  # between two checks of a worker whose log is followed
MOST_LIMITS, MOST_MORE_S = 5, 300.0  # wall time of a starved worker: most limits, and seconds beyond the first
ASSERT = re.compile(r"GGML_ASSERT\(.*\) failed|.*GGML_ABORT.*")


class TimeUpError(Exception):
    """The time for measuring was up before a worker had ended. It was killed, and its cell has no result."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker ended: its result, or its failure with the stage it was in."""

    status: Status
    pid: int
    evidence: Evidence  # from spawn to end
    measured: Measured = Measured()
    failure: Failure | None = None

    @property
    def elapsed_ns(self) -> int:
        """Nanoseconds from spawn to end."""
        return self.evidence.wall_ns


def work(
    job: msgspec.Struct,
    time_limit_s: float,
    engine: str = "",
    workload: str = "",
    ends_at: float = math.inf,
    on_log: Callable[[str], None] | None = None,
) -> Outcome:
    """Spawn a worker for `job` and wait; after `time_limit_s` seconds it is killed, and the outcome is a hang.

    A starved worker gets more time, and then another status than a hang: threads that wait for one another at every
    operator crawl when one of them shares its core, and a decode of two seconds takes minutes. The same holds for a
    worker that was stopped or whose machine slept: that time is not its own.

    `engine`: folder of another build of llama.cpp's libraries than the one in use. `workload`: module with the `RUNS`
    of this job, where measure/phases.py does not do it.
    `ends_at`: the deadline by time.monotonic(), after which TimeUpError is raised.
    `on_log`: called with the log so far, every LOG_LOOK_S.
    """
    command = children.python("-m", worker.__name__, *filter(None, [workload]))
    with tempfile.TemporaryFile() as log, children.guard() as guarded:
        before = machine.counters(children=True)
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            env=_environment(job, engine),
        )
        guarded(-child.pid)

        def follow() -> None:
            if on_log:
                on_log(os.pread(log.fileno(), MOST_LOG, 0).decode(errors="replace"))

        try:
            onlooker = watch.Onlooker(child.pid)
            looks = max(LOOKS, int(time_limit_s / LOG_LOOK_S)) if on_log else LOOKS
            result, late = _answer(
                child, msgspec.json.encode(job) + b"\n", time_limit_s, onlooker, ends_at, looks, follow
            )
        finally:
            with suppress(ProcessLookupError, PermissionError):  # none is left, or only zombies (macOS)
                os.killpg(child.pid, signal.SIGKILL)  # it leads its own group: whatever it started ends too
            child.wait()
        evidence = watch.since(before, machine.counters(children=True))
        evidence = msgspec.structs.replace(evidence, held_ns=onlooker.held_ns)
        log.seek(0)
        text = log.read().decode(errors="replace")
    return _outcome(child, result, late, text, evidence)


def _environment(job: msgspec.Struct, engine: str) -> dict[str, str]:
    """What a worker inherits, the engine's folder, what its build asks for where that is not set, and its threads.

    BLAS has as many as the cell: workers run side by side, and idle BLAS threads spin. A gate's threads do not spin:
    beside a busy process they would block the core that another thread needs. Threads of timed cells do, as by default:
    sleeping, they take a third longer on an idle machine (44 instead of 34 ms a step at full size on two cores), though
    beside a busy process they take 52 ms instead of some 1,400.
    """
    cell, chosen = getattr(job, "cell", None), {"LLAMA_CPP_LIB_PATH": engine} if engine else {}
    ours = children.environment() | chosen
    wanted = described(Path(ours["LLAMA_CPP_LIB_PATH"])).get("environment", []) if "LLAMA_CPP_LIB_PATH" in ours else []
    threads = dict.fromkeys(BLAS_THREADS, str(cell.n_threads)) if isinstance(cell, AnyCell) else {}
    waiting = YIELDING if isinstance(cell, Gate) else {}
    return waiting | dict(setting.split("=", 1) for setting in wanted) | ours | threads


def _answer(
    child: subprocess.Popen[bytes],
    job: bytes,
    limit_s: float,
    onlooker: watch.Onlooker,
    ends_at: float,
    looks: int,
    follow: Callable[[], None],
) -> tuple[bytes, Late | None]:
    """The worker's output, or why waiting for it ended; the worker is checked `looks` times per limit.

    A check that finds the worker held does not count towards its limit; their total is bounded all the same.
    """
    payload: bytes | None = job
    pause, left = limit_s / looks, looks
    for _ in range(int(looks * min(MOST_LIMITS, 1 + MOST_MORE_S / limit_s))):
        try:
            answer = child.communicate(payload, timeout=min(pause, max(ends_at - time.monotonic(), 0)))[0]
        except subprocess.TimeoutExpired:
            payload = None
            if time.monotonic() >= ends_at:
                raise TimeUpError from None
        else:
            onlooker.held(pause)
            return answer, None
        follow()
        held = onlooker.held(pause)
        left -= not held
        if not left and not onlooker.starved(limit_s):
            return b"", "hang"
        left = left or looks
    return b"", "stopped" if held else "starved"


def _outcome(child: subprocess.Popen[bytes], result: bytes, late: Late | None, log: str, whole: Evidence) -> Outcome:
    undecoded = ""
    if child.returncode == 0 and result:
        try:
            measured = msgspec.json.decode(result, type=Measured)
            return Outcome(status="ok", pid=child.pid, evidence=whole, measured=measured)
        except msgspec.DecodeError as error:  # JSON has no NaN: it writes null
            undecoded = f"the engine's answer holds no numbers ({error})"
    lines = BUILD_FOLDER.sub("", log).replace(f"{paths.ROOT}{os.sep}", "").splitlines()
    stages = [line.removeprefix("@stage ") for line in lines if line.startswith("@stage ")]
    asserts = [line for line in lines if ASSERT.search(line)]
    errors = [line.removeprefix("@error ") for line in lines if line.startswith("@error ")]
    ended_by = max(-child.returncode, 0)
    why = "quota" if late == "starved" and watch.throttled(whole) else late
    killed = KILLED if ended_by == signal.SIGKILL and not late else ""
    failure = Failure(
        stage=stages[-1] if stages else "spawn",
        exit_code=None if ended_by else child.returncode,
        signal="" if late or not ended_by else signal.Signals(ended_by).name,
        message=undecoded or next(iter(errors + asserts), SILENT[why] if why else killed),
        log_tail=[line for line in lines if not line.startswith("@")][-LOG_LINES:],
    )
    partial = Measured(checks=reported_checks(lines))  # before it ended
    of_signal: Status = "abort" if ended_by == signal.SIGABRT else "killed" if ended_by else "error"
    status: Status = "starved" if late == "stopped" else late or of_signal
    return Outcome(status=status, pid=child.pid, evidence=whole, failure=failure, measured=partial)
