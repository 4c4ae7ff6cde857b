"""Which cells the study of phase asymmetry measures at which scale."""

from plamo_study.measure import machine
from plamo_study.measure.cells import Cell, Prefill
from plamo_study.measure.plan import DTYPE, MODELS, Plan, ceilings, change, check_scale, thread_counts, with_gates


def phase_asymmetry(scale: str, gpu: bool = False, models: tuple[str, ...] = MODELS) -> Plan:
    """Notebook 01: prefill of 128, 512 and 2048 tokens, 512 decode steps at depth 128, ceilings, and fewer threads.

    With `gpu` these run offloaded, and the thread experiment, on the CPU, gives the CPU's numbers beside them.
    """
    check_scale(scale)
    offload, cores = -1 if gpu else 0, machine.performance_cores()
    cells: list[Cell] = []
    for model in models:
        base = Prefill(model=model, scale=scale, dtype=DTYPE[scale], n_threads=cores, n_gpu_layers=offload)
        cells += [change(base, n_prompt=n, repetitions=1 if n == 2048 else 3) for n in (128, 512, 2048)]
        cells.append(change(base, workload="decode", depth=128, n_gen=512))
        for threads in thread_counts():
            on_cpu = change(base, n_threads=threads, n_gpu_layers=0, n_prompt=128)
            cells += [change(on_cpu, repetitions=3), change(on_cpu, workload="decode", depth=128, n_gen=32)]
    return with_gates("01-phase-asymmetry", scale, tuple(dict.fromkeys(cells)) + ceilings(scale, gpu, thread_counts()))
