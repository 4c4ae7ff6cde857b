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
    thread_counts,
    with_gates,
)

SEQUENCES = (*range(1, 17), 24, 32)
FEW_SEQUENCES = (1, 2, 3, 4, 8, 12, 16, 24, 32)  # where curves are compared
SHORT_PROMPT = 8  # where packing prompts could pay: long ones fill a micro-batch each
SOURCE_BLOCKS = 3  # of the source's table, whose cells take minutes


def batch_scaling(scale: str, gpu: bool = False) -> Plan:
    """Notebook 03: decode and prefill of 1 to 32 sequences, the matched model beside both, and the ceilings.

    Decode starts from one prompt whose state every sequence gets a copy of, so a step costs what it costs after
    prompts of their own and a cell does not spend its time on them.
    """
    check_scale(scale)
    base = Decode(model=MODELS[0], scale=scale, dtype=DTYPE[scale], depth=DEPTH, n_gen=STEPS)
    base = change(base, policy="shared", n_threads=machine.performance_cores(), n_gpu_layers=-1 if gpu else 0)
    short = change(base, workload="prefill", n_prompt=SHORT_PROMPT, policy="per_sequence")
    cells: list[Cell] = [change(base, model=model, n_seq=n) for model in MODELS for n in SEQUENCES]
    if scale != "weights":  # the matched model is invented
        cells += [change(base, model=MATCHED, n_seq=n) for n in FEW_SEQUENCES]
    cells += [change(short, model=model, n_seq=n, policy="packed") for model in MODELS for n in SEQUENCES]
    cells += [change(short, model=model, n_seq=n, policy="per_sequence") for model in MODELS for n in (4, 16)]
    compared: list[Cell] = [change(base, n_seq=n) for n in FEW_SEQUENCES]
    compared += [change(short, n_seq=n, policy="packed") for n in (4, 16)]
    planned = with_gates("03-batch-scaling", scale, (*cells, *ceilings(scale, gpu, thread_counts()[:1])))
    return replace(planned, compared=tuple(compared), blocks=2 if scale == "mini" else BLOCKS)


def source_table(scale: str, gpu: bool = False) -> Plan:
    """The source's batch table under its own conditions: prompts of 512 tokens, 128 steps, packed and per sequence."""
    check_scale(scale)
    base = Decode(model=MODELS[0], scale=scale, dtype=DTYPE[scale], depth=512, n_gen=128)
    base = change(base, n_threads=machine.performance_cores(), n_gpu_layers=-1 if gpu else 0)
    cells = [change(base, n_seq=n, policy=policy) for n in (2, 8, 16) for policy in ("per_sequence", "packed")]
    planned = with_gates("03-source-table", scale, tuple(cells))
    return replace(planned, blocks=2 if scale == "mini" else SOURCE_BLOCKS, extra_blocks=0)
