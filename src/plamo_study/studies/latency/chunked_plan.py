"""Which cells the study of chunked prefill measures: who decodes, what arrives, and how the prompt is cut.

Also the parts of a call, each alone: decode steps, and the prompt in chunks of the engine's micro-batch sizes with no
sequence decoding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from llama_meter.cells import Arrival, Cell, Decode, File
from llama_meter.errors import StudyError
from llama_meter.measure.asked import NOTHING, Sweep
from llama_meter.measure.plan import (
    DTYPE,
    MATCHED,
    MODELS,
    Plan,
    change,
    check_scale,
    files_of,
    on_file,
    scale_of,
    threads_of,
    with_gates,
)

PROMPT = 512  # tokens of the prompt that most cells are about
LONGER_PROMPT, LONGEST = 2048, 8192
LONGER_CHUNK = 512
CHUNKS = (16, 32, 64, 128, 256)
USUAL_CHUNK = 64
TABLE_PROMPT = {"mini": 4096, "shape": LONGER_PROMPT}  # of the sources' table
TABLE_CHUNKS = (512, 128, 2048, 256, 1024, 4096)  # of it, in order of need
DECODING, OTHERS = 4, (1, 8)  # sequences being answered
STARTED = {"mini": 128, "shape": 32}  # tokens that those decoding start from
DEEPER = 512  # for comparing one buffer for all with one each
SIZES = (8, 16, 31, 32, 48, 63, 64, 65)  # of chunks without decoding, around flash attention's tiles
LAYER = "plamo-3-nict-2b-layer"  # one layer of the full width
STEPS = 8  # before the prompt arrives, and after it is evaluated
BLOCKS = {"mini": 2, "shape": 5}


def chunked(scale: str, gpu: bool = False, sweep: Sweep = NOTHING) -> Plan:
    """Chapter 7: one prompt arrives while 4 sequences decode; then more or fewer of them, and longer prompts.

    Two controls. On PLaMo 3 every mixed call runs with one buffer for all sequences and with one each, which differ in
    how calls are cut into micro-batches. And chunks run without flash attention, whose kernel changes with their size.
    `sweep`: other files, prompts, chunks, numbers of sequences decoding, or settings, without the second control.
    """
    check_scale(scale)
    base = Arrival(depth=STARTED[scale], n_gen=STEPS, n_seq=(*sweep.n_seq, DECODING)[0])
    base = change(base, n_arriving=(*sweep.n_prompt, PROMPT)[0], n_gpu_layers=-1 if gpu else 0)
    base = change(base, n_threads=threads_of(sweep), **sweep.settings())
    every, needed = _own(scale, base) if sweep == NOTHING else _asked(base, files_of(scale, sweep), sweep)
    planned = with_gates("07-chunked", scale_of(scale, sweep), every, exact_cache=False)
    return replace(planned, needed=needed, blocks=BLOCKS[scale], workload="plamo_study.studies.latency.chunks")


def _own(scale: str, base: Arrival) -> tuple[tuple[Cell, ...], int]:
    """The study's own cells in order of need, and how many are required."""
    files = [(model, scale, DTYPE[scale]) for model in (*MODELS, MATCHED)]
    usual = {file[0]: on_file(base, file) for file in files}
    cells = [cell for arrival in usual.values() for cell in _usual(arrival)]
    cells += [cell for model in MODELS for cell in _controls(change(usual[model], n_chunk=USUAL_CHUNK))]
    for n in TABLE_CHUNKS:
        for model in MODELS:
            table = change(usual[model], n_arriving=TABLE_PROMPT[scale], n_chunk=n)
            cells += [change(table, way="together")] if n <= table.n_arriving else []
            cells += [change(table, way="apart")] if n < table.n_arriving else []
    for n in (LONGER_PROMPT, LONGEST):
        cells += [change(usual[model], n_arriving=n) for model in MODELS]
        cells += [change(usual[model], n_arriving=n, way="together", n_chunk=LONGER_CHUNK) for model in MODELS]
    parted = [cell for cell in cells if cell.depth != DEEPER and (cell.n_arriving == PROMPT or cell.way == "apart")]
    every = dict.fromkeys(part for cell in cells for part in (cell, *(_parts(cell) if cell in parted else ())))
    return tuple(sorted(every, key=_rank)), sum(_rank(cell) == 0 for cell in every)


