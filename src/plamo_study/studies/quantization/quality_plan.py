"""Which cells the study of quality measures: every type and recipe of a model against its F16 file, on one text."""

import re
from dataclasses import replace

import psutil

from llama_meter.cells import Quality
from llama_meter.errors import StudyError
from llama_meter.measure import machine, texts
from llama_meter.measure.plan import MODELS, Plan, change, check_scale, types, with_gates
from llama_meter.models import registry

TEXT = "python-heldout"  # Python sources that no embedded model was trained on
REFERENCE = "F16"
CHUNK, CHUNKS = 512, 40  # llama-perplexity's default chunk; 40 of them score 10,200 tokens
PROMPTS, CONTINUED = 32, 64  # greedy continuations and their length in tokens
TIME_LIMIT_S = {"mini": 600.0}  # one process evaluates all files
MEMORY_SHARE = 0.5  # of physical memory, for all files of one process


def quality(scale: str, gpu: bool = False) -> Plan:
    """Both models, measured once as nothing is random; one process per model if its files fit in memory together.

    Raises StudyError at `shape`, whose weights are random.
    """
    check_scale(scale)
    if scale == "shape":
        raise StudyError("scale 'shape'", "random weights have no quality to lose", "choose --scale mini")
    base = Quality(scale=scale, dtype=REFERENCE, n_ctx=CHUNK, n_chunks=CHUNKS, n_gen=CONTINUED, n_seq=PROMPTS)
    base = change(base, text=TEXT, text_sha256=texts.sha256(texts.read(TEXT)))
    base = change(base, n_threads=machine.performance_cores(), n_gpu_layers=-1 if gpu else 0)
    cells = tuple(change(base, model=model, candidates=group) for model in MODELS for group in groups(model, scale))
    planned = with_gates("05-quality", scale, cells, exact_cache=False)  # the study of speed has both gates
    limit = TIME_LIMIT_S[scale]
    return replace(
        planned, blocks=1, extra_blocks=0, time_limit_s=limit, workload="plamo_study.studies.quantization.work"
    )


def groups(model: str, scale: str) -> list[tuple[str, ...]]:
    """The candidates of a model, in groups whose files fit in memory together with the reference."""
    n_params, room = registry.spec(model, scale).n_params, MEMORY_SHARE * psutil.virtual_memory().total
    fitting: list[tuple[str, ...]] = []
    for name in (name for name in types(model, scale) if name != REFERENCE):
        together = (*(fitting[-1] if fitting else ()), name)
        if fitting and sum(map(bits, (*together, REFERENCE))) * n_params / 8 <= room:
            fitting[-1] = together
        else:
            fitting.append((name,))
    return fitting


def bits(name: str) -> int:
    """Approximate bits per weight of a type or recipe: the number in its name plus one for the scales."""
    return int(re.findall(r"\d+", name)[0]) + 1
