"""Which cells the study of scheduling measures: the calls that traffic is made of, and traffic by policy and load.

Every policy gets requests of the same lengths at the same times. Parts with fewer threads are there for a machine
shared out between one that reads and one that answers, and for a server whose client has a core.
"""

from collections.abc import Iterator
from dataclasses import replace

from plamo_study.measure import machine, server
from plamo_study.measure.cells import Cell, Traffic
from plamo_study.measure.plan import DTYPE, MODELS, Plan, change, check_scale, thread_counts, with_gates

PARTS = "parts"  # instead of a policy: the calls that traffic is made of, each alone
SERVER = "llama-server"  # its own policy
SPLIT = "split"  # a process with half of the threads reads, and ships to one that answers, as notebook 09 does
LONGEST = {"mini": (256, 24), "shape": (256, 16), "weights": (256, 16)}  # tokens of a prompt and of an answer
SLOTS = 8
POLICIES = ("shared", "chunked 64", "decode first 64", "chunked 128", "one at a time")
FIRST = POLICIES[:2]  # that no page can do without
BY_LOAD = {0: FIRST, 1: POLICIES, 2: POLICIES[:3], 3: FIRST}  # policies by load, of the first model
LOADS = {"mini": (12.0, 18.0, 24.0, 32.0), "shape": (0.1, 0.2, 0.3, 0.4), "weights": (0.1, 0.2, 0.3, 0.4)}
WITHIN = {"mini": (0.05, 0.01), "shape": (10.0, 0.5), "weights": (10.0, 0.5)}  # s: first token, gap in the mean
REQUESTS = {"mini": 48, "shape": 24, "weights": 24}
BLOCKS = {"mini": 3, "shape": 3, "weights": 3}
PATIENCE = 3  # times the usual limit: a load at shape takes minutes


def scheduling(scale: str, gpu: bool = False) -> Plan:
    """Notebook 10: who is served when."""
    check_scale(scale)
    n_prompt, n_gen = LONGEST[scale]
    base = Traffic(model=MODELS[0], scale=scale, dtype=DTYPE[scale], n_prompt=n_prompt, n_gen=n_gen, n_seq=SLOTS)
    base = change(base, n_threads=machine.performance_cores(), n_gpu_layers=-1 if gpu else 0, rule=PARTS)
    cells = [cell for model in MODELS for cell in _of_model(change(base, model=model))]
    every = sorted(dict.fromkeys(cells), key=_rank)  # on one core a server's parts are everybody's
    planned = with_gates("10-scheduling", scale, tuple(every), exact_cache=False)
    needed = sum(_rank(cell) <= (scale != "mini") for cell in every)  # at full size also two policies held out
    limit = PATIENCE * planned.time_limit_s
    return replace(
        planned, needed=needed, blocks=BLOCKS[scale], extra_blocks=1, time_limit_s=limit,
        worker=f"{__package__}.worker",
    )  # fmt: skip


def known_loads(scale: str) -> tuple[float, ...]:
    """The half of the loads that a step model may be fitted on; the others are held out."""
    return LOADS[scale][1::2]


def _of_model(base: Traffic) -> Iterator[Traffic]:
    """The first model gets every load, one of them by every policy; others two policies at two loads."""
    first, loads = base.model == MODELS[0], LOADS[base.scale]
    for n in thread_counts() if first else (base.n_threads,):
        yield change(base, n_threads=n)
    asked = change(base, n_requests=REQUESTS[base.scale])
    for number, per_second in enumerate(loads):
        for rule in BY_LOAD[number] if first else FIRST if number in (1, 2) else ():
            yield change(asked, per_second=per_second, rule=rule)
    for per_second in loads[:2] if first and base.n_threads > 1 else ():
        yield change(asked, per_second=per_second, rule=SPLIT)
    if not first and server.find():  # the first model's sequences are mixed up by a server
        beside = change(base, n_threads=max(base.n_threads - 1, 1))  # a core is the client's
        yield beside
        for per_second in loads[:2]:
            yield change(beside, n_requests=REQUESTS[base.scale], per_second=per_second, rule=SERVER)


def _rank(cell: Cell) -> int:
    """What is left out last: parts and two policies at one load; the first model's held out; fewer threads; others.

    On small models the split engine is as soon wanted as the policies at that load.
    """
    assert isinstance(cell, Traffic)
    if cell.rule == PARTS:
        return 0 if cell.n_threads == machine.performance_cores() else 2
    if cell.rule == SERVER:
        return 3
    if cell.rule == SPLIT:  # the known one says what a shipment takes
        return 0 if cell.scale == "mini" and cell.per_second == LOADS[cell.scale][1] else 3
    usual = cell.rule in FIRST
    if cell.per_second == LOADS[cell.scale][1]:
        return 0 if usual else 3
    held_out = cell.per_second == LOADS[cell.scale][2] and cell.model == MODELS[0]
    return 1 if usual and held_out else 3 if usual else 4
