"""Which cells the study of speculation measures: who drafts how much, how it is taken back, and plain decode beside it.

Costs are measured on drafts whose number of right tokens is forced, every number equally often, so that one cell gives
the speed at any acceptance. Some acceptances are measured by themselves, to hold the computed speed against. What real
drafters get right is measured on a text, and means something at mini and on released weights only.
"""

from collections.abc import Iterator
from dataclasses import replace

from plamo_study.measure import machine, texts
from plamo_study.measure.cells import Cell, Speculate
from plamo_study.measure.plan import DTYPE, MODELS, Plan, change, check_scale, with_gates

HYBRID, ATTENTION = MODELS
TERMS = ("draft", "save", "verify", "restore", "replay")  # of a round: what is timed in each
BOTH_MOVE = 2  # times the rounding of a logit: two of them may come together by that
DRAFTERS = {HYBRID: "plamo-2-draft", ATTENTION: "plamo-3-draft"}  # trained to draft, in each architecture
LARGER = "plamo-2-8b"  # of the same vocabulary as the first model
DRAFTS = (1, 2, 4, 8)  # tokens of a draft
USUAL = 4
FORCED = (2, 8)  # further drafts measured at one acceptance
RATES = (0.5, 0.7, 0.9)  # acceptances measured by themselves
DEPTH, DEEP = 64, 4096
BATCHES = {"mini": (4,), "shape": (4, 8), "weights": (4, 8)}
GENERATED = {"mini": 64, "shape": 64, "weights": 64}
BLOCKS = {"mini": 3, "shape": 5, "weights": 5}
TEXT, PROSE = "python-heldout", "english-heldout"
PROMPTS = {"mini": 4, "weights": 4}  # of a text, in each process
TEMPERATURES = (0.0, 0.7, 1.0)
BINDING = 32  # tokens that `Llama.generate` is asked for; the context it makes keeps every logit
ROUGH, ROUGHER = "Q4_0", "Q2_K"  # a target's own weights in fewer bits, which draft for it


def speculative(scale: str, gpu: bool = False) -> Plan:
    """Notebook 08: the engine as released, both models."""
    check_scale(scale)
    models = [_base(scale, gpu, model) for model in MODELS]
    first = [cell for base in models for cell in (_plain(base), _even(base, USUAL), change(base, accepts=0.7))]
    first += [change(_even(models[0], USUAL), way="full")]
    rest = [_even(base, k) for base in models for k in DRAFTS]
    rest += [change(base, accepts=rate) for base in models for rate in RATES]
    rest += [change(base, accepts=rate, n_draft=k) for base in models for k in FORCED for rate in (RATES[0], RATES[-1])]
    adapts = [change(base, drafter="adapts", n_draft=DRAFTS[-1]) for base in models]
    rest += [change(each, accepts=rate) for each in adapts for rate in (RATES[0], RATES[-1])]
    rest += [change(models[0], accepts=rate, way="joined") for rate in RATES]
    rest += [change(base, accepts=RATES[0], way="binding", n_gen=BINDING) for base in models if scale == "mini"]
    rest += [cell for base in models for n in BATCHES[scale] for cell in _batched(base, n)]
    rest += _deep(models, scale)
    rest += [cell for base in models for cell in _on_text(base, scale)]
    return _planned("08-speculative", scale, first, rest)


def rollback(scale: str, gpu: bool = False) -> Plan:
    """The hybrid's drafts, to be measured beside a build that takes tokens back from its state (`rollback`)."""
    check_scale(scale)
    base = _base(scale, gpu, HYBRID)
    cells = [_plain(base), *(_even(base, k) for k in DRAFTS)]
    cells += [change(base, accepts=rate, n_draft=k) for k in (2, USUAL) for rate in RATES]
    cells += [cell for n in BATCHES["shape"] for cell in _batched(base, n)]
    cells += _deep([base], scale)
    planned = _planned("08-rollback", scale, cells, [])
    return replace(planned, compared=planned.cells)


def _base(scale: str, gpu: bool, model: str) -> Speculate:
    base = Speculate(model=model, scale=scale, dtype=DTYPE[scale], depth=DEPTH, n_gen=GENERATED[scale], n_draft=USUAL)
    return change(base, n_threads=machine.performance_cores(), n_gpu_layers=-1 if gpu else 0)


def _plain(base: Speculate) -> Speculate:
    return change(base, n_draft=0, drafter="", accepts=0.0)


def _even(base: Speculate, k: int) -> Speculate:
    return change(base, n_draft=k, drafter="even")


def _batched(base: Speculate, n_seq: int) -> list[Speculate]:
    several = change(base, n_seq=n_seq, n_gen=base.n_gen // 2)
    return [_plain(several), _even(several, USUAL)]


def _deep(models: list[Speculate], scale: str) -> list[Speculate]:
    """After a long context; the embedded models are too small for it to matter."""
    if scale == "mini":
        return []
    deep = [change(base, depth=DEEP - 2 * base.n_gen, n_gen=base.n_gen // 2) for base in models]
    return [cell for base in deep for cell in (_plain(base), _even(base, USUAL))]


def _on_text(base: Speculate, scale: str) -> Iterator[Speculate]:
    """Real drafters on real text, plain decode of the same prompts beside them."""
    if scale not in PROMPTS:
        return
    sha256 = texts.sha256(texts.read(TEXT))
    text = change(base, text=TEXT, text_sha256=sha256, repetitions=PROMPTS[scale])
    by_model = change(text, drafter="model", draft_dtype=ROUGH)
    for temperature in TEMPERATURES if base.model == HYBRID else TEMPERATURES[:1]:
        yield change(text, n_draft=0, temperature=temperature)
        yield change(text, drafter="lookup", temperature=temperature)
        if scale == "mini":
            yield change(by_model, draft=base.model, temperature=temperature)
            yield change(by_model, draft=DRAFTERS[base.model], draft_dtype=base.dtype, temperature=temperature)
    yield change(text, n_draft=DRAFTS[-1], drafter="lookup")
    if scale == "mini":
        prose = change(text, text=PROSE, text_sha256=texts.sha256(texts.read(PROSE)))
        yield from (change(prose, n_draft=0), change(prose, drafter="lookup"))
        yield change(prose, drafter="model", draft=DRAFTERS[base.model], draft_dtype=base.dtype)
    if scale == "mini":
        yield from (change(by_model, draft=other) for other in MODELS if other != base.model)
        other = next(draft for model, draft in DRAFTERS.items() if model != base.model)
        yield change(by_model, draft=other, draft_dtype=base.dtype)
    if scale == "mini" and base.model == HYBRID:
        for target, draft in ((base.dtype, ROUGHER), (ROUGH, ROUGH), (ROUGH, ROUGHER)):
            yield change(by_model, draft=base.model, dtype=target, draft_dtype=draft)
        yield change(text, n_draft=0, dtype=ROUGH)
    if scale == "weights" and base.model == HYBRID:
        yield change(text, model=LARGER, n_draft=0)
        yield change(by_model, model=LARGER, draft=HYBRID, draft_dtype=base.dtype)


def _planned(study: str, scale: str, first: list[Speculate], rest: list[Speculate]) -> Plan:
    cells: tuple[Cell, ...] = tuple(dict.fromkeys([*first, *rest]))
    planned = with_gates(study, scale, cells, exact_cache=False)
    return replace(planned, needed=len(dict.fromkeys(first)), blocks=BLOCKS[scale], worker=f"{__package__}.worker")
