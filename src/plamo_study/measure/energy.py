"""Energy meters of a machine: cumulative joules, read before and after a timed part, never during it.

Three kinds, which count different things and are never compared: RAPL (Linux: a processor's package, and its memory
where that is counted apart), NVML (a whole NVIDIA board) and IOReport (parts of an Apple chip, by zeus-apple-silicon).
zeus reads the same counters, but polls RAPL from a process beside the measurement, in case the counter wraps. Here two
readings are enough: a timed part in which a counter may wrap twice has no joules.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from math import inf
from pathlib import Path

from plamo_study.measure import machine

POWERCAP = Path("/sys/class/powercap")
INSTALL = "pip install 'plamo-study[energy]'"


@dataclass(frozen=True)
class Meter:
    """`read`: cumulative joules by part ("RAPL package-0"), all read at one time.

    `limits_w`: power limit of each part in W, where known; `wraps_j`: joules at which each counter wraps.
    """

    read: Callable[[], dict[str, float]]
    limits_w: dict[str, float]
    wraps_j: dict[str, float]


@cache
def meters() -> tuple[Meter, ...]:
    """Every meter that can be read here."""
    return (*_rapl(POWERCAP)[0], *_nvml(), *_ioreport())


def missing() -> str:
    """Why there is no meter; empty where there is one."""
    if meters():
        return ""
    if why := _rapl(POWERCAP)[1]:
        return why
    return f"no meter is shown here: nothing in {POWERCAP}, and neither NVML nor Apple's IOReport answers ({INSTALL})"


def counted() -> dict[str, float]:
    """Cumulative joules of each meter."""
    return {name: joules for meter in meters() for name, joules in meter.read().items()}


def between(before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Joules of each meter between two readings `seconds` apart.

    A counter that may have wrapped more than once, or that fell without a known wrap, is left out.
    """
    held, wraps = limits(), {name: joules for meter in meters() for name, joules in meter.wraps_j.items()}
    found = {}
    for name, joules in before.items():
        gone = after.get(name, -inf) - joules
        gone += wraps.get(name, 0.0) if gone < 0 else 0.0
        if gone >= 0 and held.get(name, 0.0) * seconds < wraps.get(name, inf):
            found[name] = gone
    return found


def limits() -> dict[str, float]:
    """Power limit in W of each meter's part of the machine, where known."""
    return {name: watts for meter in meters() for name, watts in meter.limits_w.items()}


def _rapl(folder: Path) -> tuple[list[Meter], str]:
    """Meters of the packages and of the memory beside each, and why a meter that is present cannot be read."""
    found, why = [], ""
    for zone in sorted(folder.glob("intel-rapl:*")):
        try:
            name = (zone / "name").read_text().strip()
            if name.startswith("package") or name == "dram":
                counter = zone / "energy_uj"
                counter.read_text()
                at = f"RAPL {name}" if name != "dram" else f"RAPL dram-{zone.name.split(':')[1]}"
                held = [watts for file in zone.glob("constraint_*_power_limit_uw") if (watts := _micro(file))]
                wraps = _micro(zone / "max_energy_range_uj")
                limits = {at: max(held)} if held else {}  # the burst limit is the largest
                read = partial(lambda at, file: {at: int(file.read_text()) / 1e6}, at, counter)
                found.append(Meter(read, limits, {at: wraps} if wraps else {}))
        except PermissionError:
            why = f"{zone / 'energy_uj'} is for root alone: sudo chmod a+r {folder}/intel-rapl:*/energy_uj"
        except OSError:
            continue
    return found, why


def _micro(file: Path) -> float | None:
    try:
        return int(file.read_text()) / 1e6
    except (OSError, ValueError):
        return None


def _nvml() -> list[Meter]:
    """Boards with an energy counter; not all have one."""
    found = []
    nvml, boards = machine.nvidia_boards()
    for n, board in enumerate(boards):
        name, limits = f"NVML board-{n}", {}
        try:
            nvml.nvmlDeviceGetTotalEnergyConsumption(board)
        except nvml.NVMLError:
            continue
        with suppress(nvml.NVMLError):
            limits = {name: nvml.nvmlDeviceGetEnforcedPowerLimit(board) / 1e3}
        read = partial(lambda at, of: {at: nvml.nvmlDeviceGetTotalEnergyConsumption(of) / 1e3}, name, board)  # of mJ
        found.append(Meter(read, limits, {}))
    return found


def _ioreport() -> list[Meter]:
    if find_spec("zeus_apple_silicon") is None:  # there is none but for Macs
        return []
    import zeus_apple_silicon

    parts = {"IOReport CPU": "cpu_total_mj", "IOReport GPU": "gpu_mj", "IOReport DRAM": "dram_mj"}
    try:
        monitor = zeus_apple_silicon.AppleEnergyMonitor()
        monitor.get_cumulative_energy()
    except RuntimeError:
        return []

    def read() -> dict[str, float]:
        told = monitor.get_cumulative_energy()
        counts = {name: getattr(told, field) for name, field in parts.items()}
        return {name: each / 1e3 for name, each in counts.items() if each is not None}

    return [Meter(read, {}, {})]
