"""What every plan shares: cells, gates, anchor and blocks, and the tasks that these come to.

Which cells are measured, whoever asks says.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeVar

import msgspec

from llama_meter.cells import Cell, Decode, File, Gate, MatMul, OnModel, Prefill, Read
from llama_meter.engine import bindings
from llama_meter.errors import StudyError
from llama_meter.limits import LEAST_BLOCKS
from llama_meter.measure import machine
from llama_meter.measure.request import Sweep
from llama_meter.models import registry, tensors
from llama_meter.models.registry import FILE_TYPES

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_0", "Q4_K_M", "Q4_0", "Q3_K_M", "Q2_K")
RECIPES = (
    "Q8_0-ssm_out-BF16",
    "Q4_0-ssm_out-F16",
)  # for models with Mamba layers: one against overflow (D5), one from the public benchmark
LARGEST = 8 << 30  # bytes: the F32 file of a 2.6 B model is larger, and every cell would read it from disk
MODELS = ("plamo-2-1b", "plamo-3-nict-2b")
MATCHED = "plamo-3-matched"  # attention only, with as many weight bytes as the first model
DTYPE = {"mini": "F16", "shape": "Q8_0"}  # the type a study measures where it does not compare types
READ_CACHES = 8  # array for the read ceiling, in last-level caches
MATMUL_SIZE = {"mini": 2048, "shape": 4096, "file": 4096}
GPU_MATMUL_SIZE = 16_384  # rows: a smaller product does not fill a large GPU
# Of a GPU's read ceiling: 16 times the system-level cache of an Ultra, or 20; the workload keeps within free memory
GPU_READ_BYTES = {"mini": 16 * machine.SYSTEM_CACHE, "shape": 1 << 31, "file": 1 << 31}
GPU_GATE_TOKENS, GPU_GATE_MICRO_BATCH = 320, 160  # of full-size models: CUDA uses another scan above 128 tokens a call
GATE_TOKENS = {
    "mini": 320,
    "shape": 72,
    "file": 72,
}  # mini: past the sliding window; else a minute's work
GATE_MICRO_BATCH = {
    "mini": 128,
    "shape": 32,
    "file": 32,
}  # a gate's prefill crosses two ends of micro-batches
# Of a gate at depth, with the micro-batch, flash attention and cache of deep rows. At full size two minutes a file
DEEP_TOKENS = {"mini": 16384, "shape": 4096, "file": 4096}
DEEP_STEPS = 8
CONSISTENT_TOKENS = 48  # of each sequence in a gate without an oracle
BLOCKS = 5  # processes behind every number, before marked blocks are measured again
TIME_LIMIT_S = {"mini": 60.0, "shape": 900.0, "file": 900.0}
ANCHORS = {"mini": 1, "shape": 3, "file": 3}
MOST_CELLS = 10**6
MINOR = 0.01  # share of a file's bytes below which a type's kernel is not measured
LEAN_BLOCKS = 3
LEAN_GATE: dict[str, Any] = {"n_prompt": 24, "n_ubatch": 8, "n_gen": 0, "repetitions": 1}
DEPTH, STEPS = 128, 6  # of batched decode: tokens of the shared prompt, steps timed
REPEAT = 1000  # added to the replicate of repeated measurements and of further anchors
HANDFUL = 8  # cells that are not timed

C = TypeVar("C", bound=Cell)
change = msgspec.structs.replace  # a copy of a cell with some fields changed


@dataclass(frozen=True)
class Plan:
    """Cells to measure in `blocks` randomised blocks, gates once before them, and the anchor between them.

    Cells are in the order in which the finding needs them: under a time limit the last are dropped, but none of the
    first `needed`, by default all.
    """

    study: str
    scale: str
    cells: tuple[Cell, ...]
    gates: tuple[Cell, ...]
    anchor: Cell | None  # None: nothing is timed here, or in too few blocks to show a drift
    blocks: int
    extra_blocks: int  # as many blocks' worth of rows a call may add: repeats, and blocks after those that drifted
    time_limit_s: float  # of a cell's process
    seed: int = 0
    anchors: int = 3  # processes of the anchor between blocks: one varies by 7 % of itself
    compared: tuple[Cell, ...] = ()  # what other builds of the engine measure in the same blocks
    workload: str = ""  # module with the `RUNS` of its own types of cell; without one, measure/phases.py does them
    program: str = ""  # name of the build whose program its workload runs (`engine build`)
    needed: int = MOST_CELLS
    grows: bool = True  # time to spare becomes further blocks

    @property
    def every_cell(self) -> tuple[Cell, ...]:
        """All cells that it measures."""
        return (*self.cells, *self.gates, *((self.anchor,) if self.anchor else ()))

    @property
    def least_blocks(self) -> int:
        """The blocks that any statement about its cells needs."""
        return min(self.blocks, LEAST_BLOCKS)


@dataclass(frozen=True)
class Task:
    """A cell at its place in the sweep."""

    cell: Cell
    replicate: int
    block: int
    order: int
    anchor: bool = False
    engine: str = ""  # folder of a build other than the one in use

    @property
    def repeated(self) -> "Task":
        """Its next repeat: the same cell and block, as a new replicate."""
        return replace(self, replicate=self.replicate + REPEAT, order=self.order + REPEAT)


@dataclass(frozen=True)
class Tasks:
    """The tasks of a plan; `beside`: folders of the other builds that measure what it compares."""

    plan: Plan
    beside: Sequence[str]

    def gates(self) -> list[Task]:
        """The gates of all files; for other builds, those of the compared files."""
        compared = {file for cell in self.plan.compared for file in cell.files}
        folders = {gate: self.beside if compared.issuperset(gate.files) else () for gate in self.plan.gates}
        tasks = [Task(gate, 0, -1, n) for n, gate in enumerate(folders)]
        return tasks + [replace(task, engine=folder) for task in tasks for folder in folders[task.cell]]

    def anchors(self, number: int) -> list[Task]:
        """The anchor before a block, in as many processes as the plan says."""
        cell, replicates = self.plan.anchor, range(number, number + REPEAT * self.plan.anchors, REPEAT)
        return [Task(cell, n, number, 0, anchor=True) for n in replicates] if cell else []

    def shuffled(self, number: int, cells: Sequence[Cell], n_before: int = 0) -> list[Task]:
        """These cells in a block's own order; the builds of a cell follow one another, since they are compared."""
        order = random.Random(f"{self.plan.seed}/{number}/{n_before}")
        mixed = [(cell, self.builds(cell)) for cell in order.sample(cells, len(cells))]
        tasks = [(cell, folder) for cell, folders in mixed for folder in order.sample(folders, len(folders))]
        return [Task(cell, number, number, n, engine=folder) for n, (cell, folder) in enumerate(tasks, n_before + 1)]

    def builds(self, cell: Cell) -> list[str]:
        """The builds that measure a cell."""
        return ["", *(self.beside if cell in self.plan.compared else ())]

    def every(self, n_blocks: int) -> Iterator[Task]:
        """All tasks of so many blocks: gates, and anchors before each block and after the last."""
        yield from self.gates()
        for number in range(n_blocks):
            yield from self.anchors(number)
            yield from self.shuffled(number, self.plan.cells)
        yield from self.anchors(n_blocks)

    def needed(self) -> list[Task]:
        """The tasks that the finding needs: the least blocks of the needed cells, and their files' gates."""
        cells = self.plan.cells[: self.plan.needed]
        files = {file for cell in cells for file in cell.files}
        gates = [task for task in self.gates() if files.issuperset(task.cell.files) and not task.engine]
        return gates + [Task(cell, n, n, 0) for n in range(self.plan.least_blocks) for cell in cells]


