"""What a system says of itself, as far as it does: one rule for what it leaves out, and the files of Linux's kernel."""

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, wraps
from pathlib import Path, PurePosixPath
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
PROC, SYS = Path("/proc"), Path("/sys")  # macOS has neither
CPUS = "devices/system/cpu/cpu[0-9]*"
MODEL = ("model name", "Model Name", "uarch", "cpu")  # of x86, LoongArch, RISC-V and POWER, in /proc/cpuinfo
FAST = 0.5  # of the largest capacity: CPUs beyond it are performance cores (the second tier of a phone's chip has 0.7)


def optional(read: Callable[P, T]) -> Callable[P, T | None]:
    """A reader of a fact that a system need not say: None where it is absent, refused, or of another form.

    A fact that cannot be read is unknown in a row. It ends no measurement, and it marks no row.
    """

    @wraps(read)
    def reading(*args: P.args, **how: P.kwargs) -> T | None:
        try:
            return read(*args, **how)
        except Exception:  # libraries that ask a system raise whatever its answer makes them stumble over
            return None

    return reading


def text(path: Path) -> str:
    """What a file of the kernel says; empty where it cannot be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


@optional
def number(path: Path) -> float:
    """The number in a file of the kernel: a CPU that is off has no clock, and a driver may say `<unknown>`."""
    return float(path.read_text(encoding="ascii"))


# ---------------------------------------------------------------- CPUs


def chip() -> str:
    """The processor by its model and family; by its implementer and part where the kernel knows no name."""
    lines = text(PROC / "cpuinfo").splitlines()
    said = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    name = next((said[key] for key in MODEL if said.get(key)), "")
    if not name and "CPU part" in said:
        name = f"implementer {said.get('CPU implementer', '?')}, part {said['CPU part']}"
    return f"{name or 'unknown processor'} (family {said.get('cpu family', '?')})"


def cores(allowed: Iterable[int]) -> int:
    """Cores among some CPUs, each counted once however many of its threads are among them.

    Of a chip with cores of several types only the performance cores count, unless none of them is allowed.
    """
    allowed = set(allowed)
    return len({_siblings(n) for n in allowed - slow_cpus() or allowed})


def slow_cpus() -> frozenset[int]:
    """The CPUs that are efficiency cores; none where all are alike, or where the kernel does not say."""
    return _slow_cpus(SYS)


@cache
def _slow_cpus(sys: Path) -> frozenset[int]:
    capacities = {int(path.name.removeprefix("cpu")): number(path / "cpu_capacity") for path in sys.glob(CPUS)}
    if fast := _list(sys / "devices/cpu_core/cpus"):  # Intel's hybrids
        return frozenset(capacities.keys() - fast)
    most = max((capacity for capacity in capacities.values() if capacity), default=0.0)
    return frozenset(n for n, capacity in capacities.items() if capacity and capacity <= FAST * most)


def online() -> set[int] | None:
    """The CPUs that are on."""
    return _list(SYS / "devices/system/cpu/online")


def _siblings(cpu: int) -> str:
    """What names a core: the list of its threads."""
    folder = SYS / f"devices/system/cpu/cpu{cpu}/topology"
    return text(folder / "core_cpus_list") or text(folder / "thread_siblings_list") or f"{cpu}\n"


@optional
def _list(path: Path) -> set[int]:
    """The CPUs in a list such as 0-3,8."""
    parts = [part.partition("-") for part in path.read_text(encoding="ascii").split(",")]
    return {n for first, _, last in parts for n in range(int(first), int(last or first) + 1)}


def largest_cache() -> int | None:
    """Bytes of the largest cache of the first CPU that has one."""
    for cpu in sorted(SYS.glob(CPUS)):
        sizes = [text(path).strip() for path in (cpu / "cache").glob("index*/size")]
        if caches := [int(size[:-1]) << 10 for size in sizes if size[-1:] == "K" and size[:-1].isdigit()]:
            return max(caches)
    return None


def mhz() -> float | None:
    """Clock of the slowest CPU that is on, in MHz; None where the kernel does not say."""
    clocks = [khz / 1e3 for path in SYS.glob(f"{CPUS}/cpufreq/scaling_cur_freq") if (khz := number(path))]
    if not clocks:
        for line in text(PROC / "cpuinfo").splitlines():
            with suppress(ValueError):
                clocks += [float(line.partition(":")[2])] if line.startswith("cpu MHz") else []
    return min(clocks, default=None)


def hot() -> int | None:
    """How often CPUs were slowed because they were hot; None where nothing counts it."""
    counts = [
        count
        for path in SYS.glob(f"{CPUS}/thermal_throttle/core_throttle_count")
        if (count := number(path)) is not None
    ]
    return round(sum(counts)) if counts else None


def governor() -> str:
    """The governor of the first CPU that has a clock to govern; empty without one."""
    paths = sorted(SYS.glob(f"{CPUS}/cpufreq/scaling_governor"))
    return next(filter(None, (text(path).strip() for path in paths)), "")


# ---------------------------------------------------------------- control groups


def groups() -> tuple[Path, ...]:
    """Folders of the control groups that hold this process and may limit its CPUs, each group before what holds it.

    Of both versions, where both are mounted. In a container they begin with what it sees as its own top.
    """
    return _groups(PROC)


@cache  # a process stays where it was started
def _groups(proc: Path) -> tuple[Path, ...]:
    own: dict[str, str] = {}
    for line in text(proc / "self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        own |= dict.fromkeys(controllers.split(","), path) if path else {}  # version 2 names no controller
    folders: list[Path] = []
    for line in text(proc / "self/mountinfo").splitlines():
        mount, _, system = line.partition(" - ")
        kind, _, options = f"{system}  ".split(" ", 2)
        limits = kind == "cgroup2" or (kind == "cgroup" and "cpu" in options.strip().split(","))
        group = own.get("" if kind == "cgroup2" else "cpu")
        if limits and group is not None:
            folders += _held(group, *mount.split(" ")[3:5])
    return tuple(dict.fromkeys(folders))


def _held(path: str, root: str, point: str) -> list[Path]:
    """From a process's group up to the mount point; `root`: the group that is mounted there."""
    inside, top = PurePosixPath(path), Path(point.replace(r"\040", " "))
    inside = inside.relative_to(root) if inside.is_relative_to(root) and ".." not in inside.parts else PurePosixPath()
    own = top / inside
    return [own, *own.parents[: len(inside.parts)]]


