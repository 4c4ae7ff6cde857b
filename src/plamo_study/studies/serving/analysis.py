"""Effects of load on requests and answers, and the location of a server's knee: frames in, estimates out."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from plamo_study.analysis import clustered, stats
from plamo_study.analysis.usable import usable
from plamo_study.measure.tolerance import near_tie
from plamo_study.studies.serving import metrics
from plamo_study.studies.serving.plan import ENOUGH, OBJECTIVES, SLOTS
from plamo_study.studies.serving.results import AIPERF, OURS, PATCHED, RELEASED, Beside, Crowd, Crowds, Probed, Run

SERVED = ["model", "build", "server", "n_seq", "n_clients"]
ENDED = re.compile(r"the server ended: ([^,;]+)(?:, ([^;]+))?")
MS = 1e3
TOLD = {"ttft": "first token", "itl": "each further token", "whole": "request", "throughput": "tokens/s"}


def requests(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per request of every load: `model`, `build`, `server`, `n_seq` slots, `n_clients` at a time (0: open
    loop), and `key`, the server that was asked.

    `parts`: first token that differs from the answer to the same prompt alone (-1: none); a broken-off answer is
    compared as far as it goes. `gap`: the likeliest token's lead over the next one there, in nats (-1: unknown).
    `begun`: whether any token came. `failure`: why the answer is missing or incomplete; `reached`: whether the
    request reached a server.
    """
    found = rows[(rows["workload"] == "serving") & (rows["status"] == "ok") & ~rows["anchor"]]
    names = ["model", "build", "server", "n_seq", "n_clients", "key"]
    lines = [
        {name: getattr(row, name) for name in names}
        | {"parts": int(token), "gap": gap, "begun": bool(request.token_ns), "failure": request.failure}
        for row in found.itertuples()
        for request, token, gap in zip(row.requests, row.series["differs"], row.series["gap"], strict=True)
    ]
    told = pd.DataFrame(lines, columns=[*names, "parts", "gap", "begun", "failure"])
    return told.assign(reached=~told["failure"].astype(str).str.startswith("ConnectError"))


def answers(rows: pd.DataFrame) -> pd.DataFrame:
    """Per model, build, server and concurrency: `runs`, `answers`, and how many `differ` from the same prompt alone.

    `near_ties` among those; `failed` requests; `died`: servers that crashed, with their signals (`how`) and assertions
    (`said`). Answers that broke off are compared as far as they go.
    """
    found, entries = requests(rows), []
    found["apart"] = found["parts"] >= 0
    found["tie"] = found["apart"] & near_tie(found["gap"])
    for key, group in found.groupby(SERVED, sort=True):
        ended = [deaths(of["failure"]) for _, of in group.groupby("key", sort=False)]
        dead = [end for end in ended if end]
        entry: dict[str, Any] = dict(zip(SERVED, key, strict=True)) | {"runs": len(ended)}
        entry |= {"answers": int(group["begun"].sum()), "differ": int(group["apart"].sum())}
        entry |= {"near_ties": int(group["tie"].sum()), "failed": int(group["failure"].ne("").sum())}
        entry |= {"died": len(dead), "how": ", ".join(dict.fromkeys(end[0] for end in dead))}
        entries.append(entry | {"said": next((end[1] for end in dead if end[1]), "")})
    names = [*SERVED, "runs", "answers", "differ", "near_ties", "failed", "died", "how", "said"]
    return pd.DataFrame(entries, columns=names)


def deaths(failures: Iterable[str]) -> tuple[str, str] | None:
    """Signal or exit code of the crashed server and its assertion, from its requests' failures; None if it survived."""
    for failure in failures:
        if found := ENDED.search(failure):
            return found[1], found[2] or ""
    return None


