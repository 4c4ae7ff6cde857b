"""Facts about this machine and its state. Everything that differs between Linux and macOS is in this module.

What a system need not say is read through `system.optional`: it is None or "unknown" where it cannot be read.
"""

import os
import platform
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import psutil

from llama_meter.limits import PRESSURES
from llama_meter.measure import system
from llama_meter.measure.system import optional
from llama_meter.rows import State

MACOS = sys.platform == "darwin"
SYSTEM_CACHE = 96 << 20  # of an M1, M2 or M3 Ultra; a Max has 48 MiB
PRESSURE_LEVEL = "com.apple.system.thermalpressurelevel"  # the name under which macOS publishes OSThermalPressureLevel
POWER_MODES = {"0": "automatic", "1": "low", "2": "high"}  # pmset's powermode, on older Macs lowpowermode
MEMORY_LEVELS = {"1": "normal", "2": "warning", "4": "critical"}  # DISPATCH_MEMORYPRESSURE_* of dispatch/source.h
ANSWER_S = 10.0  # that a program of the system may take to answer
STATE_S = 2.0  # the same for the state around a row, which is asked for twice a row
ACCELERATORS = ("ioreg", "-r", "-d", "1", "-w", "0", "-c", "IOAccelerator")
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
EFFICIENCY = "Efficiency"  # the level of a Mac's cores that get no thread; the others are Super and Performance
SMALLEST_CACHE = 32 << 20  # bytes assumed where a system reports no cache


def performance_cores() -> int:
    """Cores to run one thread each on: performance cores that this process may use whole.

    On Linux its affinity mask and the CPU quotas of its control groups limit them, and threads of one core count once.
    """
    if not hasattr(os, "sched_getaffinity"):
        return _cores_of_a_mac() or os.cpu_count() or 1
    allowed, quota = os.sched_getaffinity(0), system.quota()
    usable = min(system.cores(allowed), _physical_cores() or len(allowed))
    return max(min(usable, usable if quota is None else int(quota)), 1)


_CORES: list[int] = []  # of a Mac, once it said: asking takes milliseconds, and a forecast asks for every cell


def _cores_of_a_mac() -> int | None:
    if not _CORES and (cores := sum(n for name, n in _levels() if name != EFFICIENCY)):
        _CORES.append(cores)
    return next(iter(_CORES), None)


def _levels() -> list[tuple[str, int]]:
    """A Mac's cores by the name of their level: Super, Performance, Efficiency; an unnamed second level is the last."""
    levels = []
    for level in range(_integer(_output("sysctl", "-n", "hw.nperflevels")) or 0):
        name = _output("sysctl", "-n", f"hw.perflevel{level}.name") or (EFFICIENCY if level else "")
        levels.append((name, _integer(_output("sysctl", "-n", f"hw.perflevel{level}.physicalcpu")) or 0))
    return levels