def quota() -> float | None:
    """CPUs' worth of time that the tightest of these groups allows; None without a limit."""
    return min((limit for group in groups() if (limit := _limit(group))), default=None)


@optional
def _limit(group: Path) -> float | None:
    if said := text(group / "cpu.max"):  # version 2: "max 100000" without a limit, which is no number
        most, period = said.split()
        return float(most) / float(period)
    limit, period_us = number(group / "cpu.cfs_quota_us"), number(group / "cpu.cfs_period_us")
    return limit / period_us if limit and period_us and limit > 0 else None


def throttled_ns() -> int | None:
    """Nanoseconds, summed over CPUs, for which a quota held these groups so far; None where nothing counts it."""
    counts = [count for group in groups() if (count := _throttled(group)) is not None]
    return sum(counts) if counts else None


@optional
def _throttled(group: Path) -> int | None:
    said = dict(line.split() for line in text(group / "cpu.stat").splitlines())
    return int(said["throttled_usec"]) * 1000 if "throttled_usec" in said else int(said["throttled_time"])


@optional
def pressure_ns(what: str) -> int:
    """Pressure on CPUs or memory in this process's control group where that is accounted, else in the whole machine."""
    paths = (*(group / f"{what}.pressure" for group in groups()), PROC / "pressure" / what)
    said = next(filter(None, map(text, paths)))
    return next(int(line.rpartition("total=")[2]) * 1000 for line in said.splitlines() if line.startswith("some"))


# ---------------------------------------------------------------- processes


def schedstat(pid: int) -> dict[str, tuple[int, int, int]]:
    """For each living thread: nanoseconds it ran, nanoseconds it waited for a CPU, and how often it was scheduled.

    Empty where the kernel does not count them, or the process is gone.
    """
    counts = {}
    for name in _tasks(pid) or ():
        words = text(PROC / str(pid) / "task" / name / "schedstat").split()
        if len(words) > 2 and all(map(str.isdigit, words)):
            counts[name] = (int(words[0]), int(words[1]), int(words[2]))
    return counts


@optional
def _tasks(pid: int) -> list[str]:
    return os.listdir(PROC / str(pid) / "task")


@optional
def peak_rss() -> int:
    """Largest resident set of this process so far, in bytes."""
    lines = text(PROC / "self/status").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
