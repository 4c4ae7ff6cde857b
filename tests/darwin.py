"""A thin macOS to test on: what a Mac answers, refuses and lacks, here and in Python processes started from here.

`def test_…(mac)` is enough. `mac.say("pmset -g therm", "…")` changes what a program prints; one that was told nothing
prints nothing and fails. To make the Mac lack or refuse more, add a line to `changes`: everybody gets it.
"""

import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from llama_meter.measure import machine, system

LACKING = object()
NOWHERE = Path("/no/such/folder")
ANSWERS = {  # a MacBook Pro on its charger
    "sysctl -n machdep.cpu.brand_string": "Apple M4 Pro",
    "sysctl -n hw.nperflevels": "2",
    "sysctl -n hw.perflevel0.name": "Performance",
    "sysctl -n hw.perflevel0.physicalcpu": "8",
    "sysctl -n hw.perflevel1.name": "Efficiency",
    "sysctl -n hw.perflevel1.physicalcpu": "4",
    "sw_vers -buildVersion": "24G90",
    "sysctl -n iogpu.wired_limit_mb": "0",
    "pmset -g": "System-wide power settings:\nCurrently in use:\n powermode            0\n displaysleep         10",
    "pmset -g batt": "Now drawing from 'AC Power'\n -InternalBattery-0 (id=1)\t100%; charged; 0:00 remaining",
    "pmset -g therm": "Note: No thermal warning level has been recorded",
    "notifyutil -g com.apple.system.thermalpressurelevel": "com.apple.system.thermalpressurelevel 0",
    "ioreg -r -d 1 -w 0 -c IOAccelerator": """\
+-o AGXAcceleratorG16X  <class AGXAcceleratorG16X, id 0x100000432, registered, matched, active, retain 90>
    {
      "PerformanceStatistics" = {"In use system memory (driver)"=0,"Device Utilization %"=3,"Renderer Utilization %"=2}
      "gpu-core-count" = 20
      "model" = "Apple M4 Pro"
    }""",
    "sysctl -n kern.memorystatus_vm_pressure_level": "1",
    "vm_stat": """\
Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                                    10069.
Pages active:                                 432859.
Pages wired down:                             171481.
"Translation faults":                     1935466161.
Pages copy-on-write:                        84466299.
Compressions:                             1481081146.
Pageins:                                  7595367798.
Pageouts:                                   11042953.
Swapins:                                         100.
Swapouts:                                        300.
Pages tagged:                                 177075.""",
    "caffeinate": "",
}
ENGINE = {  # what a build of the locked sources says there: BLAS, that is Accelerate, tells of no features
    "build": "MTL : EMBED_LIBRARY = 1 | CPU : NEON = 1 | ARM_FMA = 1 | FP16_VA = 1 | DOTPROD = 1 | LLAMAFILE = 1 | "
    "ACCELERATE = 1 | REPACK = 1",
    "gpu_offload": True,
}
GPU_LOG = """\
ggml_metal_device_init: testing tensor API for f16 support
ggml_metal_device_init: GPU name:   MTL0 (Apple M5)
ggml_metal_device_init: GPU family: MTLGPUFamilyApple10  (1010)
ggml_metal_device_init: has bfloat            = true
ggml_metal_device_init: has tensor            = true
ggml_metal_device_init: GPU name:   MTL1 (Apple M4)
ggml_metal_device_init: has tensor            = false
"""
PROGRAM = '#!/bin/sh\nexec cat "$(dirname "$0")/answers/$(basename "$0") $*" 2>/dev/null\n'
BORN_ON_IT = f"import sys\nsys.path.append({str(Path(__file__).parent)!r})\nimport darwin\ndarwin.become()\n"


class MacCPUTimes(NamedTuple):
    user: float
    nice: float
    system: float
    idle: float


class MacMemory(NamedTuple):
    rss: int
    vms: int
    pfaults: int
    pageins: int
    uss: int


cpu_times, full_memory = psutil.cpu_times, psutil.Process.memory_full_info
process_times = psutil.Process.cpu_times


def mac_cpu_times(percpu=False):
    found = cpu_times(percpu=percpu)
    own = [MacCPUTimes(each.user, each.nice, each.system, each.idle) for each in (found if percpu else [found])]
    return own if percpu else own[0]


def mac_process_times(process):
    """Nothing is told of a process that has ended and was not waited for."""
    if process.status() == psutil.STATUS_ZOMBIE:
        raise psutil.ZombieProcess(process.pid)
    return process_times(process)


def mac_memory(process):
    """Whoever asks for pages of another process needs the right to debug it, a child's too."""
    if process.pid != os.getpid():
        raise psutil.AccessDenied(process.pid)
    found = full_memory(process)
    return MacMemory(found.rss, found.vms, 0, 0, found.uss)


ABSENT = [  # what only Linux has of what may be used; os.waitid came to macOS with Python 3.13
    *((os, f"sched_{name}") for name in ("getaffinity", "setaffinity", "getscheduler", "setscheduler", "getparam")),
    *((os, name) for name in ("posix_fadvise", "posix_fallocate", "pipe2", "memfd_create", "eventfd", "pidfd_open")),
    *((psutil.Process, name) for name in ("memory_maps", "cpu_affinity", "cpu_num", "io_counters", "ionice", "rlimit")),
    *((psutil, name) for name in ("sensors_temperatures", "sensors_fans")),
    (time, "CLOCK_BOOTTIME"),
    *([(os, "waitid")] if sys.version_info < (3, 13) else []),
]


def changes():
    """What is otherwise on a Mac: (where, name, what stands there)."""
    lacking = [(where, name, LACKING) for where, name in ABSENT if hasattr(where, name)]
    return [
        (machine, "MACOS", True),
        (system, "PROC", NOWHERE),
        (system, "SYS", NOWHERE),
        (psutil, "cpu_times", mac_cpu_times),
        (psutil.Process, "memory_full_info", mac_memory),
        (psutil.Process, "cpu_times", mac_process_times),
        *lacking,
    ]


def become():
    """Make this process one on a Mac, for good."""
    for where, name, what in changes():
        delattr(where, name) if what is LACKING else setattr(where, name, what)


def forget():
    """Let what a Mac keeps of its system be asked again."""
    machine.efficiency_cores.cache_clear()
    machine._CORES.clear()


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
        forget()


@pytest.fixture
def mac(tmp_path, monkeypatch):
    """This process is one on a Mac, as far as `changes` goes, and so are the Python processes that it starts."""
    found = Mac(tmp_path / "mac")
    (found.folder / "sitecustomize.py").write_text(BORN_ON_IT)
    monkeypatch.setenv("PATH", f"{found.folder}{os.pathsep}{os.environ['PATH']}")
    own = filter(None, [str(found.folder), os.environ.get("PYTHONPATH")])  # children import what this process does
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(own))
    for where, name, what in changes():
        if what is LACKING:
            monkeypatch.delattr(where, name)
        else:
            monkeypatch.setattr(where, name, what)
    monkeypatch.setattr(machine, "STATE_S", 60.0)  # beside other programs a shell that prints a line may take seconds
    yield found
    forget()
