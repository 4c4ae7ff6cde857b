"""Which cells the studies of chapter 6 measure at which scale: depth, memory, the loop without a cache, drift.

Depths exceed `context_length`, the length that a model was trained with: llama.cpp computes there as anywhere, and
speed does not depend on it. Predictions do, so drift stays within the training length of the embedded models.
"""

from dataclasses import replace
from typing import Any

from llama_meter.cells import FEW, WALK, WHOLE_WINDOW, Cell, Decode, Depth, File, Gate, OnModel
from llama_meter.errors import StudyError
from llama_meter.measure import machine, plan, texts
from llama_meter.measure.asked import NOTHING, Sweep
from llama_meter.measure.plan import MATCHED, MODELS, Plan, files_of, on_file, scale_of
from llama_meter.models import registry

DEEPEST = {"mini": 8192, "shape": 16384}
LARGER = {"mini": 8192, "shape": 8192}  # of the third model, twice the size of the others
WALKED = {"mini": 2048, "shape": 4096}  # tokens actually computed, past every window
NEAR = (0, plan.DEPTH)  # depths of the short decode cells; the second is where chapter 3 decodes
NEAR_PROCESSES = {"mini": 1, "shape": 3}  # of each in every block: single processes vary by 7 %
PATIENCE = 5  # times the usual limit, for the oracle's long text
PAST_WINDOW = 2304  # tokens of the gate that reaches past the window of the engine build of that name
COMPARED = {"mini": 2048, "shape": 8192}  # depth at which kinds of attention and memory are compared
STEPS = 8  # decode steps timed at each depth
LOOP = {"mini": (256, 64), "shape": (64, 24)}  # prompt and output tokens of the naive loop
BLOCKS = {"mini": 3, "shape": 5}  # processes behind a number
CACHES = ("off/f16/f16", "on/f16/f16", "on/q8_0/q8_0", "on/q4_0/q4_0")  # flash attention, type of K, type of V
CANDIDATES = (*CACHES[1:], "off/q8_0/f16", "off/q4_0/f16")  # V stays f16 without flash attention
TEXT, CHUNK, CHUNKS = "python-heldout.txt", 1024, 12
MOST_TOKENS = 131072
WIDE = ("f32", "f16", "bf16")  # types of values that attention computes with without flash attention


def context(scale: str, gpu: bool = False, sweep: Sweep = NOTHING) -> Plan:
    """Prefill and decode at depths from 0 to DEEPEST, and walks of the first tokens to check the filling.

    Other builds measure the hybrid's ladder and walk; the build `window` gives its attention the published window.
    `sweep`: other files, depths or settings.
    """
    base, files = _base(scale, gpu, sweep)
    deepest: tuple[int, ...] = (DEEPEST[scale], DEEPEST[scale], LARGER[scale])
    if sweep.files:
        deepest = tuple(_quarters(base, min(LARGER[scale], registry.spec(*file[:2]).context_length)) for file in files)
    for file in files if sweep.n_depth else ():
        if max(sweep.n_depth) > (most := registry.spec(*file[:2]).context_length):
            why = f"is more than the context of {file[0]}, {most}"
            raise StudyError(f"n_depth {max(sweep.n_depth)}", why, f"give a smaller one, such as -p n_depth {most}")
    if sweep.n_depth:
        base, deepest = plan.change(base, rungs=_rungs(sweep)), (max(sweep.n_depth),) * len(files)
    ladders = [on_file(plan.change(base, n_ctx=n), file) for file, n in zip(files, deepest, strict=False)]
    walked = plan.change(base, n_ctx=WALKED[scale], ladder=WALK, rungs=())
    walks = [on_file(walked, file) for file in files[:2]] if max(deepest) >= WALKED[scale] else []
    near = [] if sweep.files else _near(base, files[:2])
    limits = plan.limits_of(files, scale, sweep, base.n_gpu_layers != 0, (base.n_threads,))
    planned = _planned("06-context", scale, (*ladders, *walks, *near, *dict.fromkeys(limits)), sweep)
    return replace(planned, compared=(ladders[0], *walks[:1]))


