"""Energy meters that a machine shows: joules counted so far, read before and after what is timed, never in between.

Three kinds, which count different things and are never compared: RAPL (Linux: a processor's package, and its memory
where that is counted apart), NVML (a whole NVIDIA board) and IOReport (parts of an Apple chip, by zeus-apple-silicon).
zeus itself reads the same counters, but has a process poll RAPL beside what is measured, lest the counter wrap unseen.
Here a timed part is shorter than a wrap takes (minutes), so its two readings are enough.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

POWERCAP = Path("/sys/class/powercap")
INSTALL = "pip install 'plamo-study[energy]'"


@dataclass(frozen=True)
class Meter:
    """`read`: joules counted so far, beginning anew at `wraps_j`. `limit_w`: the power it is held under, if known."""

    name: str  # its kind, and which one: "RAPL package-0"
    read: Callable[[], float]
    limit_w: float | None = None
    wraps_j: float | None = None


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
    """Joules that each meter has counted so far."""
    return {meter.name: meter.read() for meter in meters()}


def between(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Joules of each meter between two readings, of which the counter began anew at most once."""
    wraps = {meter.name: meter.wraps_j or 0.0 for meter in meters()}
    gone = {name: after[name] - joules for name, joules in before.items() if name in after}
    return {name: joules if joules >= 0 else joules + wraps[name] for name, joules in gone.items()}


def limits() -> dict[str, float]:
    """Watts that each meter's part of the machine is held under, of those that say so."""
    return {meter.name: meter.limit_w for meter in meters() if meter.limit_w}


def _rapl(folder: Path) -> tuple[list[Meter], str]:
    """Packages, and the memory beside each; and why one that is there cannot be read."""
    found, why = [], ""
    for zone in sorted(folder.glob("intel-rapl:*")):
        try:
            name = (zone / "name").read_text().strip()
            if name.startswith("package") or name == "dram":
                counter = zone / "energy_uj"
                counter.read_text()
                at = f"RAPL {name}" if name != "dram" else f"RAPL dram-{zone.name.split(':')[1]}"
                wraps = _micro(zone / "max_energy_range_uj")
                found.append(Meter(at, _reader(counter), _micro(zone / "constraint_0_power_limit_uw"), wraps))
        except PermissionError:
            why = f"{zone / 'energy_uj'} is for root alone: sudo chmod a+r {folder}/intel-rapl:*/energy_uj"
        except OSError:
            continue
    return found, why


def _reader(counter: Path) -> Callable[[], float]:
    return lambda: int(counter.read_text()) / 1e6


def _micro(file: Path) -> float | None:
    try:
        return int(file.read_text()) / 1e6
    except (OSError, ValueError):
        return None


def _nvml() -> list[Meter]:
    if find_spec("pynvml") is None:
        return []
    import pynvml

    try:
        pynvml.nvmlInit()
        boards = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
        return [
            Meter(
                f"NVML board-{n}",
                lambda board=board: pynvml.nvmlDeviceGetTotalEnergyConsumption(board) / 1e3,  # type: ignore[misc] # mJ
                pynvml.nvmlDeviceGetEnforcedPowerLimit(board) / 1e3,
            )
            for n, board in enumerate(boards)
        ]
    except pynvml.NVMLError:
        return []


def _ioreport() -> list[Meter]:
    if sys.platform != "darwin" or find_spec("zeus_apple_silicon") is None:
        return []
    import zeus_apple_silicon

    try:
        monitor = zeus_apple_silicon.AppleEnergyMonitor()
        told: Any = monitor.get_cumulative_energy()
    except RuntimeError:
        return []
    parts = {"CPU": "cpu_total_mj", "GPU": "gpu_mj", "DRAM": "dram_mj"}
    return [
        Meter(f"IOReport {part}", lambda field=field: getattr(monitor.get_cumulative_energy(), field) / 1e3)  # type: ignore[misc] # mJ
        for part, field in parts.items()
        if getattr(told, field) is not None
    ]
