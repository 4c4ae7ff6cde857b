"""Which cells the study of numeric range measures: probes of every model, and planted amplitudes type by type."""

from dataclasses import replace

from llama_meter.cells import PLANTED, ROTATION, Cell, Ranges
from llama_meter.measure import machine, texts
from llama_meter.measure.plan import DTYPE, MODELS, TIME_LIMIT_S, Plan, change, check_cell, check_scale, with_gates
from llama_meter.models import casts
from plamo_study.plans import batching_law

WORKLOAD = "llama_meter.workloads.numeric_range"
TEXT = "python-heldout"  # of data/corpus
N_PROMPT, N_GEN = {"mini": 256, "shape": 64, "weights": 512}, {"mini": 32, "shape": 8, "weights": 64}
PLANTED_TOKENS = 10  # more than the 8 columns from which every backend takes its matrix kernels
REPETITIONS = 3
ROTATED_TOKENS = 48
BATCHES = 10  # of the batching law's grid
BACKEND_LIMIT_S = 900.0  # a software GPU takes minutes for a gate
BACKEND_TOKENS = 40  # more than the 32 columns from which BLAS is handed a product


def numeric_range(scale: str, gpu: bool = False) -> Plan:
    """Notebook 04b: each model probed over held-out text, and ssm_out's input planted up to 1e8, type by type.

    Amplitudes are planted in the embedded model at every scale, on the CPU and one thread. Random weights (shape) have
    a cost but no range of interest: there the probe evaluates random tokens.
    """
    check_scale(scale)
    cores, offload = machine.performance_cores(), -1 if gpu else 0
    base = Ranges(scale=scale, dtype=DTYPE[scale], n_threads=cores, n_gpu_layers=offload)
    probe = change(base, n_prompt=N_PROMPT[scale], n_gen=N_GEN[scale], mode="probe")
    probe = change(probe, repetitions=REPETITIONS, flash_attn="off")  # flash attention hides kqv
    if scale != "shape":
        probe = change(probe, text=TEXT, text_sha256=texts.sha256(texts.read(TEXT)))
    cells = [change(probe, model=model) for model in MODELS]
    cells += _planted(PLANTED_TOKENS)
    for cell in cells:
        check_cell(cell)
    anchor = change(base, workload="decode", model=MODELS[0], depth=16, n_gen=32)
    return Plan("04-ranges", scale, tuple(cells), (), anchor, 1, 0, TIME_LIMIT_S[scale], workload=WORKLOAD)


def backends(scale: str, gpu: bool = False) -> Plan:
    """Tests of another backend: on the GPU, or on the CPU in a build that has one (`blas`).

    Amplitudes planted in prompts long enough for its matrix kernels, a file without its rotation, an operator's three
    tests, part of the batching law's grid, and the embedded models' gates.
    """
    check_scale(scale)
    planted = _planted(PLANTED_TOKENS if gpu else BACKEND_TOKENS)
    cells: list[Cell] = [*planted, change(planted[0], mode=ROTATION, n_prompt=ROTATED_TOKENS)]
    cells += [batching_law.three_tests(test, model) for test in batching_law.TESTS for model in MODELS]
    cells += batching_law.grid(0, BATCHES, *MODELS)
    offloaded = tuple(change(cell, n_gpu_layers=-1 if gpu else 0) for cell in cells)
    planned = with_gates("04-backends", scale, offloaded, exact_cache=False)
    anchor = change(offloaded[0], workload="decode", depth=16, n_gen=32)
    limit_s = BACKEND_LIMIT_S if gpu else TIME_LIMIT_S[scale]
    planned = replace(planned, anchor=anchor, blocks=1, extra_blocks=0, workload=WORKLOAD)
    return replace(planned, time_limit_s=limit_s, compared=offloaded)


def _planted(n_prompt: int) -> list[Ranges]:
    """One cell per type, on the embedded model."""
    plant = Ranges(model=MODELS[0], scale="mini", dtype=DTYPE["mini"], n_prompt=n_prompt)
    return [change(plant, mode=PLANTED + name) for name in casts.known_types()]
