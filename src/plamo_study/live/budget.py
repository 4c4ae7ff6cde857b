"""How the time for measuring is shared among the studies of a command or a notebook.

Notebooks come in the order of need: where time is short, those that do not fit are left out. Each study of the others
gets up to SLOWER times what it needs, since a machine may be slower than the reference, or busy. The rest is shared by
weight, and buys further cells and blocks. Needs come from plans and recorded rows alone, so that a command and the
notebooks it runs share alike.
"""

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache

from llama_meter import journal
from llama_meter.errors import StudyError
from llama_meter.measure import durations
from llama_meter.measure.asked import NOTHING, Sweep
from llama_meter.measure.plan import Plan
from plamo_study.plans import registry

LEFT_OUT = -1.0
USUAL = 1.0  # minutes, where nothing is known
SLOWER = 2.0  # times as long as on the reference machine a study may take here
Asked = tuple[str, str, Sweep]  # a study, the scale that it is measured at, and what a user asked of it


def of_notebooks(
    names: Iterable[str], scale: str, minutes: float, sweeps: Mapping[str, Sweep] | None = None
) -> dict[str, float]:
    """Minutes of each notebook at this scale, `minutes` in total; all 0 for no limit. `sweeps`: what a user asks.

    LEFT_OUT: there is no time for it. The first notebook in the order of need that measures is never left out.
    """
    asked = {name: _asked(name, scale, (sweeps or {}).get(name, NOTHING)) for name in names}
    if not minutes:
        return dict.fromkeys(asked, 0.0)
    fit, left = dict[str, list[Asked]](), minutes
    for name in sorted(asked, key=_place):
        need = sum(_need(*study) for study in asked[name] if not _whole(*study[:2]) or len(asked[name]) == 1)
        if asked[name] and (not fit or need <= left):
            fit[name], left = asked[name], left - need
    shares = _shares([study for own in fit.values() for study in own], minutes)
    given = {name: sum(shares.get(study, 0.0) for study in own) for name, own in fit.items()}
    return {name: (given.get(name) or LEFT_OUT) if own else 0.0 for name, own in asked.items()}


def _place(name: str) -> int:
    """Where a notebook, or that of a study, stands in the order of need."""
    return [*registry.NOTEBOOKS, ""].index(registry.notebook_of(name))


def of_notebook(notebook: str, scale: str, minutes: float, sweep: Sweep = NOTHING) -> list[tuple[str, str, float]]:
    """What to measure for a notebook: study, scale, and minutes (0: what its plan takes); LEFT_OUT: nothing."""
    if minutes == LEFT_OUT:
        return []
    asked = _asked(notebook, scale, sweep)
    studies = [(name, at, of_study(name, scale, minutes, sweep)) for name, at, _ in asked]
    return [study for study in studies if study[2] != LEFT_OUT]


def _asked(name: str, scale: str, sweep: Sweep) -> list[Asked]:
    """The studies of a notebook, or of the notebook of a study; for files of a user's own only those that take some."""
    studies = registry.of_notebook(name, scale)
    own = [(study, at, sweep if registry.varies(study) else NOTHING) for study, at in studies]
    return [study for study in own if study[2].files or not sweep.files]


def of_study(name: str, scale: str, minutes: float, sweep: Sweep = NOTHING) -> float:
    """A study's share of its notebook's minutes; 0: what its plan takes; LEFT_OUT: shown as recorded.

    A study is left out if it is meaningless in part, was recorded, and does not fit the time. Such studies time
    nothing, so their results are the same on every machine but for rounding.
    """
    if not minutes:
        return 0.0
    shares = _shares(_asked(name, scale, sweep), minutes)
    return next((share for (study, *_), share in shares.items() if study == name), LEFT_OUT)


def enough(minutes: float, share: float, needed_s: float) -> int:
    """Total minutes at which the share of one study is the `needed_s` seconds that it needs."""
    return math.ceil(minutes * needed_s / (60 * share))


def lasts(name: str, scale: str, minutes: float) -> float:
    """Seconds that a study is expected to take: its share, or as long as its plan takes."""
    planned = None if minutes else _plan(name, scale, NOTHING)
    return durations.lasts(planned) if planned else 60 * (minutes or USUAL)


def _shares(asked: list[Asked], minutes: float) -> dict[Asked, float]:
    """Minutes of each study; while time is short, the longest study that may be left out is."""
    needs, weights = {study: _need(*study) for study in asked}, registry.STUDIES
    while needs:
        every = sum(needs.values())
        longest = max((study for study in needs if _whole(*study[:2])), key=lambda study: needs[study], default=None)
        if longest is None or minutes >= SLOWER * every:
            factor = min(SLOWER, minutes / every)
            rest = (minutes - factor * every) / sum(weights[name].weight for name, *_ in needs)
            return _within_most(
                {study: factor * need + rest * weights[study[0]].weight for study, need in needs.items()}
            )
        del needs[longest]
    return {}


def _within_most(shares: dict[Asked, float]) -> dict[Asked, float]:
    """The shares, with what a plan that does not grow cannot use given to the others by weight."""
    free = set(shares)
    while True:
        over = {study for study in free if shares[study] > _most(*study)}
        if not over or over == free:
            return shares
        free -= over
        spare, weights = sum(shares[study] - _most(*study) for study in over), registry.STUDIES
        every = sum(weights[name].weight for name, *_ in free)
        shares = shares | {study: _most(*study) for study in over}
        shares |= {study: shares[study] + spare * weights[study[0]].weight / every for study in free}


@cache
def _most(name: str, scale: str, sweep: Sweep) -> float:
    """Minutes that a study can use: no limit where time to spare becomes further blocks."""
    planned = None if _whole(name, scale) else _plan(name, scale, sweep)
    return math.inf if planned is None or planned.grows else SLOWER * durations.lasts(planned) / 60


def _whole(name: str, scale: str) -> bool:
    """Whether a study is measured as a whole or not at all, and can be shown as recorded."""
    return registry.STUDIES[name].whole and bool(journal.stored(journal.journal_path(name, scale, journal.REFERENCE)))


@cache  # asked for again by every study that shares the time
def _need(name: str, scale: str, sweep: Sweep) -> float:
    """Minutes that a study needs to show anything, as on the reference machine."""
    planned = _plan(name, scale, sweep)
    if planned is None:
        return USUAL
    return (durations.lasts(planned) if _whole(name, scale) else sum(durations.Durations(planned, {}).least())) / 60


def _plan(name: str, scale: str, sweep: Sweep) -> Plan | None:
    """The plan of a study; None where it cannot be measured here, as it says when it is asked to."""
    with suppress(StudyError):
        return registry.STUDIES[name].plan(scale, **({"sweep": sweep} if sweep != NOTHING else {}))
    return None
