"""Which cells the study of chunked prefill measures: who decodes, what arrives, and how the prompt is cut.

Beside them the parts that a call is made of, each alone: steps of so many sequences, and prompts of a chunk's length.
"""

from dataclasses import replace

from plamo_study.measure import machine
from plamo_study.measure.cells import Arrival, Cell, Decode, Prefill
from plamo_study.measure.plan import DEPTH, DTYPE, MATCHED, MODELS, Plan, change, check_scale, with_gates

PROMPT = {"mini": 512, "shape": 512, "weights": 512}  # tokens of the prompt that most cells are about
LONGER = {"mini": (), "shape": (2048, 8192), "weights": (2048, 8192)}
CHUNKS = {"mini": (32, 128, 512), "shape": (32, 64, 128, 256, 512), "weights": (32, 64, 128, 256, 512)}
USUAL_CHUNK = 128
DECODING, OTHERS = 4, (1, 8)  # sequences being answered
STEPS = 8  # before the prompt arrives, and after it is evaluated
BLOCKS = 5


def chunked(scale: str, gpu: bool = False) -> Plan:
    """Notebook 06: one prompt arrives while 4 sequences decode; then more or fewer of them, and longer prompts.

    On PLaMo 3 each cell in one call runs with one buffer for all sequences and with one each: the control of how calls
    are cut into micro-batches. The hybrid's memory takes no notice of it.
    """
    check_scale(scale)
    base = Arrival(model=MODELS[0], scale=scale, dtype=DTYPE[scale], depth=DEPTH, n_gen=STEPS, n_seq=DECODING)
    base = change(base, n_threads=machine.performance_cores(), n_gpu_layers=-1 if gpu else 0)
    models = MODELS if scale == "weights" else (*MODELS, MATCHED)
    cells: list[Cell] = []
    for model in models:
        first = change(base, model=model, n_arriving=PROMPT[scale])
        cells.append(first)
        for n_chunk in CHUNKS[scale]:
            together = change(first, way="together", n_chunk=n_chunk)
            cells += [change(together, way="apart"), together, change(together, kv_unified=True)]
    for model in MODELS:
        first = change(base, model=model, n_arriving=PROMPT[scale], n_chunk=USUAL_CHUNK, kv_unified=model != MODELS[0])
        cells += [change(first, n_seq=n, way=way) for n in OTHERS for way in ("apart", "together")]
        longer = [change(first, n_arriving=n) for n in LONGER[scale]]
        cells += [change(cell, way="whole", n_chunk=0) for cell in longer]
        cells += [change(cell, way=way, n_chunk=512) for cell in longer for way in ("apart", "together")]
    parts = [part for model in models for part in _parts(change(base, model=model), scale)]
    every = sorted((*cells, *parts), key=lambda cell: not _first(cell, scale))
    planned = with_gates("06-chunked", scale, tuple(every), exact_cache=False)
    needed, blocks = sum(_first(cell, scale) for cell in every), 2 if scale == "mini" else BLOCKS
    return replace(planned, needed=needed, blocks=blocks, worker=f"{__package__}.worker")


def _first(cell: Cell, scale: str) -> bool:
    """Whether no page can do without a cell: the usual prompt whole and in usual chunks, and the parts of it."""
    if isinstance(cell, Arrival):
        return (cell.n_seq, cell.n_arriving) == (DECODING, PROMPT[scale]) and cell.n_chunk in (0, USUAL_CHUNK)
    return (isinstance(cell, Prefill) and cell.n_prompt == USUAL_CHUNK) or (
        isinstance(cell, Decode) and cell.n_seq == DECODING + 1
    )


def _parts(base: Arrival, scale: str) -> list[Cell]:
    """A step of all sequences, with and without the one that arrived, and a chunk alone."""
    step = change(base, workload="decode", depth=DEPTH, n_gen=STEPS, policy="shared")
    prompt = change(base, workload="prefill", n_seq=1, policy="per_sequence", repetitions=2)
    seqs = [n + more for n in (DECODING, *(OTHERS if base.model in MODELS else ())) for more in (0, 1)]
    return [
        *(change(step, n_seq=n) for n in dict.fromkeys(seqs)),
        *(change(prompt, n_prompt=n) for n in dict.fromkeys((*CHUNKS[scale], PROMPT[scale]))),
    ]
