"""What this machine is, and the state it is in. Everything that differs between Linux and macOS is in this module.

What a system does not say is None or "unknown": it ends no measurement, and it marks no row.
"""

import os
import platform
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import psutil

from llama_meter.limits import PRESSURES
from llama_meter.rows import State

P = ParamSpec("P")
T = TypeVar("T")
MACOS = sys.platform == "darwin"
PROC, SYS, GROUPS = Path("/proc"), Path("/sys"), Path("/sys/fs/cgroup")  # macOS has none of them
CPUS = "devices/system/cpu/cpu[0-9]*"
SYSTEM_CACHE = 96 << 20  # of an M1, M2 or M3 Ultra; a Max has 48 MiB
SMALLEST_CACHE = 32 << 20  # bytes assumed where a system reports no cache
PRESSURE_LEVEL = "com.apple.system.thermalpressurelevel"  # the name under which macOS publishes OSThermalPressureLevel
POWER_MODES = {"0": "automatic", "1": "low", "2": "high"}  # pmset's powermode, on older Macs lowpowermode
MEMORY_LEVELS = {"1": "normal", "2": "warning", "4": "critical"}  # DISPATCH_MEMORYPRESSURE_* of dispatch/source.h
ANSWER_S = 5.0  # that a program of the system may take to answer
ACCELERATORS = ("ioreg", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator")  # says how many cores a Mac's GPU has
EFFICIENCY = "Efficiency"  # the level of a Mac's cores that get no thread; the others are Super and Performance
GIB = 1 << 30
UPDATED = ("os", "python", "memory_bytes")  # what of a machine's facts an update changes
REBUILT = ("sha256", "description")  # and of an engine's, where it is built again from the same sources

Counters = dict[str, int | None]  # what was counted so far, by the names of `Evidence`, and `busy_ns` of all CPUs


def optional(read: Callable[P, T]) -> Callable[P, T | None]:
    """A reader of a fact that a system need not say: None where it is absent, refused, or of another form."""

    @wraps(read)
    def reading(*args: P.args, **how: P.kwargs) -> T | None:
        try:
            return read(*args, **how)
        except Exception:  # libraries that ask a system raise whatever its answer makes them stumble over
            return None

    return reading


def _text(path: Path) -> str:
    """What a file of the kernel says; empty where it cannot be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def _output(*command: str) -> str:
    """What a program of the system prints; empty where there is none, or where it does not answer in time."""
    try:
        environment = os.environ | {"PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"}  # sysctl is there
        done = subprocess.run(command, env=environment, capture_output=True, timeout=ANSWER_S, check=False)
        return done.stdout.decode(errors="replace").strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


# ---------------------------------------------------------------- what it is


def facts() -> dict[str, Any]:
    """What identifies this machine; two runs on one machine give the same dictionary.

    A Mac also says how many cores its GPU has: they differ between chips of one name, as bandwidth does.
    """
    gpu_cores = re.findall(r'"gpu-core-count" *= *(\d+)', _output(*ACCELERATORS) if MACOS else "")
    return {
        "chip": _output("sysctl", "-n", "machdep.cpu.brand_string") if MACOS else _chip(),
        "cores": psutil.cpu_count(logical=False),
        "performance_cores": performance_cores(),
        "memory_bytes": memory_bytes(),
        "last_level_cache_bytes": last_level_cache(),
        "os": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "wired_limit_mb": _output("sysctl", "-n", "iogpu.wired_limit_mb") if MACOS else "",
        **({"gpu_cores": int(gpu_cores[0])} if gpu_cores else {}),
    }


def _chip() -> str:
    """The processor by its model and family; by its part where the kernel knows no name, as of most ARM cores."""
    pairs = (line.partition(":") for line in reversed(_text(PROC / "cpuinfo").splitlines()))
    fields = {key.strip(): value.strip() for key, _, value in pairs}
    part = f"{platform.machine()} part {fields['CPU part']}" if "CPU part" in fields else "unknown processor"
    return f"{fields.get('model name') or part} (family {fields.get('cpu family', '?')})"


def performance_cores() -> int:
    """Cores to run one thread each on: performance cores that this process may use whole.

    On Linux its affinity mask and the CPU quotas of its control groups limit them, and threads of one core count once.
    """
    if MACOS:
        return sum(n for name, n in _levels().items() if name != EFFICIENCY) or os.cpu_count() or 1
    allowed = os.sched_getaffinity(0)  # type: ignore[attr-defined, unused-ignore] # Linux alone has it
    fast = allowed - (_listed(SYS / "devices/cpu_atom/cpus") or set()) or allowed  # Intel's hybrids
    siblings = {_text(SYS / f"devices/system/cpu/cpu{n}/topology/thread_siblings_list") or n for n in fast}
    usable = min(len(siblings), psutil.cpu_count(logical=False) or len(siblings))
    quotas = [int(quota) for group in _groups() if (quota := _quota(group))]
    return max(min([usable, *quotas]), 1)


@cache
def _levels() -> dict[str, int]:
    """A Mac's physical cores by the name of their level: Super, Performance, Efficiency."""
    names = [f"hw.perflevel{level}.{what}" for level in range(3) for what in ("name", "physicalcpu")]
    fields = re.findall(r"hw\.perflevel(\d)\.(\w+): (\w+)", _output("sysctl", *names))
    levels = {(level, what): value for level, what, value in fields}
    return {levels[level, "name"]: int(n) for (level, what), n in levels.items() if what == "physicalcpu"}


@optional
def _listed(path: Path) -> set[int]:
    """The CPUs in a list such as 0-3,8."""
    parts = [part.partition("-") for part in path.read_text(encoding="ascii").split(",")]
    return {n for first, _, last in parts for n in range(int(first), int(last or first) + 1)}


def at_once(n_threads: int, n_bytes: int) -> int:
    """How many processes of `n_threads` threads and `n_bytes` of memory run side by side here; at least one."""
    return max(min(performance_cores() // n_threads, psutil.virtual_memory().available // n_bytes), 1)


def memory_bytes() -> int:
    """Bytes of this machine's memory."""
    return int(psutil.virtual_memory().total)


def last_level_cache() -> int:
    """Bytes of the largest cache the operating system reports, or 32 MiB where it reports none.

    Apple's chips share one more cache between GPU and CPU, which no sysctl reports: the largest known size is assumed.
    """
    if MACOS:
        return SYSTEM_CACHE
    sizes = [re.match(r"(\d+)K", _text(path)) for path in SYS.glob("devices/system/cpu/cpu0/cache/index*/size")]
    return max((int(size[1]) << 10 for size in sizes if size), default=SMALLEST_CACHE)


def lasting(machine: Mapping[str, Any]) -> dict[str, Any]:
    """What of a machine's facts a key holds: the system's first version number, Python's first two, memory in GiB.

    `rows.row_key` says what a key is made of, and why.
    """
    facts = {name: value for name, value in machine.items() if name != "gpus"}
    facts |= {"os": _version(facts["os"], 1), "python": _version(facts["python"], 2)}
    facts |= {"memory_bytes": _whole(facts["memory_bytes"])}
    boards = [board | {"memory_bytes": _whole(board["memory_bytes"])} for board in machine.get("gpus", ())]
    return facts | ({"gpus": boards} if boards else {})


def lasting_engine(engine: Mapping[str, Any]) -> dict[str, Any]:
    """What of an engine's facts a key holds; the hash of its libraries only where their sources are not `pinned`."""
    aside = ("pinned", "description", *(["sha256"] if engine.get("pinned") else []))
    return {name: value for name, value in engine.items() if name not in aside}


def updated(machine: Mapping[str, Any], engine: Mapping[str, Any]) -> dict[str, Any]:
    """The rest of both: what a row tells and no key holds."""
    facts = {name: machine[name] for name in UPDATED}
    return facts | {f"engine_{name}": engine[name] for name in REBUILT if name in engine}


def _version(name: str, n: int) -> str:
    """A name with the first `n` numbers of its version: "Linux 6" of "Linux 6.18.44-generic"."""
    match = re.match(rf"(?:\D* )?\d+(?:\.\d+){{{n - 1}}}", name)
    return match.group() if match else name


def _whole(n_bytes: int) -> int:
    """Memory in whole GiB, in bytes: what a kernel keeps for itself differs by build."""
    return max(round(n_bytes / GIB), 1) * GIB


# ---------------------------------------------------------------- the state it is in


def state() -> State:
    """The state of this machine now, read without root.

    A Mac's heat is the level that its governor acts on, OSThermalPressureLevel of libkern/OSThermalNotification.h: on
    Apple's own chips `pmset -g therm` reports no pressure even while they are throttled.
    """
    plugged: Any = getattr(_battery(), "power_plugged", None)
    source = {True: "ac", False: "battery"}.get(plugged, "unknown")
    if not MACOS:
        governors = [_text(path).strip() for path in sorted(SYS.glob(f"{CPUS}/cpufreq/scaling_governor"))[:1]]
        return State(power_source=source, power_mode=next(iter(governors), "") or "unknown")
    mode_of = re.search(r"^ *(?:low)?powermode +(\d)", _output("pmset", "-g"), re.MULTILINE)
    pressure = re.search(r"pressurelevel ([0-4])$", _output("notifyutil", "-g", PRESSURE_LEVEL))
    return State(
        power_source=source,
        power_mode=POWER_MODES.get(mode_of[1], "unknown") if mode_of else "unknown",
        thermal=PRESSURES[int(pressure[1])] if pressure else "unknown",
        memory_pressure=MEMORY_LEVELS.get(_output("sysctl", "-n", "kern.memorystatus_vm_pressure_level"), "unknown"),
    )


@optional
def _battery() -> Any:
    """The battery; None without one. A container may hide where Linux tells of it."""
    return psutil.sensors_battery()


@contextmanager
def awake() -> Iterator[None]:
    """Keep a Mac from sleeping while measurements run; no effect elsewhere. Its display may go dark."""
    keeper = subprocess.Popen(["caffeinate", "-ims", "-w", str(os.getpid())]) if MACOS else None
    try:
        yield
    finally:
        if keeper:
            keeper.terminate()


# ---------------------------------------------------------------- what it counts

_stops: list[int] = []  # SIGCONT signals received


def count_stops() -> None:
    """Start counting how often this process is stopped by a signal and continued (SIGCONT)."""
    signal.signal(signal.SIGCONT, lambda number, frame: _stops.append(number))
    signal.siginterrupt(signal.SIGCONT, False)  # as without a handler: system calls restart by themselves


def counters(children: bool = False) -> Counters:
    """Counters of this process, or of its ended children, and of the whole machine; the call costs 0.2 ms.

    Times are nanoseconds; None for what the system does not count.
    """
    used, times = resource.getrusage(resource.RUSAGE_CHILDREN if children else resource.RUSAGE_SELF), psutil.cpu_times()
    waited = [] if children else [waited for _, waited, _ in threads(os.getpid()).values()]
    return {
        "wall_ns": time.perf_counter_ns(),
        "cpu_ns": round((used.ru_utime + used.ru_stime) * 1e9),
        "involuntary": used.ru_nivcsw,
        "voluntary": used.ru_nvcsw,
        "waited_ns": sum(waited) if waited else None,
        "busy_ns": _busy_ns(times),
        "stolen_ns": round(times.steal * 1e9) if hasattr(times, "steal") else None,
        "hot": _hot(),
        "throttled_ns": throttled_ns(),
        "stops": 0 if children else len(_stops),
    }


def _busy_ns(times: Any) -> int:
    """Nanoseconds that CPUs computed, of psutil's times since the system began."""
    idle = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "steal", 0.0)
    idle += getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # guests are counted as user time too
    return round((sum(times) - idle) * 1e9)


def _hot() -> int | None:
    """How often CPUs were slowed because they were hot; None where nothing counts it."""
    counts = [_text(path) for path in SYS.glob(f"{CPUS}/thermal_throttle/core_throttle_count")]
    return sum(map(int, filter(None, counts))) if counts else None


def threads(pid: int) -> dict[str, tuple[int, int, int]]:
    """Nanoseconds that each living thread of a process ran and waited for a CPU, and how often it was scheduled.

    Empty where the system does not count them, as on a Mac, or where the process is gone.
    """
    fields = {path.parent.name: _text(path).split() for path in (PROC / str(pid) / "task").glob("*/schedstat")}
    return {name: (int(words[0]), int(words[1]), int(words[2])) for name, words in fields.items() if len(words) > 2}


def _groups() -> list[Path]:
    """Folders of the control groups (version 2) that hold this process, each before what holds it.

    In a container they end with what it sees as the top.
    """
    inside = re.search(r"^0::/(.*)$", _text(PROC / "self/cgroup"), re.MULTILINE)
    group = GROUPS / (inside[1] if inside else "")
    return [group, *group.parents[: len(group.relative_to(GROUPS).parts)]]


@optional
def _quota(group: Path) -> float:
    """CPUs' worth of time that a group allows; None for "max", without a limit."""
    most, period = _text(group / "cpu.max").split()
    return float(most) / float(period)


def throttled_ns() -> int | None:
    """Nanoseconds, summed over CPUs, for which a quota held these groups so far; None where nothing counts it."""
    fields = "".join(_text(group / "cpu.stat") for group in _groups())
    counts = re.findall(r"^throttled_usec (\d+)$", fields, re.MULTILINE)
    return 1000 * sum(map(int, counts)) if counts else None


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped now; False for one that is gone."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False


def awake_or_not_ns() -> int:
    """Nanoseconds of a clock that keeps running while the machine sleeps."""
    return time.clock_gettime_ns(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def how_ended(code: int) -> str:
    """An exit code in words: a signal by its name."""
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


# ---------------------------------------------------------------- memory


def mapped(path: Path) -> int | None:
    """This process's share in bytes of the pages of a mapped file; None where the system does not report it (macOS)."""
    if MACOS:
        return None
    maps = psutil.Process().memory_maps()
    return sum(region.pss for region in maps if region.path == str(path.resolve()))


def peak_rss() -> int:
    """Largest resident set of this process so far, in bytes.

    On Linux `ru_maxrss` is inherited from the parent that spawned this process, so the kernel's own record is read.
    """
    if MACOS:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", _text(PROC / "self/status"))[0])
