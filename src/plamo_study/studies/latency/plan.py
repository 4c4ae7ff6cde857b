"""Cells of chapter 7: a prompt that arrives, policies under load, simulated fleets, and states shipped."""

from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from itertools import product

from llama_meter.cells import PARTS, SPLIT, Arrival, Cell, File, Fleet, Service, Shipment, Traffic
from llama_meter.errors import StudyError
from llama_meter.journal import LOCAL, REFERENCE, journal_path, stored
from llama_meter.measure.plan import (
    MODELS,
    Plan,
    change,
    check_scale,
    files_of,
    fits,
    of_kind,
    on_file,
    scale_of,
    threads_of,
    with_gates,
)
from llama_meter.measure.request import NOTHING, Sweep
from llama_meter.models import registry
from llama_meter.models.registry import FILE_SCALE

WORKLOAD = "plamo_study.studies.latency.work"
PATIENCE = 3  # times the usual limit: a load at full size, or a long prompt, takes minutes

# ------------------------------------------------------------------ a prompt that arrives

PROMPT, DECODING = 512, 4  # tokens of the prompt; sequences being answered
CHUNKS = (64, 16, 32, 128, 256)  # tokens, in order of need
STARTED = {"mini": 128, "shape": 32}  # tokens that those decoding start from
STEPS = 8  # before the prompt arrives, and after it is evaluated


def chunked(scale: str, gpu: bool = False, sweep: Sweep = NOTHING) -> Plan:
    """A prompt arrives while sequences decode: whole, and in chunks between and in their steps; every chunk also alone.

    `sweep`: other files, prompts, chunks, numbers of sequences decoding, or settings. Required are the first prompt,
    whole and in chunks of the first size between steps.
    """
    check_scale(scale)
    base = Arrival(depth=STARTED[scale], n_gen=STEPS, n_threads=threads_of(sweep), n_gpu_layers=-1 if gpu else 0)
    base = change(base, **sweep.settings())
    prompts, chunks = sweep.n_prompt or (PROMPT,), sorted(sweep.n_chunk or CHUNKS, key=lambda n: n != CHUNKS[0])
    if min(chunks) > max(prompts):
        why = f"is longer than the prompt of {max(prompts)} tokens"
        raise StudyError(f"n_chunk {min(chunks)}", why, "give shorter chunks or a longer n_prompt")
    files, cells = files_of(scale, sweep), list[Cell]()
    for n_arriving, n_seq in product(prompts, sweep.n_seq or (DECODING,)):
        whole = change(base, n_arriving=n_arriving, n_seq=n_seq)
        ways = product((n for n in chunks if n < n_arriving), ("apart", "together"))
        in_order = [whole, *(change(whole, way=way, n_chunk=n) for n, way in ways)]
        cells += [part for cell in in_order for file in files for part in _with_chunk(on_file(cell, file))]
    planned = with_gates("07-chunked", scale_of(scale, sweep), tuple(dict.fromkeys(cells)), exact_cache=False)
    return replace(planned, needed=3 * len(files), blocks=2 if scale == "mini" else 5, workload=WORKLOAD)


def _with_chunk(cell: Arrival) -> Iterator[Arrival]:
    """A cell, and its chunk with nobody decoding: in a step's call it is computed without its first token."""
    yield cell
    if n_chunk := cell.n_chunk - (cell.way == "together"):
        yield change(cell, n_seq=0, depth=0, way="apart", n_chunk=n_chunk)


# ------------------------------------------------------------------ policies under load

LONGEST = {"mini": (256, 24), "shape": (128, 16), "file": (128, 16)}  # tokens of a prompt and of an answer
SLOTS = 8
FIRST = ("shared", "chunked 64")  # policies that every page needs
RULES = {
    "mini": (*FIRST, "one at a time", "decode first 64", SPLIT),
    "shape": FIRST,
    "file": (*FIRST, "one at a time"),
}
# Requests a second, about 30, 60 and 85 % of the capacity of chunks of 64 on the reference machine
LOADS = {"mini": (75.0, 150.0, 210.0), "shape": (0.56, 1.1, 1.6)}
SIZE = 1_374_987_584  # bytes of the file that the loads at full size were chosen for
REQUESTS = {"mini": 320, "shape": 60, "file": 60}  # for a P99 of first tokens; for a P95
BLOCKS = {"mini": 5, "shape": 2, "file": 3}


