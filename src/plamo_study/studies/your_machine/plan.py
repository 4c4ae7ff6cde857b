"""Which cells describe a machine and its files within minutes: both phases, several sequences, types, ceilings."""

from dataclasses import replace

from llama_meter.cells import Cell, Decode, File, Prefill
from llama_meter.measure.plan import (
    DEPTH,
    DTYPE,
    MODELS,
    STEPS,
    Plan,
    ceilings,
    change,
    check_scale,
    files_of,
    fits,
    kernels_of,
    lean,
    of_kind,
    on_file,
    scale_of,
    thread_counts,
)
from llama_meter.measure.request import NOTHING, Sweep
from llama_meter.models import registry

N_PROMPT, N_GEN = (512, 128, 2048), (16,)  # tokens read and written, in order of need
N_SEQ = (4, 5, 8, 9, 2, 16)  # on either side of two jumps first; one sequence is measured for the phases
TYPES = ("Q4_0", "F16", "Q4_K_M")  # of the first model the repository brings, beside the type of every study
SHORT = 32  # tokens of the prompt that a batch's sequences share
GPU_STEPS = 48  # a GPU's steps take milliseconds, and its graphs are recorded during the first of them


def first_round(scale: str, sweep: Sweep) -> Sweep:
    """What the five answers need at least, of the same cells: no file has to be quantized for it."""
    dtypes = () if sweep.files else (DTYPE[scale],)
    return replace(sweep, n_prompt=_prompts(scale, sweep)[:1], n_seq=N_SEQ[:2], dtypes=dtypes)


def _prompts(scale: str, sweep: Sweep) -> tuple[int, ...]:
    """Tokens that are read at once: as asked, else those of our own that the context of every file holds."""
    most = min(registry.spec(*file[:2]).context_length for file in files_of(scale, sweep))
    return sweep.n_prompt or tuple(n for n in N_PROMPT if n <= most) or (most // 2,)


def your_machine(scale: str, gpu: bool = False, sweep: Sweep = NOTHING) -> Plan:
    """Both phases of every file and the machine's ceilings; then batches, types and further lengths as time allows."""
    check_scale(scale)
    files = files_of(scale, sweep)
    threads = tuple(sorted(sweep.n_threads, reverse=True)) or thread_counts()[:1]  # the page is about the most
    base = Prefill(scale=scale, n_threads=threads[0], n_gpu_layers=-1 if gpu else 0)
    base = change(base, **sweep.settings())
    prompts, (answer, *answers) = _prompts(scale, sweep), sweep.n_gen or N_GEN
    (depth, *depths) = sweep.n_depth or (DEPTH,)

    def step(file: File, n_gen: int = answer, at: int = depth) -> Decode:
        return on_file(of_kind(Decode, base, depth=at, n_gen=n_gen), file)

    def phases(file: File, n_prompt: int) -> tuple[Cell, ...]:
        return on_file(change(base, n_prompt=n_prompt), file), step(file)

    def batch(file: File, n_seq: int) -> Cell:
        steps = GPU_STEPS if base.n_gpu_layers else STEPS
        return change(step(file), depth=SHORT, n_gen=steps, n_seq=n_seq, policy="shared")

    first = {file[0]: file for file in reversed(files)}  # one file of each model, the first given
    models = {file[0] for file in first.values()}
    needed = [cell for file in files for cell in phases(file, prompts[0])]
    batches = [batch(file, n) for n in sweep.n_seq or N_SEQ for file in first.values() if n > 1]
    brought = sweep.dtypes or (() if sweep.files or MODELS[0] not in models else TYPES)
    types = [step((MODELS[0], scale, dtype)) for dtype in brought]
    others = [batch(file, n) for n in sweep.n_seq or N_SEQ for file in files if file != first[file[0]] and n > 1]
    lengths: list[Cell] = [on_file(change(base, n_prompt=n), file) for n in prompts[1:] for file in files]
    lengths += [step(file, n) for n in answers for file in files] + [step(file, at=n) for n in depths for file in files]
    threaded = [change(cell, n_threads=n) for n in threads[1:] for cell in needed]
    cells = [*needed, *batches[: 2 * len(first)], *types, *batches[2 * len(first) :], *lengths, *threaded, *others]
    if not sweep.n_prompt:  # our own choice gives way to a short context, yours is an error
        cells = [*needed, *filter(fits, cells)]
    limits = ceilings(scale_of(scale, sweep), base.n_gpu_layers != 0, threads[:1])
    kernels = kernels_of([*files, *(cell.files[0] for cell in types)], limits[1])
    cells = [*cells[: len(needed)], *kernels, *cells[len(needed) :]]
    cells = [*limits, *dict.fromkeys(cells)]
    planned = lean("your-machine", scale_of(scale, sweep), tuple(cells), len(limits) + len(needed))
    return replace(planned, blocks=(*sweep.blocks, planned.blocks)[0])
