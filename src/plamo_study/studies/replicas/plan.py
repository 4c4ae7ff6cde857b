"""Which cells the study of replicas measures: the same sequences in one process, in several, and in one each.

Also the parts of a replica's work, measured alone on its share of the cores: prompts, and steps of its sequences.
"""

from dataclasses import replace

from plamo_study.measure import machine
from plamo_study.measure.cells import Cell, MatMul, Replicas
from plamo_study.measure.plan import DTYPE, MODELS, Plan, ceilings, change, check_scale, with_gates

ARRANGEMENTS = ((1, 8), (8, 1), (2, 4), (4, 2))  # processes, sequences of each
FEWER = ((1, 4), (4, 1), (2, 2))  # few enough for private weights in every process
REPACKED = "Q4_0"  # a type whose matrices the engine lays out anew, in its own memory, when it loads a model
PROMPT = 32
STEPS = {"mini": 32, "shape": 16, "weights": 16}
BLOCKS = 5


def replicas(scale: str, gpu: bool = False) -> Plan:
    """Notebook 07: equal cores and equal requests, the weights mapped or private, repacked or not.

    For the first model also: a replica is killed, and the prompts of a process share a call.
    """
    check_scale(scale)
    base = Replicas(model=MODELS[0], scale=scale, dtype=DTYPE[scale], n_prompt=PROMPT, n_gen=STEPS[scale])
    base = change(base, n_threads=machine.performance_cores(), n_gpu_layers=-1 if gpu else 0)
    first = [_arranged(base, *arrangement) for arrangement in ARRANGEMENTS]
    crash = change(_arranged(base, 2, 2), killed=1)
    limits = ceilings(scale, gpu, (base.n_threads,))
    needed = [*limits, *first, crash, *_parts(first)]
    fewer = [_arranged(base, *arrangement) for arrangement in FEWER]
    second = [change(cell, model=MODELS[1]) for cell in (*first, *fewer)]
    kinds = [(base.dtype, False), (REPACKED, True), (REPACKED, False)]
    kept = [change(cell, dtype=dtype, use_mmap=mapped) for dtype, mapped in kinds for cell in fewer]
    packed = [change(cell, policy="packed") for cell in fewer[:2]]
    kernel = [change(limit, dtype=REPACKED) for limit in limits if isinstance(limit, MatMul)]
    others = [*fewer, *second, *kept, *packed, *_parts(fewer), *_parts(second), *_parts(kept), *kernel]
    cells = tuple(dict.fromkeys([*needed, *others]))
    planned = with_gates("07-replicas", scale, cells, exact_cache=False)
    blocks = 2 if scale == "mini" else BLOCKS
    return replace(planned, needed=len(needed), blocks=blocks, workload=f"{__package__}.workload")


def _arranged(base: Replicas, n_processes: int, n_seq: int) -> Replicas:
    return change(base, n_processes=n_processes, n_seq=n_seq)


def _parts(cells: list[Replicas]) -> list[Cell]:
    """One replica's work for each cell, alone on its threads, however the weights were loaded."""
    found: list[Cell] = []
    for cell in cells:
        alone = change(cell, n_threads=cell.threads_each, use_mmap=True)
        found.append(change(alone, workload="prefill", n_seq=1, repetitions=3))
        found.append(change(alone, workload="decode", depth=cell.n_prompt, policy="shared"))
    return list(dict.fromkeys(found))
