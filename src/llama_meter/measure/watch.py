"""Direct evidence of disturbance: system counters around a worker's timed parts and its whole run.

Counters are read before and after, never in between: nothing runs inside a timed loop. The rules for marking a row as
disturbed are here too; their limits were held against planted disturbances at commit 53f8ee5.
"""

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import msgspec
import psutil

from llama_meter.cells import Cell
from llama_meter.limits import (
    COMPUTED_LIMIT,
    LATE_S,
    LOAD_LIMIT,
    LONG_NS,
    OTHERS_LIMIT,
    PRESSURES,
    STARVED_LIMIT,
    THROTTLED_LIMIT,
    WAITED_LIMIT,
)
from llama_meter.measure import machine
from llama_meter.measure.machine import Counters, optional
from llama_meter.rows import Conditions, Evidence, Row, State

ALONE = 0.1  # other threads' share of the CPU time of a worker that computes on one
_parts: list[Evidence] = []  # of this process's one job


@contextmanager
def timed(*helpers: int) -> Iterator[None]:
    """Put this around what is timed: what the system counts meanwhile becomes part of the job's evidence.

    `helpers`: pids of living processes that compute for this job; their CPU time and waiting count as its own.
    """
    theirs, before = _of_helpers(helpers), machine.counters()
    yield
    evidence = since(before, machine.counters())
    after = _of_helpers(helpers)  # a helper that ended meanwhile can no longer be read
    ran, waited = (max(late - early, 0) for late, early in zip(after, theirs, strict=True))
    changes: dict[str, int | None] = {"cpu_ns": evidence.cpu_ns + ran, "others_ns": max(_others(evidence) - ran, 0)}
    changes["waited_ns"] = None if evidence.waited_ns is None else evidence.waited_ns + waited
    _parts.append(msgspec.structs.replace(evidence, **changes))


def _of_helpers(pids: Iterable[int]) -> tuple[int, int]:
    """Nanoseconds that some processes ran, and that their living threads waited for a CPU; 0 where unknown.

    A server's threads come and go: the process's account, in units of 10 ms, includes those that ended.
    """
    ran = waited = 0
    for pid in pids:
        threads = machine.threads(pid).values()
        ran += max(sum(ns for ns, _, _ in threads), _account(pid) or 0)
        waited += sum(ns for _, ns, _ in threads)
    return ran, waited


@optional
def _account(pid: int) -> int:
    """CPU time of a process in ns; None for one that is gone, or for a zombie on macOS."""
    times = psutil.Process(pid).cpu_times()
    return int((times.user + times.system) * 1e9)


def collected() -> Evidence | None:
    """The evidence of all timed parts so far; None where nothing was timed."""
    return added(_parts) if _parts else None


def take_over(parts: list[Evidence]) -> None:
    """Add the evidence of this job's processes, which computed side by side, to its own.

    Processes of one job must not count as other programs to one another.
    """
    longest, cpu_ns = max(parts, key=lambda part: part.wall_ns), sum(part.cpu_ns for part in parts)
    waited = [part.waited_ns for part in parts]
    changes = {
        "cpu_ns": cpu_ns,
        "others_ns": max(_others(longest) + longest.cpu_ns - cpu_ns, 0),
        "waited_ns": None if None in waited else sum(ns or 0 for ns in waited),
        "involuntary": sum(part.involuntary for part in parts),
        "voluntary": sum(part.voluntary for part in parts),
        "stops": sum(part.stops for part in parts),
    }
    _parts.append(msgspec.structs.replace(longest, **changes))


def since(before: Counters, after: Counters) -> Evidence:
    """What was counted between two readings."""
    pairs = ((name, first, after[name]) for name, first in before.items())
    gone = {name: max(last - first, 0) for name, first, last in pairs if first is not None and last is not None}
    others = max(gone.pop("busy_ns") - gone["cpu_ns"], 0)
    return Evidence(cpus=psutil.cpu_count() or 1, others_ns=others, **gone)


def added(parts: list[Evidence]) -> Evidence:
    """The sum of several intervals."""
    total: dict[str, Any] = {"cpus": parts[0].cpus}
    for name in Evidence.__struct_fields__:
        values = [value for part in parts if (value := getattr(part, name)) is not None]
        if values and name not in total:
            total[name] = sum(values)
    return Evidence(**total)


def calm() -> bool:
    """Whether nothing else computes on this machine now, observed for half a second."""
    before = machine.counters()
    time.sleep(0.5)
    evidence = since(before, machine.counters())
    return _taken(evidence) <= OTHERS_LIMIT * evidence.cpus and not slowed(machine.state())


