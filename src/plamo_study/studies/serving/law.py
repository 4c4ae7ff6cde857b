"""What load does to answers, and what other tools' clients count; soaks minute by minute: frames in, estimates out."""

import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import pandas as pd

from llama_meter import stats
from llama_meter.serve.objectives import SLOTS
from plamo_study.read import results
from plamo_study.read.results import AIPERF, OURS, PATCHED, RELEASED, Beside, Crowds, Minute, Probed, Run, Soak
from plamo_study.show.evidence import chip
from plamo_study.stats import estimates
from plamo_study.stats.estimates import names_of

COUNTS = ["prompts", "prompts_changed", "share", "answers", "changed", "near_ties", "servers", "died"]
ENDED = "the server ended: "  # in the failure of a request whose server crashed
MS = 1e3
TOLD = {"ttft": "first token", "itl": "each further token", "whole": "request", "throughput": "tokens/s"}
SOAKED = ["machine", "model", "rate", "held_s", "n_minutes"]  # the load of a soak
OF_RUN = ["server", "run", *SOAKED, "sent", "lost", "missing", "twice", "differ", "near_ties", "tokens", "counted"]


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


def compared(comparison: Beside) -> pd.DataFrame:
    """AIPerf beside our client: one row per number of concurrent requests and quantity in TOLD (`what`).

    `ours` and `theirs`: estimates over rounds of per-request means, in seconds or tokens/s; `ratio`: theirs over ours,
    paired by round. Server speed varies between runs, so each is also divided by the server's own count for the same
    run: `ours_of_own`, `theirs_of_own`, and `of_own`, the ratio of the two, paired by round.
    """
    entries = []
    for n_clients in dict.fromkeys(run.n_clients for run in comparison.runs):
        loads = {tool: _by_round(comparison, tool, n_clients) for tool in (OURS, AIPERF)}
        for name, what in TOLD.items():
            ours, theirs = ([_mean(run, name) for run in loads[tool]] for tool in (OURS, AIPERF))
            ours_of_own, theirs_of_own = (
                [_mean(run, name) / _own(run, name) for run in loads[tool]] for tool in (OURS, AIPERF)
            )
            entry = {"scale": comparison.scale, "n_clients": n_clients, "what": what, "is_time": name != "throughput"}
            entry |= {"ours": stats.median(ours), "theirs": stats.median(theirs), "ratio": stats.ratio(theirs, ours)}
            entry |= {"ours_of_own": stats.median(ours_of_own), "theirs_of_own": stats.median(theirs_of_own)}
            entries.append(entry | {"of_own": stats.ratio(theirs_of_own, ours_of_own)})
    return pd.DataFrame(entries)


def later(comparison: Beside) -> pd.DataFrame:
    """Where two clients of one server differ: one row per number of concurrent requests and entry of LATER (`what`).

    Estimates over rounds, in seconds: `ours`, `theirs`, and `apart`, theirs minus ours in the same round. The pause
    between an answer and the next request is measured only with a single client.
    """
    entries = []
    for n_clients in dict.fromkeys(run.n_clients for run in comparison.runs):
        both = [_by_round(comparison, tool, n_clients) for tool in (OURS, AIPERF)]
        for what, seconds in LATER.items():
            ours, theirs = ([seconds(run) for run in runs] for runs in both)
            if any(map(math.isnan, [*ours, *theirs])):
                continue
            entry: dict[str, Any] = {"scale": comparison.scale, "n_clients": n_clients, "what": what}
            entry |= {"ours": stats.median(ours), "theirs": stats.median(theirs)}
            apart = [late - early for late, early in zip(theirs, ours, strict=True)]
            entries.append(entry | {"apart": stats.median(apart)})
    return pd.DataFrame(entries)


def _between(run: Run) -> float:
    """Mean seconds from an answer to the next request; NaN for several clients or a single request."""
    n, span = len(run.whole), sum(run.n_gen) / run.throughput
    return (span - sum(run.whole)) / (n - 1) if run.n_clients == 1 and n > 1 else math.nan


