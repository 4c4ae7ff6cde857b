"""Which cells the study of scheduling measures: the calls that traffic is made of, and traffic by policy and load.

Every policy gets the same requests at the same times. One thread's parts are there for a machine shared out between
one that reads and one that answers.
"""

from collections.abc import Iterator
from dataclasses import replace

from plamo_study.measure import machine
from plamo_study.measure.cells import Cell, Traffic
from plamo_study.measure.plan import DTYPE, MODELS, Plan, change, check_scale, thread_counts, with_gates
from plamo_study.studies.scheduling.traffic import PARTS

LONGEST = {"mini": (512, 32), "shape": (256, 16), "weights": (256, 16)}  # tokens of a prompt and of an answer
SLOTS = 8
POLICIES = ("shared", "chunked 64", "chunked 256", "decode first 64", "prefill first", "one at a time")
FIRST = ("shared", "chunked 64")  # policies that no page can do without
LOADS = {"mini": (20.0, 30.0, 40.0, 60.0), "shape": (0.1, 0.15, 0.2, 0.3), "weights": (0.1, 0.15, 0.2, 0.3)}
REQUESTS = {"mini": 60, "shape": 30, "weights": 30}
BLOCKS = {"mini": 3, "shape": 3, "weights": 3}
PATIENCE = 3  # times the usual limit: a load at shape takes minutes


def scheduling(scale: str, gpu: bool = False) -> Plan:
    """Notebook 10: who is served when."""
    check_scale(scale)
    n_prompt, n_gen = LONGEST[scale]
    base = Traffic(model=MODELS[0], scale=scale, dtype=DTYPE[scale], n_prompt=n_prompt, n_gen=n_gen, n_seq=SLOTS)
    base = change(base, n_threads=machine.performance_cores(), n_gpu_layers=-1 if gpu else 0, rule=PARTS)
    every = sorted((cell for model in MODELS for cell in _of_model(change(base, model=model))), key=_rank)
    planned = with_gates("10-scheduling", scale, tuple(every), exact_cache=False)
    needed = sum(_rank(cell) == 0 for cell in every)
    limit = PATIENCE * planned.time_limit_s
    return replace(
        planned, needed=needed, blocks=BLOCKS[scale], extra_blocks=1, time_limit_s=limit,
        worker=f"{__package__}.worker",
    )  # fmt: skip


def _of_model(base: Traffic) -> Iterator[Traffic]:
    for n in thread_counts():
        yield change(base, n_threads=n)
    asked = change(base, n_requests=REQUESTS[base.scale])
    for per_second in LOADS[base.scale]:
        for rule in POLICIES:
            yield change(asked, per_second=per_second, rule=rule)


def _rank(cell: Cell) -> int:
    """What is left out last: the parts, two policies at two loads, the others there, the loads held out."""
    assert isinstance(cell, Traffic)
    if cell.rule == PARTS:
        return 0
    known = cell.per_second in LOADS[cell.scale][1::2]
    return (0 if cell.rule in FIRST else 1) if known else 2
