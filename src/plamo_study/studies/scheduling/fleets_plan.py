"""Which fleets are simulated: a load of so many machines, by kind of traffic and by how requests are shared out."""

from hashlib import sha256
from itertools import product
from pathlib import Path

from plamo_study.measure.cells import Fleet
from plamo_study.measure.plan import MODELS, Plan, change, check_scale
from plamo_study.measure.recording import LOCAL, REFERENCE, journal_path
from plamo_study.studies.scheduling.plan import FIRST, SLOTS

CALLS = "10-scheduling"  # whose journal fleets are simulated by
MACHINES = (1, 10, 100, 1000, 10_000)
DAY, DAYS = 200, 6  # requests of a machine in a day, in the mean; repetitions
WELL = 0.99  # of all requests are to be served in time
LIMIT_S = 1800.0


def fleet(scale: str, gpu: bool = False) -> Plan:
    """Notebook 10: fleets of simulated machines. No engine runs; calls take what the journal of loads says."""
    check_scale(scale)
    known = next(filter(None, (digest(journal_path(CALLS, scale, place)) for place in (LOCAL, REFERENCE))), "")
    base = Fleet(model=MODELS[0], scale=scale, rows_sha256=known, rule=FIRST[1], n_seq=SLOTS)
    base = change(base, n_requests=DAY, repetitions=DAYS)
    cells = tuple(
        change(base, n_machines=n, pattern=pattern, balance=balance)
        for n, pattern, balance in product(MACHINES, ("steady", "diurnal", "bursty"), ("round robin", "least work"))
    )
    return Plan("10-fleet", scale, cells, (), None, 1, 0, LIMIT_S, worker=f"{__package__}.fleets")


def digest(journal: Path) -> str:
    """SHA-256 of a journal; none where it is not there."""
    return sha256(journal.read_bytes()).hexdigest() if journal.exists() else ""
