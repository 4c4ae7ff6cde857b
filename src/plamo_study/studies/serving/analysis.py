"""What a server adds to the engine, what load does to requests and to their answers: frames in, estimates out."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from plamo_study.analysis import stats, timing
from plamo_study.analysis.memo import once_a_frame
from plamo_study.analysis.threshold import threshold
from plamo_study.analysis.usable import of_cell, usable, verdict_of
from plamo_study.measure.rows import Request
from plamo_study.measure.serving import NEAR_TIE
from plamo_study.studies.serving import crowd, knee, metrics
from plamo_study.studies.serving.beside import AIPERF, OURS, Beside, Run
from plamo_study.studies.serving.crowd import Crowd, Crowds
from plamo_study.studies.serving.plan import SLOTS

CELL = ["model", "build", "server", "n_prompt", "n_gen", "n_seq", "n_clients", "pattern", "per_second"]
TIMES = ["ttft", "tpot", "itl", "largest", "whole", "throughput"]
BINDS = "client binds"
ALIKE, OTHER, UNANSWERED = "as alone", "another answer", "no answer"
ENDED = re.compile(r"the server ended: ([^,;]+)(?:, ([^;]+))?")
MS = 1e3
TOLD = {"ttft": "first token", "itl": "each further token", "whole": "request", "throughput": "tokens/s"}


@once_a_frame
def processes(rows: pd.DataFrame) -> pd.DataFrame:
    """A line a server that was loaded, under its row's index: CELL, `block`, `verdict`, TIMES in seconds, counts, and
    how late the client was.

    `late`: the client's lag over the median gap between tokens. `prompt` and `answer`: seconds as llama-server says
    itself, of a prompt and of each further token. `floor`: of an empty request. `n_prompts`: tokens by its own count.
    """
    entries = []
    loaded = rows[(rows["workload"] == "serving") & (rows["status"] == "ok")]
    for row in loaded.itertuples():
        entry = {name: getattr(row, name) for name in (*CELL, "block", "verdict")}
        entry |= metrics.of_load(row.requests)
        told = pd.DataFrame({name: row.series[name] for name in ("n_prompt", "n_gen", "prompt_ms", "answer_ms")})
        told = told[(told["prompt_ms"] > 0) & (told["n_gen"] > 1)]
        entry["prompt"] = float(told["prompt_ms"].median()) / MS
        entry["answer"] = float((told["answer_ms"] / (told["n_gen"] - 1)).median()) / MS
        entry |= {"floor": median(row.series["floor"]), "late": row.series["lag"][1] / entry["itl"]}
        entry |= {"n_prompts": median(row.series["n_prompt"]), "binds": bool(row.checks["client_binds"])}
        entries.append(entry)
    names = [*CELL, "block", "verdict", *TIMES, "ttft_p90", "answered", "failed", "n_tokens", "prompt", "answer"]
    return pd.DataFrame(entries, loaded.index, columns=[*names, "floor", "late", "n_prompts", "binds"])


def usable_processes(rows: pd.DataFrame) -> pd.DataFrame:
    """The `processes` that a speed may be taken from."""
    found = processes(rows)
    return found[found.index.isin(usable(rows).index)]


@once_a_frame
def table(rows: pd.DataFrame) -> pd.DataFrame:
    """A line a cell: TIMES as estimates, `n_prompts`, `late` (median), `binds` and `n` (servers), and the verdict.

    That is "client binds" where the client did in half of the loads or more: its times are then of the client.
    """
    right, entries = usable_processes(rows), []
    for key, group in processes(rows).groupby(CELL, sort=False):
        entry: dict[str, Any] = dict(zip(CELL, key, strict=True))
        entry |= {"verdict": verdict_of(group["verdict"]), "failed": int(group["failed"].sum())}
        used = of_cell(right, entry, CELL)
        used = used[used["ttft"].notna()]
        if len(used):
            entry |= {name: stats.median(used[name].dropna().tolist()) for name in TIMES}
            entry |= {"n_prompts": used["n_prompts"].median(), "late": used["late"].median()}
            entry |= {"binds": int(used["binds"].sum()), "n": len(used)}
            if entry["verdict"] == "valid" and 2 * entry["binds"] >= entry["n"]:
                entry["verdict"] = BINDS
            entries.append(entry)
    return pd.DataFrame(entries, columns=[*CELL, "verdict", "failed", *TIMES, "n_prompts", "late", "binds", "n"])


def answers(rows: pd.DataFrame) -> pd.DataFrame:
    """Per model, build, server and number at a time: `runs`, `answers`, how many `differ` from the same prompt alone.

    `near_ties` among these; `failed` requests; `died`: servers that ended, with the signals (`how`) and assertions
    (`said`). Answers that broke off count as far as they go. Of all `requests`, `other` got another answer where no
    near-tie explains it, and of the rest `unanswered` got none, or not all of it; those that found no server any more
    are not counted there.
    """
    found = rows[(rows["workload"] == "serving") & (rows["status"] == "ok") & ~rows["anchor"]]
    entries = []
    for key, group in found.groupby(["model", "build", "server", "n_seq", "n_clients"], sort=True):
        entry: dict[str, Any] = dict(zip(("model", "build", "server", "n_seq", "n_clients"), key, strict=True))
        checks = list(group["checks"])
        ended = [deaths(requests) for requests in group["requests"]]
        dead = [end for end in ended if end]
        entry |= {"runs": len(group), "answers": sum(len(_begun(requests)) for requests in group["requests"])}
        entry |= {name: int(sum(check[name] for check in checks)) for name in ("differ", "near_ties")}
        entry |= {"failed": sum(bool(r.failure) for requests in group["requests"] for r in requests)}
        became = [each for row in group.itertuples() for each in _became(row)]
        entry |= {"requests": len(became), "other": became.count(OTHER), "unanswered": became.count(UNANSWERED)}
        entry |= {"died": len(dead), "how": ", ".join(dict.fromkeys(end[0] for end in dead))}
        entry |= {"said": next((end[1] for end in dead if end[1]), "")}
        entries.append(entry)
    names = ["model", "build", "server", "n_seq", "n_clients", "runs", "answers", "differ", "near_ties", "failed"]
    return pd.DataFrame(entries, columns=[*names, "requests", "other", "unanswered", "died", "how", "said"])


def _became(row: Any) -> Iterator[str]:
    """What became of each request of a load that reached the server."""
    for request, token, gap in zip(row.requests, row.series["differs"], row.series["gap"], strict=True):
        if request.failure.startswith("ConnectError"):
            continue
        if token >= 0 and not 0 <= gap < NEAR_TIE:
            yield OTHER
        else:
            yield UNANSWERED if request.failure else ALIKE


def _begun(requests: Sequence[Request]) -> list[Request]:
    return [request for request in requests if request.token_ns]


def deaths(requests: Sequence[Request]) -> tuple[str, str] | None:
    """How the server ended that these requests went to: signal or exit code, and assertion; None where it lived."""
    for request in requests:
        if found := ENDED.search(request.failure):
            return found[1], found[2] or ""
    return None


@once_a_frame
def predicted(rows: pd.DataFrame) -> pd.DataFrame:
    """Each server's first token and further tokens beside what the engine alone takes after a prompt of that length.

    `what`: "first token" or "each further token"; `engine`, `measured` and `added` seconds (estimates): `measured` of
    all servers, `added` and `ratio` (of measured over engine) of the blocks that timed the engine too. Of the
    difference `inside` (what llama-server takes by its own count beyond the engine: sampling, scheduling,
    detokenizing) and `outside` (the rest: HTTP, the queue and the client), medians.
    """
    used = usable(rows)
    parts = used[used["n_threads"].isin(used.loc[used["workload"] == "serving", "n_threads"])]
    prompts = {
        key: timing.median_by_block(group)
        for key, group in parts[parts["workload"] == "prefill"].groupby(["model", "n_prompt"])
    }
    steps = {
        key: timing.median_by_block(group)
        for key, group in parts[parts["workload"] == "decode"].groupby(["model", "n_prompt", "n_seq"])
    }
    entries = []
    found = usable_processes(rows)
    answered = (found["n_clients"] > 0) & (found["n_clients"] <= found["n_seq"])  # all in one step
    for key, group in found[answered | (found["server"] != "llama-server")].groupby(CELL, sort=False):
        cell = dict(zip(CELL, key, strict=True))
        known = group.drop_duplicates("block", keep="last").set_index("block")
        asked = [
            ("each further token", "tpot", "answer", steps.get((cell["model"], cell["n_prompt"], cell["n_clients"])))
        ]
        if cell["n_clients"] == 1:
            asked.insert(0, ("first token", "ttft", "prompt", prompts.get((cell["model"], cell["n_prompt"]))))
        for what, name, own, engine in asked:
            if engine is None or (cell["server"] == "llama_cpp.server" and cell["n_clients"] > 1):
                continue
            both = pd.concat([known[name], engine.rename("engine"), known[own].rename("own")], axis=1)
            measured = stats.median(both[name].dropna().tolist())  # of every server, as everywhere on the page
            both = both.dropna(subset=[name, "engine"])
            if both.empty:
                continue
            entry = {**cell, "what": what, "ratio": timing.paired_ratio(both[name], both["engine"])}
            entry |= {"engine": stats.median(both["engine"].tolist()), "measured": measured}
            entry |= {"added": stats.median((both[name] - both["engine"]).tolist())}
            entry |= {"inside": float((both["own"] - both["engine"]).median())}
            entries.append(entry | {"outside": float((both[name] - both["own"]).median())})
    names = [*CELL, "what", "engine", "measured", "added", "ratio", "inside", "outside"]
    return pd.DataFrame(entries, columns=names)


@once_a_frame
def waiting(rows: pd.DataFrame) -> pd.DataFrame:
    """What requests that wait cost those that are answered: `model`, `n_clients` at a time of `n_seq` slots, `waits`.

    `token`: seconds of a further token as llama-server says itself, a median over the requests that ended while others
    took their places; `ratio`, over that with as many requests as slots, paired by block; `wakes`: how often, at least,
    the server's threads were put on a CPU for a token (None where nobody counted: those of threads that are gone are
    not); `throughput`, tokens a second; `late`: the client's lag over the gap it saw (medians).
    """
    used = usable(rows)
    used = used[(used["workload"] == "serving") & (used["server"] == "llama-server") & (used["n_clients"] > 0)]
    told = [(_wakes(row), _while_full(row)) for row in used.itertuples()]
    found = processes(rows).loc[used.index]
    found = found.assign(wakes=[wakes for wakes, _ in told], token=[token for _, token in told])
    entries = []
    for (model, build, n_seq), of_slots in found.groupby(["model", "build", "n_seq"], sort=True):
        group = of_slots[of_slots["n_clients"] >= n_seq]
        same = group[group["n_clients"] == n_seq].groupby("block")["token"].median()
        for n, own in group.groupby("n_clients") if len(same) and (group["n_clients"] > n_seq).any() else ():
            by_block = own.groupby("block")["token"].median()
            entry: dict[str, Any] = {"model": model, "build": build, "n_seq": n_seq, "n_clients": n, "waits": n - n_seq}
            entry |= {"token": stats.median(by_block.tolist()), "ratio": timing.paired_ratio(by_block, same)}
            entry |= {"throughput": stats.median(own["throughput"].tolist()), "late": own["late"].median()}
            counted = own["wakes"].dropna().tolist()
            entries.append(entry | {"wakes": stats.median(counted) if counted else None})
    names = ["model", "build", "n_seq", "n_clients", "waits", "token", "ratio", "throughput", "late", "wakes"]
    return pd.DataFrame(entries, columns=names)


def _wakes(row: Any) -> float:
    """How often the server's threads were put on a CPU, for each token it wrote; NaN where nobody counted."""
    switches, tokens = row.series.get("switches", [0.0])[0], sum(row.series["n_gen"])
    return switches / tokens if switches and tokens else float("nan")


