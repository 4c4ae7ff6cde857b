"""Which cells notebook 02 measures of its own: passes of every size between one token and a long prompt, and ceilings.

Notebooks 01 and 03 cover both ends: prompts of 128 tokens and more, and decode. The ridge lies between them.
"""

from dataclasses import replace

from plamo_study.measure import machine
from plamo_study.measure.cells import Cell, MatMul, Prefill
from plamo_study.measure.plan import (
    BLOCKS,
    DEPTH,
    DTYPE,
    GPU_MATMUL_SIZE,
    MODELS,
    STEPS,
    Plan,
    ceilings,
    change,
    check_scale,
    with_gates,
)

PROMPTS = {"mini": (4, 32, 512), "shape": (2, 4, 8, 16, 32, 64, 512), "weights": (2, 4, 8, 16, 32, 64, 512)}
SEQUENCES = {"mini": (1, 8), "shape": (1, 4, 16), "weights": (1, 4, 16)}
OTHER_TYPES = ("F32", "F16", "Q8_0")  # matrix ceilings beside the one of the study's own type
COLUMNS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32, 64, 128)  # of the engine's product, whose kernel depends on them
FEW_COLUMNS = (1, 4, 8, 32)
GPU_REPETITIONS = 50
COLUMN_SIZE = {"mini": 2048, "shape": 8192, "weights": 8192}  # rows and columns of its weights; shape: out of the cache


def roofline(scale: str, gpu: bool = False) -> Plan:
    """Prompts of 2 to 512 tokens, decode of 1 to 16 sequences, both ceilings, and the matrix ceiling by type."""
    check_scale(scale)
    base = Prefill(model=MODELS[0], scale=scale, dtype=DTYPE[scale], repetitions=3)
    base = change(base, n_threads=machine.performance_cores(), n_gpu_layers=-1 if gpu else 0)
    step = change(base, workload="decode", depth=DEPTH, n_gen=STEPS, policy="shared", repetitions=1)
    cells: list[Cell] = [
        change(base, model=m, n_prompt=n, repetitions=1 if n == 512 else 3) for m in MODELS for n in PROMPTS[scale]
    ]
    cells += [change(step, model=model, n_seq=n) for model in MODELS for n in SEQUENCES[scale]]
    limits = ceilings(scale, gpu, (base.n_threads,))
    others = [change(cell, dtype=dtype) for cell in limits if isinstance(cell, MatMul) for dtype in OTHER_TYPES]
    few = change(others[0], dtype=DTYPE[scale], n_rows=COLUMN_SIZE[scale])
    if gpu:  # on the GPU like the passes: microseconds each, and a small product would stay in its cache
        few = change(few, n_rows=GPU_MATMUL_SIZE, n_gpu_layers=-1, repetitions=GPU_REPETITIONS)
    others += [change(few, n_columns=n) for n in (FEW_COLUMNS if scale == "mini" else COLUMNS)]
    planned = with_gates("02-roofline", scale, (*cells, *dict.fromkeys((*limits, *others))), exact_cache=False)
    return replace(planned, blocks=2 if scale == "mini" else BLOCKS)
