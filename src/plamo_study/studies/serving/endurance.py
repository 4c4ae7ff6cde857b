"""Servers under sustained load, suspended in it, or beside a patched one: frames of their runs, and the two tables of
`data/upstream/server-wakeups.md`."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import pandas as pd

from plamo_study.measure.recording import Recording
from plamo_study.present import evidence
from plamo_study.present.evidence import chip, escaped
from plamo_study.present.tables import Columns, Table, significant, table
from plamo_study.studies.serving import analysis, results
from plamo_study.studies.serving.plan import SLOTS
from plamo_study.studies.serving.results import HELD_AT, PATCHED, RELEASED, Minute, Soak

MS = 1e3
SERVERS = {RELEASED: False, PATCHED: True}  # whether patched
HELD_UP = f"{results.SOAKED} --minutes 6 --hold 30"
OF_RUN = ["server", "run", "machine", "model", "rate", "held_s"]


def soaks(recording: Recording, held: bool = False) -> list[Soak]:
    """All soaks of the released server or, with `held`, those of both servers that were suspended: this machine's if
    rows are live and there are any, else the reference machine's."""
    asked = SERVERS.values() if held else [False]
    loads = [partial(results.soaks, scale=recording.scale, held=held, patched=patched) for patched in asked]
    return [run for load in loads for run in evidence.standing(recording, load) or []]


def runs(found: Sequence[Soak]) -> pd.DataFrame:
    """One row per soak: OF_RUN (`run` numbers one server's soaks from 1), `n_minutes`, and its request counts."""
    counts = ["sent", "answered", "failed", "missing", "twice", "differ", "near_ties", "tokens", "counted"]
    lines = [who | {name: getattr(run, name) for name in counts} for who, run in _named(found)]
    return pd.DataFrame(lines, columns=[*OF_RUN, "n_minutes", *counts])


def minutes(found: Sequence[Soak]) -> pd.DataFrame:
    """One row per minute of every soak: OF_RUN, `n_minutes`, `minute` from 1, and the fields of Minute (None: NaN)."""
    fields = [name for name in Minute.__struct_fields__ if name != "fine"]
    lines = [
        who | {"minute": n} | {name: getattr(each, name) for name in fields}
        for who, run in _named(found)
        for n, each in enumerate(run.minutes, 1)
    ]
    told = pd.DataFrame(lines, columns=[*OF_RUN, "n_minutes", "minute", *fields])
    return told.astype(dict.fromkeys(["minute", *fields], float))


def answers(found: Sequence[Soak]) -> pd.DataFrame:
    """Answers per second of every soak, one row per counting interval (five seconds or a minute): OF_RUN,
    `n_minutes`, `begin` and `end` in minutes, and `value` (1/s)."""
    lines = []
    for who, run in _named(found):
        for minute, each in enumerate(run.minutes):
            counts = each.fine or (each.answered,)
            for n, count in enumerate(counts):
                begin, end = (minute + at / len(counts) for at in (n, n + 1))
                lines.append(who | {"begin": begin, "end": end, "value": count * len(counts) / 60})
    return pd.DataFrame(lines, columns=[*OF_RUN, "n_minutes", "begin", "end", "value"])


def _named(found: Sequence[Soak]) -> Iterable[tuple[dict[str, Any], Soak]]:
    """Each soak with its identifying fields."""
    counted = dict.fromkeys(SERVERS, 0)
    for run in found:
        server = PATCHED if run.patched else RELEASED
        counted[server] += 1
        who = {"server": server, "run": counted[server], "machine": chip(run.machine), "model": run.model}
        yield who | {"rate": run.rate, "held_s": run.held_s, "n_minutes": len(run.minutes)}, run


def crowds(recording: Recording) -> Table:
    """Time per token by the server's own count, with few and with many requests waiting, on both servers."""
    found = evidence.standing(recording, results.crowds) if recording.scale == "mini" else None
    if not found:
        return Table(pd.DataFrame([{"not compared here": f"plamo-study server build --patched, {results.CROWDED}"}]))
    time = significant(3, MS)
    columns: Columns = {
        "n_clients": ("requests at a time", ""), "waits": ("waiting", ""),
        "released": ("as released (ms)", time), "patched": ("patched (ms)", time),
        "ratio": ("released / patched", ".2f"), "rate": ("tokens/s, released", significant(3)),
        "rate_patched": ("patched", significant(3)), "rates": ("patched / released", ".2f"),
    }  # fmt: skip
    rounds = len({each.round for each in found.loads})
    note = (
        f"{escaped(found.model)}, {rounds} servers of each kind, in turn; a further token by the server's own count. "
        f"Recorded on {chip(found.machine)}."
    )
    beside = {"ratio": ("released", "patched"), "rates": ("rate_patched", "rate")}
    return table(analysis.crowds(found), columns, note, beside)


def side_by_side(recording: Recording) -> Table:
    """Ranges for the released and the patched server, suspended equally long under the load that most runs had."""
    found, entries = soaks(recording, held=True), []
    most = max(found, key=lambda one: sum(_same(one, each) for each in found), default=None)
    for name, patched in SERVERS.items():
        of = [run for run in found if run.patched == patched and _same(run, most)]
        if not of:
            continue
        before, after = [run.minutes[HELD_AT - 1] for run in of], [run.minutes[HELD_AT:] for run in of]
        gone = [_gone(run) for run in of]
        entry = {"llama-server": name, "requests/s": f"{of[0].rate:.1f}", "stopped for (s)": f"{of[0].held_s:.0f}"}
        entry |= {
            "answers in the minute before": _range(minute.answered for minute in before),
            "in the minute of the stop": f"{_range(each[0].answered for each in after)}, "
            f"{_range(each[0].failed for each in after)} failed",
            f"in minute {len(after[0])} from the stop on": _range(each[-1].answered for each in after),
            "not ended, at most, at a minute's end": _range(
                max(minute.waiting for minute in run.minutes) for run in of
            ),
            "queue gone by minute": _range(gone)
            if all(gone)
            else "not in every run"
            if any(gone)
            else f"not in {len(after[0])}",
            "failed, of sent": f"{_range(run.failed for run in of)} of {_range(run.sent for run in of)}",
        }
        entries.append(entry | ({"runs": f"{len(of)}"} if len(found) > len(SERVERS) else {}))
    return Table(pd.DataFrame(entries or [{"not tried here": HELD_UP}]))


def _range(numbers: Iterable[Any]) -> str:
    of = list(numbers)
    least, most = min(of), max(of)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _same(one: Soak, other: Soak | None) -> bool:
    """Whether two soaks had the same machine, load and suspension time."""
    told = [(each.machine, each.model, each.rate, each.held_s, len(each.minutes)) for each in (one, other) if each]
    return told[0] == told[-1]


def _gone(found: Soak) -> int | None:
    """Minute after the suspension by which the queue was gone for good; None if it never was."""
    usual = max(minute.waiting for minute in found.minutes[:HELD_AT])
    calm = [minute.waiting <= max(usual, SLOTS) for minute in found.minutes[HELD_AT:]]
    return next((n + 1 for n, _ in enumerate(calm) if all(calm[n:])), None)
