"""Cells of the scheduling study: the calls that traffic is made of, and traffic by policy and load.

Every policy gets requests of the same lengths at the same times, at about 30, 60 and 85 % of the capacity of chunks of
64 on the reference machine. A reader's own file is asked for as many requests as its size suggests. Parts with fewer
threads are for a server that leaves a core to its client.
"""

from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from itertools import product
from pathlib import Path

from llama_meter.cells import PARTS, SERVER, SPLIT, Cell, File, Fleet, Traffic
from llama_meter.journal import LOCAL, REFERENCE, journal_path, stored
from llama_meter.measure.asked import NOTHING, Sweep
from llama_meter.measure.plan import (
    MODELS,
    Plan,
    change,
    check_scale,
    files_of,
    on_file,
    one,
    scale_of,
    threads_of,
    with_gates,
)
from llama_meter.models import given
from llama_meter.models.registry import GIVEN
from llama_meter.serve import server

LONGEST = {
    "mini": (256, 24),
    "shape": (128, 16),
    "file": (128, 16),
}  # tokens of a prompt and of an answer
SLOTS = 8
POLICIES = ("shared", "chunked 64", "one at a time", "decode first 64")
FIRST = POLICIES[:2]  # which every page needs
RULES = {"mini": POLICIES, "shape": FIRST, "file": POLICIES[:3]}
CUT = "chunked {}"  # the policy that cuts prompts into pieces of so many tokens
LOADS = {"mini": (75.0, 150.0, 210.0), "shape": (0.56, 1.1, 1.6)}  # requests a second
SIZE = 1_374_987_584  # bytes of the file that the loads at full size were chosen for
REQUESTS = {"mini": 320, "shape": 60, "file": 60}  # for a P99 of first tokens; for a P95
BLOCKS = {"mini": 5, "shape": 2, "file": 3}
PATIENCE = 3  # times the usual limit: a load at shape takes minutes


def scheduling(scale: str, gpu: bool = False, sweep: Sweep = NOTHING) -> Plan:
    """Chapter 7: scheduling policies under load. `sweep`: other files, rates, chunks, slots, threads or settings.

    Raises StudyError for several numbers of slots or of threads: policies are compared at one.
    """
    check_scale(scale)
    own, (n_prompt, n_gen) = scale_of(scale, sweep), LONGEST[scale_of(scale, sweep)]
    n_seq, n_threads = one("n_seq", sweep.n_seq, SLOTS), threads_of(sweep)
    base = Traffic(n_prompt=n_prompt, n_gen=n_gen, n_seq=n_seq, n_threads=n_threads)
    base = change(base, n_gpu_layers=-1 if gpu else 0, rule=PARTS)
    base = change(base, **sweep.settings())
    files = files_of(scale, sweep, MODELS if scale == "mini" else MODELS[:1])  # a request at full size takes a second
    ranked: dict[Traffic, int] = {}
    for file in files:
        for rank, cell in _of_file(on_file(base, file), file == files[0], sweep):
            ranked.setdefault(cell, rank)  # on one core a server's parts are the same cells
    cells: tuple[Cell, ...] = tuple(cell for cell, _ in sorted(ranked.items(), key=lambda item: item[1]))
    planned = with_gates("07-scheduling", own, cells, exact_cache=False)
    needed = sum(rank <= (own == "shape") for rank in ranked.values())
    return replace(
        planned,
        needed=needed,
        blocks=BLOCKS[own],
        extra_blocks=1,
        time_limit_s=PATIENCE * planned.time_limit_s,
        workload="plamo_study.studies.latency.work",
    )


def loads_of(file: File, sweep: Sweep) -> tuple[float, ...]:
    """Requests a second at which policies are compared on a file, ascending: by its size, where it was given."""
    if sweep.rates or file[1] != GIVEN:
        return sweep.rates or LOADS[file[1]]
    return tuple(float(f"{load * SIZE / given.FILES[file].n_bytes:.2g}") for load in LOADS["shape"])


def _of_file(base: Traffic, first: bool, sweep: Sweep) -> Iterator[tuple[int, Traffic]]:
    """Every policy at every load; on small models also the split engine and a server.

    Each with its priority under a time limit: 0 parts, and two policies of the first file at the middle load; 1 these
    at other loads; 2 other policies; 3 parts with fewer threads, as beside a server; 4 server and split.
    """
    small, loads = base.scale == "mini", loads_of(base.files[0], sweep)
    asked, middle = change(base, n_requests=REQUESTS[base.scale]), loads[len(loads) // 2]
    named = RULES[base.scale] if first else RULES[base.scale][:3]
    cut = tuple(map(CUT.format, sweep.n_chunk)) or FIRST[1:]
    rules = dict.fromkeys(name for rule in named for name in (cut if rule == FIRST[1] else (rule,)))
    needed = (FIRST[0], *cut)
    yield 0, base
    for per_second, rule in product(loads, rules):
        rank = 2 if not first or rule not in needed else 0 if per_second == middle else 1
        yield rank, change(asked, per_second=per_second, rule=rule)
    if first and small and base.n_threads > 1:
        yield from ((4, change(asked, per_second=per_second, rule=SPLIT)) for per_second in loads[:2])
    if small and not first and server.find():  # the first model's sequences are mixed up by a server
        beside = change(base, n_threads=max(base.n_threads - 1, 1))  # a core is the client's
        yield 3, beside
        for per_second in loads[:2]:
            yield 4, change(beside, n_requests=asked.n_requests, per_second=per_second, rule=SERVER)


CALLS = "07-scheduling"  # the study whose journal the simulation is fitted on
MACHINES = (1, 10, 100, 1000, 10_000)
DAY, DAYS = 200, 6  # mean requests of a machine in a day; repetitions
WELL = 0.99  # of all requests are to be served in time
LIMIT_S = 1800.0


def fleet(scale: str, gpu: bool = False) -> Plan:
    """Chapter 7: fleets of simulated machines. No engine runs; call times come from the journal of loads."""
    check_scale(scale)
    rows_sha256 = next(filter(None, (digest(journal_path(CALLS, scale, place)) for place in (LOCAL, REFERENCE))), "")
    base = Fleet(model=MODELS[0], scale=scale, rows_sha256=rows_sha256, rule=FIRST[1], n_seq=SLOTS)
    base = change(base, n_requests=DAY, repetitions=DAYS)
    cells = tuple(
        change(base, n_machines=n, pattern=pattern, balance=balance)
        for n, pattern, balance in product(MACHINES, ("steady", "diurnal", "bursty"), ("round robin", "least work"))
    )
    return Plan("07-fleet", scale, cells, (), None, 1, 0, LIMIT_S, workload="plamo_study.studies.latency.fleets")


def digest(journal: Path) -> str:
    """SHA-256 of a journal's lines in hex; empty if there are none."""
    return sha256(lines).hexdigest() if (lines := stored(journal)) else ""
