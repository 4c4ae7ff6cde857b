"""Which cells measure batch scaling, the source's own table, and the same sequences shared out among processes.

Of a replica's work also the parts, measured alone on its share of the cores: prompts, and steps of its sequences.
"""

from dataclasses import replace

from llama_meter.cells import Cell, Decode, MatMul, Prefill, Replicas
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
    of_kind,
    on_file,
    scale_of,
    threads_of,
    with_gates,
)
from llama_meter.measure.request import NOTHING, Sweep
from llama_meter.models import registry

SEQUENCES = (*range(1, 17), 24, 32)
FEW_SEQUENCES = (1, 2, 3, 4, 8, 12, 16, 24, 32)  # where curves are compared
FIRST_SEQUENCES = (1, 4, 16)  # that every page requires
GPU_STEPS = 48  # a GPU's steps take milliseconds, and its graphs are recorded during the first of them
SHORT_PROMPT = 8  # where packing prompts could pay: long ones fill a micro-batch each
SOURCE_BLOCKS = 3  # of the source's table, whose cells take minutes
TOTALS, PROCESSES = (8, 4), (1, 8, 2, 4)  # sequences shared out; the last are few enough for private weights
ROOM = 0.75  # share of the machine's memory that the weights of all processes may take, if each has its own
REPACKED = "Q4_0"  # a type whose matrices the engine lays out anew, in its own memory, when it loads a model
REPLICA_PROMPT, REPLICA_STEPS = 32, {"mini": 32, "shape": 16}


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
    base, files, at = change(base, **sweep.settings()), files_of(scale, sweep), scale_of(scale, sweep)
    short = of_kind(Prefill, base, n_prompt=SHORT_PROMPT, policy="per_sequence")
    limits = limits_of(files, scale, sweep, base.n_gpu_layers != 0, (n_threads,))
    first = FIRST_SEQUENCES if not sweep.n_seq else (1,)
    order = (*FIRST_SEQUENCES, *FEW_SEQUENCES, *SEQUENCES) if not sweep.n_seq else (1, *sweep.n_seq)

    def of(n_seq: int) -> list[Cell]:
        invented = n_seq in FEW_SEQUENCES and not sweep.files
        matched = ((MATCHED, scale, DTYPE[scale]),) if invented else ()
        policies = ("packed", "per_sequence") if n_seq in (4, 16) else ("packed",)
        steps: list[Cell] = [on_file(change(base, n_seq=n_seq), file) for file in (*files, *matched)]
        steps += [on_file(change(short, n_seq=n_seq, policy=how), file) for how in policies for file in files]
        return steps

    cells = [cell for n_seq in dict.fromkeys(order) for cell in of(n_seq)]
    compared: list[Cell] = [on_file(change(base, n_seq=n), files[0]) for n in FEW_SEQUENCES]
    compared += [on_file(change(short, n_seq=n, policy="packed"), files[0]) for n in (4, 16)]
    needed = len(limits) + sum(len(of(n_seq)) for n_seq in first)
    planned = with_gates("03-batch-scaling", at, (*limits, *cells), exact_cache=False)
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


def replicas(scale: str, gpu: bool = False, sweep: Sweep = NOTHING) -> Plan:
    """Chapter 3: equal cores and equal requests, the weights mapped or private, repacked or not.

    For the first model also: the prompts of a process share a call. `sweep`: other files, numbers of sequences, or
    threads.
    """
    check_scale(scale)
    at, files, totals = scale_of(scale, sweep), files_of(scale, sweep), sweep.n_seq or TOTALS
    base = Replicas(n_prompt=REPLICA_PROMPT, n_gen=REPLICA_STEPS[scale], n_threads=threads_of(sweep))
    base = on_file(change(base, n_gpu_layers=-1 if gpu else 0), files[0])
    first, *rest = ([change(base, n_processes=p, n_seq=n // p) for p in PROCESSES if n % p == 0] for n in totals)
    fewer = [cell for group in rest for cell in group]
    fewest = (rest or [first])[-1]
    limits = limits_of(files, scale, sweep, gpu, (base.n_threads,))
    needed = [cell for cell in (*first, *limits, *_parts(first)) if _fits(cell)]
    second = [on_file(cell, file) for file in files[1:] for cell in (*first, *fewer)]
    kinds = [(base.dtype, False), *([] if sweep.files else [(REPACKED, True), (REPACKED, False)])]
    by_kind = [change(cell, dtype=dtype, use_mmap=mapped) for dtype, mapped in kinds for cell in fewest]
    packed = [change(cell, policy="packed") for cell in fewest if 1 in (cell.n_processes, cell.n_seq)]
    kernel = [] if sweep.files else [change(limit, dtype=REPACKED) for limit in limits if isinstance(limit, MatMul)]
    others = [*fewer, *second, *by_kind, *packed, *_parts(fewer), *_parts(second), *_parts(by_kind), *kernel]
    cells = tuple(dict.fromkeys([*needed, *(cell for cell in others if _fits(cell))]))
    planned = with_gates("03-replicas", at, cells, exact_cache=False)
    blocks = 2 if scale == "mini" else BLOCKS
    return replace(planned, needed=len(needed), blocks=blocks, workload="plamo_study.studies.batch_scaling.work")


def _fits(cell: Cell) -> bool:
    """Whether the weights of a given file fit memory once a process; those of our own models are small enough."""
    if not isinstance(cell, Replicas) or cell.scale != registry.FILE_SCALE or (cell.n_processes == 1 and cell.use_mmap):
        return True
    return cell.n_processes * registry.FILES[cell.files[0]].n_bytes <= ROOM * machine.memory_bytes()


def _parts(cells: list[Replicas]) -> list[Cell]:
    """One replica's work for each cell, alone on its threads, however the weights were loaded."""
    parts: list[Cell] = []
    for cell in cells:
        alone = change(cell, n_threads=cell.threads_each, use_mmap=True)
        parts.append(of_kind(Prefill, alone, n_seq=1, repetitions=3))
        parts.append(of_kind(Decode, alone, depth=cell.n_prompt, policy="shared"))
    return list(dict.fromkeys(parts))
