"""Latency and throughput of a load from the times of its requests, as this project and other tools define them.

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

from plamo_study.analysis import stats
from plamo_study.analysis.timing import NS
from plamo_study.measure.rows import Request
from plamo_study.studies.serving.plan import Objectives

NAN = float("nan")
MS = 1e3


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


def by_tool(requests: Sequence[Request]) -> dict[str, dict[str, float]]:
    """The same load as four tools would report it: means of `ttft`, `itl` and `tpot` in seconds, by tool.

    Ours and MLPerf's TTFT counts from when a request was due, the others' from when it was sent. ITL: ours every gap
    between tokens, vLLM's the gaps between chunks, pooled, AIPerf's (whole - TTFT) / (n - 1) of each request.
    """
    answered = [request for request in requests if not request.failure and len(request.token_ns) > 1]
    due = [(r.token_ns[0] - r.arrived_ns) / NS for r in answered]
    sent = [(r.token_ns[0] - r.sent_ns) / NS for r in answered]
    gaps = [gap for r in answered for gap in _gaps(r)]
    chunks = [gap for r in answered for gap in _gaps(r) if gap > 0]
    per_token = [tpot(r) for r in answered]
    to_end = [(r.ended_ns - r.token_ns[0]) / (len(r.token_ns) - 1) / NS for r in answered]
    return {
        "ours": {"ttft": _mean(due), "itl": _mean(gaps), "tpot": _mean(per_token)},
        "vLLM": {"ttft": _mean(sent), "itl": _mean(chunks), "tpot": _mean(to_end)},
        "AIPerf": {"ttft": _mean(sent), "itl": _mean(per_token), "tpot": NAN},
        "MLPerf": {"ttft": _mean(due), "itl": NAN, "tpot": _mean(per_token)},
    }


def _mean(values: Sequence[Any]) -> float:
    return float(np.mean(values)) if values else NAN


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
    others["wakes"] = ("", switches / tokens if switches and tokens else NAN)
    others["binds"] = ("", float(row["checks"]["client_binds"]))
    for name, (unit, value) in others.items():
        if value == value:
            yield name, unit, value, np.array([value])
