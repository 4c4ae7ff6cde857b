"""Which cells the studies of chapter 6 measure at which scale: depth, memory, the loop without a cache.

Depths exceed `context_length`, the length that a model was trained with: llama.cpp computes there as anywhere, and
speed does not depend on it. Predictions do, so these rows tell nothing about them.
"""

from dataclasses import replace
from typing import Any

from llama_meter.cells import FEW, WALK, WHOLE_WINDOW, Cell, Decode, Depth, File, Gate, Naive
from llama_meter.errors import StudyError
from llama_meter.measure import machine, plan
from llama_meter.measure.plan import MATCHED, MODELS, Plan, files_of, on_file, scale_of
from llama_meter.measure.request import NOTHING, Sweep
from llama_meter.models import registry

DEEPEST = {"mini": 8192, "shape": 16384}
LARGER = 8192  # of the third model, twice the size of the others, and of a reader's files
WALKED = {"mini": 2048, "shape": 4096}  # tokens actually computed, past every window
COMPARED = {"mini": 2048, "shape": 8192}  # depth at which kinds of attention and memory are compared
STEPS = 8  # decode steps timed at each depth
LOOP = {"mini": (256, 64), "shape": (64, 24)}  # prompt and output tokens of the naive loop
BLOCKS = {"mini": 3, "shape": 5}  # processes behind a number
CACHES = ("off/f16/f16", "on/f16/f16", "on/q8_0/q8_0", "on/q4_0/q4_0")  # flash attention, type of K, type of V


def context(scale: str, gpu: bool = False, sweep: Sweep = NOTHING) -> Plan:
    """Prefill and decode at depths from 0 to DEEPEST, and walks of the first tokens to check the filling.

    Other builds measure the hybrid's ladder and walk; the build `window` gives its attention the published window.
    `sweep`: other files, depths or settings.
    """
    base, files = _base(scale, gpu, sweep)
    if sweep.n_depth:
        depths = _depths(sweep)
        base, deepest = plan.change(base, rungs=depths[:-1] or (0,)), [depths[-1]] * len(files)
    elif sweep.files:
        deepest = [min(LARGER, registry.spec(*file[:2]).context_length) for file in files]
    else:
        deepest = [DEEPEST[scale], DEEPEST[scale], LARGER]
    ladders = [on_file(plan.change(base, n_ctx=n), file) for file, n in zip(files, deepest, strict=True)]
    walked = plan.change(base, n_ctx=WALKED[scale], ladder=WALK, rungs=())
    walks = [on_file(walked, file) for file in files[:2]] if max(deepest) >= WALKED[scale] else []
    limits = plan.limits_of(files, scale, sweep, base.n_gpu_layers != 0, (base.n_threads,))
    planned = _planned("06-context", scale, (*ladders, *walks, *dict.fromkeys(limits)), sweep)
    return replace(planned, compared=(ladders[0], *walks[:1]))


def _depths(sweep: Sweep) -> tuple[int, ...]:
    """The depths to go to. StudyError where there is none, or one that a reader's file has no context for."""
    depths = tuple(sorted(set(sweep.n_depth) - {0}))
    if not depths:
        raise StudyError("n_depth 0", "is the start of every ladder", "give a depth to go to, such as -p n_depth 4096")
    for file in sweep.files:
        if depths[-1] > (most := registry.spec(*file[:2]).context_length):
            why = f"is more than the context of {file[0]}, {most}"
            raise StudyError(f"n_depth {depths[-1]}", why, f"give a smaller one, such as -p n_depth {most}")
    return depths


def memory(scale: str, gpu: bool = False, sweep: Sweep = NOTHING) -> Plan:
    """Flash attention off and on, keys and values in fewer bits, and sliding layers that keep everything.

    `sweep`: other files or depths; a kind of cache that is asked for takes the place of those in fewer bits.
    """
    base, files = _base(scale, gpu, sweep)
    n_ctx = _depths(sweep)[-1] if sweep.n_depth else COMPARED[scale]
    if sweep.files:
        n_ctx = min(n_ctx, *(registry.spec(*file[:2]).context_length for file in files))
    base, wanted = plan.change(base, n_ctx=n_ctx, ladder=FEW), f"{base.flash_attn}/{base.type_k}/{base.type_v}"
    kinds = CACHES if wanted in CACHES[:2] else (*CACHES[:2], wanted)
    files = files if sweep.files else files[:2]
    cells = [
        on_file(_of_kind(base, kind), file)
        for file in files
        for kind in (kinds if sweep.files or file == files[0] else kinds[:2])
    ]
    whole = plan.change(base, ladder=WHOLE_WINDOW)
    sliding = [file for file in files if registry.spec(*file[:2]).window]
    cells += [on_file(_of_kind(whole, kind), file) for file in sliding for kind in reversed(CACHES[:2])]
    return _planned("06-memory", scale, tuple(cells), sweep)


def _of_kind(cell: Depth, kind: str) -> Depth:
    flash, type_k, type_v = kind.split("/")
    return plan.change(cell, flash_attn=flash, type_k=type_k, type_v=type_v)


def naive(scale: str, gpu: bool = False, sweep: Sweep = NOTHING) -> Plan:
    """The same output tokens with the cache and without it. `sweep`: other files or settings."""
    base, files = _base(scale, gpu, sweep)
    n_prompt, n_gen = LOOP[scale]
    loop = plan.of_kind(Naive, base, n_prompt=n_prompt, n_gen=n_gen, repetitions=1)
    return _planned("06-naive", scale, tuple(on_file(loop, file) for file in files[:2]), sweep)


def _base(scale: str, gpu: bool, sweep: Sweep) -> tuple[Depth, tuple[File, ...]]:
    """A base cell, on the first file, and the files: the hybrid, then what it is compared with, equal bytes first.

    The matched model of equal bytes is invented, so it has no released weights.
    """
    plan.check_scale(scale)
    files = files_of(scale, sweep, (MODELS[0], MATCHED, MODELS[1]))
    threads = plan.threads_of(sweep)
    base = on_file(Depth(n_gen=STEPS, n_threads=threads, n_gpu_layers=-1 if gpu else 0, flash_attn="on"), files[0])
    return plan.change(base, **sweep.settings()), files


def _planned(study: str, scale: str, cells: tuple[Cell, ...], sweep: Sweep) -> Plan:
    first, of_files = cells[0], scale_of(scale, sweep)
    assert isinstance(first, Depth | Naive)
    how: dict[str, Any] = {"n_threads": machine.performance_cores(), "n_gpu_layers": first.n_gpu_layers}
    files = dict.fromkeys(file for cell in cells for file in cell.files)
    gate = Gate(**plan.gate_tokens(of_files), **how)
    gates = tuple(plan.gate_of(gate, file) for file in files)
    file = first.files[0] if sweep.files else (MODELS[0], scale, plan.DTYPE[scale])
    anchor = on_file(Decode(depth=16, n_gen=32, **how), file)
    planned = Plan(study, of_files, cells, gates, anchor, BLOCKS[scale], 1, plan.TIME_LIMIT_S[of_files])
    return replace(planned, anchors=plan.ANCHORS[of_files], workload="plamo_study.studies.context.work")
