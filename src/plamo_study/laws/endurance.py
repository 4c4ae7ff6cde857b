"""Servers under sustained load, as released and patched, some of them stopped for a while: their minutes as a frame."""

from collections.abc import Sequence

import pandas as pd

from plamo_study.read import results
from plamo_study.read.results import PATCHED, RELEASED, Minute, Soak
from plamo_study.show.evidence import chip

LOAD = ["machine", "model", "rate", "held_s", "n_minutes"]
OF_RUN = ["server", "run", *LOAD, "sent", "lost", "missing", "twice", "differ", "near_ties", "tokens", "counted"]


def held(place: str, scale: str) -> pd.DataFrame:
    """The minutes of both servers that were stopped."""
    return minutes([run for patched in (False, True) for run in results.soaks(place, scale, True, patched)])


def alike(held: pd.DataFrame) -> pd.DataFrame:
    """The minutes of the runs that shared the load and machine of most runs: those compare."""
    runs = held.drop_duplicates(["server", "run"])
    return held[held[LOAD].apply(tuple, axis=1) == runs.groupby(LOAD).size().idxmax()] if len(runs) else held


def minutes(found: Sequence[Soak]) -> pd.DataFrame:
    """One row a minute of every run: OF_RUN, of which `run` numbers one server's runs from 1, `minute` from 1, and the
    fields of Minute (None: NaN). `sent` and the others after it count the whole run,
    also what ended after its last minute; `lost`: without an answer."""
    fields, counted = list(Minute.__struct_fields__), dict.fromkeys((RELEASED, PATCHED), 0)
    lines = []
    for run in found:
        server = PATCHED if run.patched else RELEASED
        counted[server] += 1
        who = {"server": server, "run": counted[server], "machine": chip(run.machine), "n_minutes": len(run.minutes)}
        who |= {"lost": run.failed} | {name: getattr(run, name) for name in OF_RUN if hasattr(run, name)} | who
        for n, each in enumerate(run.minutes, 1):
            lines.append(who | {"minute": n} | {name: getattr(each, name) for name in fields})
    told = pd.DataFrame(lines, columns=[*OF_RUN, "minute", *fields])
    return told.astype(dict.fromkeys(["minute", *(name for name in fields if name != "fine")], float))
