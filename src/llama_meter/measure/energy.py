"""Energy meters of a machine: cumulative joules, read before and after a timed part, never during it.

Three kinds, which count different things and are never compared: RAPL (Linux: a processor's package, and its memory
where that is counted apart), NVML (a whole NVIDIA board) and IOReport (parts of an Apple chip, by zeus-apple-silicon).
zeus reads the same counters, but polls RAPL from a process beside the measurement, in case the counter wraps. Here two
readings are enough: a timed part in which a counter may wrap twice has no joules.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any

from llama_meter.measure import machine
from llama_meter.measure.system import number, optional, text

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
    """Cumulative joules of each meter, as far as it answers: a part that was not read has no joules."""
    return {name: joules for meter in meters() for name, joules in (optional(meter.read)() or {}).items()}


def between(before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Joules of each meter between two readings `seconds` apart.

    A counter that may have wrapped more than once, or that fell without a known wrap, is left out.
    """
    held, wraps = limits(), {name: joules for meter in meters() for name, joules in meter.wraps_j.items()}
    spent = {}
    for name, joules in before.items():
        gone = after.get(name, -inf) - joules
        gone += wraps.get(name, 0.0) if gone < 0 else 0.0
        if gone >= 0 and held.get(name, 0.0) * seconds < wraps.get(name, inf):
            spent[name] = gone
    return spent


def limits() -> dict[str, float]:
    """Power limit in W of each meter's part of the machine, where known."""
    return {name: watts for meter in meters() for name, watts in meter.limits_w.items()}


def _rapl(folder: Path) -> tuple[list[Meter], str]:
    """Meters of the packages and of the memory beside each, and why a meter that is present cannot be read."""
    zones = [
        zone for zone in sorted(folder.glob("intel-rapl:*")) if text(zone / "name").startswith(("package", "dram"))
    ]
    meters = [meter for zone in zones if (meter := _zone(zone))]
    closed = [zone for zone in zones if _is_refused(zone / "energy_uj")]
    why = (
        f"{closed[-1] / 'energy_uj'} is for root alone: sudo chmod a+r {folder}/intel-rapl:*/energy_uj"
        if closed
        else ""
    )
    return meters, why


def _is_refused(counter: Path) -> bool:
    try:
        counter.read_text()
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def _zone(zone: Path) -> Meter | None:
    """The meter of a package, or of the memory beside one; None where its counter cannot be read."""
    name, counter = text(zone / "name").strip(), zone / "energy_uj"
    at = f"RAPL {name}" if name != "dram" else f"RAPL dram-{zone.name.split(':')[1]}"
    if number(counter) is None:
        return None
    held = [watts / 1e6 for file in zone.glob("constraint_*_power_limit_uw") if (watts := number(file))]
    wraps = number(zone / "max_energy_range_uj")
    limits = {at: max(held)} if held else {}  # the burst limit is the largest
    return Meter(lambda: {at: int(counter.read_text()) / 1e6}, limits, {at: wraps / 1e6} if wraps else {})


def _nvml() -> list[Meter]:
    """Boards with an energy counter; not all have one."""
    nvml, boards = machine.nvidia_boards()
    return [meter for n, board in enumerate(boards) if (meter := _board(nvml, n, board))]


@optional
def _board(nvml: Any, n: int, board: Any) -> Meter:
    name = f"NVML board-{n}"

    def read() -> dict[str, float]:
        return {name: nvml.nvmlDeviceGetTotalEnergyConsumption(board) / 1e3}  # of mJ

    read()
    held = optional(nvml.nvmlDeviceGetEnforcedPowerLimit)(board)
    return Meter(read, {} if held is None else {name: held / 1e3}, {})


def _ioreport() -> list[Meter]:
    meter = _apple_chip() if find_spec("zeus_apple_silicon") else None  # there is none but for Macs
    return [meter] if meter else []


@optional
def _apple_chip() -> Meter:
    import zeus_apple_silicon

    parts = {"IOReport CPU": "cpu_total_mj", "IOReport GPU": "gpu_mj", "IOReport DRAM": "dram_mj"}
    monitor = zeus_apple_silicon.AppleEnergyMonitor()

    def read() -> dict[str, float]:
        reading = monitor.get_cumulative_energy()
        counts = {name: getattr(reading, field) for name, field in parts.items()}
        return {name: count / 1e3 for name, count in counts.items() if count is not None}

    read()
    return Meter(read, {}, {})