def together(cells: Sequence[Cell]) -> Iterator[tuple[Cell, ...]]:
    """Cells in order: singly where they are timed, else in groups that can run side by side."""
    for timed, group in groupby(cells, key=lambda cell: cell.is_timed):
        alike = tuple(group)
        size = 1 if timed else HANDFUL
        yield from (alike[start : start + size] for start in range(0, len(alike), size))


def gates(scale: str, gpu: bool = False) -> Plan:
    """Gates of the files that studies use most, as a plan of their own: a better gate need not wait for its study.

    One thread: nothing here is timed, and on a busy machine threads that wait for one another are many times slower.
    """
    check_scale(scale)
    base = Gate(scale=scale, n_gpu_layers=-1 if gpu else 0, **gate_tokens(scale, gpu))
    files = [(model, DTYPE[scale]) for model in (*MODELS, MATCHED)] + [(MODELS[0], "F16")]
    cells: tuple[Cell, ...] = tuple(change(base, model=model, dtype=dtype) for model, dtype in dict.fromkeys(files))
    cells += tuple(deep_gate(base, (model, scale, DTYPE[scale])) for model in (*MODELS, MATCHED))
    if scale == "shape":  # every other type that a study times, part by part
        lean_gate = change(base, judges="parts", **LEAN_GATE)
        every = ((model, dtype) for model in MODELS for dtype in types(model, scale))
        cells += tuple(
            change(lean_gate, model=model, dtype=dtype) for model, dtype in every if (model, dtype) not in files
        )
    return Plan("A-gates", scale, (), cells, None, 1, 0, TIME_LIMIT_S[scale] * 2)


