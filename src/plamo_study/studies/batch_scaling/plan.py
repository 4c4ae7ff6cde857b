"""Which cells the study of batch scaling measures at which scale, and the source's own table."""

from dataclasses import replace

from llama_meter.cells import Cell, Decode
from llama_meter.measure import machine
from llama_meter.measure.plan import (
    BLOCKS,
    DEPTH,
    DTYPE,
    MATCHED,
    MODELS,
    STEPS,
    Plan,
    change,
    check_scale,
    files_of,
    limits_of,
    on_file,
    scale_of,
    threads_of,
    with_gates,
)
from llama_meter.measure.request import NOTHING, Sweep

SEQUENCES = (*range(1, 17), 24, 32)
FEW_SEQUENCES = (1, 2, 3, 4, 8, 12, 16, 24, 32)  # where curves are compared
FIRST_SEQUENCES = (1, 4, 16)  # that every page requires
GPU_STEPS = 48  # a GPU's steps take milliseconds, and its graphs are recorded during the first of them
SHORT_PROMPT = 8  # where packing prompts could pay: long ones fill a micro-batch each
SOURCE_BLOCKS = 3  # of the source's table, whose cells take minutes


def batch_scaling(scale: str, gpu: bool = False, sweep: Sweep = NOTHING) -> Plan:
    """Chapter 3: decode and prefill of 1 to 32 sequences, the matched model beside both, and the ceilings.

    Decode starts from copies of one prompt's state: a step costs the same as after separate prompts, and the cell
    saves their time. `sweep`: other files, numbers of sequences, depths, steps or settings.
    """
    check_scale(scale)
    n_gen = (*sweep.n_gen, GPU_STEPS if gpu else STEPS)[0]
    n_threads = threads_of(sweep)
    base = Decode(depth=(*sweep.n_depth, DEPTH)[0], n_gen=n_gen, policy="shared", n_threads=n_threads)
    base = change(base, n_gpu_layers=-1 if gpu else 0)
    base, files, own = change(base, **sweep.settings()), files_of(scale, sweep), scale_of(scale, sweep)
    short = change(base, workload="prefill", n_prompt=SHORT_PROMPT, policy="per_sequence")
    limits = limits_of(files, scale, sweep, base.n_gpu_layers != 0, (n_threads,))
    first = FIRST_SEQUENCES if not sweep.n_seq else (1,)
    order = (*FIRST_SEQUENCES, *FEW_SEQUENCES, *SEQUENCES) if not sweep.n_seq else (1, *sweep.n_seq)

    def of(n_seq: int) -> list[Cell]:
        invented = n_seq in FEW_SEQUENCES and not sweep.files
        matched = ((MATCHED, scale, DTYPE[scale]),) if invented else ()
        policies = ("packed", "per_sequence") if n_seq in (4, 16) else ("packed",)
        steps = [on_file(change(base, n_seq=n_seq), file) for file in (*files, *matched)]
        return steps + [on_file(change(short, n_seq=n_seq, policy=how), file) for how in policies for file in files]

    cells = [cell for n_seq in dict.fromkeys(order) for cell in of(n_seq)]
    compared: list[Cell] = [on_file(change(base, n_seq=n), files[0]) for n in FEW_SEQUENCES]
    compared += [on_file(change(short, n_seq=n, policy="packed"), files[0]) for n in (4, 16)]
    needed = len(limits) + sum(len(of(n_seq)) for n_seq in first)
    planned = with_gates("03-batch-scaling", own, (*limits, *cells), exact_cache=False)
    return replace(planned, compared=tuple(compared), needed=needed, blocks=2 if scale == "mini" else BLOCKS)


def source_table(scale: str, gpu: bool = False) -> Plan:
    """The source's batch table under its own conditions: prompts of 512 tokens, 128 steps, packed and per sequence."""
    check_scale(scale)
    n_gen = 32 if scale == "mini" else 128
    base = Decode(model=MODELS[0], scale=scale, dtype=DTYPE[scale], depth=512, n_gen=n_gen)
    base = change(base, n_threads=machine.performance_cores(), n_gpu_layers=-1 if gpu else 0)
    cells = [change(base, n_seq=n, policy=policy) for n in (2, 8, 16) for policy in ("per_sequence", "packed")]
    planned = with_gates("04-source-table", scale, tuple(cells))
    return replace(planned, blocks=2 if scale == "mini" else SOURCE_BLOCKS, extra_blocks=0)