def wait_until_calm(most_s: float) -> None:
    """Return when the machine is calm, or after `most_s` seconds."""
    end = time.monotonic() + most_s
    while time.monotonic() < end and not calm():
        pass


class Onlooker:
    """Tells whether something kept an overdue worker from computing."""

    def __init__(self, pid: int):
        self.pid, self.waited_ns, self.ran_ns, self.held_ns = pid, 0, 0, 0
        self.before, self.looked_ns = machine.counters(), machine.awake_or_not_ns()

    def held(self, pause_s: float) -> bool:
        """Whether the worker is stopped now, or this check, `pause_s` seconds after the last one, is late.

        A check is late where the whole machine slept or stalled, or this process itself was stopped.
        """
        now = machine.awake_or_not_ns()
        gone, self.looked_ns = now - self.looked_ns, now
        held = gone > (pause_s + LATE_S) * 1e9 or machine.is_stopped(self.pid)
        self.held_ns += gone * held
        return held

    def starved(self, limit_s: float) -> bool:
        """Whether others, or a CPU quota, kept the worker from computing since the last call.

        A worker with one busy thread is not starved once it has had `limit_s` seconds of CPU time: that is progress
        enough. The CPU time of threads that spin while they wait for one another says nothing.
        """
        threads, now = machine.threads(self.pid), machine.counters()
        meanwhile = since(self.before, now)
        self.before = now
        if not threads:
            return self._crowded(meanwhile)
        waited_ns = sum(waited for _, waited, _ in threads.values())
        held_ns, self.waited_ns = waited_ns - self.waited_ns + (meanwhile.throttled_ns or 0), waited_ns
        queued = held_ns / meanwhile.wall_ns
        ran = sorted((ran for ran, _, _ in threads.values()), reverse=True)
        alone = sum(ran[1:]) < ALONE * ran[0]
        return queued > STARVED_LIMIT and not (alone and ran[0] >= limit_s * 1e9)

    def _crowded(self, meanwhile: Evidence) -> bool:
        """Without counts of how long threads wait: whether all CPUs were busy, partly with other work."""
        before, self.ran_ns = self.ran_ns, _account(self.pid) or 0
        ran = max(self.ran_ns - before, 0)
        busy = _others(meanwhile) / meanwhile.wall_ns
        return busy > 0.95 * meanwhile.cpus and busy - ran / meanwhile.wall_ns > STARVED_LIMIT


def others(conditions: Conditions) -> float | None:
    """Share of the machine's CPU time that other processes took or that the hypervisor gave to other guests.

    Taken from the timed parts where they are long against the 10 ms units of the system's counts, else from the whole
    worker. None for a row without evidence.
    """
    evidence = conditions.timed
    if evidence is None or evidence.wall_ns < LONG_NS:
        evidence = conditions.whole
    return None if evidence is None or evidence.others_ns is None else _taken(evidence) / evidence.cpus


def _others(part: Evidence) -> int:
    """CPU time that other processes took; 0 where nothing counted it."""
    return part.others_ns or 0


def _taken(part: Evidence) -> float:
    """CPUs' worth of time that other processes and other guests took."""
    return _others(part) / part.wall_ns + (part.stolen_ns or 0) / part.wall_ns


def waited(conditions: Conditions) -> float | None:
    """CPUs' worth of time for which the worker's threads were ready but had no CPU, during its timed parts."""
    part = conditions.timed
    return None if part is None or part.waited_ns is None or not part.wall_ns else part.waited_ns / part.wall_ns


STOPPED, OTHERS, WAITED, LOAD = "stopped", "others", "waited", "load"
QUOTA, STARVED = "quota", "starved"
BATTERY, LOW_POWER, HEAT, MEMORY = "battery", "low power", "heat", "memory"


def disturbed(rows: Iterable[Row]) -> set[str]:
    """Keys of the rows of one journal that something disturbed; `causes` says what."""
    return set(causes(rows))


def causes(rows: Iterable[Row]) -> dict[str, str]:
    """The disturbed rows of one journal: their keys, with the cause of each.

    A row is disturbed if other work took CPUs or held up its worker, if it was stopped, if a CPU quota held
    it, or if the machine was slow or short of memory. STARVED: its threads computed for less time than they could have,
    and nothing that the system counts says why.

    Where processes of one cell wait for one another's threads, waiting says nothing about other work. All cells of such
    a workload are judged by what others took, or ratios between them would come from differently judged blocks.
    Rows older than the evidence are judged by the load when they began: no more threads may have been ready to run than
    the journal's cells use.
    """
    rows = list(rows)
    threads: dict[str, int] = {}
    for row in rows:
        threads[row.machine] = max(threads.get(row.machine, 1), row.cell.n_threads)
    return {row.key: cause for row in rows if (cause := _cause(row, threads))}


