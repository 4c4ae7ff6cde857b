"""Which cells the study of replicas measures: the same sequences in one process, in several, and in one each.

Also the parts of a replica's work, measured alone on its share of the cores: prompts, and steps of its sequences.
"""

from dataclasses import replace

from llama_meter.cells import Cell, MatMul, Replicas
from llama_meter.measure import machine
from llama_meter.measure.plan import (
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
from llama_meter.models import given, registry

TOTALS, PROCESSES = (8, 4), (1, 8, 2, 4)  # sequences shared out; the last are few enough for private weights
ROOM = 0.75  # share of the machine's memory that the weights of all processes may take, if each has its own
REPACKED = "Q4_0"  # a type whose matrices the engine lays out anew, in its own memory, when it loads a model
PROMPT = 32
STEPS = {"mini": 32, "shape": 16}
BLOCKS = 5


def replicas(scale: str, gpu: bool = False, sweep: Sweep = NOTHING) -> Plan:
    """Chapter 3: equal cores and equal requests, the weights mapped or private, repacked or not.

    For the first model also: a replica is killed, and the prompts of a process share a call. `sweep`: other files,
    numbers of sequences, or threads.
    """
    check_scale(scale)
    own, files, totals = scale_of(scale, sweep), files_of(scale, sweep), sweep.n_seq or TOTALS
    base = Replicas(n_prompt=PROMPT, n_gen=STEPS[scale], n_threads=threads_of(sweep))
    base = on_file(change(base, n_gpu_layers=-1 if gpu else 0), files[0])
    first, *rest = ([change(base, n_processes=p, n_seq=n // p) for p in PROCESSES if n % p == 0] for n in totals)
    fewer = [cell for group in rest for cell in group]
    fewest = (rest or [first])[-1]
    limits = limits_of(files, scale, sweep, gpu, (base.n_threads,))
    crash = [change(cell, killed=1) for cell in fewest if cell.n_processes == 2]
    needed = [cell for cell in (*first, *limits, *crash, *_parts(first)) if _fits(cell)]
    second = [on_file(cell, file) for file in files[1:] for cell in (*first, *fewer)]
    kinds = [(base.dtype, False), *([] if sweep.files else [(REPACKED, True), (REPACKED, False)])]
    by_kind = [change(cell, dtype=dtype, use_mmap=mapped) for dtype, mapped in kinds for cell in fewest]
    packed = [change(cell, policy="packed") for cell in fewest if 1 in (cell.n_processes, cell.n_seq)]
    kernel = [] if sweep.files else [change(limit, dtype=REPACKED) for limit in limits if isinstance(limit, MatMul)]
    others = [*fewer, *second, *by_kind, *packed, *_parts(fewer), *_parts(second), *_parts(by_kind), *kernel]
    cells = tuple(dict.fromkeys([*needed, *(cell for cell in others if _fits(cell))]))
    planned = with_gates("03-replicas", own, cells, exact_cache=False)
    blocks = 2 if scale == "mini" else BLOCKS
    return replace(planned, needed=len(needed), blocks=blocks, workload="plamo_study.studies.batch_scaling.work")


def _fits(cell: Cell) -> bool:
    """Whether the weights of a given file fit memory once a process; those of our own models are small enough."""
    if not isinstance(cell, Replicas) or cell.scale != registry.GIVEN or (cell.n_processes == 1 and cell.use_mmap):
        return True
    return cell.n_processes * given.FILES[cell.files[0]].n_bytes <= ROOM * machine.memory_bytes()


def _parts(cells: list[Replicas]) -> list[Cell]:
    """One replica's work for each cell, alone on its threads, however the weights were loaded."""
    parts: list[Cell] = []
    for cell in cells:
        alone = change(cell, n_threads=cell.threads_each, use_mmap=True)
        parts.append(change(alone, workload="prefill", n_seq=1, repetitions=3))
        parts.append(change(alone, workload="decode", depth=cell.n_prompt, policy="shared"))
    return list(dict.fromkeys(parts))