def _while_full(row: Any) -> float:
    """Seconds of a further token as the server says, of the requests that ended before nobody came after them."""
    order = np.argsort([request.ended_ns for request in row.requests])[: len(row.requests) - row.n_clients]
    taken = [(row.series["answer_ms"][i], row.series["n_gen"][i]) for i in order if row.series["n_gen"][i] > 1]
    return median(ms / (n - 1) for ms, n in taken) / MS if taken else float("nan")


def knees(rows: pd.DataFrame) -> pd.DataFrame:
    """A line a server whose knee was sought: `model`, `build`, `block`, `n` (requests of each rate that was tried),
    `met` and `failed`: the highest rate asked for that met the objectives and the lowest that did not, which no search
    by halves can turn round; `goodput`: requests a second that kept to them at the first.
    """
    entries = []
    for row in _sought(rows).itertuples():
        met, failed = knee.bracket(row.series["rates"], row.series["met"])
        entry = {"model": row.model, "build": row.build, "block": row.block, "n": row.n_requests}
        kept = metrics.goodput(row.requests, knee.OBJECTIVES[row.scale])
        entries.append(entry | {"met": met, "failed": failed, "goodput": kept})
    return pd.DataFrame(entries, columns=["model", "build", "block", "n", "met", "failed", "goodput"])


