"""Requests recorded for the operator timeline of the roofline study: one per model, and the ceilings."""

from dataclasses import replace

from plamo_study.measure import machine
from plamo_study.measure.cells import Trace
from plamo_study.measure.plan import (
    BLOCKS,
    DTYPE,
    MODELS,
    Plan,
    ceilings,
    change,
    check_scale,
    thread_counts,
    with_gates,
)

PROMPT = {"mini": 128, "shape": 256, "weights": 256}
STEPS = 16


def trace(scale: str, gpu: bool = False) -> Plan:
    """Notebook 02: one request of each model, recorded operator by operator between two unrecorded ones.

    Prompts are shorter than in the studies of speed: the question here is where the time goes.
    """
    check_scale(scale)
    base = Trace(scale=scale, dtype=DTYPE[scale], n_prompt=PROMPT[scale], n_gen=STEPS)
    base = change(base, n_threads=machine.performance_cores(), n_gpu_layers=-1 if gpu else 0)
    cells = tuple(change(base, model=model) for model in MODELS)
    planned = with_gates("02-trace", scale, cells + ceilings(scale, gpu, thread_counts()[:1]), exact_cache=False)
    return replace(planned, blocks=2 if scale == "mini" else BLOCKS, workload=f"{__package__}.workload")
