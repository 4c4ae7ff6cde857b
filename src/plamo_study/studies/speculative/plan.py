"""Cells of the speculation studies: drafters, draft lengths, ways of taking drafts back, and real drafters on text.

Costs are measured on drafts with a forced number of right tokens, every number equally often, so that one cell gives
the speed at any acceptance. Some acceptances are measured directly, to check the computed speed. The acceptance of real
drafters is a separate study: with random weights no text means anything.
"""

from collections.abc import Iterator
from dataclasses import replace

from plamo_study.measure import machine, texts
from plamo_study.measure.cells import Speculate
from plamo_study.measure.plan import DTYPE, MODELS, Plan, change, check_scale, with_gates

WORKLOAD = f"{__package__}.workload"
HYBRID, ATTENTION = MODELS
TERMS = ("draft", "save", "verify", "restore", "replay")  # parts of a round that are timed
BOTH_MOVE = 2  # times the rounding of a logit: the gap that rounding of two logits can close
DRAFTERS = {HYBRID: "plamo-2-draft", ATTENTION: "plamo-3-draft"}  # trained to draft, in each architecture
LARGER = "plamo-2-8b"  # of the same vocabulary as the first model
DRAFTS = (1, 2, 3, 4, 7, 8)  # tokens per draft; with the token before them, 3 and 7 fill tiles of four columns
USUAL = 4
RATES = (0.5, 0.7, 0.9)  # acceptances measured directly
DEPTH, DEEP = 64, 4096
BATCHES = (4, 8)  # sequences
GENERATED = 64
BLOCKS = {"mini": 3, "shape": 4, "weights": 5}
TEXT, PROSE = "python-heldout", "english-heldout"
PROMPTS = 4  # of a text, in each process
TEMPERATURES = (0.0, 0.7, 1.0)
BINDING = 32  # tokens that `Llama.generate` is asked for; the context it makes keeps every logit
ROUGH, ROUGHER = "Q4_0", "Q2_K"  # the target's own weights in fewer bits, as drafters


def speculative(scale: str, gpu: bool = False) -> Plan:
    """Notebook 08: both models; the hybrid's drafts also on a build that can remove tokens from its state."""
    check_scale(scale)
    models = [_base(scale, gpu, model) for model in MODELS]
    first = [cell for base in models for cell in (_even(base, USUAL), change(base, accepts=0.7))]
    first += [change(_even(models[0], USUAL), way="full")]
    costs = [_even(base, k) for base in models for k in DRAFTS]
    costs += [change(base, accepts=rate) for base in models for rate in RATES]
    costs += [_batched(base, n) for base in models for n in BATCHES]
    costs += [_deep(base) for base in models if scale != "mini"]  # the embedded models are too small for it to matter
    rest = [change(models[0], accepts=rate, way="joined") for rate in RATES]
    adapts = [change(base, drafter="adapts", n_draft=DRAFTS[-1]) for base in models]
    rest += [change(each, accepts=rate) for each in adapts for rate in (RATES[0], RATES[-1])]
    planned = _planned("08-speculative", scale, [*first, *costs, *rest], len(dict.fromkeys(first)))
    return replace(planned, compared=tuple(dict.fromkeys(cell for cell in costs if cell.model == HYBRID)))


def several(scale: str, gpu: bool = False) -> Plan:
    """Every short draft with one and with several sequences, to compare drafts and batches like for like."""
    check_scale(scale)
    models = [_base(scale, gpu, model) for model in MODELS]
    short = [change(base, n_gen=base.n_gen // 2) for base in models]
    cells = [
        change(_even(base, k), n_seq=n, n_gen=base.n_gen if n < BATCHES[-1] else base.n_gen // 2)
        for base in short
        for n in (1, *BATCHES)
        for k in DRAFTS[:USUAL]
    ]
    planned = _planned("08-several", scale, cells, len(cells))
    compared = tuple(cell for cell in cells if cell.model == HYBRID)
    return replace(planned, compared=compared, blocks=5)


def drafters(scale: str, gpu: bool = False) -> Plan:
    """Notebook 08: real drafters on real text, and the bindings' own loop."""
    check_scale(scale)
    models = [_base(scale, gpu, model) for model in MODELS]
    first = [cell for base in models for cell in _usual_on_text(base, scale)]
    if scale == "mini":
        first += [change(base, accepts=RATES[0], way="binding", n_gen=BINDING) for base in models]
    rest = [cell for base in models for cell in _on_text(base, scale)]
    return _planned("08-drafters", scale, [*first, *rest], len(first))


def _base(scale: str, gpu: bool, model: str) -> Speculate:
    base = Speculate(model=model, scale=scale, dtype=DTYPE[scale], depth=DEPTH, n_gen=GENERATED, n_draft=USUAL)
    return change(base, n_threads=machine.performance_cores(), n_gpu_layers=-1 if gpu else 0)


def _even(base: Speculate, k: int) -> Speculate:
    return change(base, n_draft=k, drafter="even")


def _batched(base: Speculate, n_seq: int) -> Speculate:
    return change(_even(base, USUAL), n_seq=n_seq, n_gen=base.n_gen // 2)


def _deep(base: Speculate) -> Speculate:
    return change(_even(base, USUAL), depth=DEEP - 2 * base.n_gen, n_gen=base.n_gen // 2)


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
    if scale == "weights" and base.model == HYBRID:
        yield change(by_model, model=LARGER, draft=HYBRID, draft_dtype=base.dtype)


def _planned(study: str, scale: str, cells: list[Speculate], needed: int) -> Plan:
    planned = with_gates(study, scale, tuple(dict.fromkeys(cells)), exact_cache=False)
    return replace(planned, needed=needed, blocks=BLOCKS[scale], workload=WORKLOAD)