def _cause(row: Row, threads: Mapping[str, int]) -> str:
    """The first cause that disturbed a row; "" for none."""
    if row.status == "starved":
        return QUOTA if throttled(row.conditions.whole) else WAITED
    cell, conditions = row.cell, row.conditions
    if not cell.is_timed:
        return ""
    if conditions.whole is None:
        return LOAD if (conditions.load_1min or 0.0) > threads[row.machine] + LOAD_LIMIT else ""
    if conditions.whole.held_ns or (conditions.timed and conditions.timed.stops):
        return STOPPED
    if throttled(conditions.timed):
        return QUOTA
    if cell.keeps_busy and not getattr(cell, "n_gpu_layers", 0) and _starved(conditions.timed, cell.n_threads):
        return STARVED
    if (others(conditions) or 0.0) > OTHERS_LIMIT:
        return OTHERS
    if not cell.crowds and (waited(conditions) or 0.0) > WAITED_LIMIT:
        return WAITED
    if slow := slowed(conditions.before or State()) or slowed(conditions):
        return slow
    return HEAT if conditions.timed and conditions.timed.hot else ""


def throttled(part: Evidence | None) -> bool:
    """Whether a CPU quota held what was counted."""
    return part is not None and (part.throttled_ns or 0) > THROTTLED_LIMIT * part.wall_ns


def _starved(part: Evidence | None, n_threads: int) -> bool:
    """Whether threads that never sleep ran for far less time than they could, and others did not take half of the rest.

    Only where the system counts how long threads wait: on a Mac, Accelerate computes prompts while they sleep.
    """
    if part is None or not part.cpu_ns or part.waited_ns is None or part.wall_ns < LONG_NS:
        return False
    ran = part.cpu_ns / part.wall_ns
    return ran < COMPUTED_LIMIT * n_threads and _taken(part) < (n_threads - ran) / 2


def slowed(state: State) -> str:
    """Why the whole machine is slower than it could be; "" where the system reports no reason."""
    if state.power_source == "battery":
        return BATTERY
    if state.power_mode == "low":
        return LOW_POWER
    if state.thermal in PRESSURES[1:]:
        return HEAT
    return MEMORY if state.memory_pressure in ("warning", "critical") else ""


def drift_by_block(rows: Iterable[Row]) -> dict[int, float]:
    """Relative drift of each block, as a fraction: the smaller of its anchors' drift and its cells' drift.

    Anchors: the distance of the anchor before or after the block from the median anchor, the larger of the two. Cells:
    the median ratio of their times to their medians over all blocks, less 1. An anchor is one process, and processes
    vary by some 7 %, so an anchor alone would mark every third steady block. A block without an anchor, added by a
    later call, is judged by its cells.
    """
    rows = list(rows)
    marked = disturbed(rows)
    rows = [row for row in rows if row.key not in marked]
    anchors, cells = _anchor_drift(rows), _cell_drift(rows)
    both = {block: min(drift, cells.get(block, drift)) for block, drift in anchors.items()}
    return cells | both if anchors else {}


def _anchor_drift(rows: list[Row]) -> dict[int, float]:
    processes: dict[int, list[float]] = {}
    for row in rows:
        if row.anchor and any(row.samples_ns):
            processes.setdefault(row.block, []).append(statistics.median(chain(*row.samples_ns)))
    if not processes:
        return {}
    anchors = {block: statistics.median(times) for block, times in processes.items()}
    middle = statistics.median(anchors.values())
    off = {block: abs(value / middle - 1) for block, value in anchors.items()}
    return {block: max(off[block], off.get(block + 1, 0.0)) for block in off}


def _cell_drift(rows: list[Row]) -> dict[int, float]:
    taken: dict[tuple[str, Cell], dict[int, float]] = {}
    for row in rows:
        if any(row.samples_ns) and row.block >= 0 and not row.anchor:
            taken.setdefault((row.engine, row.cell), {})[row.block] = statistics.median(chain(*row.samples_ns))
    relative: dict[int, list[float]] = {}
    for times in taken.values():
        for block, taking in times.items() if len(times) > 1 else ():
            relative.setdefault(block, []).append(taking / statistics.median(times.values()))
    return {block: abs(statistics.median(values) - 1) for block, values in relative.items()}
