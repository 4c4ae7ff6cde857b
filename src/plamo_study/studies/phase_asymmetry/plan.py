"""Which cells the study of phase asymmetry measures at which scale."""

from dataclasses import replace

from plamo_study.measure import energy, machine
from plamo_study.measure.cells import Cell, Idle, Prefill
from plamo_study.measure.plan import (
    DEPTH,
    DTYPE,
    MODELS,
    Plan,
    ceilings,
    change,
    check_scale,
    lean,
    planned_models,
    thread_counts,
    with_gates,
)

IDLE_S = 10
LEAN_STEPS = 16


def phase_asymmetry(scale: str, gpu: bool = False, models: tuple[str, ...] = MODELS) -> Plan:
    """Notebook 01: prefill of 128, 512 and 2048 tokens, 512 decode steps at depth 128, ceilings, and fewer threads.

    With `gpu` these run offloaded, and the thread experiment, on the CPU, gives the CPU's numbers beside them.
    """
    check_scale(scale)
    base = Prefill(scale=scale, dtype=DTYPE[scale], n_threads=machine.performance_cores())
    base = change(base, n_gpu_layers=-1 if gpu else 0)
    often = {128: 20, 512: 20, 2048: 20} if gpu else {128: 3, 512: 3, 2048: 1}  # milliseconds each on a GPU
    asked: list[Cell] = [
        cell
        for model in models
        for cell in (
            *(change(base, model=model, n_prompt=n, repetitions=times) for n, times in often.items()),
            change(base, model=model, workload="decode", depth=128, n_gen=512),
        )
    ]
    limits: tuple[Cell, ...] = ceilings(scale, gpu, thread_counts())
    if energy.meters():  # idle power belongs to no phase
        limits += (Idle(seconds=IDLE_S),)
    fewer: list[Cell] = []
    counts = thread_counts()
    for threads in counts if len(counts) > 1 else ():  # one thread is compared with no other
        for model in models:
            on_cpu = change(base, model=model, n_threads=threads, n_gpu_layers=0, n_prompt=128)
            fewer += [change(on_cpu, repetitions=3), change(on_cpu, workload="decode", depth=128, n_gen=32)]
    planned = with_gates("01-phase-asymmetry", scale, tuple(dict.fromkeys((*asked, *limits, *fewer))))
    return replace(planned, compared=tuple(asked), needed=len(asked) + len(limits))


def core(scale: str, gpu: bool = False) -> Plan:
    """Both phases of both models, and this machine's ceilings: a prompt of 512 tokens, and steps after 128."""
    check_scale(scale)
    base = Prefill(scale=scale, dtype=DTYPE[scale], n_threads=machine.performance_cores(), n_prompt=512)
    base = change(base, n_gpu_layers=-1 if gpu else 0)
    of_models = [
        cell
        for model in planned_models(scale)
        for cell in (
            change(base, model=model),
            change(base, model=model, workload="decode", depth=DEPTH, n_gen=LEAN_STEPS),
        )
    ]
    return lean("01-core", scale, (*ceilings(scale, gpu, thread_counts()[:1]), *of_models))
