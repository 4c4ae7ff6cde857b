"""Cells of the scheduling study: the calls that traffic is made of, and traffic by policy and load.

Every policy gets requests of the same lengths at the same times, at about 30, 60 and 85 % of the capacity of chunks of
64 on the reference machine. Parts with fewer threads are for a machine split between one process that prefills and one
that decodes, and for a server that leaves a core to its client.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from plamo_study.measure import machine, server
from plamo_study.measure.cells import Cell, Traffic
from plamo_study.measure.plan import DTYPE, MODELS, Plan, change, check_scale, thread_counts, with_gates

PARTS = "parts"  # instead of a policy: the calls that traffic is made of, each alone
SERVER = "llama-server"  # its own policy
SPLIT = "split"  # a process with half of the threads reads, and ships to one that answers, as notebook 09 does
LONGEST = {"mini": (256, 24), "shape": (128, 16), "weights": (128, 16)}  # tokens of a prompt and of an answer
SLOTS = 8
POLICIES = ("shared", "chunked 64", "one at a time", "decode first 64")
FIRST = POLICIES[:2]  # which every page needs
RULES = {"mini": POLICIES, "shape": FIRST, "weights": FIRST}
LOADS = {"mini": (75.0, 150.0, 210.0), "shape": (0.56, 1.1, 1.6), "weights": (0.56, 1.1, 1.6)}  # requests a second
WITHIN = {"mini": (0.05, 0.01), "shape": (10.0, 0.5), "weights": (10.0, 0.5)}  # s: first token, mean gap
REQUESTS = {"mini": 320, "shape": 60, "weights": 60}  # for a P99 of first tokens; for a P95
ALONE, MANY = (80.0, 110.0, 140.0), 1000  # at mini: rates (1/s) around the one of which a machine serves 99 % in time
# by simulation; requests at each, enough to estimate a share
BLOCKS = {"mini": 5, "shape": 2, "weights": 2}
PATIENCE = 3  # times the usual limit: a load at shape takes minutes


def scheduling(scale: str, gpu: bool = False) -> Plan:
    """Notebook 10: scheduling policies under load."""
    check_scale(scale)
    n_prompt, n_gen = LONGEST[scale]
    base = Traffic(model=MODELS[0], scale=scale, dtype=DTYPE[scale], n_prompt=n_prompt, n_gen=n_gen, n_seq=SLOTS)
    base = change(base, n_threads=machine.performance_cores(), n_gpu_layers=-1 if gpu else 0, rule=PARTS)
    models = MODELS if scale == "mini" else MODELS[:1]  # a request at full size takes a second
    cells = [cell for model in models for cell in _of_model(change(base, model=model))]
    every = sorted(dict.fromkeys(cells), key=_rank)  # on one core a server's parts are the same cells
    planned = with_gates("10-scheduling", scale, tuple(every), exact_cache=False)
    needed = sum(_rank(cell) <= (scale != "mini") for cell in every)  # at full size also the loads beside it
    limit = PATIENCE * planned.time_limit_s
    return replace(
        planned, needed=needed, blocks=BLOCKS[scale], extra_blocks=1, time_limit_s=limit,
        workload=f"{__package__}.workload",
    )  # fmt: skip


def _of_model(base: Traffic) -> Iterator[Traffic]:
    """Every policy at every load; on small models also the split engine, a server and one machine's capacity."""
    first, small = base.model == MODELS[0], base.scale == "mini"
    asked, loads = change(base, n_requests=REQUESTS[base.scale]), LOADS[base.scale]
    yield base
    for per_second, rule in product(loads, RULES[base.scale] if first else POLICIES[:3]):
        yield change(asked, per_second=per_second, rule=rule)
    if first and small:
        yield from (change(base, n_requests=MANY, per_second=per_second, rule=FIRST[1]) for per_second in ALONE)
    if first and small and base.n_threads > 1:
        yield change(base, n_threads=min(thread_counts()))
        yield from (change(asked, per_second=per_second, rule=SPLIT) for per_second in loads[:2])
    if not first and server.find():  # the first model's sequences are mixed up by a server
        beside = change(base, n_threads=max(base.n_threads - 1, 1))  # a core is the client's
        yield beside
        for per_second in loads[:2]:
            yield change(beside, n_requests=asked.n_requests, per_second=per_second, rule=SERVER)


def _rank(cell: Cell) -> int:
    """Priority under a time limit, 0 first: 0 parts, and two policies of the first model at the middle load; 1 these
    at other loads; 2 other policies; 3 one machine's capacity, and parts with fewer threads; 4 server and split."""
    assert isinstance(cell, Traffic)
    if cell.rule == PARTS:
        return 0 if cell.n_threads == machine.performance_cores() else 3
    if cell.rule in (SERVER, SPLIT):
        return 4
    if cell.n_requests == MANY:
        return 3
    if cell.model != MODELS[0] or cell.rule not in FIRST:
        return 2
    return 0 if cell.per_second == LOADS[cell.scale][1] else 1
