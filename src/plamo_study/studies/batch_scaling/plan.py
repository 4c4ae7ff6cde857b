"""Which cells the study of batch scaling measures at which scale, and the source's own table."""

from dataclasses import replace

from plamo_study.measure import machine
from plamo_study.measure.cells import Cell, Decode
from plamo_study.measure.plan import (
    BLOCKS,
    DEPTH,
    DTYPE,
    MATCHED,
    MODELS,
    STEPS,
    Plan,
    ceilings,
    change,
    check_scale,
    lean,
    planned_models,
    thread_counts,
    with_gates,
)

SEQUENCES = (*range(1, 17), 24, 32)
FEW_SEQUENCES = (1, 2, 3, 4, 8, 12, 16, 24, 32)  # where curves are compared
LEAN_DEPTH = 32
LEAN_SEQUENCES = (4, 5, 8, 9, 16)  # either side of two cliffs; one sequence is measured for the phases
FIRST_SEQUENCES = (1, 4, 16)  # that every page requires
GPU_STEPS = 48  # a GPU's steps take milliseconds, and its graphs are recorded during the first of them
SHORT_PROMPT = 8  # where packing prompts could pay: long ones fill a micro-batch each
SOURCE_BLOCKS = 3  # of the source's table, whose cells take minutes


def batch_scaling(scale: str, gpu: bool = False) -> Plan:
    """Notebook 03: decode and prefill of 1 to 32 sequences, the matched model beside both, and the ceilings.

    Decode starts from copies of one prompt's state: a step costs the same as after separate prompts, and the cell
    saves their time.
    """
    check_scale(scale)
    steps = GPU_STEPS if gpu else STEPS
    base = Decode(model=MODELS[0], scale=scale, dtype=DTYPE[scale], depth=DEPTH, n_gen=steps)
    base = change(base, policy="shared", n_threads=machine.performance_cores(), n_gpu_layers=-1 if gpu else 0)
    short = change(base, workload="prefill", n_prompt=SHORT_PROMPT, policy="per_sequence")
    limits = ceilings(scale, gpu, thread_counts()[:1])

    def of(n_seq: int) -> list[Cell]:
        matched = (MATCHED,) if n_seq in FEW_SEQUENCES and scale != "weights" else ()  # it is invented
        policies = ("packed", "per_sequence") if n_seq in (4, 16) else ("packed",)
        steps = [change(base, model=model, n_seq=n_seq) for model in (*MODELS, *matched)]
        return steps + [change(short, model=model, n_seq=n_seq, policy=how) for how in policies for model in MODELS]

    cells = [cell for n_seq in dict.fromkeys((*FIRST_SEQUENCES, *FEW_SEQUENCES, *SEQUENCES)) for cell in of(n_seq)]
    compared: list[Cell] = [change(base, n_seq=n) for n in FEW_SEQUENCES]
    compared += [change(short, n_seq=n, policy="packed") for n in (4, 16)]
    needed = len(limits) + sum(len(of(n_seq)) for n_seq in FIRST_SEQUENCES)
    planned = with_gates("03-batch-scaling", scale, (*limits, *cells), exact_cache=False)
    return replace(planned, compared=tuple(compared), needed=needed, blocks=2 if scale == "mini" else BLOCKS)


def source_table(scale: str, gpu: bool = False) -> Plan:
    """The source's batch table under its own conditions: prompts of 512 tokens, 128 steps, packed and per sequence."""
    check_scale(scale)
    n_gen = 32 if scale == "mini" else 128
    base = Decode(model=MODELS[0], scale=scale, dtype=DTYPE[scale], depth=512, n_gen=n_gen)
    base = change(base, n_threads=machine.performance_cores(), n_gpu_layers=-1 if gpu else 0)
    cells = [change(base, n_seq=n, policy=policy) for n in (2, 8, 16) for policy in ("per_sequence", "packed")]
    planned = with_gates("03-source-table", scale, tuple(cells))
    return replace(planned, blocks=2 if scale == "mini" else SOURCE_BLOCKS, extra_blocks=0)


def core(scale: str, gpu: bool = False) -> Plan:
    """Decode steps of a few batch sizes, those of the first cliff first, after a short prompt.

    The study's prompt of 128 tokens would take as long as the steps, and makes them at most 3 % longer.
    """
    check_scale(scale)
    base = Decode(scale=scale, dtype=DTYPE[scale], depth=LEAN_DEPTH, n_gen=GPU_STEPS if gpu else STEPS, policy="shared")
    base = change(base, n_threads=machine.performance_cores(), n_gpu_layers=-1 if gpu else 0)
    models = planned_models(scale)
    cells = tuple(change(base, model=model, n_seq=n) for n in LEAN_SEQUENCES for model in models)
    return lean("03-core", scale, cells, needed=LEAN_SEQUENCES.index(5) * len(models) + len(models))