def knee_of(rows: pd.DataFrame) -> pd.DataFrame:
    """A line a model and build: `knee`, requests a second at which ENOUGH of them are expected to meet the objectives.

    Estimated from every load of every server: `servers` of them, `n` requests each. No interval where all servers were
    asked by the same arrivals, as before each search had a seed of its own: what those drew is in every one of them.
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
        found = threshold(rates, shares, servers, knee.ENOUGH, n)
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
    """One cell's loads as four tools would tell them: `tool`, `ttft`, `itl`, `tpot`, seconds, medians over servers."""
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
    """AIPerf beside our client, a line for each number of requests at a time and quantity of TOLD (`what`).

    `ours` and `theirs`: estimates over rounds, of means over requests, in seconds or tokens a second; `ratio` of theirs
    over ours, paired by round. The server is not as fast in every run, so each is also held against what the server
    counted in the same run: `ours_of_own`, `theirs_of_own`, and `of_own`, the ratio of the two, paired by round.
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
    """Where two clients of one server part, a line for each number of requests at a time and LATER (`what`).

    Seconds, estimates over rounds: `ours`, `theirs`, and `apart`, theirs less ours of the same round. What lies between
    an answer and the next request is told by one client that asks again and again.
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
    """Seconds from an answer to the next request; NaN with several clients, or where none asks twice."""
    n, span = len(run.whole), sum(run.n_gen) / run.throughput
    return (span - sum(run.whole)) / (n - 1) if run.n_clients == 1 and n > 1 else math.nan


