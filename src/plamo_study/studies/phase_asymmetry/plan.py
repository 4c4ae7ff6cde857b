"""Which cells the study of phase asymmetry measures at which scale."""

from dataclasses import replace
from itertools import product

from llama_meter.cells import Cell, Decode, Prefill
from llama_meter.measure.plan import (
    DEPTH,
    Plan,
    change,
    check_scale,
    files_of,
    fits,
    limits_of,
    of_kind,
    on_file,
    scale_of,
    thread_counts,
    with_gates,
)
from llama_meter.measure.request import NOTHING, Sweep

PROMPTS, LONG, ANSWER = (128, 512, 2048), 512, 512  # tokens read; read three times up to LONG; and written


def phase_asymmetry(scale: str, gpu: bool = False, sweep: Sweep = NOTHING) -> Plan:
    """Chapter 1: prefill of 128, 512 and 2048 tokens, 512 decode steps at depth 128, ceilings, and fewer threads.

    With `gpu` these run offloaded, and the thread experiment, on the CPU, gives the CPU's numbers beside them.
    `sweep`: other files, prompts, answers, depths or settings.
    """
    check_scale(scale)
    threads = sweep.n_threads or thread_counts()
    base = Prefill(scale=scale, n_threads=threads[0], n_gpu_layers=-1 if gpu else 0)
    base = change(base, **sweep.settings())
    at, gpu, files = scale_of(scale, sweep), base.n_gpu_layers != 0, files_of(scale, sweep)
    often = {n: 20 if gpu else 3 if n <= LONG else 1 for n in sweep.n_prompt or PROMPTS}  # milliseconds each on a GPU
    steps = of_kind(Decode, base)
    lengths = list(product(sweep.n_depth or (DEPTH,), sweep.n_gen or (ANSWER,)))
    needed: list[Cell] = []
    for file in files:
        needed += [on_file(change(base, n_prompt=n, repetitions=times), file) for n, times in often.items()]
        needed += [on_file(change(steps, depth=depth, n_gen=n), file) for depth, n in lengths]
    if sweep.files and not (sweep.n_prompt or sweep.n_gen):  # our own choice gives way to a short context
        needed = [cell for cell in needed if fits(cell)]
    limits = limits_of(files, scale, sweep, gpu, threads)
    fewer: list[Cell] = []
    for n_threads in threads if len(threads) > 1 else ():  # one thread is compared with no other
        for file in files:
            on_cpu = on_file(change(base, n_threads=n_threads, n_gpu_layers=0, n_prompt=128), file)
            fewer += [change(on_cpu, repetitions=3), of_kind(Decode, on_cpu, depth=128, n_gen=32)]
    planned = with_gates("01-phase-asymmetry", at, tuple(dict.fromkeys((*limits, *needed, *fewer))))
    return replace(planned, compared=tuple(needed), needed=len(needed) + len(limits))
