"""Which cells the study of two files measures: what an answer loses that is read in one type and written in another."""

from collections.abc import Iterator
from dataclasses import replace

from llama_meter.cells import File, Handover
from llama_meter.errors import StudyError
from llama_meter.measure import texts
from llama_meter.measure.plan import MODELS, Plan, change, one, scale_of, threads_of, with_gates
from llama_meter.measure.request import NOTHING, Sweep
from llama_meter.models.registry import FILE_SCALE

WORKLOAD = "plamo_study.studies.two_files.work"
REFERENCE, TEXT, OTHER_TEXT = "F16", "python-heldout", "english-heldout"
TYPES = ("BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0", "Q3_K_M", "Q2_K")  # beside the reference
FEW = ("Q8_0", "Q4_K_M", "Q4_0", "Q2_K")  # where something else is varied
COARSE = ("Q4_K_M", "Q4_0", "Q2_K")
MIXED = ("Q8_0-ssm_out-BF16", "Q4_0-ssm_out-F16")  # of the hybrid
AS_LARGE = "Q8_0-ffn_down-F16-ssm_out-F16"  # of the hybrid: one file of the bytes of Q5_K_M and Q4_0 together
PROMPT, WRITTEN, TEXTS, LONGER = 256, 64, 32, 256  # tokens read and written, texts, and tokens of a longer answer
LENGTHS = {64: 32, 1024: 24, 2048: 16}  # other prompts, and texts of each
TIME_LIMIT_S = 1800.0
FILE_TEXTS, FILE_WRITTEN = 8, 32  # for a reader's files


def pairs(scale: str, gpu: bool = False, sweep: Sweep = NOTHING) -> Plan:
    """Pairs of types, for both trained embedded models; measured once as nothing is random.

    Both models are in each process: the state of the other one must be refused. One thread, as nothing is timed.
    `sweep`: files of one model, the first of which is the reference, or types; tokens read, and tokens written.
    StudyError for another scale, and for files of several models.
    """
    base = Handover(scale=scale, dtype=REFERENCE, n_ctx=PROMPT, n_gen=WRITTEN, n_chunks=TEXTS)
    base = _on(change(base, n_threads=1, n_gpu_layers=-1 if gpu else 0), TEXT)
    if sweep.files:
        (model, _, dtype), *others = _of_one_model(sweep)
        base = change(base, model=model, scale=FILE_SCALE, dtype=dtype, candidates=tuple(name for _, _, name in others))
        base = change(base, n_threads=threads_of(sweep), n_chunks=FILE_TEXTS, n_gen=FILE_WRITTEN)
        cells = list(_of_lengths(base, sweep))
    elif scale != "mini":
        raise StudyError(f"scale {scale!r}", "pairs are held on the trained embedded models", "choose --scale mini")
    else:
        strangers = zip(MODELS, reversed(MODELS), strict=True)
        models = [change(base, model=model, stranger=stranger) for model, stranger in strangers]
        each = [list(_of_model(pair) if sweep == NOTHING else _of_lengths(pair, sweep)) for pair in models]
        cells = [cell for kind in zip(*each, strict=True) for cell in kind if cell]
    planned = with_gates("B-pairs", scale_of(scale, sweep), tuple(cells), exact_cache=False)
    return replace(planned, blocks=1, extra_blocks=0, time_limit_s=TIME_LIMIT_S, workload=WORKLOAD)


def _on(base: Handover, text: str) -> Handover:
    return change(base, text=text, text_sha256=texts.sha256(texts.read(text)))


def _of_model(base: Handover) -> Iterator[Handover | None]:
    """The cells of a model, in order of need; None for what only the hybrid has."""
    hybrid, few = base.model == MODELS[0], change(base, candidates=FEW, paired="few")
    yield change(base, candidates=TYPES + (MIXED if hybrid else ()))
    yield change(base, candidates=COARSE, compares="parts") if hybrid else None
    yield change(base, candidates=(AS_LARGE,), paired="few") if hybrid else None
    yield change(few, candidates=COARSE, compares="free")
    yield _on(few, OTHER_TEXT)
    yield change(few, dtype="F32")
    yield change(few, dtype="BF16")
    yield change(few, type_k="f32", type_v="f32", flash_attn="off")
    yield change(few, n_gen=LONGER)
    for n_ctx, n_chunks in LENGTHS.items():
        yield change(few, n_ctx=n_ctx, n_chunks=n_chunks, candidates=TYPES)


def _of_lengths(base: Handover, sweep: Sweep) -> Iterator[Handover]:
    """Every pair of the types that were asked for, at the lengths that were asked for."""
    types = tuple(name for name in sweep.dtypes if name != base.dtype) or base.candidates or FEW
    cell = change(base, candidates=types, n_gen=one("n_gen", sweep.n_gen, base.n_gen))
    yield from (change(cell, n_ctx=n_ctx) for n_ctx in sweep.n_prompt or (PROMPT,))


def _of_one_model(sweep: Sweep) -> tuple[File, ...]:
    """The files of a sweep. StudyError unless they are two or more of one model."""
    names = dict.fromkeys(model for model, _, _ in sweep.files)
    if len(names) > 1 or len(sweep.files) < 2:
        why = f"are of {len(names)} models: {', '.join(names)}" if len(names) > 1 else "is one, and two are needed"
        raise StudyError("files", why, "give two files of one model, such as -p files a.F16.gguf,a.Q4_0.gguf")
    return sweep.files
