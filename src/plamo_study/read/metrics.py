"""What requests measured: one definition of each metric.

What a kind of cell holds in place of times in one piece, a function of its chapter's module `metrics` says, by the kind
in its QUANTITIES. Steps, prompts and ceilings stand in `measurements._measured`.

ttft
    Time to first token: from when a request arrived, or was due, to its first token.
itl, itl_max (of a load on a server: largest)
    The gap between two tokens of one answer, and the longest gap. Of traffic, a gap counts once for each request
    that waited.
tpot
    The mean gap of one answer: (last token - first token) / (tokens - 1).
throughput
    Answered tokens a second, from the first arrival to the last token.
whole
    From a request's arrival to its last token.
met
    The share of requests whose ttft and tpot kept the limits of their load.

A percentile of too few values (`stats.NEEDED`) is left out. A quantity that is undefined is left out too.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from llama_meter.rows import Request

NS = 1e9
Measured = tuple[str, str, float, np.ndarray]  # metric, unit, value, samples
Quantities = Callable[[Mapping[str, Any]], Iterator[Measured]]
Stamps = list[np.ndarray]  # when the tokens of each request came (s)


def stamps(requests: Sequence[Request]) -> tuple[np.ndarray, Stamps]:
    """When requests arrived (s), (n,), and when their tokens came (s), an array a request."""
    tokens = [np.array(request.token_ns) / NS for request in requests]
    return np.array([request.arrived_ns for request in requests]) / NS, tokens


def first_tokens(arrived: np.ndarray, tokens: Stamps) -> np.ndarray:
    """ttft of each request, (n,)."""
    return np.array([times[0] for times in tokens]) - arrived  # type: ignore[no-any-return] # an array


def gaps(tokens: Stamps) -> np.ndarray:
    """itl: the gaps of all answers, one answer after the other."""
    return np.concatenate([np.diff(times) for times in tokens]) if tokens else np.empty(0)


def mean_gaps(tokens: Stamps) -> np.ndarray:
    """tpot of each request, (n,); 0 for an answer of one token."""
    return np.array([(times[-1] - times[0]) / max(len(times) - 1, 1) for times in tokens])


def throughput(arrived: np.ndarray, tokens: Stamps) -> float:
    """Tokens a second."""
    return sum(map(len, tokens)) / float(max(times[-1] for times in tokens) - arrived.min())


def answered(requests: Sequence[Request]) -> list[Request]:
    """The requests that were answered in full."""
    return [request for request in requests if not request.failure and request.token_ns]