def thread_counts() -> tuple[int, ...]:
    """All performance cores and half of them; one entry on a single core."""
    cores = machine.performance_cores()
    return tuple(dict.fromkeys((cores, max(cores // 2, 1))))


def files_of(scale: str, sweep: Sweep, models: Sequence[str] = MODELS) -> tuple[File, ...]:
    """The files that a study runs on: those that were asked for, else these models in its type."""
    return sweep.files or tuple((model, scale, DTYPE[scale]) for model in models)


def scale_of(scale: str, sweep: Sweep) -> str:
    """The scale of a plan: "file" where files were asked for."""
    return registry.FILE_SCALE if sweep.files else scale


def one(name: str, values: Sequence[int], usual: int) -> int:
    """The value that was asked for, or the usual one. StudyError for several: this study does not vary it."""
    if len(values) > 1:
        why = f"{len(values)} values, and this study is measured at one"
        raise StudyError(f"{name} {','.join(map(str, values))}", why, f"give one, such as -p {name} {values[0]}")
    return (*values, usual)[0]


def threads_of(sweep: Sweep) -> int:
    """The number of threads that was asked for, else all performance cores. StudyError for several."""
    return one("n_threads", sweep.n_threads, machine.performance_cores())


def on_file(cell: C, file: File) -> C:
    """A cell on another file."""
    return change(cell, model=file[0], scale=file[1], dtype=file[2])


def ceilings(scale: str, gpu: bool, threads: tuple[int, ...]) -> tuple[Read | MatMul, ...]:
    """Both ceilings of the CPU at each thread count, and of the GPU where there is one."""
    dtype = DTYPE.get(scale, "Q8_0")
    read = Read(dtype=dtype, array_bytes=READ_CACHES * machine.last_level_cache(), repetitions=11)
    matmul = MatMul(dtype=dtype, n_rows=MATMUL_SIZE[scale], repetitions=6)
    cells: list[Read | MatMul] = [change(cell, n_threads=n) for n in threads for cell in (read, matmul)]
    if gpu:
        where: dict[str, Any] = {"n_threads": threads[0], "n_gpu_layers": -1}
        cells += [change(read, array_bytes=GPU_READ_BYTES[scale], **where)]
        cells += [change(matmul, n_rows=GPU_MATMUL_SIZE, **where)]
    return tuple(cells)


def kernels_of(files: Sequence[File], product: C) -> tuple[C, ...]:
    """The matrix product in the types that these files' matrices have, where the engine's kernel can be timed."""
    return tuple(dict.fromkeys(change(product, dtype=dtype) for file in files for dtype in _matrix_types(file)))


def limits_of(files: Sequence[File], scale: str, sweep: Sweep, gpu: bool, threads: tuple[int, ...]) -> tuple[Cell, ...]:
    """The machine's ceilings for a study of these files; of files that were asked for also their kernels."""
    bounds = ceilings(scale_of(scale, sweep), gpu, threads)
    return (*bounds, *kernels_of(files, bounds[1])) if sweep.files else bounds


def _matrix_types(file: File) -> tuple[str, ...]:
    """The types of a file's matrices: of a given one those with a kernel and MINOR of its bytes, else as named."""
    if file[1] == registry.FILE_SCALE:
        sizes = tensors.matrix_bytes(registry.FILES[file].parts)
        most = [dtype for dtype, n_bytes in sizes.items() if n_bytes >= MINOR * sum(sizes.values())]
        return tuple(dtype for dtype in most if dtype in bindings.TYPES)
    name = file[2].split("-")[0]
    return (FILE_TYPES[name], *(("Q6_K",) if name.endswith("K_M") else ()))  # a mixture's larger type


def with_gates(study: str, scale: str, cells: tuple[Cell, ...], exact_cache: bool = True) -> Plan:
    """A plan of these cells, with a gate for every file, the usual anchor, blocks and time limit.

    `exact_cache`: at mini, gate every file a second time without the rounding of the engine's cache. Raises StudyError
    for a cell that cannot be measured.
    """
    for cell in cells:
        check_cell(cell)
    first = next(cell for cell in cells if isinstance(cell, OnModel))
    base = change(first, n_threads=machine.performance_cores(), repetitions=1)
    files = dict.fromkeys(file for cell in cells for file in cell.files)
    gate = of_kind(Gate, base, **gate_tokens(scale, gpu=base.n_gpu_layers != 0))
    exact = change(gate, type_k="f32", type_v="f32", flash_attn="off")  # the same without the cache's own rounding
    kinds = (gate, exact) if scale == "mini" and exact_cache else (gate,)
    gates = tuple(dict.fromkeys(gate_of(kind, file) for file in files for kind in kinds))
    anchor = of_kind(Decode, base, n_seq=1, policy="per_sequence", depth=16, n_gen=32)
    planned = Plan(study, scale, cells, gates, anchor, BLOCKS, BLOCKS // 2, TIME_LIMIT_S[scale])
    return replace(planned, anchors=ANCHORS[scale])


def lean(study: str, scale: str, cells: tuple[Cell, ...], needed: int = MOST_CELLS) -> Plan:
    """A plan for a few minutes on a reader's own machine: three processes per cell, and only what they need.

    Only the first process of a cell proves its result, and the others warm up with a short prompt. A file's gate judges
    every part of every layer and the head for a few tokens. No anchor: three blocks are too few to show which drifted.
    """
    proved = tuple(change(cell, proof="first") if isinstance(cell, Prefill | Decode) else cell for cell in cells)
    for cell in proved:
        check_cell(cell)
    first = next(cell for cell in proved if isinstance(cell, OnModel))
    gate = of_kind(Gate, first, judges="parts", n_threads=1, **LEAN_GATE)
    files = dict.fromkeys(file for cell in proved for file in cell.files)
    gates = tuple(gate_of(gate, file) for file in files)
    return Plan(study, scale, proved, gates, None, LEAN_BLOCKS, 1, TIME_LIMIT_S[scale], needed=needed, grows=False)


def deep_gate(gate: Gate, file: File) -> Gate:
    """A gate of this file by the oracle at depth: some positions of a long prompt, and the steps after it."""
    n = DEEP_TOKENS[file[1]]
    deep: dict[str, Any] = {"n_prompt": n, "n_gen": DEEP_STEPS, "n_batch": n, "n_ubatch": 512, "flash_attn": "on"}
    return on_file(change(gate, judges="depth", **deep), file)


def gate_of(gate: Cell, file: File) -> Cell:
    """A gate of this file: by the oracle, or by the engine against itself where the oracle cannot read it."""
    cell = on_file(gate, file)
    if file[1] != registry.FILE_SCALE or registry.FILES[file].has_oracle:
        return cell
    return change(cell, judges="consistent", n_prompt=CONSISTENT_TOKENS, n_gen=0, n_ubatch=512)


def gate_tokens(scale: str, gpu: bool = False) -> dict[str, Any]:
    """Fields of every gate: the tokens that the oracle sees, and the micro-batches they come in."""
    if gpu and scale != "mini":
        return {"n_prompt": GPU_GATE_TOKENS, "n_ubatch": GPU_GATE_MICRO_BATCH, "n_gen": 0}
    return {"n_prompt": GATE_TOKENS[scale], "n_ubatch": GATE_MICRO_BATCH[scale], "n_gen": 0}


def of_kind(kind: type[C], cell: OnModel, **changes: Any) -> C:
    """A cell of another type with the values of the fields that both have, some of them changed."""
    shared = {name: getattr(cell, name) for name in cell.__struct_fields__ if name in kind.__struct_fields__}
    return kind(**shared | changes)


def check_scale(scale: str) -> None:
    """StudyError unless studies run at this scale."""
    if scale not in DTYPE:
        raise StudyError(f"scale {scale!r}", f"unknown; known: {', '.join(DTYPE)}", "plamo-study run --scale mini")


def check_cell(cell: Cell) -> None:
    """Raise StudyError for token counts that cannot be measured: zero, negative, or beyond the model's context."""
    if not isinstance(cell, OnModel):
        return
    what, (n_seq, n_prompt, n_gen) = f"cell {cell.workload} of {cell.model}", cell.shape
    least = 1 if isinstance(cell, Decode) else 0  # steps
    if n_prompt < 0 or n_gen < least or n_prompt + n_gen == 0 or min(n_seq, cell.n_threads) < 1:
        raise StudyError(what, "token, sequence and thread counts must be positive", "raise them")
    most = registry.spec(cell.model, cell.scale).context_length
    if n_prompt + n_gen > most:
        why = f"{n_prompt} + {n_gen} tokens do not fit the model's context of {most}"
        mend = f"choose a shorter prompt or fewer steps: -p n_prompt {most // 4},{most // 2} -p n_gen {most // 4}"
        raise StudyError(what, why, mend)
    if isinstance(cell, Decode) and cell.policy == "shared" and not cell.depth:
        raise StudyError(what, "only decode after a prompt can share it", "pack it")


def fits(cell: Cell) -> bool:
    """Whether a cell's tokens fit the model's context."""
    return not isinstance(cell, OnModel) or sum(cell.shape[1:]) <= registry.spec(cell.model, cell.scale).context_length


def types(model: str, scale: str) -> tuple[str, ...]:
    """Types and recipes to study a model in: those its tensors allow, and F32 where the file is small enough."""
    spec = registry.spec(model, scale)
    named = (*TYPES, *RECIPES) if spec.mamba_heads else TYPES
    return tuple(name for name in named if name != "F32" or 4 * spec.n_params <= LARGEST)
