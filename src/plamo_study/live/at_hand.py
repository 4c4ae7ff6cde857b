"""What `make study` measures on the machine at hand: which studies, in order of need, and how long it should take.

A probe of a few seconds measures both ceilings here, memory's and the matrix kernel's. They give the pace at which the
times of recorded rows hold here, and so a forecast, printed before anything is measured.
"""

import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from llama_meter import journal, paths
from llama_meter.cells import Cell
from llama_meter.errors import StudyError
from llama_meter.measure import durations, files, machine, plan
from llama_meter.measure.plan import Plan
from llama_meter.measure.process import measured_once
from llama_meter.models import recipes, registry

NOTEBOOK = "your-machine"  # and the study behind it
SCALE = "shape"  # of the study's own models
MINUTES = 11.0  # default for measuring; writing files comes on top
PROBE_LIMIT_S = 60.0
ROOM = 1 << 30  # bytes that stay free on the disk
BITS = {"F32": 32.0, "F16": 16.02, "BF16": 16.02, "Q8_0": 8.52, "Q4_0": 4.85, "Q4_K_M": 5.1}  # per weight, about
WRITTEN = 2.5e8  # bytes a second of a file with random weights
QUANTIZED = {"Q4_0": 1.2e8, "Q4_K_M": 2.5e7}  # weights a second


@dataclass(frozen=True)
class Pace:
    """What the probe measured: bytes a second read from memory, and FLOP a second of the engine's own matrix kernel.

    `times`: as long as on the reference machine a process takes here, about.
    """

    read: float
    matmul: float
    times: float


def measured(planned: Plan) -> bool:
    """Whether the least blocks that a plan needs were measured here, but for files whose gate failed."""
    path = journal.journal_path(planned.study, planned.scale, journal.LOCAL)
    rows = journal.latest_rows(journal.read(path)) if path.exists() else []
    refused = {file for row in rows if row.refuses for file in row.cell.files}
    needed = [cell for cell in planned.cells[: planned.needed] if not refused.intersection(cell.files)]
    had, (blocks, _) = Counter(row.cell for row in rows), durations.least_blocks(planned)
    return bool(rows) and all(had[cell] >= blocks for cell in needed)


def lacking(plans: Iterable[Plan]) -> dict[str, int]:
    """Missing model files with the approximate bytes of each."""
    return {
        recipes.model_path(*file).name: int(registry.spec(*file[:2]).n_params * BITS.get(file[2], 8) / 8)
        for planned in plans
        for file in files.needed(planned)
        if file[1] != registry.GIVEN and not recipes.model_path(*file).exists()
    }


def missing(plans: Iterable[Plan]) -> dict[str, int]:
    """The files that are `lacking`; StudyError if the disk lacks room for them."""
    sizes = lacking(plans)
    paths.MODELS.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(paths.MODELS).free
    if sizes and sum(sizes.values()) + ROOM > free:
        why = f"model files of full size take {sum(sizes.values()) / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
        raise StudyError(str(paths.MODELS), why, "free some space, or measure small models: make study SCALE=mini")
    return sizes


def probed(scale: str) -> Pace:
    """Both ceilings of this machine, each by a process of a second or two. StudyError if one fails."""
    threads = machine.performance_cores()
    cells: tuple[Cell, ...] = plan.ceilings(scale, False, (threads,))
    read, matmul = (durations.rate(measured_once(cell, time_limit_s=PROBE_LIMIT_S)) for cell in cells)
    return Pace(read, matmul, durations.pace(scale, dict(zip(cells, (read, matmul), strict=True))))


def writing_s(sizes: dict[str, int]) -> float:
    """Approximate seconds to write these files."""
    spent = 0.0
    for name, n_bytes in sizes.items():
        dtype = name.split(".")[-2]
        spent += n_bytes * 8 / BITS[dtype] / QUANTIZED[dtype] if dtype in QUANTIZED else n_bytes / WRITTEN
    return spent
