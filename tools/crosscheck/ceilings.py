"""Our two ceilings beside other people's: likwid-bench's kernels and NumPy's BLAS, runs interleaved, every sample kept.

likwid-bench (Debian package likwid) has a read-only kernel like ours; its copy and STREAM triad run as well, to show
what a store costs. NumPy asks for huge pages and likwid-bench does not, so it is made to, and runs once more without
them to show what small pages cost. Our matrix product is the engine's, in F32 as in BLAS. This module builds and
downloads nothing.
"""

import json
import re
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from crosscheck import blas
from llama_meter import children, progress
from llama_meter.cells import MatMul, Read
from llama_meter.errors import StudyError
from llama_meter.measure import machine, plan, process
from llama_meter.workloads.phases import MATMUL_COLUMNS
from plamo_study.laws.checked_ceilings import INSTALL, Run, SideBySide

READS = 40  # passes over the array in one run: a fifth of a second
PRODUCTS = 6  # matrix products in one run, after one that warms up
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # malloc asks for them with madvise, as NumPy does
KERNELS = {  # name of a run: likwid-bench's kernel, and its environment variables
    "likwid-bench, read only": ("load", HUGE_PAGES),
    "likwid-bench, copy": ("copy", HUGE_PAGES),
    "likwid-bench, STREAM triad": ("stream", HUGE_PAGES),
    "likwid-bench, read only, small pages": ("load", {}),
}
WIDEST = ("_avx512", "_avx", "_sse", "")  # likwid-bench's variants, best first
WIDER = "SKYLAKEX"  # OpenBLAS's name for its AVX-512 kernels, which it does not choose on a CPU it does not know
LIMIT_S = 120.0
Program = Callable[[], list[float]]


def side_by_side(scale: str, likwid: Path, rounds: int) -> SideBySide:
    """Run everything `rounds` times, reversing the order every round. StudyError if a program fails."""
    threads = machine.performance_cores()
    read, matmul = plan.both_ceilings(scale)
    read = plan.change(read, n_threads=threads, repetitions=READS + 1)
    matmul = plan.change(matmul, n_threads=threads, dtype="F32", repetitions=PRODUCTS + 1)
    runs: list[Run] = []
    programs, tools = _programs(read, matmul, likwid)
    for number in progress.counted(range(rounds), "ceilings side by side"):
        for what in list(programs)[:: 1 if number % 2 else -1]:
            runs.append(Run(what=what, round=number, rates=programs[what]()))
    flops = 2 * matmul.n_rows**2 * MATMUL_COLUMNS
    return SideBySide(
        machine=machine.facts(),
        scale=scale,
        n_bytes=read.n_bytes,
        n_flops=flops,
        n_threads=threads,
        tools=tools,
        runs=runs,
    )


def _programs(read: Read, matmul: MatMul, likwid: Path) -> tuple[dict[str, Program], dict[str, str]]:
    """The programs of one round by display name, and the tools behind them."""
    programs: dict[str, Program] = {"our read kernel": partial(_ours, read)}
    tools: dict[str, str] = {}
    for name, (family, told) in KERNELS.items():
        kernel = _kernel(likwid, family)
        tools[name] = f"{_version(likwid)}, kernel {kernel}"
        programs[name] = partial(_likwid, likwid, kernel, told, read)
    programs["our matrix product"] = partial(_ours, matmul)
    for core, name in (("", "NumPy"), (WIDER, "NumPy, told of AVX-512")):
        if not core or "avx512f" in _flags():
            tools[name] = _blas(core, matmul, 1)["blas"]
            programs[name] = partial(_blas_rates, core, matmul)
    return programs, tools


def _ours(cell: Read | MatMul) -> list[float]:
    found = process.measured_once(cell)
    return [(found.n_bytes + found.n_flops) * 1e9 / sample[0] for sample in found.samples_ns]


# ---------------------------------------------------------------- likwid-bench


def _kernel(tool: Path, family: str) -> str:
    """The widest variant of a kernel that this processor and this build of the tool have."""
    listed = re.findall(r"^(\w+) - ", _said(tool, "-a"), re.MULTILINE)
    flags = _flags()
    for width in WIDEST:
        if family + width in listed and (not width or not flags or width[1:].replace("512", "512f") in flags):
            return family + width
    raise StudyError(str(tool), f"lists no kernel {family}", INSTALL)


def _likwid(tool: Path, kernel: str, told: dict[str, str], cell: Read) -> list[float]:
    """Bytes per second of one run, the mean it prints, with the array size and threads of the cell."""
    group = f"S0:{cell.n_bytes // 1000}kB:{cell.n_threads}"
    said = _said(tool, "-t", kernel, "-w", group, "-i", str(READS), told=told)
    found = re.search(r"^MByte/s:\s*([\d.]+)", said, re.MULTILINE)
    if found is None:
        raise StudyError(str(tool), "printed no MByte/s", INSTALL)
    return [float(found.group(1)) * 1e6]


def _version(tool: Path) -> str:
    found = re.search(r"Version\s+([\d.]+)", _said(tool, "-h"))
    return f"likwid-bench {found.group(1) if found else 'of unknown version'}"


def _said(tool: Path, *arguments: str, told: dict[str, str] | None = None) -> str:
    command, heard = [str(tool.absolute()), *arguments], children.environment() | (told or {})
    how: dict[str, Any] = {"env": heard, "cwd": children.NOWHERE, "timeout": LIMIT_S}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, **how)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StudyError(str(tool), f"cannot be run ({error})", INSTALL) from error
    if done.returncode and arguments != ("-h",):
        raise StudyError(str(tool), f"failed ({done.stderr.strip().splitlines()[-1:]})", INSTALL)
    return done.stdout


# ---------------------------------------------------------------- NumPy's BLAS, in a process of its own


def _blas(core: str, cell: MatMul, products: int) -> dict[str, Any]:
    """Which BLAS NumPy has and its FLOP/s at a cell's shape; `core` tells OpenBLAS which kernels to use."""
    shape = (cell.n_rows, MATMUL_COLUMNS, cell.n_threads, products)
    command = children.python(blas.__file__, *map(str, shape))
    told = children.environment() | ({"OPENBLAS_CORETYPE": core} if core else {})
    done = subprocess.run(command, capture_output=True, text=True, env=told, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise StudyError(
            "NumPy's BLAS", f"failed ({done.stderr.strip().splitlines()[-1:]})", "python tools/selfcheck.py"
        )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _blas_rates(core: str, cell: MatMul) -> list[float]:
    return list(_blas(core, cell, PRODUCTS)["rates"])


def _flags() -> set[str]:
    """The processor's feature flags; empty where the system lists none."""
    try:
        found = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        return set()
    return set(found.group(1).split()) if found else set()
