"""Requests recorded for the operator timeline of the roofline study: one per model, and the ceilings."""

from dataclasses import replace

from llama_meter.cells import Trace
from llama_meter.measure.asked import NOTHING, Sweep
from llama_meter.measure.plan import (
    BLOCKS,
    Plan,
    change,
    check_scale,
    files_of,
    fits,
    limits_of,
    on_file,
    scale_of,
    thread_counts,
    with_gates,
)

PROMPT = {"mini": 128, "shape": 256}
SHORT = 32  # of a file whose context has no room for more
STEPS = 16


def trace(scale: str, gpu: bool = False, sweep: Sweep = NOTHING) -> Plan:
    """Chapter 2: one request of each model, recorded operator by operator between two unrecorded ones.

    Prompts are shorter than in the studies of speed: the question here is where the time goes. `sweep`: other files or
    settings.
    """
    check_scale(scale)
    files, own, threads = files_of(scale, sweep), scale_of(scale, sweep), sweep.n_threads[:1] or thread_counts()[:1]
    base = Trace(n_prompt=PROMPT[scale], n_gen=STEPS, n_threads=threads[0], n_gpu_layers=-1 if gpu else 0)
    base = change(base, **sweep.settings())
    cells = tuple(on_file(base, file) for file in files)
    cells = tuple(cell if fits(cell) else change(cell, n_prompt=SHORT) for cell in cells)
    limits = limits_of(files, scale, sweep, base.n_gpu_layers != 0, threads)
    planned = with_gates("02-trace", own, tuple(dict.fromkeys((*cells, *limits))), exact_cache=False)
    return replace(planned, blocks=2 if scale == "mini" else BLOCKS, workload="plamo_study.studies.roofline.work")