def at_once(n_threads: int, n_bytes: int) -> int:
    """How many processes of `n_threads` threads and `n_bytes` of memory run side by side here; at least one."""
    return max(min(performance_cores() // n_threads, (_free_bytes() or 0) // n_bytes), 1)


def last_level_cache() -> int:
    """Bytes of the largest cache the operating system reports, or 32 MiB where it reports none.

    Apple's chips share one more cache between GPU and CPU, which no sysctl reports: the largest known size is assumed.
    """
    return SYSTEM_CACHE if MACOS else system.largest_cache() or SMALLEST_CACHE


def slow_cpus() -> frozenset[int]:
    """The CPUs that are efficiency cores, by the numbers under which the system counts their time."""
    return efficiency_cores() if MACOS else system.slow_cpus()


@cache  # it takes some 20 ms, and is asked for around every timed part
def efficiency_cores() -> frozenset[int]:
    """A Mac's efficiency cores: its device tree names the cluster of each CPU. An Ultra has two such clusters."""
    said = re.split(r"\+-o cpu(\d+)@", _output("ioreg", "-r", "-d", "1", "-k", "cluster-type"))
    kinds = {
        int(n): re.search(r'"cluster-type" = <"(\w)">', entry) for n, entry in zip(said[1::2], said[2::2], strict=True)
    }
    return frozenset(n for n, kind in kinds.items() if kind and kind.group(1) == "E")


@optional
def _physical_cores() -> int | None:
    return psutil.cpu_count(logical=False)


@optional
def _free_bytes() -> int:
    return int(psutil.virtual_memory().available)


def memory_bytes() -> int:
    """Bytes of this machine's memory."""
    return _memory_bytes() or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@optional
def _memory_bytes() -> int:
    return int(psutil.virtual_memory().total)


@optional
def _integer(said: str) -> int:
    return int(said)


@optional
def load() -> float:
    """Threads that were ready to run, in the mean over the last minute."""
    return os.getloadavg()[0]


def facts() -> dict[str, Any]:
    """What identifies this machine; two runs on one machine give the same dictionary."""
    return {
        "chip": _output("sysctl", "-n", "machdep.cpu.brand_string") if MACOS else system.chip(),
        "cores": _physical_cores(),
        "performance_cores": performance_cores(),
        "memory_bytes": memory_bytes(),
        "last_level_cache_bytes": last_level_cache(),
        "os": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
        "compiler": platform.python_compiler(),
        "python": platform.python_version(),
        "wired_limit_mb": _output("sysctl", "-n", "iogpu.wired_limit_mb") if MACOS else "",
    } | _of_mac()


def state() -> State:
    """The state of this machine now, read without root. A Mac's programs are asked side by side.

    Where each fact of a Mac comes from:

    - thermal: the level that its governor acts on, OSThermalPressureLevel of libkern/OSThermalNotification.h. On
      Apple's own chips `pmset -g therm` reports no pressure even while they are throttled.
    - memory_pressure: sysctl_memorystatus_vm_pressure_level in xnu's bsd/kern/kern_memorystatus_notify.c, which asks
      for no privilege on macOS.
    - swapped_bytes: "Swapins" and "Swapouts" of vm_stat. `vm.swapusage` says how much lies in swap, not how much moves,
      and psutil's counts (`psutil_swap_mem`) are of all pages read from files.
    - gpu_used: "Device Utilization %" in the PerformanceStatistics of AGXAccelerator, which the driver averages over a
      time that nobody documents. The clock needs Apple's private IOReport, and is not read.

    On Linux use and clock are those of NVIDIA's boards, which NVML averages over a second at most.
    """
    if not MACOS:
        return State(
            power_source=_power_source() or "unknown",
            power_mode=system.governor() or "unknown",
            swapped_bytes=_swapped(
                r"^pswp(?:in|out) (\d+)$", system.text(system.PROC / "vmstat"), resource.getpagesize()
            ),
            **_boards(),
        )
    source, modes, level, short, pages, gpus = _outputs(
        ("pmset", "-g", "batt"),
        ("pmset", "-g"),
        ("notifyutil", "-g", PRESSURE_LEVEL),
        ("sysctl", "-n", "kern.memorystatus_vm_pressure_level"),
        ("vm_stat",),
        ACCELERATORS,
    )
    mode = re.search(r"^ *(?:low)?powermode +(\d)", modes, re.MULTILINE)
    pressure = re.search(r"pressurelevel ([0-4])$", level)
    size = re.search(r"page size of (\d+) bytes", pages)
    used = [int(percent) for percent in re.findall(r'"Device Utilization %" *= *(\d+)', gpus)]
    return State(
        power_source="ac" if "AC Power" in source else "battery" if "Battery Power" in source else "unknown",
        power_mode=POWER_MODES.get(mode.group(1), "unknown") if mode else "unknown",
        thermal=PRESSURES[int(pressure.group(1))] if pressure else "unknown",
        memory_pressure=MEMORY_LEVELS.get(short, "unknown"),
        swapped_bytes=_swapped(r"^Swap(?:ins|outs): +(\d+)\.$", pages, int(size.group(1))) if size else None,
        gpu_used=max(used) / 100 if used else None,
    )


@optional
def _power_source() -> str | None:
    battery = psutil.sensors_battery()
    return None if battery is None or battery.power_plugged is None else "ac" if battery.power_plugged else "battery"


def _boards() -> dict[str, Any]:
    """`gpu_used` of the busiest and `gpu_mhz` of the slowest of NVIDIA's boards, as far as they answer."""
    nvml, boards = nvidia_boards()
    used = [share for board in boards if (share := _board_used(nvml, board)) is not None]
    clocks = [mhz for board in boards if (mhz := _board_mhz(nvml, board)) is not None]
    return ({"gpu_used": max(used)} if used else {}) | ({"gpu_mhz": min(clocks)} if clocks else {})


@optional
def _board_used(nvml: Any, board: Any) -> float:
    return float(nvml.nvmlDeviceGetUtilizationRates(board).gpu / 100)


@optional
def _board_mhz(nvml: Any, board: Any) -> float:
    return float(nvml.nvmlDeviceGetClockInfo(board, nvml.NVML_CLOCK_SM))


def nvidia_boards() -> tuple[Any, list[Any]]:
    """The module of NVML and its handles of NVIDIA's boards: none where it is not installed or does not answer."""
    return _nvidia_boards() or (None, [])


@optional
def _nvidia_boards() -> tuple[Any, list[Any]]:
    if find_spec("pynvml") is None:
        return None, []
    import pynvml  # an optional package

    pynvml.nvmlInit()
    return pynvml, [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]


def _swapped(pattern: str, said: str, page_bytes: int) -> int | None:
    """Bytes of the pages swapped in and out; None where both are not counted."""
    pages = re.findall(pattern, said, re.MULTILINE)
    return sum(map(int, pages)) * page_bytes if len(pages) == 2 else None


def _of_mac() -> dict[str, Any]:
    """What tells Macs with a chip of one name apart, each where it is reported; empty elsewhere.

    GPU cores differ between chips of one name, as bandwidth does.
    """
    if not MACOS:
        return {}
    gpu_cores = re.findall(r'"gpu-core-count" *= *(\d+)', _output(*ACCELERATORS))
    traits: dict[str, Any] = {"gpu_cores": int(gpu_cores[0])} if gpu_cores else {}
    if EFFICIENCY in (levels := dict(_levels())):
        traits["efficiency_cores"] = levels[EFFICIENCY]
    build = _output("sw_vers", "-buildVersion")
    return traits | ({"macos_build": build} if build else {})


@dataclass(frozen=True)
class Counters:
    """What the system has counted so far; None where it does not count. Times are nanoseconds."""

    wall_ns: int
    cpu_ns: int
    involuntary: int
    voluntary: int
    waited_ns: int | None
    busy_ns: int | None
    slow_busy_ns: int | None  # of it, on efficiency cores
    stolen_ns: int | None
    pressure_ns: int | None
    stalled_ns: int | None
    hot: int | None
    throttled_ns: int | None  # summed over CPUs: a quota held this process's control group
    stops: int = 0


_stops: list[int] = []  # SIGCONT signals received


def count_stops() -> None:
    """Start counting how often this process is stopped by a signal and continued (SIGCONT)."""
    signal.signal(signal.SIGCONT, lambda number, frame: _stops.append(number))
    signal.siginterrupt(signal.SIGCONT, False)  # as without a handler: system calls restart by themselves


def was_stopped(child: int) -> bool:
    """Whether a child of this process was stopped or continued since the last call.

    Always False where the system cannot report it without waiting for the child's end (macOS before Python 3.13).
    """
    if not hasattr(os, "waitid"):
        return False
    try:
        return os.waitid(os.P_PID, child, os.WSTOPPED | os.WCONTINUED | os.WNOHANG) is not None
    except ChildProcessError:
        return False


def is_stopped(pid: int) -> bool:
    """Whether a process, or one that it started, is stopped now; False for one that is gone."""
    return bool(_is_stopped(pid))


@optional
def _is_stopped(pid: int) -> bool:
    process = psutil.Process(pid)
    return any(member.status() in STOPPED for member in (process, *process.children(recursive=True)))


def awake_or_not_ns() -> int:
    """Nanoseconds of a clock that keeps running while the machine sleeps."""
    return time.clock_gettime_ns(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def counters(children: bool = False) -> Counters:
    """Counters of this process, or of its ended children, and of the whole machine; the call costs 0.2 ms."""
    own = resource.getrusage(resource.RUSAGE_CHILDREN if children else resource.RUSAGE_SELF)
    times, slow = _cpu_times(), slow_cpus()
    return Counters(
        wall_ns=time.perf_counter_ns(),
        cpu_ns=round((own.ru_utime + own.ru_stime) * 1e9),
        involuntary=own.ru_nivcsw,
        voluntary=own.ru_nvcsw,
        waited_ns=None if children else waited_ns(os.getpid()),
        busy_ns=None if times is None else _busy_ns(times),
        slow_busy_ns=_slow_busy_ns(slow) if slow else None,
        stolen_ns=None if times is None or not hasattr(times, "steal") else round(times.steal * 1e9),
        pressure_ns=system.pressure_ns("cpu"),
        stalled_ns=system.pressure_ns("memory"),
        hot=system.hot(),
        throttled_ns=system.throttled_ns(),
        stops=0 if children else len(_stops),
    )


@optional
def _cpu_times() -> Any:
    return psutil.cpu_times()


@optional
def _slow_busy_ns(slow: frozenset[int]) -> int:
    """Nanoseconds that some CPUs computed; CPUs that are off are not among those that the system counts."""
    numbers: Iterable[int] = sorted(system.online() or ()) or count()
    return sum(_busy_ns(times) for n, times in zip(numbers, psutil.cpu_times(percpu=True), strict=False) if n in slow)


def _busy_ns(times: Any) -> int:
    """Nanoseconds that CPUs computed, of psutil's times since the system began."""
    idle = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "steal", 0.0)
    idle += getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # guests are counted as user time too
    return round((sum(times) - idle) * 1e9)


def waited_ns(pid: int) -> int | None:
    """Nanoseconds that a process's living threads were ready to run without a CPU; None where it is not counted."""
    counts = threads(pid)
    return sum(waited for _, waited in counts.values()) if counts else None


def threads(pid: int) -> dict[str, tuple[int, int]] | None:
    """Nanoseconds that each living thread of a process ran and waited for a CPU; None where they are not counted."""
    return {name: (ran, waited) for name, (ran, waited, _) in system.schedstat(pid).items()} or None


def timeslices(pid: int) -> int:
    """How often the living threads of a process have been scheduled so far; 0 where it is not counted."""
    return sum(times for _, _, times in system.schedstat(pid).values())


@dataclass(frozen=True)
class Memory:
    """Bytes of a process in memory; None where the system does not count them (macOS has no shares of pages)."""

    rss: int  # all of its pages
    private: int | None  # pages of this process alone
    pss: int | None  # private pages, and this process's share of each shared page


def memory() -> Memory:
    """Memory held by this process now; the call takes some milliseconds. macOS does not report other processes."""
    info = psutil.Process().memory_full_info()
    return Memory(info.rss, getattr(info, "uss", None), getattr(info, "pss", None))


@optional
def mapped(path: Path) -> int:
    """This process's share in bytes of the pages of a mapped file; None where the system does not report it (macOS)."""
    maps = psutil.Process().memory_maps()
    return sum(region.pss for region in maps if region.path == str(path.resolve()))


def report_no_abort() -> None:
    """On a Mac, turn an abort of this process into an exit code: each signal that dumps core starts a crash report.

    A report is seconds of other work beside the next measurement, for every abort that a study expects. `_exit` is safe
    in any handler, and is the handler itself: the exit code is the signal's number. `ended_by` reads it.
    """
    if MACOS:
        import ctypes  # only for this: a handler in Python would run too late for abort()

        system = ctypes.CDLL(None)
        system.signal.argtypes, system.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        system.signal(signal.SIGABRT, ctypes.cast(system._exit, ctypes.c_void_p))


def ended_by(code: int) -> int:
    """The number of the signal that ended a worker or a server, from its exit code; 0 for none."""
    return -code if code < 0 else int(signal.SIGABRT) if MACOS and code == signal.SIGABRT else 0


def how_ended(code: int) -> str:
    """An exit code in words: a signal by its name."""
    return signal.Signals(number).name if (number := ended_by(code)) else f"exit code {code}"


def sleeps_when_closed() -> bool:
    """Whether this is a Mac with a lid. Closing it puts the Mac to sleep, whatever keeps it awake otherwise."""
    return MACOS and "InternalBattery" in _output("pmset", "-g", "batt")


@contextmanager
def awake() -> Iterator[None]:
    """Keep a Mac from sleeping while measurements run; no effect elsewhere. Its display may go dark."""
    keeper = subprocess.Popen(["caffeinate", "-ims", "-w", str(os.getpid())]) if MACOS else None
    try:
        yield
    finally:
        if keeper:
            keeper.terminate()


def _output(*command: str, most_s: float | None = None) -> str:
    """What a program of the system prints; empty where there is none, or where it does not answer in time."""
    most_s = ANSWER_S if most_s is None else most_s
    try:
        environment = os.environ | {"PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"}  # sysctl is there
        done = subprocess.run(command, env=environment, capture_output=True, timeout=most_s, check=False)
        return done.stdout.decode(errors="replace").strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _outputs(*commands: tuple[str, ...]) -> list[str]:
    """What several programs print, run side by side within STATE_S."""
    with ThreadPoolExecutor(len(commands)) as threads:
        return list(threads.map(lambda command: _output(*command, most_s=STATE_S), commands))


def peak_rss() -> int:
    """Largest resident set of this process so far, in bytes; 0 where the system does not say.

    On Linux `ru_maxrss` is inherited from the parent that spawned this process, so the kernel's own record is read.
    """
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if MACOS else system.peak_rss() or 0
