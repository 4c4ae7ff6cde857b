"""Cells of the disaggregation study: shipments by length, cache and link, and requests under load.

Lengths go beyond `context_length`, which is only the training length: the size of a state does not depend on it. The
plan also measures the parts that formulas need: prompts and steps with all threads and with half.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest

from llama_meter.cells import Cell, Service, Shipment
from llama_meter.measure.asked import NOTHING, Sweep
from llama_meter.measure.plan import (
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

LENGTHS = {"mini": (128, 2048, 512, 8192, 16384), "shape": (128, 512, 2048, 8192)}
OTHERWISE = {"mini": (128, 2048, 16384), "shape": (128, 512)}  # no flash attention; 8-bit cache
ONE_THREAD = {"mini": (512, 2048), "shape": ()}  # decoded by one thread, beyond the small model's window
BLOCK = 32  # values that share a scale in a cache of 8 bits
TRAINED = 2048  # least training length of the models, in tokens
LINKED = {"mini": 2048, "shape": 128}  # tokens shipped over links of every speed
LINKS = (10**8, 10**9, 10**10, 10**11)  # bits per second
REPEATED = {"mini": 2048, "shape": 512}  # most tokens with REPETITIONS in a process
REPETITIONS = {"mini": 3, "shape": 1}  # at full size reading the prompt again takes longest of all
STEPS = 4  # decoded on both sides of a shipment
ASKED = {"mini": (512, 32), "shape": (128, 16)}  # tokens of a request and of its answer
REQUESTS = 8
LOADS = {"mini": (4.0, 8.0, 16.0), "shape": (0.1, 0.2, 0.4)}  # requests per second
AT_ONCE = 4  # answered
BLOCKS = {"mini": 5, "shape": 3}
PATIENCE = 3  # times the usual limit: the longest prompts take a minute on a slow machine


def disaggregation(scale: str, gpu: bool = False, sweep: Sweep = NOTHING) -> Plan:
    """Chapter 7: prefill here, decode there. `sweep`: other files, lengths of shipped prompts, or threads."""
    check_scale(scale)
    n_threads = threads_of(sweep)
    base = Shipment(n_gen=STEPS, flash_attn="on", n_gpu_layers=-1 if gpu else 0, n_threads=n_threads)
    lengths = sweep.n_prompt or LENGTHS[scale]
    of_files = [list(_of_file(on_file(base, file), scale, lengths)) for file in files_of(scale, sweep)]
    cells = dict.fromkeys(cell for cells in zip_longest(*of_files) for cell in cells if cell)
    if sweep.files and not sweep.n_prompt:  # our own choice gives way to a short context
        cells = {cell: None for cell in cells if fits(cell)}
    every = sorted(cells, key=lambda cell: _rank(cell, scale, lengths, n_threads))
    trained = tuple(cell for cell in every if not isinstance(cell, Shipment) or cell.n_prompt <= TRAINED)
    trained = tuple(cell for cell in trained if fits(cell)) or tuple(every)
    planned = with_gates("07-disaggregation", scale_of(scale, sweep), trained, exact_cache=False)
    planned = replace(planned, cells=tuple(every), blocks=BLOCKS[scale], extra_blocks=1)
    needed = sum(_rank(cell, scale, lengths, n_threads) == 0 for cell in every)
    limit = PATIENCE * planned.time_limit_s
    return replace(planned, needed=needed, time_limit_s=limit, workload="plamo_study.studies.latency.service")


def _of_file(base: Shipment, scale: str, lengths: Sequence[int]) -> Iterator[Cell]:
    otherwise = OTHERWISE[scale] if lengths == LENGTHS[scale] else tuple(dict.fromkeys((min(lengths), max(lengths))))
    for n in lengths:
        yield _shipment(base, scale, n)
    for n in otherwise:
        yield change(_shipment(base, scale, n), flash_attn="off")
    in_8_bits = registry.spec(base.model, base.scale).head_dim % BLOCK == 0  # else the engine has no such cache
    for n in otherwise if in_8_bits else ():
        yield change(_shipment(base, scale, n), type_k="q8_0", type_v="q8_0")
    for n in ONE_THREAD[scale] if lengths == LENGTHS[scale] else otherwise:
        yield change(_shipment(base, scale, n), n_threads=1)
    for bps in LINKS:
        yield change(_shipment(base, scale, LINKED[scale] if LINKED[scale] in lengths else min(lengths)), link_bps=bps)
    n_prompt, n_gen = ASKED[scale]
    service = change(base, workload="service", n_prompt=n_prompt, n_gen=n_gen, n_seq=AT_ONCE, n_requests=REQUESTS)
    for per_second in LOADS[scale]:
        for mode in ("shared", "split"):
            yield change(service, per_second=per_second, mode=mode)
    for n in dict.fromkeys((base.n_threads, max(base.n_threads // 2, 1))):
        yield change(base, workload="prefill", n_prompt=n_prompt, n_threads=n, repetitions=2)
        yield change(base, workload="decode", depth=n_prompt, n_gen=STEPS, n_seq=AT_ONCE, policy="shared", n_threads=n)


def _shipment(base: Shipment, scale: str, n_prompt: int) -> Shipment:
    again = n_prompt <= REPEATED[scale]
    return change(base, n_prompt=n_prompt, repetitions=REPETITIONS[scale] if again else 1)


def _rank(cell: Cell, scale: str, lengths: Sequence[int], n_threads: int) -> int:
    """Priority under a time limit: 0 required, 1 parts, 2 highest load, 3 links, caches, 4 other loads, 5 longest."""
    if isinstance(cell, Service):
        return 2 if cell.per_second == LOADS[scale][-1] else 4
    if not isinstance(cell, Shipment):
        return 1
    usual = (cell.flash_attn, cell.type_k, cell.n_threads, cell.link_bps) == ("on", "f16", n_threads, 0)
    asked = lengths != LENGTHS[scale]
    if usual and cell.n_prompt in (lengths if asked else (lengths[0], TRAINED)):
        return 0
    if cell.n_prompt == max(lengths) and not asked:
        return 5
    return 1 if usual and cell.n_prompt <= TRAINED else 3
