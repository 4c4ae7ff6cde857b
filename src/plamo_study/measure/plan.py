"""Which cells the studies of phase asymmetry and batch scaling measure at which scale, and what every plan shares."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from plamo_study.errors import StudyError
from plamo_study.measure import machine
from plamo_study.measure.process import WORKER
from plamo_study.measure.rows import Cell
from plamo_study.models import registry

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_0", "Q4_K_M", "Q4_0", "Q3_K_M", "Q2_K")
RECIPES = (
    "Q8_0-ssm_out-BF16",
    "Q4_0-ssm_out-F16",
)  # of models with Mamba layers: against overflow (D5); the public benchmark's
LARGEST = 8 << 30  # bytes: the F32 file of a 2.6 B model is larger, and every cell would read it from the disk
MODELS = ("plamo-2-1b", "plamo-3-nict-2b")
MATCHED = "plamo-3-matched"  # attention only, of the weight bytes of the first model
DTYPE = {"mini": "F16", "shape": "Q8_0", "weights": "Q8_0"}  # the type a study measures where it does not compare types
READ_CACHES = 8  # array for the read ceiling, in last-level caches
MATMUL_SIZE = {"mini": 2048, "shape": 4096, "weights": 4096}
GATE_TOKENS = {"mini": 320, "shape": 72, "weights": 72}  # mini: past the sliding window; else a minute's work
GATE_MICRO_BATCH = {"mini": 128, "shape": 32, "weights": 32}  # a gate's prefill crosses two ends of micro-batches
GREEDY_TOKENS = 32  # continued greedily after a gate, to see whether the model loops
BLOCKS = 5  # processes behind every number, before marked blocks are measured again
TIME_LIMIT_S = {"mini": 60.0, "shape": 900.0, "weights": 900.0}
ANCHORS = {"mini": 1, "shape": 3, "weights": 3}
MOST_CELLS = 10**6
DEPTH, STEPS = 128, 6  # of batched decode: tokens of the shared prompt, steps timed


@dataclass(frozen=True)
class Plan:
    """Cells to measure in `blocks` randomised blocks, gates once before them, and the anchor between them.

    Cells stand in the order of what the finding needs: where time is limited the last are left out, but none of the
    first `needed`, by default all.
    """

    study: str
    scale: str
    cells: tuple[Cell, ...]
    gates: tuple[Cell, ...]
    anchor: Cell
    blocks: int
    extra_blocks: int
    time_limit_s: float
    seed: int = 0
    anchors: int = 3  # processes of the anchor between blocks: one varies by 7 % of itself
    compared: tuple[Cell, ...] = ()  # what other builds of the engine measure in the same blocks
    worker: str = WORKER  # module of the process that each cell runs in
    needed: int = MOST_CELLS


def gates(scale: str, gpu: bool = False) -> Plan:
    """Gates of the files that studies use most, by themselves: so that a better gate need not wait for its study.

    One thread: nothing here is timed, and on a busy machine threads that wait for one another take many times as long.
    """
    check_scale(scale)
    base = change(Cell(workload="gate", scale=scale, n_gpu_layers=-1 if gpu else 0), **gate_tokens(scale))
    others = () if scale == "weights" else (MATCHED,)  # the matched model is invented
    files = [(model, DTYPE[scale]) for model in (*MODELS, *others)] + [(MODELS[0], "F16")]
    cells = tuple(change(base, model=model, dtype=dtype) for model, dtype in dict.fromkeys(files))
    anchor = change(base, workload="decode", model=MODELS[0], dtype=DTYPE[scale], n_prompt=16, n_ubatch=512)
    return Plan("00-gates", scale, (), cells, anchor, 1, 0, TIME_LIMIT_S[scale] * 2)


def thread_counts() -> tuple[int, ...]:
    """All performance cores and half of them; one entry on a single core."""
    cores = machine.performance_cores()
    return tuple(dict.fromkeys((cores, max(cores // 2, 1))))


def ceilings(scale: str, gpu: bool, threads: tuple[int, ...]) -> tuple[Cell, ...]:
    """Read bandwidth and matrix throughput of the CPU at each thread count, and of the GPU where there is one."""
    dtype, size = DTYPE[scale], MATMUL_SIZE[scale]
    read = Cell(workload="read", dtype=dtype, size=READ_CACHES * machine.last_level_cache(), repetitions=11)
    matmul = Cell(workload="matmul", dtype=dtype, size=size, repetitions=6)
    cells = [change(cell, n_threads=n) for n in threads for cell in (read, matmul)]
    if gpu:
        cells += [change(cell, n_threads=threads[0], n_gpu_layers=-1) for cell in (read, matmul)]
    return tuple(cells)


def with_gates(study: str, scale: str, cells: tuple[Cell, ...], exact_cache: bool = True) -> Plan:
    """A plan of these cells, with a gate for every file, the usual anchor, blocks and time limit.

    `exact_cache`: at mini, gate every file a second time without the rounding of the engine's cache.
    Raises StudyError for a cell that cannot be measured.
    """
    for cell in cells:
        check_cell(cell)
    base = change(cells[0], n_threads=machine.performance_cores(), repetitions=1, n_seq=1, policy="per_sequence")
    files = dict.fromkeys((cell.model, cell.dtype) for cell in cells if cell.model)
    gate = change(base, workload="gate", **gate_tokens(scale))
    exact = change(gate, type_k="f32", type_v="f32", flash_attn="off")  # the same without the cache's own rounding
    kinds = (gate, exact) if scale == "mini" and exact_cache else (gate,)
    gates = tuple(change(kind, model=model, dtype=dtype) for model, dtype in files for kind in kinds)
    anchor = change(base, workload="decode", n_prompt=16, n_gen=32)
    planned = Plan(study, scale, cells, gates, anchor, BLOCKS, BLOCKS // 2, TIME_LIMIT_S[scale])
    return replace(planned, anchors=ANCHORS[scale])


def gate_tokens(scale: str) -> dict[str, int]:
    """Fields of every gate: the tokens that the oracle sees, the micro-batches they come in, and those continued."""
    return {"n_prompt": GATE_TOKENS[scale], "n_ubatch": GATE_MICRO_BATCH[scale], "n_gen": GREEDY_TOKENS}


def change(cell: Cell, **changes: Any) -> Cell:
    """A copy of a cell with some fields changed."""
    return msgspec.structs.replace(cell, **changes)


def model_file(cell: Cell) -> Path:
    """The GGUF a cell runs on."""
    return registry.model_path(cell.model, cell.scale, cell.dtype)


def check_scale(scale: str) -> None:
    """StudyError unless studies run at this scale."""
    if scale not in DTYPE:
        raise StudyError(f"scale {scale!r}", f"unknown; known: {', '.join(DTYPE)}", "plamo-study run --scale mini")


def check_cell(cell: Cell) -> None:
    """StudyError for token counts that cannot be measured: none, negative, or more than the model was made for."""
    if cell.workload in ("read", "matmul"):
        return
    spec = registry.spec(cell.model, cell.scale)
    if cell.n_prompt < 0 or cell.n_gen < 0 or cell.n_prompt + cell.n_gen == 0 or min(cell.n_seq, cell.n_threads) < 1:
        raise StudyError(
            f"cell {cell.workload} of {cell.model}", "token, sequence and thread counts must be positive", "raise them"
        )
    if cell.n_prompt + cell.n_gen > spec.context_length:
        why = f"{cell.n_prompt} + {cell.n_gen} tokens do not fit the model's context of {spec.context_length}"
        raise StudyError(f"cell {cell.workload} of {cell.model}", why, "choose a shorter prompt or fewer steps")
    if cell.policy == "shared" and (cell.workload != "decode" or not cell.n_prompt):
        raise StudyError(f"cell {cell.workload} of {cell.model}", "only decode after a prompt can share it", "pack it")


def types(model: str, scale: str) -> tuple[str, ...]:
    """Types and recipes a model is studied in: those its tensors allow, and F32 where the file is small enough."""
    spec = registry.spec(model, scale)
    named = (*TYPES, *RECIPES) if spec.mamba_heads else TYPES
    return tuple(name for name in named if name != "F32" or 4 * spec.n_params <= LARGEST)
