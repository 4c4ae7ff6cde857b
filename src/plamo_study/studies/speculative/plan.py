"""Cells of the speculation studies: drafters, draft lengths, ways of taking drafts back, and real drafters on text.

Costs are measured on drafts with a forced number of right tokens, every number equally often, so that one cell gives
the speed at any acceptance. Some acceptances are measured directly, to check the computed speed. The acceptance of real
drafters is a separate study: with random weights no text means anything.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from llama_meter.cells import Cell, Decode, File, Speculate
from llama_meter.errors import StudyError
from llama_meter.measure import texts
from llama_meter.measure.asked import NOTHING, Sweep
from llama_meter.measure.plan import (
    DTYPE,
    MODELS,
    STEPS,
    Plan,
    change,
    check_scale,
    files_of,
    fits,
    on_file,
    scale_of,
    threads_of,
    with_gates,
)
from llama_meter.models import registry

WORKLOAD = "plamo_study.studies.speculative.work"
HYBRID, ATTENTION = MODELS
DRAFTERS = {HYBRID: "plamo-2-draft", ATTENTION: "plamo-3-draft"}  # trained to draft, in each architecture
LARGER = "plamo-2-8b"  # of the same vocabulary as the first model
DRAFTS = (1, 2, 3, 4, 7, 8)  # tokens per draft; with the token before them, 3 and 7 fill tiles of four columns
USUAL = 4
COLUMNS = (3, 4, 5, 8, 9)  # on either side of what a tile of four columns takes
RATES = (0.5, 0.7, 0.9)  # acceptances measured directly
DEPTH, DEEP = 64, 4096
BATCHES = (4, 8)  # sequences
GENERATED = 64
BLOCKS = {"mini": 3, "shape": 4, "file": 4}
TEXT, PROSE = "python-heldout", "english-heldout"
PROMPTS = 4  # of a text, in each process
TEMPERATURES = (0.0, 0.7, 1.0)
ROUGH, ROUGHER = "Q4_0", "Q2_K"  # the target's own weights in fewer bits, as drafters


def speculative(scale: str, gpu: bool = False, sweep: Sweep = NOTHING) -> Plan:
    """Chapter 8: drafts without cost on every model; the hybrid's also on a build that removes tokens from its state.

    `sweep`: other files, lengths of drafts, acceptances, threads or layers. One of the lengths takes all other
    measurements: USUAL where it is among them, else the first.
    """
    check_scale(scale)
    bases = [_base(scale, gpu, file, sweep) for file in files_of(scale, sweep)]
    states = [base for base in bases if _keeps_a_state(base)]
    lengths, rates = sweep.n_draft or DRAFTS, sweep.acceptance or RATES
    direct = RATES[1] if RATES[1] in rates else rates[0]
    first = [cell for base in bases for cell in (_even(base, base.n_draft), change(base, accepts=direct))]
    first += [change(_even(base, base.n_draft), back="full") for base in states]
    costs = [_even(base, k) for base in bases for k in lengths]
    costs += [change(base, accepts=rate) for base in bases for rate in rates]
    costs += [_batched(base, n) for base in bases for n in BATCHES]
    costs += [_deep(base) for base in bases if scale != "mini"]  # the embedded models are too small for it to matter
    rest = [change(base, accepts=rate, back="joined") for base in states for rate in rates]
    adapts = [change(base, drafter="adapts", n_draft=max(lengths)) for base in bases]
    rest += [change(adaptive, accepts=rate) for adaptive in adapts for rate in dict.fromkeys((rates[0], rates[-1]))]
    cells = [*first, *(cell for cell in (*costs, *rest) if not sweep.files or fits(cell))]
    planned = _planned("08-speculative", scale_of(scale, sweep), cells, len(dict.fromkeys(first)))
    return replace(planned, compared=tuple(dict.fromkeys(cell for cell in costs if cell.model == HYBRID)))


def columns(scale: str, gpu: bool = False) -> Plan:
    """Calls that check drafts beside steps of as many sequences, in the same blocks: like for like."""
    check_scale(scale)
    cells: list[Cell] = []
    for base in _short(scale, gpu):
        step = Decode(depth=DEPTH, n_gen=STEPS, n_threads=base.n_threads, n_gpu_layers=base.n_gpu_layers)
        step = on_file(change(step, policy="shared"), base.files[0])
        cells += [change(step, n_seq=n) for n in (1, *COLUMNS)] + [_even(base, n - 1) for n in COLUMNS]
    return replace(_planned("08-columns", scale, cells, len(cells)), blocks=6, extra_blocks=0)


def drafters(scale: str, gpu: bool = False, sweep: Sweep = NOTHING) -> Plan:
    """Chapter 8: real drafters on real text.

    `sweep`: other files and a model that drafts for them, lengths of drafts, threads or layers.
    """
    check_scale(scale)
    bases = [_base(scale, gpu, file, sweep) for file in files_of(scale, sweep)]
    if sweep.files:
        return _drafters_of_files(bases, sweep)
    first = [cell for base in bases for cell in _usual_on_text(base, scale)]
    rest = [cell for base in bases for cell in _on_text(base, scale)]
    rest += [change(cell, n_draft=k) for k in sweep.n_draft for base in bases for cell in _usual_on_text(base, scale)]
    return _planned("08-drafters", scale, [*first, *rest], len(first))


def _drafters_of_files(bases: list[Speculate], sweep: Sweep) -> Plan:
    """N-grams and the model that was given, on code and on prose, greedily and at a temperature."""
    for base in bases:
        for draft in sweep.draft_file:
            _check_vocabulary(base, draft)

    def of(base: Speculate, text: str, **changes: float) -> Iterator[Speculate]:
        own = change(_text(base, text), **changes)
        yield change(own, drafter="lookup")
        for name, _, dtype in sweep.draft_file:
            yield change(own, drafter="model", draft=name, draft_dtype=dtype)

    first = [cell for base in bases for cell in of(base, TEXT)]
    rest = [cell for k in sweep.n_draft or (DRAFTS[-1],) for base in bases for cell in of(base, TEXT, n_draft=k)]
    rest += [cell for base in bases for cell in of(base, PROSE)]
    rest += [cell for base in bases for cell in of(base, TEXT, temperature=TEMPERATURES[1])]
    return _planned("08-drafters", registry.GIVEN, [*first, *rest], len(first))


def _check_vocabulary(base: Speculate, draft: File) -> None:
    """StudyError where a file that drafts has another number of tokens than its target; a worker compares the texts."""
    own, other = (registry.spec(name, registry.GIVEN).vocab for name in (base.model, draft[0]))
    if own != other:
        why = f"has {other:,} tokens, and {base.model} has {own:,}: a drafted token would mean another text"
        raise StudyError(f"draft_file {draft[0]}", why, "draft with a model of the target's vocabulary")


def _keeps_a_state(base: Speculate) -> bool:
    """Whether a model has a recurrent state, which wrong tokens overwrite."""
    return registry.spec(base.model, base.scale).d_state > 0


def _base(scale: str, gpu: bool, file: File, sweep: Sweep = NOTHING) -> Speculate:
    """A draft of the usual length on a file, or of the first length asked for."""
    usual = USUAL if not sweep.n_draft or USUAL in sweep.n_draft else sweep.n_draft[0]
    base = Speculate(depth=DEPTH, n_gen=GENERATED, n_draft=usual)
    n_threads = threads_of(sweep)
    base = change(base, n_threads=n_threads, n_gpu_layers=-1 if gpu else 0)
    return on_file(change(base, **sweep.settings()), file)


def _short(scale: str, gpu: bool) -> list[Speculate]:
    """A draft of the usual length on both models, of half as many tokens."""
    bases = [_base(scale, gpu, (model, scale, DTYPE[scale])) for model in MODELS]
    return [change(base, n_gen=base.n_gen // 2) for base in bases]


def _even(base: Speculate, k: int) -> Speculate:
    return change(base, n_draft=k, drafter="even")


def _batched(base: Speculate, n_seq: int) -> Speculate:
    return change(_even(base, base.n_draft), n_seq=n_seq, n_gen=base.n_gen // 2)


def _deep(base: Speculate) -> Speculate:
    return change(_even(base, base.n_draft), depth=DEEP - 2 * base.n_gen, n_gen=base.n_gen // 2)


def _text(base: Speculate, name: str) -> Speculate:
    return change(base, text=name, text_sha256=texts.sha256(texts.read(name)), repetitions=PROMPTS)


def _usual_on_text(base: Speculate, scale: str) -> Iterator[Speculate]:
    """N-grams and, where one exists, the model trained to draft."""
    text = _text(base, TEXT)
    yield change(text, drafter="lookup")
    if scale == "mini":
        yield change(text, drafter="model", draft=DRAFTERS[base.model], draft_dtype=base.dtype)


def _on_text(base: Speculate, scale: str) -> Iterator[Speculate]:
    """Real drafters at other temperatures, with longer drafts, on another text, and with other draft models."""
    text = _text(base, TEXT)
    by_model = change(text, drafter="model", draft_dtype=ROUGH)
    for temperature in TEMPERATURES if base.model == HYBRID else TEMPERATURES[:1]:
        yield from (change(cell, temperature=temperature) for cell in _usual_on_text(base, scale))
        if scale == "mini":
            yield change(by_model, draft=base.model, temperature=temperature)
    yield change(text, n_draft=DRAFTS[-1], drafter="lookup")
    if scale == "mini":
        yield from (_text(cell, PROSE) for cell in _usual_on_text(base, scale))
        yield from (change(by_model, draft=other) for other in MODELS if other != base.model)
        other = next(draft for model, draft in DRAFTERS.items() if model != base.model)
        yield change(by_model, draft=other, draft_dtype=base.dtype)
    if scale == "mini" and base.model == HYBRID:
        for target, draft in ((base.dtype, ROUGHER), (ROUGH, ROUGH), (ROUGH, ROUGHER)):
            yield change(by_model, draft=base.model, dtype=target, draft_dtype=draft)


def _planned(study: str, scale: str, cells: Sequence[Cell], needed: int) -> Plan:
    for cell in cells:
        if isinstance(cell, Speculate):
            cell.check()
    planned = with_gates(study, scale, tuple(dict.fromkeys(cells)), exact_cache=False)
    return replace(planned, needed=needed, blocks=BLOCKS[scale], workload=WORKLOAD)
