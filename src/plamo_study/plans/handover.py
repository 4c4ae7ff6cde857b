"""Which cells the study of two files measures: a prompt read in one type and its answer written in another."""

from dataclasses import replace

from llama_meter.cells import Handover
from llama_meter.errors import StudyError
from llama_meter.measure import texts
from llama_meter.measure.plan import MODELS, Plan, change, with_gates
from plamo_study.plans.quality import REFERENCE, TEXT

TYPES = ("Q8_0", "Q4_K_M", "Q4_0", "Q2_K")  # read and written in, beside the reference
PROMPTS, WRITTEN, TEXTS = (256,), 64, 32  # tokens read, tokens written, texts
TIME_LIMIT_S = 600.0


def pairs(scale: str, gpu: bool = False) -> Plan:
    """Every pair of types, for both trained embedded models; measured once as nothing is random.

    Both models are in each process: the state of the other one must be refused. One thread, as nothing is timed.
    StudyError for another scale.
    """
    if scale != "mini":
        raise StudyError(f"scale {scale!r}", "pairs are held on the trained embedded models", "choose --scale mini")
    base = Handover(scale=scale, dtype=REFERENCE, candidates=TYPES, n_gen=WRITTEN, n_chunks=TEXTS)
    base = change(base, text=TEXT, text_sha256=texts.sha256(texts.read(TEXT)))
    base = change(base, n_threads=1, n_gpu_layers=-1 if gpu else 0)
    others = dict(zip(MODELS, reversed(MODELS), strict=True))
    cells = [change(base, model=model, stranger=others[model], n_ctx=n) for n in PROMPTS for model in MODELS]
    planned = with_gates("16-pairs", scale, tuple(cells), exact_cache=False)
    return replace(
        planned, blocks=1, extra_blocks=0, time_limit_s=TIME_LIMIT_S, workload="llama_meter.workloads.handover"
    )
