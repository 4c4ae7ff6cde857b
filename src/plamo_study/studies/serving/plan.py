"""Cells of the serving study: single requests by length, concurrent requests, rates, and the engine's parts.

The engine alone is timed on the same prompts and decode steps; predictions are made from these times.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from llama_meter.cells import SHORT, SLOTS, Cell, Decode, File, Prefill, Serving
from llama_meter.errors import StudyError
from llama_meter.measure.plan import (
    MODELS,
    Plan,
    change,
    check_scale,
    files_of,
    fits,
    of_kind,
    on_file,
    one,
    scale_of,
    with_gates,
)
from llama_meter.measure.request import NOTHING, Sweep
from llama_meter.serve import server

PROMPTS, ANSWERS = (128, 512, 2048), (16, 64, 256)  # tokens, of the exercise that this notebook answers
AT_ONCE = (1, 2, 4, 8, 16)  # concurrent requests on 16 slots
WAITING = (16, 64, 256)  # concurrent requests on SLOTS slots
ALONE = 2  # requests of a cell that asks one at a time
LOADED = {"mini": 24, "shape": 8, "file": 8}  # of a concurrent cell that checks answers
FEWEST = 8  # of a cell that measures times, and at least two per client
SOUGHT = {"mini": 16, "shape": 8, "file": 8}  # of each rate that is tried for the knee
STEPS = 16  # decode steps timed by themselves
BLOCKS = {"mini": 2, "shape": 3, "file": 3}
OPEN_S = 30  # of requests at random times, at a rate that was asked for
SUSTAINED = 96  # requests at each rate there: sixteen within a tenth of a second are a burst, not a rate
PATIENCE = 2  # times the usual limit
WORKLOAD = "plamo_study.studies.serving.work"


def serving(scale: str, gpu: bool = False, sweep: Sweep = NOTHING) -> Plan:
    """Chapter 9.

    `sweep`: other files, slots, requests at a time, rates, lengths or settings. StudyError for a setting that the
    servers are not started with.
    """
    check_scale(scale)
    if refused := sweep.settings().keys() & {"type_k", "type_v"}:
        raise StudyError(f"-p {min(refused)}", "the servers of this study keep their caches in F16", "leave it out")
    at, files = scale_of(scale, sweep), files_of(scale, sweep)
    n_prompt, n_gen = (*sweep.n_prompt, SHORT[at][0])[0], (*sweep.n_gen, SHORT[at][1])[0]
    base = Serving(n_gpu_layers=-1 if gpu else 0, n_threads=one("n_threads", sweep.n_threads, server.threads()))
    base = change(base, n_seq=SLOTS, n_prompt=n_prompt, n_gen=n_gen, **sweep.settings())
    bases = [on_file(base, file) for file in files]
    lengths = list(product(sweep.n_prompt or PROMPTS, sweep.n_gen or ANSWERS))
    slots, at_once = sweep.n_seq or (SLOTS,), sweep.n_clients or AT_ONCE
    needed: list[Cell] = []
    others: list[Cell] = []
    for base in bases:
        if sweep.n_seq or sweep.n_clients:
            needed += [_closed(base, s, n, _enough(n)) for s in slots for n in dict.fromkeys((1, *at_once))]
        else:
            needed += [_closed(base, SLOTS, 4, LOADED[at]), _closed(base, SLOTS, 1, ALONE)]
            others += [_closed(base, SLOTS, 2, LOADED[at])]
        needed += [_opened(change(base, n_seq=slots[0]), rate) for rate in sweep.rates]
        others += _lengths(base, lengths, sweep)
        if not (sweep.n_seq or sweep.n_clients):
            others += [_closed(base, AT_ONCE[-1], n, max(FEWEST, 2 * n)) for n in AT_ONCE]
        if not sweep.rates:
            others += [change(base, n_clients=0, pattern="knee", n_requests=SOUGHT[at])]
        # The slots of the first model are mixed up.
        crowd = WAITING if sweep == NOTHING and base.model == MODELS[1] and scale == "mini" else ()
        others += [_closed(base, SLOTS, n, 2 * n) for n in crowd]
    shortest = lengths[0][0]
    needed += [part for base in bases for part in _parts(base, (), (shortest,))]
    widths = tuple(dict.fromkeys((*at_once, *slots))) if sweep.n_seq else at_once
    parts = [part for base in bases for part in _parts(base, widths, sweep.n_prompt or PROMPTS)]
    others += [part for part in parts if sweep.n_prompt or fits(part)]
    cells = tuple(dict.fromkeys([*needed, *others]))
    planned = with_gates("09-serving", at, tuple(c for c in cells if not isinstance(c, Serving)), exact_cache=False)
    compared = tuple(cell for cell in cells if isinstance(cell, Serving) and _compared(cell, files[0]))
    planned = replace(planned, cells=cells, compared=compared, needed=len(dict.fromkeys(needed)), extra_blocks=0)
    limit = PATIENCE * planned.time_limit_s
    return replace(planned, blocks=BLOCKS[at], time_limit_s=limit, workload=WORKLOAD, program=server.BINARY)


def _closed(base: Serving, n_slots: int, n_clients: int, n_requests: int) -> Serving:
    return change(base, n_seq=n_slots, n_clients=n_clients, n_requests=n_requests)


def _enough(n_clients: int) -> int:
    """Requests of a cell that measures times."""
    return ALONE if n_clients == 1 else max(FEWEST, 2 * n_clients)


def _opened(base: Serving, rate: float) -> Serving:
    """Requests at random times: as many as come in OPEN_S, within bounds."""
    n_requests = int(min(max(FEWEST, OPEN_S * rate), SUSTAINED))
    return change(base, n_clients=0, pattern="poisson", per_second=rate, n_requests=n_requests)


def _of(base: Serving, n_prompt: int, n_gen: int) -> Serving:
    return change(base, n_prompt=n_prompt, n_gen=n_gen, n_clients=1, n_requests=ALONE)


def _lengths(base: Serving, lengths: Sequence[tuple[int, int]], sweep: Sweep) -> list[Cell]:
    """One request at a time of every length; of the study's own lengths, those that fit the model's context."""
    cells = [_of(base, *length) for length in lengths]
    return [cell for cell in cells if sweep.n_prompt or sweep.n_gen or fits(cell)]


def _compared(cell: Serving, file: File) -> bool:
    """Whether other builds measure the cell too: concurrent requests to the first file."""
    return cell.files[0] == file and cell.n_clients != 1


def _parts(base: Serving, at_once: Sequence[int], lengths: Sequence[int]) -> list[Cell]:
    """Cells of the engine alone: prompts, a decode step after each, and batched steps after the shortest."""
    step = of_kind(Decode, base, depth=base.n_prompt, n_gen=STEPS, n_seq=1, policy="shared")
    alone = [of_kind(Prefill, base, n_prompt=n, n_seq=1, repetitions=3) for n in lengths]
    return [*alone, *(change(step, depth=n) for n in lengths), *(change(step, n_seq=n) for n in at_once)]
