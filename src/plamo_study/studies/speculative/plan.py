"""Cells of the speculation studies: drafters, draft lengths, ways of taking drafts back, and real drafters on text.

Costs are measured on drafts with a forced number of right tokens, every number equally often, so that one cell gives
the speed at any acceptance. Some acceptances are measured directly, to check the computed speed. The acceptance of real
drafters is a separate study: with random weights no text means anything.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from llama_meter.cells import File, Speculate
from llama_meter.errors import StudyError
from llama_meter.measure import texts
from llama_meter.measure.plan import (
    MODELS,
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
from llama_meter.measure.request import NOTHING, Sweep
from llama_meter.models import registry

HYBRID, ATTENTION = MODELS
DRAFTERS = {HYBRID: "plamo-2-draft", ATTENTION: "plamo-3-draft"}  # trained to draft, in each architecture
DRAFTS = (1, 2, 3, 4, 7, 8)  # tokens per draft; with the token before them, 3 and 7 fill tiles of four columns
USUAL = 4
RATES = (0.7, 0.5, 0.9)  # acceptances measured directly
DEPTH, DEEP = 64, 4096
BATCHES = (4, 8)  # sequences
GENERATED = 64
BLOCKS = {"mini": 3, "shape": 4, "file": 4}
TEXT, PROSE = "python-heldout", "english-heldout"
PROMPTS = 4  # of a text, in each process
ROUGH, ROUGHER = "Q4_0", "Q2_K"  # the target's own weights in fewer bits, as drafters


def speculative(scale: str, gpu: bool = False, sweep: Sweep = NOTHING) -> Plan:
    """Chapter 8: drafts without cost on every model; the hybrid's also on a build that removes tokens from its state.

    `sweep`: other files, lengths of drafts, acceptances, threads or layers. One of the lengths takes all other
    measurements: USUAL where it is among them, else the first.
    """
    bases = _bases(scale, gpu, sweep)
    lengths, rates = sweep.n_draft or DRAFTS, sweep.acceptance or RATES
    even = [change(base, drafter="even") for base in bases]
    first = [each for base in even for each in (base, change(base, drafter="", accepts=rates[0]))]
    first += [change(base, back="full") for base in even if registry.spec(base.model, base.scale).d_state]
    costs = [change(base, n_draft=k) for base in even for k in lengths]
    costs += [change(base, accepts=rate) for base in bases for rate in rates]
    shorter = [change(base, n_gen=GENERATED // 2) for base in even]
    costs += [change(base, n_seq=n) for base in shorter for n in BATCHES]
    if scale != "mini":  # the embedded models are too small for depth to matter
        costs += [change(base, depth=DEEP - 2 * GENERATED) for base in shorter]
    cells = [*first, *(cell for cell in costs if not sweep.files or fits(cell))]
    planned = _planned("08-speculative", scale_of(scale, sweep), cells, len(first))
    return replace(planned, compared=tuple(dict.fromkeys(cell for cell in costs if cell.model == HYBRID)))


def drafters(scale: str, gpu: bool = False, sweep: Sweep = NOTHING) -> Plan:
    """Chapter 8: real drafters on real text, n-grams and models.

    `sweep`: other files and a model that drafts for them, lengths of drafts, threads or layers. StudyError for a model
    that drafts in another vocabulary.
    """
    bases = _bases(scale, gpu, sweep)
    for base in bases:
        for draft in sweep.draft_file:
            _check_vocabulary(base, draft)
    first = [cell for base in bases for cell in _on_text(base, TEXT, sweep)]
    lengths = sweep.n_draft or (DRAFTS[-1],)
    rest = [change(cell, n_draft=k) for k in lengths for cell in first if sweep.n_draft or cell.drafter == "lookup"]
    rest += [cell for base in bases for cell in _on_text(base, PROSE, sweep)]
    rest += [
        change(cell, draft=cell.model, draft_dtype=dtype)
        for cell in first
        for dtype in (ROUGH, ROUGHER)
        if cell.drafter == "model" and not sweep.files
    ]
    return _planned("08-drafters", scale_of(scale, sweep), [*first, *rest], len(first))


def _check_vocabulary(base: Speculate, draft: File) -> None:
    target, drafter = (registry.spec(name, registry.FILE_SCALE).vocab for name in (base.model, draft[0]))
    if drafter != target:
        why = f"has {drafter:,} tokens, and {base.model} has {target:,}: a drafted token would mean another text"
        raise StudyError(f"draft_file {draft[0]}", why, "draft with a model of the target's vocabulary")


def _bases(scale: str, gpu: bool, sweep: Sweep) -> list[Speculate]:
    """A draft on each file, of the usual length or of the first that is wanted. StudyError for one without room."""
    check_scale(scale)
    usual = USUAL if not sweep.n_draft or USUAL in sweep.n_draft else sweep.n_draft[0]
    if max((usual, *sweep.n_draft)) > (room := DEPTH + GENERATED):
        raise StudyError(f"n_draft {max(sweep.n_draft)}", f"is longer than the context of {room} tokens", "draft fewer")
    base = Speculate(depth=DEPTH, n_gen=GENERATED, n_draft=usual, n_threads=threads_of(sweep))
    base = change(change(base, n_gpu_layers=-1 if gpu else 0), **sweep.settings())
    return [on_file(base, file) for file in files_of(scale, sweep)]


def _on_text(base: Speculate, name: str, sweep: Sweep) -> Iterator[Speculate]:
    """N-grams and, where one exists, the model that is trained to draft, or given to."""
    text = change(base, text=name, text_sha256=texts.sha256(texts.read(name)), repetitions=PROMPTS)
    yield change(text, drafter="lookup")
    trained = [(DRAFTERS[base.model], base.scale, base.dtype)] if base.scale == "mini" else []
    for model, _, dtype in sweep.draft_file or trained:
        yield change(text, drafter="model", draft=model, draft_dtype=dtype)


def _planned(study: str, scale: str, cells: Sequence[Speculate], needed: int) -> Plan:
    planned = with_gates(study, scale, tuple(dict.fromkeys(cells)), exact_cache=False)
    return replace(planned, needed=needed, blocks=BLOCKS[scale], workload="plamo_study.studies.speculative.work")
