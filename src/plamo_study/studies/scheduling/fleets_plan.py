"""Cells of the fleet simulations: number of machines, kind of traffic, and method of sharing requests out."""

from hashlib import sha256
from itertools import product
from pathlib import Path

from plamo_study.measure.cells import Fleet
from plamo_study.measure.journal import LOCAL, REFERENCE, journal_path
from plamo_study.measure.plan import MODELS, Plan, change, check_scale
from plamo_study.studies.scheduling.plan import FIRST, SLOTS

CALLS = "10-scheduling"  # the study whose journal the simulation is fitted on
MACHINES = (1, 10, 100, 1000, 10_000)
DAY, DAYS = 200, 6  # mean requests of a machine in a day; repetitions
WELL = 0.99  # of all requests are to be served in time
LIMIT_S = 1800.0


def fleet(scale: str, gpu: bool = False) -> Plan:
    """Notebook 10: fleets of simulated machines. No engine runs; call times come from the journal of loads."""
    check_scale(scale)
    known = next(filter(None, (digest(journal_path(CALLS, scale, place)) for place in (LOCAL, REFERENCE))), "")
    base = Fleet(model=MODELS[0], scale=scale, rows_sha256=known, rule=FIRST[1], n_seq=SLOTS)
    base = change(base, n_requests=DAY, repetitions=DAYS)
    cells = tuple(
        change(base, n_machines=n, pattern=pattern, balance=balance)
        for n, pattern, balance in product(MACHINES, ("steady", "diurnal", "bursty"), ("round robin", "least work"))
    )
    return Plan("10-fleet", scale, cells, (), None, 1, 0, LIMIT_S, workload=f"{__package__}.fleets")


def digest(journal: Path) -> str:
    """SHA-256 of a journal in hex; empty if there is no file."""
    return sha256(journal.read_bytes()).hexdigest() if journal.exists() else ""
