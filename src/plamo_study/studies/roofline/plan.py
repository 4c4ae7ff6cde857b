"""Which cells chapter 2 measures of its own: passes of every size between one token and a long prompt, and ceilings.

Notebooks 01 and 03 cover both ends: prompts of 128 tokens and more, and decode. The ridge lies between them.
"""

from dataclasses import replace

from llama_meter.cells import Cell, Decode, MatMul, Prefill
from llama_meter.measure import machine
from llama_meter.measure.plan import (
    BLOCKS,
    DEPTH,
    STEPS,
    Plan,
    ceilings,
    change,
    check_scale,
    files_of,
    fits,
    kernels_of,
    of_kind,
    on_file,
    scale_of,
    with_gates,
)
from llama_meter.measure.request import NOTHING, Sweep

PROMPTS = {"mini": (512, 4, 32), "shape": (512, 2, 16, 4, 8, 32, 64)}
SEQUENCES = {"mini": (1, 8), "shape": (1, 4, 16)}
LONG = 512  # tokens of a prompt from which it is read once a process
OTHER_TYPES = ("F32", "F16", "Q8_0")  # matrix ceilings beside the one of the study's own type


def roofline(scale: str, gpu: bool = False, sweep: Sweep = NOTHING) -> Plan:
    """Prompts of 2 to 512 tokens, decode of 1 to 16 sequences, both ceilings, and the matrix ceiling by type.

    `sweep`: other files, prompts, depths of decode or settings. Of files that were given, kernels are timed in the
    types that they hold.
    """
    check_scale(scale)
    threads = sweep.n_threads or (machine.performance_cores(),)
    base = Prefill(n_threads=threads[0], n_gpu_layers=-1 if gpu else 0, repetitions=3)
    base, files, of_files = change(base, **sweep.settings()), files_of(scale, sweep), scale_of(scale, sweep)
    on_gpu = base.n_gpu_layers != 0
    step = of_kind(Decode, base, n_gen=STEPS, policy="shared", repetitions=1)

    def prompts(n: int) -> list[Cell]:
        return [on_file(change(base, n_prompt=n, repetitions=1 if n >= LONG else 3), file) for file in files]

    def steps(depth: int, n_seq: int) -> list[Cell]:
        how = {"depth": depth, "n_seq": n_seq, "policy": "shared" if depth else "per_sequence"}
        return [on_file(change(step, **how), file) for file in files]

    (first, *lengths), (alone, *batches) = sweep.n_prompt or PROMPTS[scale], SEQUENCES[scale]
    depths = sweep.n_depth or (DEPTH,)
    cells = [*prompts(first), *steps(depths[0], alone)]
    ends = len(cells)
    cells += [cell for n in lengths for cell in prompts(n)]
    cells += [cell for n_seq in batches for cell in steps(depths[0], n_seq)]
    cells += [cell for depth in depths[1:] for n_seq in (alone, *batches) for cell in steps(depth, n_seq)]
    cells += [change(cell, n_threads=n) for n in threads[1:] for cell in cells[:ends]]
    if sweep.files and not (sweep.n_prompt or sweep.n_depth):  # our own choice gives way to a short context
        cells = [cell for cell in cells if fits(cell)]
    limits = ceilings(of_files, on_gpu, threads)
    products = [cell for cell in limits if isinstance(cell, MatMul)]
    if sweep.files:
        kernels = [kernel for product in products for kernel in kernels_of(files, product)]
    else:
        kernels = [change(cell, dtype=dtype) for cell in products for dtype in OTHER_TYPES]
    ordered = dict.fromkeys((*limits, *kernels, *cells))
    needed = len(dict.fromkeys((*limits, *kernels))) + ends
    planned = with_gates("02-roofline", of_files, tuple(ordered), exact_cache=False)
    return replace(planned, needed=needed, blocks=2 if scale == "mini" else BLOCKS)
