"""What `make study` measures on the machine at hand: which studies, in order of need, and how long it should take.

The forecast follows from two rates that a probe of a few seconds measures here, memory's and the matrix kernel's. It is
printed before anything is measured, and beside the actual time afterwards.
"""

import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from llama_meter import journal, paths
from llama_meter.cells import Cell, Decode, MatMul, OnModel, Prefill, Read
from llama_meter.errors import StudyError
from llama_meter.measure import files, machine, plan
from llama_meter.measure.durations import least_blocks
from llama_meter.measure.plan import Plan
from llama_meter.measure.process import measured_once
from llama_meter.measure.proof import TAIL_STEPS
from llama_meter.models import recipes, registry
from llama_meter.workloads.phases import WARM_STEPS, WARM_TOKENS

NOTEBOOK = "your-machine"  # and the study behind it
MINUTES = 11.0  # default for measuring; writing files comes on top
PROBE = {"n_bytes": 1 << 30, "repetitions": 4}
PROBE_LIMIT_S = 60.0
ROOM = 1 << 30  # bytes that stay free on the disk
BITS = {"F32": 32.0, "F16": 16.02, "BF16": 16.02, "Q8_0": 8.52, "Q4_0": 4.85, "Q4_K_M": 5.1}  # per weight, about
WRITTEN = 2.5e8  # bytes a second of a file with random weights
QUANTIZED = {"Q4_0": 1.2e8, "Q4_K_M": 2.5e7}  # weights a second
START_S = 2.0  # from the start of a process until its model is loaded
READING_S, JUDGED = 6.0, 6e7  # of a gate: reading the file's vocabulary, and weights a second
GATES_AT = 1.5e11  # FLOP/s of the matrix kernel on the machine where the last four lines were measured


@dataclass(frozen=True)
class Pace:
    """What the probe found: bytes a second read from memory, and FLOP a second of the engine's own matrix kernel."""

    read: float
    matmul: float


def scale() -> str:
    """The scale of the study's own models here: released weights where some were fetched, else random ones."""
    return "weights" if plan.planned_models("weights") else registry.SCALES[-1]


def measured(planned: Plan) -> bool:
    """Whether the least blocks that a plan needs were measured here, but for files whose gate failed."""
    path = journal.journal_path(planned.study, planned.scale, journal.LOCAL)
    rows = journal.latest_rows(journal.read(path)) if path.exists() else []
    refused = {file for row in rows if row.refuses for file in row.cell.files}
    needed = [cell for cell in planned.cells[: planned.needed] if not refused.intersection(cell.files)]
    had, (blocks, _) = Counter(row.cell for row in rows), least_blocks(planned)
    return bool(rows) and all(had[cell] >= blocks for cell in needed)


def lacking(found: Iterable[Plan]) -> dict[str, int]:
    """Missing model files with the approximate bytes of each."""
    return {
        recipes.model_path(*file).name: int(registry.spec(*file[:2]).n_params * BITS.get(file[2], 8) / 8)
        for each in found
        for file in files.needed(each)
        if file[1] != registry.GIVEN and not recipes.model_path(*file).exists()
    }


def missing(found: Iterable[Plan]) -> dict[str, int]:
    """The files that are `lacking`; StudyError if the disk lacks room for them."""
    sizes = lacking(found)
    paths.MODELS.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(paths.MODELS).free
    if sizes and sum(sizes.values()) + ROOM > free:
        why = f"model files of full size take {sum(sizes.values()) / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
        raise StudyError(str(paths.MODELS), why, "free some space, or measure small models: make study SCALE=mini")
    return sizes


def probed() -> Pace:
    """Both rates of this machine, each by a process of a second or two. StudyError if one fails."""
    threads = machine.performance_cores()
    cells = (
        Read(dtype="Q8_0", n_threads=threads, **PROBE),
        MatMul(dtype="Q8_0", n_rows=2048, n_threads=threads, repetitions=4),
    )
    rates = []
    for cell in cells:
        found = measured_once(cell, time_limit_s=PROBE_LIMIT_S)
        rates.append((found.n_bytes or found.n_flops) * 1e9 / sorted(sample[0] for sample in found.samples_ns)[1])
    return Pace(*rates)


def writing_s(sizes: dict[str, int]) -> float:
    """Approximate seconds to write these files."""
    spent = 0.0
    for name, n_bytes in sizes.items():
        dtype = name.split(".")[-2]
        spent += n_bytes * 8 / BITS[dtype] / QUANTIZED[dtype] if dtype in QUANTIZED else n_bytes / WRITTEN
    return spent


def measuring_s(planned: Plan, pace: Pace, gated: set[Any]) -> float:
    """Approximate seconds of a plan here; `gated`: files that earlier plans judged, extended by this one."""
    new = {cell.files for cell in planned.gates} - gated
    gated |= new
    weights = [registry.spec(*file[:2]).n_params for (file,) in new]
    gates = sum(READING_S + n / JUDGED for n in weights) * GATES_AT / pace.matmul
    cells = sum(_cell_s(cell, pace, proved=block == 0) for cell in planned.cells for block in range(planned.blocks))
    return gates / machine.at_once(1, 1) + cells


def _cell_s(cell: Cell, pace: Pace, proved: bool) -> float:
    """One process: its start, the tokens of its prompts, and its steps, each of which reads all weights."""
    if not isinstance(cell, OnModel):
        size = cell.n_bytes if isinstance(cell, Read) else 0
        return START_S + (cell.repetitions + 20) * size / pace.read
    (model, scale, dtype), n_seq = cell.files[0], cell.shape[0]
    n_params = registry.spec(model, scale).n_params
    tokens, steps = 0, 0
    if isinstance(cell, Prefill):
        tokens = cell.n_prompt * n_seq + (cell.n_prompt if proved else WARM_TOKENS)
        steps = TAIL_STEPS if proved else 0
    elif isinstance(cell, Decode):
        shared = cell.policy == "shared"
        again = n_seq * cell.n_gen if shared else cell.depth + cell.n_gen
        tokens = cell.depth * (1 if shared else n_seq) + (again if proved else 0 if shared else WARM_TOKENS)
        steps = WARM_STEPS + cell.n_gen
    multiplied = 2 * n_params * (tokens + steps * n_seq) / pace.matmul
    return START_S + multiplied + steps * n_params * BITS.get(dtype, 8) / 8 / pace.read
