"""The records: rows and facts. Raw values with units, and whether they count; every statistic is derived elsewhere."""

import hashlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from llama_meter.cells import Cell, Gate, Replay, canonical

SCHEMA = 3  # 3: every field of a cell has a name of its own
CHECK = "@check "  # prefix of a line on a worker's stderr that reports a check
Status = Literal["ok", "abort", "hang", "starved", "killed", "error"]


class State(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What slows a whole machine at one moment. What its system does not say is "unknown" or None, never zero."""

    power_source: str = "unknown"  # ac or battery
    power_mode: str = "unknown"  # macOS: low, automatic or high; Linux: the governor of the clock
    thermal: str = "unknown"  # macOS: nominal, moderate, heavy, trapping or sleeping
    memory_pressure: str = "unknown"  # macOS: normal, warning or critical
    # In older rows, as the load, clock and pressures below: bytes moved to swap and back since the system began, share
    # of the busiest GPU in use, and clock of the slowest
    swapped_bytes: int | None = None
    gpu_used: float | None = None
    gpu_mhz: float | None = None


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a worker ended when it did not end well."""

    stage: str
    exit_code: int | None = None
    signal: str = ""
    message: str = ""
    log_tail: list[str] = []

    @property
    def why(self) -> str:
        """What the worker said last, or the signal that ended it."""
        return self.message or self.signal

    def __str__(self) -> str:
        return f"{self.stage}: {self.why}"


class Evidence(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the system counted while a worker ran: its own share, and what others took. None where it does not say.

    Times are nanoseconds, summed over threads or CPUs; `wall_ns` is the stretch they belong to.
    """

    wall_ns: int = 0
    cpu_ns: int = 0  # CPU time of the worker, all its threads
    cpus: int = 0  # of the machine
    waited_ns: int | None = None  # the worker's threads were ready to run and had no CPU
    involuntary: int = 0  # context switches: a CPU was taken away
    voluntary: int = 0  # context switches: the worker itself waited for something
    others_ns: int | None = None  # CPU time of everything else on the machine
    throttled_ns: int | None = None  # a CPU quota held the worker's control group
    stolen_ns: int | None = None  # the hypervisor gave a CPU to another guest
    pressure_ns: int | None = None  # some task somewhere waited for a CPU (pressure-stall information, "some")
    mhz: float | None = None  # of the slowest CPU, at the end
    stalled_ns: int | None = None  # some task waited for memory (pressure-stall information, "some")
    hot: int | None = None  # times a CPU was slowed because it was hot
    stops: int = 0  # times that the worker, or a process that computed for it, was stopped and went on
    held_ns: int = 0  # seen from outside: it was stopped, or the machine slept or stood still


class Conditions(State, frozen=True, kw_only=True, omit_defaults=True):
    """The machine's state just after one worker, and what else was seen of it around the worker."""

    load_1min: float | None = None  # threads ready to run before the worker, in the mean over a minute
    before: State | None = None  # just before the worker; None in rows older than this
    peak_rss_bytes: int = 0
    timed: Evidence | None = None  # what was counted around the timed parts alone
    whole: Evidence | None = None  # and from spawn to end


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request of a load: when it arrived and when each token of its answer came, in ns since timing began."""

    id: str
    n_prompt: int  # tokens
    arrived_ns: int
    token_ns: list[int] = []
    failure: str = ""  # why it was not answered in full
    # Of a request over HTTP, which arrives when it is due; when things happened there
    sent_ns: int = 0
    byte_ns: int = 0  # the first byte of the answer's body
    ended_ns: int = 0
    divided: bool = False  # chunks held several tokens, and their times were shared out


class Results(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was measured. Times are nanoseconds: one list per repetition, one number per call timed."""

    samples_ns: list[list[int]] = []
    warmup_ns: list[int] = []  # the untimed pass before them
    prefill_ns: list[int] = []  # of the prompts each timed decode starts from
    load_ns: int = 0  # loading the file and making the context
    n_evaluated: int = 0  # tokens the engine evaluated in the timed part
    n_bytes: int = 0  # of a sample of read; of a shipment's state
    n_flops: int = 0  # matmul: floating-point operations per sample
    splits: tuple[int, int] | None = None  # parts of a prompt's graph and of a step's, each on one device
    flash_attention: bool | None = None  # whether the engine computed with it, whatever the cell asks for
    buffer_bytes: int = 0  # of weights, caches, states and computing on all devices, as the engine tells of them
    checks: dict[str, float | bool] = {}  # errors are relative, ‖a − b‖ / ‖b‖ of logits; booleans are the verdict
    series: dict[str, list[float]] = {}  # named results that are many numbers: one per chunk, layer or depth
    requests: list[Request] = []
    file_sha256: str = ""  # of a file that was written for the cell
    valid: bool | None = None  # whether every check that judges holds


class Measured(Results, frozen=True, kw_only=True):
    """What a worker hands back."""

    peak_rss_bytes: int = 0
    facts: dict[str, Any] = {}
    evidence: Evidence | None = None  # of the timed parts


class Row(Results, frozen=True, kw_only=True, tag="row", tag_field="kind"):
    """One worker's outcome with its provenance; `model`, `engine` and `machine` name facts in the same journal."""

    schema: int  # version of this type
    key: str  # hash of study, cell, model, engine, machine and replicate: what is never measured twice
    study: str
    cell: Cell  # what was measured; fields at their default are left out
    replicate: int  # which repetition of the cell; 1000 more where it was measured again
    block: int  # the randomised block it belongs to; -1: a gate
    order: int  # its place in the block; -1: a gate that another study passed
    anchor: bool = False  # the fixed cell that is measured between blocks
    model: str = ""
    others: list[str] = []  # facts of further model files
    engine: str = ""  # none: a simulation
    system: str = ""  # what of engine and machine an update changes; none: their facts hold it, in the oldest rows
    machine: str
    status: Status  # abort: an assertion; hang: past the time limit; starved: past it beside others, measured again
    started: str  # when the worker was spawned, UTC
    elapsed_ns: int  # from spawn to end of the worker
    pid: int
    conditions: Conditions
    failure: Failure | None = None

    @property
    def refuses(self) -> bool:
        """Whether it is a gate that failed: nothing that is measured with its files counts."""
        return isinstance(self.cell, Gate) and self.status != "starved" and self.valid is not True

    @property
    def facts(self) -> list[str]:
        """Ids of the facts it names."""
        return [fact for fact in (self.machine, self.model, *self.others, self.engine, self.system) if fact]


class Fact(msgspec.Struct, frozen=True, kw_only=True, tag="fact", tag_field="kind"):
    """Something many rows share: a model, an engine, a machine, or its system. `id` is the hash of its content."""

    id: str
    what: Literal["model", "engine", "machine", "system"]
    data: dict[str, Any]


Record = Row | Fact


def content_id(value: Any) -> str:
    """First 16 hex digits of the SHA-256 of a value's canonical JSON."""
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()[:16]


def report_check(name: str, value: float) -> float:
    """Return `value` and write it to stderr: a check that the runner knows even if the worker aborts later."""
    print(f"{CHECK}{name} {value!r}", file=sys.stderr, flush=True)
    return value


def reported_checks(lines: Iterable[str]) -> dict[str, float | bool]:
    """The checks that `report_check` wrote among a worker's lines."""
    pairs = (line.removeprefix(CHECK).split(" ", 1) for line in lines if line.startswith(CHECK))
    return {name: float(value) for name, value in pairs}


def passed(checks: Mapping[str, float | bool]) -> bool:
    """Whether every check that judges (those that are true or false) holds; numbers do not judge."""
    return all(value for value in checks.values() if isinstance(value, bool))


def row_key(study: str, cell: Cell, model: str, engine: str, machine: str, replicate: int, *others: str) -> str:
    """The identity of a measurement: what is measured, on which files, build and machine, and which replicate it is.

    The ids are those of facts, so what a fact holds decides what is measured again. It holds what changes a time, and
    nothing that merely comes with an update; `measure.machine` takes the facts apart.

    - A file: all of it, by its hash. Other weights, even of one shape, may give other results.
    - A machine: chip, cores, cache, memory and GPUs, which set its ceilings; the system's name and first version
      number, and Python's first two, with which threads, memory and the loop around the engine may change. Not the
      rest of these versions or the build of the kernel; and memory in whole GiB, since kernels keep some of it for
      themselves.
    - An engine: the versions of bindings, llama.cpp and ggml, the instructions and options that its libraries report,
      which libraries there are, the first version number of their compiler, and what its `engine.toml` says of
      patches (by hash), options and environment. Not the bytes of libraries that come from the locked sources: these
      contain the path of the folder that they were compiled in, a new one with every build. Of libraries from any
      other folder nobody knows the sources, so their hash stays in.

    What is left out is a fact too, `system`, which rows name.
    """
    return content_id([study, canonical(cell), model, engine, machine, replicate, *others])


def verdicts(rows: list[Row]) -> list[str]:
    """One verdict for each row of one journal; the gates are among its rows.

    valid, invalid (computed, but wrong), ungated (no oracle verdict on file and build), failed, starved, or n/a.
    "consistent" instead of valid: the file's gate held the engine against itself, as no oracle reads the file.
    """
    gates, proofs = _gates(rows), _proofs(rows)
    consistent = {row.model for row in rows if isinstance(row.cell, Gate) and row.cell.judges == "consistent"}
    return [_verdict(row, gates, proofs, consistent) for row in rows]


def _gates(rows: list[Row]) -> dict[tuple[str, str], bool]:
    judged: dict[tuple[str, str], bool] = {}
    for row in rows:
        if row.cell.workload == "gate" and row.status != "starved":
            judged[row.model, row.engine] = judged.get((row.model, row.engine), True) and row.valid is True
    return judged


def _proofs(rows: list[Row]) -> dict[tuple[Cell, str, str], bool]:
    """Whether a cell's result was right, for cells where only the first process checks it."""
    proved = [row for row in rows if getattr(row.cell, "proof", "") == "first" and row.valid is not None]
    return {(row.cell, row.model, row.engine): row.valid is True for row in proved}


def _verdict(
    row: Row, gates: dict[tuple[str, str], bool], proofs: dict[tuple[Cell, str, str], bool], consistent: set[str]
) -> str:
    if row.status == "starved":
        return "starved"
    if row.status != "ok":
        return "failed"
    if not row.model or (isinstance(row.cell, Replay) and row.valid is None):
        return "n/a"
    passes = [gates.get((model, row.engine)) for model in (row.model, *row.others)]
    right = proofs.get((row.cell, row.model, row.engine)) if row.valid is None else row.valid
    if (right is None and getattr(row.cell, "proof", "") == "first") and False not in passes:
        return "ungated"  # the process that should have proved it did not finish
    if right is not True or False in passes:
        return "invalid"
    judged = "consistent" if consistent & {row.model, *row.others} else "valid"
    return "ungated" if None in passes else judged
