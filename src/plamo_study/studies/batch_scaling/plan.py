"""Which cells the study of batch scaling measures at which scale, and the source's own table."""

from dataclasses import replace

from plamo_study.measure import machine
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
    thread_counts,
    with_gates,
)
from plamo_study.measure.rows import Cell

SEQUENCES = (*range(1, 17), 24, 32)
FEW_SEQUENCES = (1, 2, 3, 4, 8, 12, 16, 24, 32)  # where curves are compared
FIRST_SEQUENCES = (1, 4, 16)  # that no page can do without
SHORT_PROMPT = 8  # where packing prompts could pay: long ones fill a micro-batch each
SOURCE_BLOCKS = 3  # of the source's table, whose cells take minutes


def batch_scaling(scale: str, gpu: bool = False) -> Plan:
    """Notebook 03: decode and prefill of 1 to 32 sequences, the matched model beside both, and the ceilings.

    Decode starts from one prompt whose state every sequence gets a copy of, so a step costs what it costs after
    prompts of their own and a cell does not spend its time on them.
    """
    check_scale(scale)
    base = Cell(workload="decode", model=MODELS[0], scale=scale, dtype=DTYPE[scale], n_prompt=DEPTH, n_gen=STEPS)
    base = change(base, policy="shared", n_threads=machine.performance_cores(), n_gpu_layers=-1 if gpu else 0)
    short = change(base, workload="prefill", n_prompt=SHORT_PROMPT, n_gen=0)
    limits = ceilings(scale, gpu, thread_counts()[:1])
    cells = [change(base, model=model, n_seq=n) for n in SEQUENCES for model in MODELS]
    if scale != "weights":  # the matched model is invented
        cells += [change(base, model=MATCHED, n_seq=n) for n in FEW_SEQUENCES]
    cells += [change(short, model=model, n_seq=n, policy="packed") for n in SEQUENCES for model in MODELS]
    cells += [change(short, model=model, n_seq=n, policy="per_sequence") for model in MODELS for n in (4, 16)]
    compared = [change(base, n_seq=n) for n in FEW_SEQUENCES]
    compared += [change(short, n_seq=n, policy="packed") for n in (4, 16)]
    by_need = (FIRST_SEQUENCES, FEW_SEQUENCES, SEQUENCES)
    cells.sort(key=lambda cell: next(n for n, group in enumerate(by_need) if cell.n_seq in group))
    needed = len(limits) + sum(cell.n_seq in FIRST_SEQUENCES for cell in cells)
    planned = with_gates("03-batch-scaling", scale, (*limits, *cells))
    return replace(planned, compared=tuple(compared), needed=needed, blocks=2 if scale == "mini" else BLOCKS)


def source_table(scale: str, gpu: bool = False) -> Plan:
    """The source's batch table under its own conditions: prompts of 512 tokens, 128 steps, packed and per sequence."""
    check_scale(scale)
    base = Cell(workload="decode", model=MODELS[0], scale=scale, dtype=DTYPE[scale], n_prompt=512, n_gen=128)
    base = change(base, n_threads=machine.performance_cores(), n_gpu_layers=-1 if gpu else 0)
    cells = [change(base, n_seq=n, policy=policy) for n in (2, 8, 16) for policy in ("per_sequence", "packed")]
    planned = with_gates("03-source-table", scale, tuple(cells))
    return replace(planned, blocks=2 if scale == "mini" else SOURCE_BLOCKS, extra_blocks=0)