def knees(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per server whose knee was searched: `model`, `build`, `block`, `n` (requests at each rate tried), `met`
    and `failed`: the highest requested rate that met the objectives and the lowest that did not (bisection keeps them
    in this order); `goodput`: requests a second that met the objectives at the rate `met`.
    """
    entries = []
    for row in _sought(rows).itertuples():
        met, failed = bracket(row.series["rates"], row.series["met"])
        entry = {"model": row.model, "build": row.build, "block": row.block, "n": row.n_requests}
        kept = metrics.goodput(row.requests, OBJECTIVES[row.scale])
        entries.append(entry | {"met": met, "failed": failed, "goodput": kept})
    return pd.DataFrame(entries, columns=["model", "build", "block", "n", "met", "failed", "goodput"])


def bracket(rates: Sequence[float], met: Sequence[float]) -> tuple[float, float]:
    """Highest requested rate that met the objectives and lowest that did not (1/s); NaN if there is none."""
    nan = float("nan")
    good = [rate for rate, share in zip(rates, met, strict=True) if share >= ENOUGH]
    bad = [rate for rate, share in zip(rates, met, strict=True) if share < ENOUGH]
    return max(good, default=nan), min(bad, default=nan)


def knee_of(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per model and build: `knee`, the rate (1/s) at which ENOUGH of the requests should meet the objectives.

    Estimated from all loads of all `servers`, `n` requests each. The interval is NaN where servers shared their
    arrivals, as in recordings without a seed per search: the luck of that one draw is in all of them.
    """
    entries = []
    for (model, build), group in _sought(rows).groupby(["model", "build"]):
        tried = [
            (rate, share, number)
            for number, row in enumerate(group.itertuples())
            for rate, share in zip(row.series["rates"], row.series["met"], strict=True)
        ]
        rates, shares, servers = zip(*tried, strict=True)
        n = int(group["n_requests"].iloc[0])
        found = stats.threshold(rates, shares, servers, ENOUGH, n)
        seeds = [seed for series in group["series"] for seed in series.get("seed", [])]
        if len(set(seeds)) < len(group):
            found = replace(found, low=math.nan, high=math.nan)
        entries.append({"model": model, "build": build, "n": n, "servers": len(group), "knee": found})
    return pd.DataFrame(entries, columns=["model", "build", "n", "servers", "knee"])


def _sought(rows: pd.DataFrame) -> pd.DataFrame:
    found = usable(rows)
    found = found[(found["workload"] == "serving") & (found["pattern"] == "knee")]
    return found.sort_values(["model", "build", "block"])


def tools(rows: pd.DataFrame) -> pd.DataFrame:
    """One cell's loads as four tools would report them: `tool`, `ttft`, `itl`, `tpot` (s), medians over servers."""
    told = [metrics.by_tool(requests) for requests in rows["requests"]]
    entries = []
    for tool in told[0] if told else ():
        entry: dict[str, Any] = {"tool": tool}
        for name in ("ttft", "itl", "tpot"):
            values = [each[tool][name] for each in told if each[tool][name] == each[tool][name]]
            entry[name] = median(values) if values else float("nan")
        entries.append(entry)
    return pd.DataFrame(entries, columns=["tool", "ttft", "itl", "tpot"])


def compared(found: Beside) -> pd.DataFrame:
    """AIPerf beside our client: one row per number of concurrent requests and quantity in TOLD (`what`).

    `ours` and `theirs`: estimates over rounds of per-request means, in seconds or tokens/s; `ratio`: theirs over ours,
    paired by round. Server speed varies between runs, so each is also divided by the server's own count for the same
    run: `ours_of_own`, `theirs_of_own`, and `of_own`, the ratio of the two, paired by round.
    """
    entries = []
    for n_clients in dict.fromkeys(run.n_clients for run in found.runs):
        loads = {tool: _by_round(found, tool, n_clients) for tool in (OURS, AIPERF)}
        for name, what in TOLD.items():
            ours, theirs = ([_mean(run, name) for run in loads[tool]] for tool in (OURS, AIPERF))
            ours_of_own, theirs_of_own = (
                [_mean(run, name) / _own(run, name) for run in loads[tool]] for tool in (OURS, AIPERF)
            )
            entry = {"scale": found.scale, "n_clients": n_clients, "what": what, "is_time": name != "throughput"}
            entry |= {"ours": stats.median(ours), "theirs": stats.median(theirs), "ratio": stats.ratio(theirs, ours)}
            entry |= {"ours_of_own": stats.median(ours_of_own), "theirs_of_own": stats.median(theirs_of_own)}
            entries.append(entry | {"of_own": stats.ratio(theirs_of_own, ours_of_own)})
    return pd.DataFrame(entries)


def later(found: Beside) -> pd.DataFrame:
    """Where two clients of one server differ: one row per number of concurrent requests and entry of LATER (`what`).

    Estimates over rounds, in seconds: `ours`, `theirs`, and `apart`, theirs minus ours in the same round. The pause
    between an answer and the next request is measured only with a single client.
    """
    entries = []
    for n_clients in dict.fromkeys(run.n_clients for run in found.runs):
        both = [_by_round(found, tool, n_clients) for tool in (OURS, AIPERF)]
        for what, seconds in LATER.items():
            ours, theirs = ([seconds(run) for run in runs] for runs in both)
            if any(map(math.isnan, [*ours, *theirs])):
                continue
            entry: dict[str, Any] = {"scale": found.scale, "n_clients": n_clients, "what": what}
            entry |= {"ours": stats.median(ours), "theirs": stats.median(theirs)}
            apart = [late - early for late, early in zip(theirs, ours, strict=True)]
            entries.append(entry | {"apart": stats.median(apart)})
    return pd.DataFrame(entries)


def _between(run: Run) -> float:
    """Mean seconds from an answer to the next request; NaN for several clients or a single request."""
    n, span = len(run.whole), sum(run.n_gen) / run.throughput
    return (span - sum(run.whole)) / (n - 1) if run.n_clients == 1 and n > 1 else math.nan


def crowds(found: Crowds) -> pd.DataFrame:
    """One row per number of concurrent requests, `waits` of which have no slot: seconds per further token by each
    server's own count (`released`, `patched`), tokens/s (`rate`, `rate_patched`), and their ratios, released over
    patched (`ratio`) and patched over released (`rates`), with intervals over paired rounds."""
    entries = []
    for n_clients in dict.fromkeys(each.n_clients for each in found.loads):
        both = [
            sorted((each for each in found.loads if (each.server, each.n_clients) == (name, n_clients)), key=_turn)
            for name in (RELEASED, PATCHED)
        ]
        slow, fast = ([float(np.mean(each.token)) for each in loads] for loads in both)
        less, more = ([each.tokens / each.seconds for each in loads] for loads in both)
        entry: dict[str, Any] = {"n_clients": n_clients, "waits": max(n_clients - SLOTS, 0)}
        entry |= {"released": stats.median(slow), "patched": stats.median(fast), "ratio": stats.ratio(slow, fast)}
        entry |= {"rate": stats.median(less), "rate_patched": stats.median(more), "rates": stats.ratio(more, less)}
        entries.append(entry)
    return pd.DataFrame(entries)


def _turn(each: Crowd) -> int:
    return each.round


def _by_round(found: Beside, tool: str, n_clients: int) -> list[Run]:
    runs = [run for run in found.runs if run.tool == tool and run.n_clients == n_clients]
    return sorted(runs, key=lambda run: run.round)


def _mean(run: Run, name: str) -> float:
    return run.throughput if name == "throughput" else float(np.mean(getattr(run, name)))


def _own(run: Run, name: str) -> float:
    """The same quantity by the server's count; NaN if it has none. Its throughput assumes that all slots are full."""
    prompt, token = (math.nan if told is None else told for told in (run.prompt, run.token))
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
    for known, error in (("right", "wrong"), ("wrong", "right")):
        said = [each.verdict for each in probed if each.truth == known]
        counts = {verdict: said.count(verdict) for verdict in ("right", "wrong", "cannot tell")}
        lines.append({"known": known, **counts, "errors": clustered.rate(said.count(error), len(said))})
    return pd.DataFrame(lines)