def _near(base: Depth, files: tuple[File, ...]) -> list[Cell]:
    """Decode at depth 0 and, like the first cell of chapter 3, after a short prompt."""
    step = plan.change(base, workload="decode", n_gen=plan.STEPS, flash_attn="auto", repetitions=1)
    return [
        on_file(plan.change(step, depth=n, policy="shared" if n else "per_sequence", seed=seed), file)
        for file in files
        for n in NEAR
        for seed in range(NEAR_PROCESSES[file[1]])
    ]


def _rungs(sweep: Sweep) -> tuple[int, ...]:
    """The depths that were asked for, but for the first and the last; StudyError where there is none to go to."""
    depths = sorted(set(sweep.n_depth) - {0})
    if not depths:
        raise StudyError("n_depth 0", "is the start of every ladder", "give a depth to go to, such as -p n_depth 4096")
    return tuple(depths[:-1]) or (0,)


def memory(scale: str, gpu: bool = False, sweep: Sweep = NOTHING) -> Plan:
    """Flash attention off and on, keys and values in fewer bits, and sliding layers that keep everything.

    `sweep`: other files or depths; a kind of cache that is asked for takes the place of those in fewer bits.
    """
    base, files = _base(scale, gpu, sweep)
    n_ctx = max((*sweep.n_depth, 0)) or COMPARED[scale]
    if sweep.files:
        n_ctx = _quarters(base, min(n_ctx, *(registry.spec(*file[:2]).context_length for file in files)))
    base = plan.change(base, n_ctx=n_ctx, ladder=FEW)
    asked = "/".join((base.flash_attn, base.type_k, base.type_v))
    compared = tuple(dict.fromkeys((*CACHES[:2], asked))) if sweep.settings().keys() - {"n_gpu_layers"} else CACHES
    kinds = [compared] * len(files) if sweep.files else [compared, compared[:2]]
    cells = [
        on_file(plan.change(base, **_kind(name)), file)
        for file, names in zip(files, kinds, strict=False)
        for name in names
    ]
    sliding = [file for file in files if registry.spec(*file[:2]).window] if sweep.files else files[1:2]
    whole = plan.change(base, ladder=WHOLE_WINDOW)
    whole = plan.change(whole, type_k="f16", type_v="f16") if sweep.settings() else whole
    cells += [on_file(plan.change(whole, flash_attn=flash), file) for file in sliding for flash in ("on", "off")]
    return _planned("06-memory", scale, tuple(cells), sweep)


