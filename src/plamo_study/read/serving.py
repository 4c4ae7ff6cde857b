"""Latency and throughput of a load, and what became of its answers, from the requests of a row.

TTFT: from when a request was due to its first token. TPOT: (last token - first token) / (tokens - 1), of one request.
ITL: one gap between two tokens of one request. Throughput: answered tokens a second, from the first request due to the
last token. Goodput: requests a second that met the objectives. A percentile is reported only if there are enough
requests for it; the largest gap and the failures always are.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from llama_meter import stats
from llama_meter.measure.tolerance import near_tie
from llama_meter.rows import Request
from llama_meter.serve.objectives import DISTINCT, OBJECTIVES, Objectives
from plamo_study.stats.estimates import NS

ASKED = ("serving", "answers")  # workloads whose requests are held against the answers alone
NAN = float("nan")
MS = 1e3
OF_ROW = ["model", "dtype", "build", "server", "n_prompt", "n_gen", "n_seq", "n_clients", "key"]
OF_REQUEST = [
    "answer",
    "parts",
    "gap",
    "begun",
    "failure",
    "reached",
    "due",
    "sent",
    "first",
    "last",
    "ended",
    "tokens",
]
OF_REQUEST += ["gaps"]


def of_load(requests: Sequence[Request]) -> dict[str, float]:
    """Metrics of one load in seconds and tokens/s: medians `ttft`, `tpot`, `itl`, `whole`; `ttft_p90`, `largest` gap.

    `throughput`; `answered` and `failed` requests; `n_tokens`. NaN where undefined.
    """
    answered = [request for request in requests if not request.failure and request.token_ns]
    firsts = [(request.token_ns[0] - request.arrived_ns) / NS for request in answered]
    gaps = [gap for request in answered for gap in _gaps(request)]
    tpots = [tpot(request) for request in answered if len(request.token_ns) > 1]
    wholes = [(request.token_ns[-1] - request.arrived_ns) / NS for request in answered]
    n_tokens = sum(len(request.token_ns) for request in answered)
    return {
        "ttft": median(firsts) if firsts else NAN,
        "ttft_p90": stats.percentile(firsts, 0.9),
        "tpot": median(tpots) if tpots else NAN,
        "itl": median(gaps) if gaps else NAN,
        "largest": max(gaps, default=NAN),
        "whole": median(wholes) if wholes else NAN,
        "throughput": n_tokens / span(answered) if answered else NAN,
        "answered": len(answered),
        "failed": len(requests) - len(answered),
        "n_tokens": n_tokens,
    }


def _gaps(request: Request) -> list[float]:
    return [(after - before) / NS for before, after in pairwise(request.token_ns)]


def tpot(request: Request) -> float:
    """Mean seconds per token after the first, of one request."""
    return (request.token_ns[-1] - request.token_ns[0]) / (len(request.token_ns) - 1) / NS


def span(requests: Sequence[Request]) -> float:
    """Seconds from the first request due to the last token."""
    return (max(r.token_ns[-1] for r in requests) - min(r.arrived_ns for r in requests)) / NS


def goodput(requests: Sequence[Request], objectives: Objectives) -> float:
    """Requests per second that met the objectives; NaN if none was answered."""
    kept = [r for r in requests if objectives.met(r.arrived_ns, r.token_ns, r.failure)]
    answered = [r for r in requests if r.token_ns]
    return len(kept) / span(answered) if answered else NAN


def answers(rows: pd.DataFrame) -> pd.DataFrame:
    """One line a request of every load, as `measurements.answers` describes it."""
    found = rows[rows["workload"].isin(ASKED) & (rows["status"] == "ok") & ~rows["anchor"]]
    found = found.assign(server=found["server"].where(found["workload"] == "serving", ""))  # or none: the engine itself
    lines = [
        {name: getattr(row, name) for name in OF_ROW}
        | _answer(request, int(token), gap)
        | {"prompt": n % DISTINCT if row.server else request.id}
        for row in found.itertuples()
        for n, (request, token, gap) in enumerate(
            zip(row.requests, row.series["differs"], row.series["gap"], strict=True)
        )
    ]
    told = pd.DataFrame(lines, columns=[*OF_ROW, "prompt", *OF_REQUEST]).astype({"begun": bool, "reached": bool})
    return told.assign(file=told["model"] + " " + told["dtype"])


def _answer(request: Request, token: int, gap: float) -> dict[str, Any]:
    """What became of a request: `token` and `gap` as in a row's series."""
    parts = token >= 0
    answer = "lost" if request.failure else "as alone"
    if parts:
        answer = "near-tie" if near_tie(gap) else "changed"
    stamps = request.token_ns
    return {
        "answer": answer, "parts": token, "gap": gap, "begun": bool(stamps), "failure": request.failure,
        "reached": not request.failure.startswith("ConnectError"),
        "due": request.arrived_ns / NS, "sent": request.sent_ns / NS,
        "first": stamps[0] / NS if stamps else NAN, "last": stamps[-1] / NS if stamps else NAN,
        "ended": request.ended_ns / NS, "tokens": len(stamps), "gaps": np.array(_gaps(request)),
    }  # fmt: skip


