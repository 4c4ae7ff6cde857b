"""Cells of the disaggregation study: shipments by length, cache and link, and requests under load.

Lengths go beyond `context_length`, which is only the training length: the size of a state does not depend on it. The
plan also measures the parts that formulas need: prompts and steps with all threads and with half.
"""

from collections.abc import Iterator
from dataclasses import replace

from plamo_study.measure import machine
from plamo_study.measure.cells import Cell, Service, Shipment
from plamo_study.measure.plan import DTYPE, MODELS, Plan, change, check_scale, thread_counts, with_gates

LENGTHS = {"mini": (128, 2048, 512, 8192, 16384), "shape": (128, 512, 2048, 8192), "weights": (128, 512, 2048, 8192)}
OTHERWISE = {"mini": (128, 2048, 16384), "shape": (128, 512), "weights": (128, 512)}  # no flash attention; 8-bit cache
ONE_THREAD = {"mini": (512, 2048), "shape": (), "weights": ()}  # decoded by one thread, beyond the small model's window
TRAINED = 2048  # least training length of the models, in tokens
LINKED = {"mini": 2048, "shape": 128, "weights": 128}  # tokens shipped over links of every speed
LINKS = (10**8, 10**9, 10**10, 10**11)  # bits per second
REPEATED = {"mini": 2048, "shape": 512, "weights": 512}  # most tokens with REPETITIONS in a process
REPETITIONS = {"mini": 3, "shape": 1, "weights": 1}  # at full size reading the prompt again takes longest of all
STEPS = 4  # decoded on both sides of a shipment
ASKED = {"mini": (512, 32), "shape": (128, 16), "weights": (128, 16)}  # tokens of a request and of its answer
REQUESTS = 8
LOADS = {"mini": (4.0, 8.0, 16.0), "shape": (0.1, 0.2, 0.4), "weights": (0.1, 0.2, 0.4)}  # requests per second
AT_ONCE = 4  # answered
BLOCKS = {"mini": 5, "shape": 3, "weights": 3}
PATIENCE = 3  # times the usual limit: the longest prompts take a minute on a slow machine


def disaggregation(scale: str, gpu: bool = False) -> Plan:
    """Notebook 09: prefill here, decode there."""
    check_scale(scale)
    base = Shipment(scale=scale, dtype=DTYPE[scale], n_gen=STEPS, flash_attn="on", n_gpu_layers=-1 if gpu else 0)
    base = change(base, n_threads=machine.performance_cores())
    of_models = [list(_of_model(change(base, model=model))) for model in MODELS]
    cells = dict.fromkeys(cell for cells in zip(*of_models, strict=True) for cell in cells)
    every = sorted(cells, key=lambda cell: _rank(cell, scale))
    trained = tuple(cell for cell in every if not isinstance(cell, Shipment) or cell.n_prompt <= TRAINED)
    planned = with_gates("09-disaggregation", scale, trained, exact_cache=False)
    planned = replace(planned, cells=tuple(every), blocks=BLOCKS[scale], extra_blocks=1)
    needed = sum(_rank(cell, scale) == 0 for cell in every)
    limit = PATIENCE * planned.time_limit_s
    return replace(planned, needed=needed, time_limit_s=limit, workload=f"{__package__}.service")


def _of_model(base: Shipment) -> Iterator[Cell]:
    scale = base.scale
    for n in LENGTHS[scale]:
        yield _shipment(base, n)
    for n in OTHERWISE[scale]:
        yield change(_shipment(base, n), flash_attn="off")
    for n in OTHERWISE[scale]:
        yield change(_shipment(base, n), type_k="q8_0", type_v="q8_0")
    for n in ONE_THREAD[scale]:
        yield change(_shipment(base, n), n_threads=1)
    for bps in LINKS:
        yield change(_shipment(base, LINKED[scale]), link_bps=bps)
    n_prompt, n_gen = ASKED[scale]
    service = change(base, workload="service", n_prompt=n_prompt, n_gen=n_gen, n_seq=AT_ONCE, n_requests=REQUESTS)
    for per_second in LOADS[scale]:
        for mode in ("shared", "split"):
            yield change(service, per_second=per_second, mode=mode)
    for n in thread_counts():
        yield change(base, workload="prefill", n_prompt=n_prompt, n_threads=n, repetitions=2)
        yield change(base, workload="decode", depth=n_prompt, n_gen=STEPS, n_seq=AT_ONCE, policy="shared", n_threads=n)


def _shipment(base: Shipment, n_prompt: int) -> Shipment:
    again = n_prompt <= REPEATED[base.scale]
    return change(base, n_prompt=n_prompt, repetitions=REPETITIONS[base.scale] if again else 1)


def _rank(cell: Cell, scale: str) -> int:
    """Priority under a time limit: 0 required, 1 parts, 2 highest load, 3 links, caches, 4 other loads, 5 longest."""
    if isinstance(cell, Service):
        return 2 if cell.per_second == LOADS[scale][-1] else 4
    if not isinstance(cell, Shipment):
        return 1
    usual = (cell.flash_attn, cell.type_k, cell.n_threads) == ("on", "f16", machine.performance_cores())
    if usual and cell.n_prompt in (LENGTHS[scale][0], TRAINED) and not cell.link_bps:
        return 0
    if cell.n_prompt == max(LENGTHS[scale]):
        return 5
    return 1 if usual and not cell.link_bps and cell.n_prompt <= TRAINED else 3