def crowds(found: Crowds) -> pd.DataFrame:
    """A line for each number of requests at a time, `waits` of which have no slot: seconds of a further token by the
    server's own count on both servers (`released`, `patched`), tokens a second (`rate`, `rate_patched`), and ratios,
    released over patched (`ratio`) and patched over released (`rates`), with intervals of the rounds' pairs."""
    entries = []
    for n_clients in dict.fromkeys(each.n_clients for each in found.loads):
        both = [
            sorted((each for each in found.loads if (each.server, each.n_clients) == (name, n_clients)), key=_turn)
            for name in (crowd.RELEASED, crowd.PATCHED)
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
    """The same quantity by the server's own count; NaN where it has none. A slot is never empty in its throughput."""
    prompt, token = (math.nan if told is None else told for told in (run.prompt, run.token))
    n_gen = float(np.mean(run.n_gen))
    whole = prompt + (n_gen - 1) * token
    return {"ttft": prompt, "itl": token, "whole": whole, "throughput": run.n_clients * n_gen / whole}[name]


LATER: dict[str, Callable[[Run], float]] = {
    "first token, after the server's count": lambda run: _mean(run, "ttft") - _own(run, "ttft"),
    "last token, after the server's count": lambda run: _mean(run, "whole") - _own(run, "whole"),
    "from an answer to the next request": _between,
}