def measured(row: Mapping[str, Any]) -> Iterator[tuple[str, str, float, np.ndarray]]:
    """Yield (metric, unit, value, samples) of a row of this study, as `measurements` names them, without NaN values."""
    requests, series, told = row["requests"], row["series"], of_load(row["requests"])
    answered = [request for request in requests if not request.failure and request.token_ns]
    samples = {
        "ttft": [(request.token_ns[0] - request.arrived_ns) / NS for request in answered],
        "tpot": [tpot(request) for request in answered if len(request.token_ns) > 1],
        "itl": [gap for request in answered for gap in _gaps(request)],
        "whole": [(request.token_ns[-1] - request.arrived_ns) / NS for request in answered],
    }
    n_gen, prompt_ms, answer_ms = (np.array(series[name], float) for name in ("n_gen", "prompt_ms", "answer_ms"))
    further = answer_ms / np.maximum(n_gen - 1, 1) / MS
    counted = (prompt_ms > 0) & (n_gen > 1)
    samples |= {"own_ttft": list(prompt_ms[counted] / MS), "own_tpot": list(further[counted])}
    before = np.argsort([request.ended_ns for request in requests])[: len(requests) - row["n_clients"]]
    full = [further[n] for n in before if row["n_clients"] and n_gen[n] > 1]
    samples["own_tpot_full"] = full if row["server"] == "llama-server" else []
    for name, values in samples.items():
        if values:
            yield name, "s", float(np.median(values)), np.array(values)
    switches, tokens = series.get("switches", [0.0])[0], n_gen.sum()
    late = series["lag"][1] / told["itl"]
    others = {"largest": ("s", told["largest"]), "throughput": ("tokens/s", told["throughput"]), "late": ("", late)}
    if not row["n_clients"]:
        yield from _open_loop(row)
    others["wakes"] = ("", switches / tokens if switches and tokens else NAN)
    others["binds"] = ("", float(row["checks"]["client_binds"]))
    for name, (unit, value) in others.items():
        if value == value:
            yield name, unit, value, np.array([value])


def _open_loop(row: Mapping[str, Any]) -> Iterator[tuple[str, str, float, np.ndarray]]:
    """The rates (1/s) of a load that came at random times, and the share of each that met the objectives."""
    requests, objectives, series = row["requests"], OBJECTIVES[row["scale"]], row["series"]
    kept = sum(objectives.met(r.arrived_ns, r.token_ns, r.failure) for r in requests)
    rates = np.array(series.get("rates", [row["per_second"]]))
    shares = np.array(series.get("met", [kept / len(requests)]))
    yield "rate", "1/s", float(np.median(rates)), rates
    yield "met", "", float(np.median(shares)), shares
    goodput_of = goodput(requests, objectives)
    if goodput_of == goodput_of:
        yield "goodput", "1/s", goodput_of, np.array([goodput_of])