def _asked(base: Arrival, files: Sequence[File], sweep: Sweep) -> tuple[tuple[Cell, ...], int]:
    """The cells of a sweep in order of need, each with its parts, and how many are required.

    Required are the first prompt, whole and in chunks of one size between the steps of the first number of sequences.
    """
    prompts, chunks = sweep.n_prompt or (PROMPT,), sweep.n_chunk or CHUNKS
    if min(chunks) > max(prompts):
        why = f"is longer than the prompt of {max(prompts)} tokens"
        raise StudyError(f"n_chunk {min(chunks)}", why, "give shorter chunks or a longer n_prompt")
    chunks = tuple(sorted(chunks, key=lambda n: n != USUAL_CHUNK))
    cells: list[Cell] = []
    needed = 0
    for n_arriving in prompts:
        fitting = [n for n in chunks if n < n_arriving]
        for n_seq in sweep.n_seq or (DECODING,):
            whole = change(base, n_arriving=n_arriving, n_seq=n_seq)
            apart = [change(whole, way="apart", n_chunk=n) for n in fitting]
            together = [change(whole, way="together", n_chunk=n) for n in chunks if n <= n_arriving]
            joined = [change(arrival, kv_unified=True) for arrival in together[:1]]
            for group in ([whole, *apart[:1]], together[:1], apart[1:], together[1:], joined):
                for cell in group:
                    cells += [on_file(part, file) for file in files for part in (cell, *_parts(cell))]
                needed = needed or len(dict.fromkeys(cells))
    return tuple(dict.fromkeys(cells)), needed


def _usual(first: Arrival) -> Iterator[Arrival]:
    """The usual prompt, whole and in chunks of every size."""
    yield first
    for n_chunk in CHUNKS:
        yield change(first, way="apart", n_chunk=n_chunk)
        yield change(first, way="together", n_chunk=n_chunk)
        if first.model != MODELS[0]:  # the hybrid's memory ignores it
            yield change(first, way="together", n_chunk=n_chunk, kv_unified=True)


def _controls(usual: Arrival) -> Iterator[Arrival]:
    """The usual chunks with one buffer and with longer neighbours, without flash attention, beside fewer and more."""
    for way in ("apart", "together"):
        yield change(usual, way=way, flash_attn="off")
        yield from (change(usual, way=way, n_seq=n) for n in OTHERS)
    for n in (usual.depth, DEEPER):
        yield from (change(usual, way="together", depth=n, kv_unified=unified) for unified in (False, True))


def _rank(cell: Cell) -> int:
    """Priority under a time limit: 0 required, 1 one buffer for all, 2 a longer prompt, 3 the rest, 4 the longest.

    Required are the usual prompt, whole and in usual chunks, and its parts.
    """
    model = cell.files[0][0]
    if isinstance(cell, Decode):
        return 0 if model in MODELS and (cell.n_seq, cell.flash_attn) == (DECODING + 1, "auto") else 3
    if not isinstance(cell, Arrival) or model not in MODELS or cell.flash_attn == "off":
        return 3
    if cell.n_arriving == LONGEST:
        return 4
    if cell.n_arriving == LONGER_PROMPT and model == MODELS[0] and cell.way != "apart":
        return 2
    if cell.n_arriving != PROMPT:
        return 3
    if cell.n_seq == DECODING and cell.depth != DEEPER and cell.n_chunk in (0, USUAL_CHUNK):
        return int(cell.kv_unified)
    parts = {USUAL_CHUNK - 1: 0, USUAL_CHUNK: 0, USUAL_CHUNK + DECODING: 1}
    return parts.get(cell.n_chunk, 3) if cell.n_seq == 0 else 3


def _parts(cell: Arrival) -> Iterator[Cell]:
    """The parts of the cell's calls: a step of all its sequences, and the prompt with no sequence decoding.

    A mixed call is two micro-batches, one of them without the chunk's first token, or one micro-batch of all tokens.
    """
    alone = change(cell, n_seq=0, depth=0, kv_unified=False, way="apart" if cell.n_chunk else "whole")
    if cell.way == "together":
        yield change(cell, workload="decode", n_seq=cell.n_seq + 1, policy="shared")
        if cell.n_chunk > 1:
            yield change(alone, n_chunk=cell.n_chunk - 1)
        if cell.kv_unified:
            yield change(alone, n_chunk=cell.n_chunk + cell.n_seq)
    else:
        yield alone