def crowds(comparison: Crowds) -> pd.DataFrame:
    """One row per number of concurrent requests, `waits` of which have no slot: seconds per further token by each
    server's own count (`released`, `patched`), and released over patched (`ratio`), over paired rounds."""
    entries = []
    for n_clients in dict.fromkeys(load.n_clients for load in comparison.loads):
        both = [
            sorted(
                (load for load in comparison.loads if (load.server, load.n_clients) == (name, n_clients)),
                key=attrgetter("round"),
            )
            for name in (RELEASED, PATCHED)
        ]
        slow, fast = ([float(np.mean(load.token)) for load in loads] for loads in both)
        entry: dict[str, Any] = {"n_clients": n_clients, "waits": max(n_clients - SLOTS, 0)}
        entry |= {"released": stats.median(slow), "patched": stats.median(fast), "ratio": stats.ratio(slow, fast)}
        entries.append(entry)
    return pd.DataFrame(entries)


def _by_round(comparison: Beside, tool: str, n_clients: int) -> list[Run]:
    runs = [run for run in comparison.runs if run.tool == tool and run.n_clients == n_clients]
    return sorted(runs, key=lambda run: run.round)


def _mean(run: Run, name: str) -> float:
    return run.throughput if name == "throughput" else float(np.mean(getattr(run, name)))


def _own(run: Run, name: str) -> float:
    """The same quantity by the server's count; NaN if it has none. Its throughput assumes that all slots are full."""
    prompt, token = (math.nan if seconds is None else seconds for seconds in (run.prompt, run.token))
    n_gen = float(np.mean(run.n_gen))
    whole = prompt + (n_gen - 1) * token
    return {"ttft": prompt, "itl": token, "whole": whole, "throughput": run.n_clients * n_gen / whole}[name]


LATER: dict[str, Callable[[Run], float]] = {
    "first token, after the server's count": lambda run: _mean(run, "ttft") - _own(run, "ttft"),
    "last token, after the server's count": lambda run: _mean(run, "whole") - _own(run, "whole"),
    "from an answer to the next request": _between,
}


def confusion(probed: Sequence[Probed]) -> pd.DataFrame:
    """Probed servers by what is known of them and the verdict, with the share of `errors` (exact interval).

    An error at a right server is a false alarm, at a wrong one a miss. "Cannot tell" is counted, and neither.
    """
    lines: list[dict[str, Any]] = []
    for truth, error in (("right", "wrong"), ("wrong", "right")):
        said = [server.verdict for server in probed if server.truth == truth]
        counts = {verdict: said.count(verdict) for verdict in ("right", "wrong", "cannot tell")}
        lines.append({"known": truth, **counts, "errors": estimates.rate(said.count(error), len(said))})
    return pd.DataFrame(lines)


# ------------------------------------------------------------------ servers under sustained load, minute by minute


def held(place: str, scale: str) -> pd.DataFrame:
    """The minutes of both servers that were stopped."""
    return minutes([run for patched in (False, True) for run in results.soaks(place, scale, True, patched)])


def alike(held: pd.DataFrame) -> pd.DataFrame:
    """The minutes of the runs that shared the load and machine of most runs: those compare."""
    runs = held.drop_duplicates(["server", "run"])
    return held[held[SOAKED].apply(tuple, axis=1) == runs.groupby(SOAKED).size().idxmax()] if len(runs) else held


def minutes(runs: Sequence[Soak]) -> pd.DataFrame:
    """One row a minute of every run: OF_RUN, of which `run` numbers one server's runs from 1, `minute` from 1, and the
    fields of Minute (None: NaN). `sent` and the others after it count the whole run,
    also what ended after its last minute; `lost`: without an answer."""
    fields, counted = list(Minute.__struct_fields__), dict.fromkeys((RELEASED, PATCHED), 0)
    lines = []
    for run in runs:
        server = PATCHED if run.patched else RELEASED
        counted[server] += 1
        who = {"server": server, "run": counted[server], "machine": chip(run.machine), "n_minutes": len(run.minutes)}
        who |= {"lost": run.failed} | {name: getattr(run, name) for name in OF_RUN if hasattr(run, name)} | who
        for n, minute in enumerate(run.minutes, 1):
            lines.append(who | {"minute": n} | {name: getattr(minute, name) for name in fields})
    table = pd.DataFrame(lines, columns=[*OF_RUN, "minute", *fields])
    return table.astype(dict.fromkeys(["minute", *(name for name in fields if name != "fine")], float))