def scheduling(scale: str, gpu: bool = False, sweep: Sweep = NOTHING) -> Plan:
    """The calls that traffic is made of, and traffic by policy and load. `sweep`: other files, threads or settings.

    Every policy gets requests of the same lengths at the same times. In order of need: calls, and the policies of FIRST
    on the first file at the middle load; these at other loads; the rest.
    """
    check_scale(scale)
    scale = scale_of(scale, sweep)
    n_prompt, n_gen = LONGEST[scale]
    base = Traffic(n_prompt=n_prompt, n_gen=n_gen, n_seq=SLOTS, n_threads=threads_of(sweep), rule=PARTS)
    base = change(change(base, n_gpu_layers=-1 if gpu else 0), **sweep.settings())
    files = files_of(scale, sweep, MODELS if scale == "mini" else MODELS[:1])  # a request at full size takes a second
    ranks: dict[Cell, int] = {}
    for file in files:
        parts = on_file(base, file)
        ranks[parts] = 0
        loads = _loads(file)
        for per_second, rule in product(loads, RULES[scale]):
            rank = int(per_second != loads[1]) if rule in FIRST and file == files[0] else 2
            ranks[change(parts, n_requests=REQUESTS[scale], per_second=per_second, rule=rule)] = rank
    planned = with_gates("07-scheduling", scale, tuple(sorted(ranks, key=ranks.__getitem__)), exact_cache=False)
    return replace(
        planned,
        needed=sum(rank <= (scale == "shape") for rank in ranks.values()),
        blocks=BLOCKS[scale],
        extra_blocks=1,
        time_limit_s=PATIENCE * planned.time_limit_s,
        workload=WORKLOAD,
    )


def _loads(file: File) -> tuple[float, ...]:
    """Requests a second at which policies are compared on a file, ascending; of a file of a reader by its size."""
    if file[1] != FILE_SCALE:
        return LOADS[file[1]]
    return tuple(float(f"{load * SIZE / registry.FILES[file].n_bytes:.2g}") for load in LOADS["shape"])


# ------------------------------------------------------------------ simulated fleets

CALLS = "07-scheduling"  # the study whose journal the simulation is fitted on
MACHINES = (1, 10, 100, 1000, 10_000)
DAY, DAYS = 200, 6  # mean requests of a machine in a day; repetitions
WELL = 0.99  # of all requests are to be served in time


def fleet(scale: str, gpu: bool = False) -> Plan:
    """Fleets of simulated machines. No engine runs; call times come from the journal of loads."""
    check_scale(scale)
    lines = next(filter(None, (stored(journal_path(CALLS, scale, place)) for place in (LOCAL, REFERENCE))), b"")
    rows_sha256 = sha256(lines).hexdigest()
    base = Fleet(model=MODELS[0], scale=scale, rows_sha256=rows_sha256, rule=FIRST[1], n_seq=SLOTS)
    base = change(base, n_requests=DAY, repetitions=DAYS, balance="least work", pattern="steady")
    cells = tuple(change(base, n_machines=n) for n in MACHINES)
    return Plan("07-fleet", scale, cells, (), None, 1, 0, 1800.0, workload="plamo_study.studies.latency.law")


# ------------------------------------------------------------------ read here, write there

# Tokens shipped, in order of need; beyond the training length too, on which the size of a state does not depend
LENGTHS = {"mini": (128, 2048, 512, 8192, 16384), "shape": (128, 512, 2048, 8192)}
SOON = 2  # of them come before all else
REPETITIONS, REPEATED = {"mini": 3, "shape": 1}, 2048  # in a process; at most so many tokens
REQUESTED = {"mini": (512, 32, 16.0), "shape": (128, 16, 0.4)}  # tokens of a request and its answer, requests a second


def disaggregation(scale: str, gpu: bool = False, sweep: Sweep = NOTHING) -> Plan:
    """Prefill here, decode there: shipments, and requests of one engine and of two that share its threads.

    `sweep`: other files, lengths of shipped prompts, or threads. Required are the first two lengths.
    """
    check_scale(scale)
    files, lengths = files_of(scale, sweep), sweep.n_prompt or LENGTHS[scale]
    base = Shipment(n_gen=4, flash_attn="on", n_gpu_layers=-1 if gpu else 0, n_threads=threads_of(sweep))
    shipments = [change(base, n_prompt=n, repetitions=REPETITIONS[scale] if n <= REPEATED else 1) for n in lengths]
    n_prompt, n_gen, per_second = REQUESTED[scale]
    service = of_kind(Service, base, n_prompt=n_prompt, n_gen=n_gen, n_seq=4, n_requests=8)
    services = [change(service, per_second=per_second, mode=mode) for mode in ("shared", "split")]
    in_order: tuple[Cell, ...] = (*shipments[:SOON], *services, *shipments[SOON:])
    cells = tuple(on_file(cell, file) for cell in in_order for file in files)
    fitting = tuple(filter(fits, cells)) or cells
    planned = with_gates("07-disaggregation", scale_of(scale, sweep), fitting, exact_cache=False)
    return replace(
        planned,
        cells=fitting if sweep.files and not sweep.n_prompt else cells,  # our own choice gives way to a short context
        needed=len(files) * len(lengths[:SOON]),
        blocks=5 if scale == "mini" else 3,
        extra_blocks=1,
        time_limit_s=PATIENCE * planned.time_limit_s,
        workload=WORKLOAD,
    )
