"""A thin macOS to test on: what a Mac answers, refuses and lacks, here and in Python processes started from here.

`def test_…(mac)` is enough. `mac.say("pmset -g", "…")` changes what a program prints; one that was told nothing prints
nothing and fails. To make the Mac lack or refuse more, add a line to `changes`: everybody gets it.
"""

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import psutil
import pytest

from llama_meter.measure import machine

LACKING, NOWHERE = object(), Path("/no/such/folder")
ANSWERS = {  # a MacBook Pro on its charger
    "sysctl -n machdep.cpu.brand_string": "Apple M4 Pro",
    "sysctl hw.perflevel0.name hw.perflevel0.physicalcpu hw.perflevel1.name hw.perflevel1.physicalcpu "
    "hw.perflevel2.name hw.perflevel2.physicalcpu": "hw.perflevel0.name: Performance\nhw.perflevel0.physicalcpu: 8\n"
    "hw.perflevel1.name: Efficiency\nhw.perflevel1.physicalcpu: 4",
    "sysctl -n iogpu.wired_limit_mb": "0",
    "sysctl -n kern.memorystatus_vm_pressure_level": "1",
    "pmset -g": "System-wide power settings:\nCurrently in use:\n powermode            0\n displaysleep         10",
    f"notifyutil -g {machine.PRESSURE_LEVEL}": f"{machine.PRESSURE_LEVEL} 0",
    " ".join(machine.ACCELERATORS): """\
+-o AGXAcceleratorG16X  <class AGXAcceleratorG16X, id 0x100000432, registered, matched, active, retain 90>
      "gpu-core-count" = 20""",
    "caffeinate": "",
}
LEVELS = next(command for command in ANSWERS if "perflevel" in command)
ENGINE = {  # what a build of the locked sources says there: BLAS, that is Accelerate, tells of no features
    "build": "MTL : EMBED_LIBRARY = 1 | CPU : NEON = 1 | ARM_FMA = 1 | FP16_VA = 1 | DOTPROD = 1 | LLAMAFILE = 1 | "
    "ACCELERATE = 1 | REPACK = 1",
    "gpu_offload": True,
}
PROGRAM = '#!/bin/sh\nexec cat "$(dirname "$0")/answers/$(basename "$0") $*" 2>/dev/null\n'
BORN_ON_IT = f"import sys\nsys.path.append({str(Path(__file__).parent)!r})\nimport darwin\ndarwin.become()\n"


class MacCPUTimes(NamedTuple):
    user: float
    nice: float
    system: float
    idle: float


cpu_times = psutil.cpu_times


def mac_cpu_times(percpu=False):
    return MacCPUTimes(*(getattr(cpu_times(), name) for name in MacCPUTimes._fields))


ABSENT = ((os, "sched_getaffinity"), (os, "posix_fadvise"), (psutil.Process, "memory_maps"), (time, "CLOCK_BOOTTIME"))


def changes():
    """What is otherwise on a Mac: (where, name, what stands there)."""
    return [
        (machine, "MACOS", True),
        (machine, "PROC", NOWHERE),
        (machine, "SYS", NOWHERE),
        (machine, "GROUPS", NOWHERE),
        (psutil, "cpu_times", mac_cpu_times),
        (psutil, "sensors_battery", lambda: SimpleNamespace(power_plugged=True)),
        *((where, name, LACKING) for where, name in ABSENT if hasattr(where, name)),
    ]


def become():
    """Make this process one on a Mac, for good."""
    for where, name, what in changes():
        delattr(where, name) if what is LACKING else setattr(where, name, what)


class Mac:
    """The Mac of one test."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "answers").mkdir(parents=True)
        for command, answer in ANSWERS.items():
            self.say(command, answer)

    def say(self, command: str, answer: str) -> None:
        """Let a command, with just these arguments, print this."""
        name, _, arguments = command.partition(" ")
        program = self.folder / name
        program.write_text(PROGRAM)
        program.chmod(0o755)
        (self.folder / "answers" / f"{name} {arguments}").write_text(answer + "\n")
        machine._levels.cache_clear()


@pytest.fixture
def mac(tmp_path, monkeypatch):
    """This process is one on a Mac, as far as `changes` goes, and so are the Python processes that it starts."""
    found = Mac(tmp_path / "mac")
    (found.folder / "sitecustomize.py").write_text(BORN_ON_IT)
    monkeypatch.setenv("PATH", f"{found.folder}{os.pathsep}{os.environ['PATH']}")
    own = filter(None, [str(found.folder), os.environ.get("PYTHONPATH")])  # children import what this process does
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(own))
    for where, name, what in changes():
        monkeypatch.delattr(where, name) if what is LACKING else monkeypatch.setattr(where, name, what)
    monkeypatch.setattr(machine, "ANSWER_S", 60.0)  # beside other programs a shell that prints a line may take seconds
    yield found
    machine._levels.cache_clear()