def _quarters(base: Depth, n: int) -> int:
    """A depth of at most `n` tokens whose quarters are whole micro-batches; one micro-batch each at least."""
    return max(n // (4 * base.n_ubatch), 1) * 4 * base.n_ubatch


def _kind(name: str) -> dict[str, str]:
    """The fields of a kind of cache, "flash/K/V"."""
    return dict(zip(("flash_attn", "type_k", "type_v"), name.split("/"), strict=True))


def naive(scale: str, gpu: bool = False, sweep: Sweep = NOTHING) -> Plan:
    """The same output tokens with the cache and without it. `sweep`: other files or settings."""
    base, files = _base(scale, gpu, sweep)
    n_prompt, n_gen = LOOP[scale]
    loop = plan.change(base, workload="naive", n_prompt=n_prompt, n_gen=n_gen, repetitions=1)
    return _planned("06-naive", scale, tuple(on_file(loop, file) for file in files[:2]), sweep)


def drift(scale: str, gpu: bool = False) -> Plan:
    """Effect of attention and cache kinds on the predictions of the trained embedded models; on the CPU, at mini."""
    if scale != "mini":
        raise StudyError(f"scale {scale!r}", "drift is measured on the trained embedded models", "choose --scale mini")
    text = texts.read(TEXT)
    base, _ = _base(scale, gpu=False)
    base = plan.change(base, n_ctx=CHUNK, n_gen=0, n_chunks=CHUNKS, text=TEXT, text_sha256=texts.sha256(text))
    cells = [plan.change(base, model=model, caches=CANDIDATES, repetitions=1) for model in MODELS]
    return replace(_planned("06-drift", scale, tuple(cells)), blocks=1, extra_blocks=0)


def window(scale: str, gpu: bool = False) -> Plan:
    """The oracle on the embedded hybrid past the window that another build gives it; one process, on the CPU.

    The cache is F32: over so many keys, its usual rounding is as large as the effect of a window.
    """
    if scale != "mini":
        raise StudyError(f"scale {scale!r}", "the oracle reads a text this long at mini only", "choose --scale mini")
    base, _ = _base(scale, gpu=False)
    exact = {"n_threads": 1, "type_k": "f32", "type_v": "f32", "flash_attn": "off"}
    cell = plan.change(base, workload="decode", depth=PAST_WINDOW, repetitions=1, **exact)
    planned = _planned("06-window", scale, (cell,))
    gates = tuple(plan.change(gate, n_prompt=PAST_WINDOW, **exact) for gate in planned.gates)
    planned = replace(planned, gates=gates, compared=(cell,), blocks=1, extra_blocks=0)
    return replace(planned, time_limit_s=PATIENCE * planned.time_limit_s)


def _base(scale: str, gpu: bool, sweep: Sweep = NOTHING) -> tuple[Depth, tuple[File, ...]]:
    """A base cell, on the first file, and the files: the hybrid, then what it is compared with, equal bytes first.

    The matched model of equal bytes is invented, so it has no released weights.
    """
    plan.check_scale(scale)
    files = files_of(scale, sweep, (MODELS[0], MATCHED, MODELS[1]))
    threads = plan.threads_of(sweep)
    base = on_file(Depth(n_gen=STEPS, n_threads=threads, n_gpu_layers=-1 if gpu else 0, flash_attn="on"), files[0])
    base = plan.change(base, **sweep.settings())
    if base.flash_attn == "off" and base.type_v not in WIDE:
        why = "needs flash attention: llama.cpp computes with values of these types in no other way"
        raise StudyError(f"type_v {base.type_v}", why, "leave flash_attn away, or give type_v f16")
    return base, files


def _planned(study: str, scale: str, cells: tuple[Cell, ...], sweep: Sweep = NOTHING) -> Plan:
    for cell in cells:
        check(cell)
    first, own = cells[0], scale_of(scale, sweep)
    assert isinstance(first, OnModel)
    how: dict[str, Any] = {"n_threads": machine.performance_cores(), "n_gpu_layers": first.n_gpu_layers}
    files = dict.fromkeys(file for cell in cells for file in cell.files)
    gate = Gate(**plan.gate_tokens(own), **how)
    gates = tuple(plan.gate_of(gate, file) for file in files)
    file = first.files[0] if sweep.files else (MODELS[0], scale, plan.DTYPE[scale])
    anchor = on_file(Decode(depth=16, n_gen=32, **how), file)
    planned = Plan(study, own, cells, gates, anchor, BLOCKS[scale], 1, plan.TIME_LIMIT_S[own])
    return replace(planned, anchors=plan.ANCHORS[own], workload="plamo_study.studies.context.work")


def check(cell: Cell) -> None:
    """StudyError for a depth above MOST_TOKENS, or one of our own that is not a multiple of four micro-batches."""
    if not isinstance(cell, OnModel):
        return
    what, n = f"cell {cell.workload} of {cell.model}", cell.shape[1]
    if n > MOST_TOKENS:
        raise StudyError(what, f"{n} tokens are more than {MOST_TOKENS}", "choose a smaller depth")
    if isinstance(cell, Depth) and not cell.text and not cell.rungs and (not n or n % (4 * cell.n_ubatch)):
        why = f"{n} tokens are not a multiple of four micro-batches of {cell.n_ubatch}"
        raise StudyError(what, why, f"choose a multiple of {4 * cell.n_ubatch}")
