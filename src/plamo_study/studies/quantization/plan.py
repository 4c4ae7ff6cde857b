"""Which cells the studies of quantization measure: speed of every type and recipe, kernels behind it, and quality."""

from dataclasses import replace

from llama_meter.cells import Cell, Decode, MatMul, Quality
from llama_meter.errors import StudyError
from llama_meter.measure import machine, texts
from llama_meter.measure.plan import (
    BLOCKS,
    DEPTH,
    DTYPE,
    MATMUL_SIZE,
    MODELS,
    Plan,
    change,
    check_scale,
    kernels_of,
    on_file,
    scale_of,
    threads_of,
    types,
    with_gates,
)
from llama_meter.measure.request import NOTHING, Sweep

QUICK = ("F16", "Q8_0", "Q4_K_M", "Q4_0", "Q2_K", "Q4_0-ssm_out-F16")  # types measured at mini: a minute when live
KERNELS = ("F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K", "Q5_0", "Q4_K", "Q4_0", "Q3_K", "Q2_K")  # tensor types
IN_QUICK = ("F16", "Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q4_0", "Q3_K", "Q2_K")  # what the files of QUICK are made of
PACKED = ("Q4_K", "Q4_0", "Q2_K")  # types whose layout on x86 differs from the file's
STEPS, STEPS_TOGETHER, TOGETHER = 16, 6, 8  # decode steps alone and of a batch, and the sequences in that batch
VECTOR_SIZE = {"mini": 4096, "shape": 16384}  # mini: it fits the cache; else 4 times that or more
TEXT = "python-heldout"  # Python sources that no embedded model was trained on
REFERENCE = "F16"  # what the others' quality is held against
CHUNK, CHUNKS = 512, 40  # llama-perplexity's default chunk; 40 of them score 10,200 tokens
QUALITY_LIMIT_S = 600.0  # one process evaluates all files


def speed(scale: str, gpu: bool = False, sweep: Sweep = NOTHING) -> Plan:
    """Per type: prefill of 128 tokens and decode steps after it, decode of 8 sequences, and its kernels' rates.

    Only a few types at mini, where speed itself means little. One process measures prefill and decode alone. The engine
    prefills 128 tokens at the rate of 512, so a longer prompt would only cost time. The batched cell is that of the
    study of batch scaling.
    """
    check_scale(scale)
    base = Decode(depth=(*sweep.n_depth, DEPTH)[0], n_threads=threads_of(sweep), n_gpu_layers=-1 if gpu else 0)
    base = change(base, **sweep.settings())
    alone = change(base, n_gen=(*sweep.n_gen, STEPS)[0])
    together = [change(base, n_gen=STEPS_TOGETHER, n_seq=n, policy="shared") for n in sweep.n_seq or (TOGETHER,)]
    ours = [
        (model, scale, dtype)
        for model in MODELS
        for dtype in sweep.dtypes or types(model, scale)
        if sweep.dtypes or scale != "mini" or dtype in QUICK
    ]
    files = list(sweep.files) or ours
    cells: list[Cell] = [on_file(cell, file) for cell in (alone, *together) for file in files]
    products = kernels(scale, gpu)
    cells += [kernel for product in products[:2] for kernel in kernels_of(files, product)] if sweep.files else products
    planned = with_gates("05-quantization", scale_of(scale, sweep), tuple(cells), exact_cache=False)
    if planned.anchor and not sweep.files:
        planned = replace(planned, anchor=change(planned.anchor, dtype=DTYPE[scale]))
    return replace(planned, needed=len(files), blocks=2 if scale == "mini" else BLOCKS)


def kernels(scale: str, gpu: bool = False) -> tuple[MatMul, ...]:
    """The engine's matrix product per tensor type: 512 columns as in prefill, one column as in decode.

    `packed`: weights lie as the engine lays them out when it loads a model; `plain`: as the file holds them.
    """
    base = MatMul(n_threads=machine.performance_cores(), layout="packed", repetitions=5)
    base = change(base, n_gpu_layers=-1 if gpu else 0)
    many = change(base, n_rows=MATMUL_SIZE[scale])
    one = change(base, n_rows=VECTOR_SIZE[scale], n_columns=1)
    wanted = IN_QUICK if scale == "mini" else KERNELS
    cells = [change(cell, dtype=dtype) for dtype in wanted for cell in (many, one)]
    if not gpu:
        cells += [change(cell, dtype=dtype, layout="plain") for dtype in PACKED for cell in (many, one)]
    return tuple(cells)


def quality(scale: str, gpu: bool = False) -> Plan:
    """Both models, every type and recipe against F16 on one text; measured once as nothing is random.

    Raises StudyError at `shape`, whose weights are random.
    """
    check_scale(scale)
    if scale == "shape":
        raise StudyError("scale 'shape'", "random weights have no quality to lose", "choose --scale mini")
    base = Quality(scale=scale, dtype=REFERENCE, n_ctx=CHUNK, n_chunks=CHUNKS)
    base = change(base, text=TEXT, text_sha256=texts.sha256(texts.read(TEXT)))
    base = change(base, n_threads=machine.performance_cores(), n_gpu_layers=-1 if gpu else 0)
    others = {model: tuple(name for name in types(model, scale) if name != REFERENCE) for model in MODELS}
    cells = tuple(change(base, model=model, candidates=names) for model, names in others.items())
    planned = with_gates("05-quality", scale, cells, exact_cache=False)  # the study of speed has both gates
    workload = "plamo_study.studies.quantization.work"
    return replace(planned, blocks=1, extra_blocks=0, time_limit_s=QUALITY_LIMIT_S, workload=workload)
