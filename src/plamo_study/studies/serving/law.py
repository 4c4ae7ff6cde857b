"""What load does to answers, and servers minute by minute.

Frames in, estimates out. Soaks, crowds and probed servers were recorded beside the journals (commit
53f8ee5 measured them); of their fields those are read that a page shows.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pandas as pd

from llama_meter import paths, stats
from llama_meter.cells import SLOTS
from plamo_study.show.evidence import chip
from plamo_study.stats import estimates
from plamo_study.stats.estimates import names_of

COUNTS = ["prompts", "prompts_changed", "share", "answers", "changed", "near_ties", "servers", "died"]
ENDED = "the server ended: "  # in the failure of a request whose server crashed
RELEASED, PATCHED = "as released", "patched"  # servers that take turns
HELD_AT = 2  # minutes before a server is suspended
SOAKED = ["machine", "model", "rate", "held_s", "n_minutes"]  # the load of a soak
OF_RUN = ["server", "run", *SOAKED, "sent", "lost", "differ", "near_ties"]


def under_load(asked: pd.DataFrame) -> pd.DataFrame:
    """What became of the answers of several users at once, by file, build and server, as `counted` counts them.

    Every page, README and the reports quote this one count. `asked`: a frame of `measurements.answers`.
    """
    return counted(asked[asked["n_clients"] > 1], "model file build server")


def counted(asked: pd.DataFrame, by: str | Sequence[str]) -> pd.DataFrame:
    """Answers by what became of them, one line a group of `by`; the unit is the prompt.

    `prompts`: distinct ones that got an answer, and `prompts_changed`: those of them whose answer changed at least
    once; `share`: the latter's share with its exact interval. `answers`: requests of which a token came, `changed` and
    `near_ties` of them; an answer that broke off is compared as far as it goes. `servers`, and how many `died`.
    """
    names, entries = names_of(by), []
    for key, group in asked.groupby(names, sort=True):
        came = group[group["begun"]]
        entry = dict(zip(names, key, strict=True)) | {"prompts": len(came.groupby(["n_prompt", "prompt"]))}
        entry["prompts_changed"] = len(came[came["answer"] == "changed"].groupby(["n_prompt", "prompt"]))
        entry |= {"share": estimates.rate(entry["prompts_changed"], entry["prompts"]), "answers": len(came)}
        entry |= {"changed": int((came["answer"] == "changed").sum())}
        entry |= {"near_ties": int((came["answer"] == "near-tie").sum()), "servers": group["key"].nunique()}
        entries.append(entry | {"died": group["key"][group["failure"].str.contains(ENDED, regex=False)].nunique()})
    return pd.DataFrame(entries, columns=[*names, *COUNTS])


def _stored(place: str, name: str, kind: Any) -> Any:
    """A result of a type; None where there is none."""
    path = paths.MEASURED / place / name
    return msgspec.json.decode(path.read_bytes(), type=kind) if path.exists() else None


# ------------------------------------------------------------------ crowds


class Crowd(msgspec.Struct, frozen=True, kw_only=True):
    """One load of one server: `token`, seconds per further token of each answer, by the server."""

    server: str
    n_clients: int
    round: int
    token: list[float]


class Crowds(msgspec.Struct, frozen=True, kw_only=True):
    """Loads of both servers, in turn, on one machine."""

    machine: dict[str, Any]
    loads: list[Crowd]


def crowds(place: str, scale: str) -> pd.DataFrame:
    """One row per number of concurrent requests, `waits` of which have no slot: seconds per further token by each
    server's own count (`released`, `patched`), and released over patched (`ratio`), over paired rounds."""
    stored: Crowds | None = _stored(place, f"09-crowd.{scale}.json", Crowds)
    every, machine = (stored.loads, chip(stored.machine)) if stored else ([], "")
    entries = []
    for n_clients in dict.fromkeys(load.n_clients for load in every):
        loads = sorted((load for load in every if load.n_clients == n_clients), key=lambda load: load.round)
        slow, fast = (
            [float(np.mean(each.token)) for each in loads if each.server == name] for name in (RELEASED, PATCHED)
        )
        entry: dict[str, Any] = {"machine": machine, "waits": max(n_clients - SLOTS, 0)}
        entry |= {"released": stats.median(slow), "patched": stats.median(fast), "ratio": stats.ratio(slow, fast)}
        entries.append(entry)
    return pd.DataFrame(entries, columns=["machine", "waits", "released", "patched", "ratio"])


