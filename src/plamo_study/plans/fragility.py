"""Which cells the study of fragile tensors measures: one scan per model and candidate, on the quality study's text.

A scan evaluates some 3.7 models per point and chunk, so chunks are shorter and fewer than the quality study's.
"""

from dataclasses import replace

from llama_meter.cells import Scan
from llama_meter.errors import StudyError
from llama_meter.measure import machine, texts
from llama_meter.measure.plan import MODELS, Plan, change, check_scale, with_gates
from plamo_study.plans.quality import REFERENCE, TEXT

CANDIDATES = ("Q4_0",)  # the type whose damage the public claim about ssm_out is about
CHUNK = {"mini": 256, "weights": 512}
CHUNKS = 32  # four per draw of a control
TIME_LIMIT_S = {"mini": 1200.0, "weights": 24 * 3600.0}


def scan(scale: str, gpu: bool = False, text: str = TEXT, candidates: tuple[str, ...] = CANDIDATES) -> Plan:
    """Both models, one process per candidate, measured once: only the controls are random, and they are seeded.

    `text`: one of data/corpus or any UTF-8 file. Raises StudyError at `shape`, whose weights are random, and for a text
    that cannot be read.
    """
    check_scale(scale)
    if scale == "shape":
        raise StudyError("scale 'shape'", "random weights have no quality to lose", "choose --scale mini or weights")
    base = Scan(scale=scale, dtype=REFERENCE, n_ctx=CHUNK[scale], n_chunks=CHUNKS)
    base = change(base, text=text, text_sha256=texts.sha256(texts.read(text)))
    base = change(base, n_threads=machine.performance_cores(), n_gpu_layers=-1 if gpu else 0)
    cells = tuple(change(base, model=model, candidates=(name,)) for model in MODELS for name in candidates)
    planned = with_gates("04-scan", scale, cells, exact_cache=False)  # the study of speed has both gates
    limit = TIME_LIMIT_S[scale]
    return replace(planned, blocks=1, extra_blocks=0, time_limit_s=limit, workload="llama_meter.workloads.fragility")