# ------------------------------------------------------------------ probed servers


class Probed(msgspec.Struct, frozen=True, kw_only=True):
    """A server known to be right or wrong (`truth`), and what a probe of it said."""

    truth: str
    verdict: str


class Probings(msgspec.Struct, frozen=True, kw_only=True):
    """All servers that were probed on one machine."""

    servers: list[Probed]


def confusion(place: str) -> pd.DataFrame:
    """Probed servers by what is known of them and the verdict, with the share of `errors` (exact interval).

    An error at a right server is a false alarm, at a wrong one a miss. "Cannot tell" is counted, and neither.
    """
    stored: Probings | None = _stored(place, "09-probed.json", Probings)
    lines: list[dict[str, Any]] = []
    servers = stored.servers if stored else []
    for truth, error in (("right", "wrong"), ("wrong", "right")) if servers else ():
        verdicts = [server.verdict for server in servers if server.truth == truth]
        counts = {verdict: verdicts.count(verdict) for verdict in ("right", "wrong", "cannot tell")}
        lines.append({"known": truth, **counts, "errors": estimates.rate(verdicts.count(error), len(verdicts))})
    return pd.DataFrame(lines, columns=["known", "right", "wrong", "cannot tell", "errors"])


# ------------------------------------------------------------------ servers under sustained load, minute by minute


class Minute(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that were answered in one minute; at its end those still open, and bytes of client and server.

    `fine`: answers that ended in each 5 s of the minute; empty in older recordings.
    """

    answered: float
    waiting: float
    client_bytes: float
    server_bytes: float
    fine: tuple[int, ...] = ()


class Soak(msgspec.Struct, frozen=True, kw_only=True):
    """A soak: its server and load, the outcome of all requests, and its minutes.

    `failed`: requests without an answer; `differ`: answers that differ from the one to the prompt alone, `near_ties`
    among them.
    """

    machine: dict[str, Any]
    model: str
    rate: float
    held_s: float = 0.0  # seconds for which the server was suspended after HELD_AT minutes
    patched: bool = False  # the server with our patch for waiting threads
    sent: int
    failed: int
    differ: int
    near_ties: int
    minutes: list[Minute]


def minutes(place: str, *names: str) -> pd.DataFrame:
    """One row a minute of every run in some results: OF_RUN, `minute` from 1, and the fields of Minute.

    `run` numbers a server's runs from 1. `sent` and what follows it count the whole run; `lost`: without an answer.
    """
    lines, runs = [], dict.fromkeys((RELEASED, PATCHED), 0)
    for name in names:
        stored = _stored(place, name, Soak | list[Soak]) or []  # the oldest file holds a single one
        for soak in stored if isinstance(stored, list) else [stored]:
            runs[server := PATCHED if soak.patched else RELEASED] += 1
            run = msgspec.structs.asdict(soak) | {"server": server, "run": runs[server], "lost": soak.failed}
            run |= {"machine": chip(soak.machine), "n_minutes": len(soak.minutes)}
            for n, minute in enumerate(soak.minutes, 1):
                lines.append(run | {"minute": float(n)} | msgspec.structs.asdict(minute))
    return pd.DataFrame(lines, columns=[*OF_RUN, "minute", *Minute.__struct_fields__])


def held(place: str, scale: str) -> pd.DataFrame:
    """The minutes of both servers that were stopped."""
    return minutes(place, f"09-held.{scale}.json", f"09-held-patched.{scale}.json")


def alike(held: pd.DataFrame) -> pd.DataFrame:
    """The minutes of the runs that shared the load and machine of most runs: those compare."""
    runs = held.drop_duplicates(["server", "run"])
    return held[held[SOAKED].apply(tuple, axis=1) == runs.groupby(SOAKED).size().idxmax()] if len(runs) else held
