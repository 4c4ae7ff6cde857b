"""Which phase binds a server's traffic: prompt length, answer length and load are changed one at a time, in rounds.

The elasticity of a request's time to each is reported with its interval.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from llama_meter import http, stats
from llama_meter.serve import client, load, meeting, questions
from llama_meter.serve.client import Answer
from llama_meter.serve.load import Loaded
from llama_meter.serve.meeting import FACTOR, WARM, Ask, Setting

CHARACTERS, MOST_CHARACTERS = 3.0, 8.0  # per token: before the server has counted some, and whatever it counts
Phase = Literal["prefill", "decode", "queue", "client", "cannot tell"]
LEVERS: Mapping[Phase, str] = {
    "prefill": "keep prefixes cached, shorten prompts; chunk them to protect running answers (chapter 7), or "
    "prefill them elsewhere (09)",
    "decode": "fewer bits (chapter 5), a bigger batch if the aggregate counts (03), shorter answers",
    "queue": "more slots while a step stays cheap (chapter 3), replicas (07), or less load",
    "client": "probe from a machine with idle cores",
    "cannot tell": "probe again when the server is quiet, or for longer lengths",
}
DOUBLED = {"prompt": " with twice the prompt", "output": " with twice the answer", "load": " with twice the load"}
ENDS = {  # what did not grow with what was asked for
    "prompt": "a prompt of twice the text has no more tokens: the server cuts prompts; shorten --prompt-tokens",
    "output": "an answer did not grow with what was asked for: it ends by itself",
}
SEVERAL = 4  # pieces of an answer from which on it can be seen whether they are streamed
STREAMED = 1 / 8  # share of an answer's pieces that have to be waited for; fewer are held back on their way
UNSTREAMED = "probe the server itself past its proxy, or turn buffering off there (nginx: proxy_buffering off)"


class Interval(msgspec.Struct, frozen=True):
    """An estimate in JSON form."""

    value: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        return f"{self.value:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """Which phase binds; `elasticities`: percent more time per request for 1 % more prompt, answer or load.

    `shares` of a request's time under the usual load; `seconds`: to the first token and to the end, alone and under it;
    `late_s`: 95th percentile of the client's lag.
    """

    verdict: Phase
    why: str
    lever: str = ""
    elasticities: dict[str, Interval] = {}
    shares: dict[str, Interval] = {}
    seconds: dict[str, float] = {}
    late_s: float = 0.0


@dataclass(frozen=True)
class Seen:
    """Means over the requests of one setting in one round: seconds to the first token and to the end; tokens.

    `pieces` of an answer's stream, and how often they came in `bursts` that had to be waited for.
    """

    ttft: float
    whole: float
    prompt_tokens: float
    output_tokens: float
    pieces: float = 0.0
    bursts: float = 0.0


def cannot(why: str, lever: str = LEVERS["cannot tell"]) -> Binding:
    """No verdict, and why."""
    return Binding(verdict="cannot tell", why=why, lever=lever)


async def binding(web: http.Client, ask: Ask, until: float) -> Binding:
    """Ask a server that was met, in rounds begun before `until`."""
    warm = questions.of_characters(WARM, int(CHARACTERS * ask.prompt_tokens), ask.output_tokens, seed=2)[0]
    first = await client.ask(web, ask.target, warm)
    if first.failure:
        return cannot(f"a request failed: {first.failure}", meeting.mend(first, ask))
    if not first.n_prompt:
        return cannot("the server counts no tokens in what it streams")
    per_token = min(len(warm.text) / first.n_prompt, MOST_CHARACTERS)
    rounds: list[dict[str, Seen]] = []
    loads: list[Loaded] = []
    for turn in range(meeting.PHASE_ROUNDS):
        if time.monotonic() > until:
            break
        seen: dict[str, Seen] = {}
        for name, setting in ask.settings().items():
            seed = 10 + meeting.PHASE_ROUNDS * len(seen) + turn
            characters = int(per_token * setting.prompt_tokens)
            prompts = questions.of_characters(setting.n, characters, setting.output_tokens, seed)
            if setting.per_second:
                due = load.arrivals("poisson", setting.n, setting.per_second, turn)
                loaded = await load.opened(web, ask.target, prompts, due)
            else:
                loaded = await load.closed(web, ask.target, prompts, setting.n)
            if failed := [answer for answer in loaded.answers if answer.failure]:
                why = f"{len(failed)} of {setting.n} requests failed{DOUBLED.get(name, '')}: {failed[0].failure}"
                return cannot(why, meeting.mend(failed[0], ask))
            loads.append(loaded)
            seen[name] = _seen(loaded.answers, setting)
        rounds.append(seen)
    return _bound(rounds, loads)


def _seen(answers: list[Answer], setting: Setting) -> Seen:
    firsts = [(a.token_ns[0] if a.token_ns else a.ended_ns) - a.due_ns for a in answers]
    return Seen(
        float(np.mean(firsts)) / 1e9,
        float(np.mean([a.ended_ns - a.due_ns for a in answers])) / 1e9,
        float(np.mean([a.n_prompt or setting.prompt_tokens for a in answers])),
        float(np.mean([a.n_gen or len(a.chunk_ns) or 1 for a in answers])),
        float(np.mean([len(a.chunk_ns) for a in answers])),
        float(np.mean([a.bursts for a in answers])),
    )


def _bound(rounds: list[dict[str, Seen]], loads: list[Loaded]) -> Binding:
    if len(rounds) < stats.NEEDED[0.5] + 2:
        return cannot("there was no time for three rounds")
    changed: dict[str, Callable[[Seen], float]] = {
        "prompt": lambda seen: seen.prompt_tokens,
        "output": lambda seen: seen.output_tokens,
    }
    logs: dict[str, np.ndarray] = {}
    for name in ("prompt", "output", "load"):
        grown = [
            np.log(changed[name](turn[name]) / changed[name](turn["usual"])) if name in changed else np.log(FACTOR)
            for turn in rounds
        ]
        taken = [np.log(turn[name].whole / turn["usual"].whole) for turn in rounds]
        logs[name] = np.array(taken) / np.where(np.array(grown) > 0, grown, np.nan)
    elasticities = {name: _interval(values) for name, values in logs.items()}
    shares = {name: _interval(np.array(values)) for name, values in _shares(rounds).items()}
    seconds = {
        f"{part} {how}": float(np.median([getattr(turn[name], attribute) for turn in rounds]))
        for name, how in (("alone", "alone"), ("usual", "under load"))
        for attribute, part in (("ttft", "first token"), ("whole", "whole answer"))
    }
    late = float(np.median([loaded.late_ns for loaded in loads] or [0.0])) / 1e9
    if held_back := _held_back(rounds):  # when a first token came is not known
        seconds = {name: value for name, value in seconds.items() if name.startswith("whole")}
        unstreamed = cannot(held_back, UNSTREAMED)
        return msgspec.structs.replace(unstreamed, elasticities=elasticities, seconds=seconds, late_s=late)
    verdict, why = _verdict(logs, rounds, loads)
    return Binding(
        verdict=verdict,
        why=why,
        lever=LEVERS[verdict],
        elasticities=elasticities,
        shares=shares,
        seconds=seconds,
        late_s=late,
    )


def _held_back(rounds: list[dict[str, Seen]]) -> str:
    """How answers arrive that something holds back on their way; empty where they are streamed.

    Judged by one request at a time: a client that is late finds several pieces waiting too.
    """
    alone = [turn["alone"] for turn in rounds]
    tokens, pieces, bursts = (
        float(np.median([getattr(seen, name) for seen in alone])) for name in ("output_tokens", "pieces", "bursts")
    )
    if tokens < SEVERAL or not pieces or bursts > max(STREAMED * pieces, 1):
        return ""
    if bursts <= 1:
        return "the stream arrives at once: buffered"
    return f"the stream arrives in bursts of {pieces / bursts:.0f} pieces: buffered"


def _shares(rounds: list[dict[str, Seen]]) -> dict[str, list[float]]:
    """Shares of a request's time under the usual load, by round: queue, prefill and decode."""
    shares: dict[str, list[float]] = {"queue": [], "prefill": [], "decode": []}
    for turn in rounds:
        usual, alone = turn["usual"], turn["alone"]
        shares["queue"].append(max(usual.ttft - alone.ttft, 0.0) / usual.whole)
        shares["prefill"].append(min(alone.ttft, usual.ttft) / usual.whole)
        shares["decode"].append((usual.whole - usual.ttft) / usual.whole)
    return shares


def _interval(values: np.ndarray) -> Interval:
    """The median with the interval of paired values; NaN where any is missing."""
    if np.isnan(values).any():
        return Interval(float("nan"), float("nan"), float("nan"))
    low, high = stats.paired_bounds(values)
    middle = float(np.median(values))
    return Interval(middle, min(float(low), middle), max(float(high), middle))


def _verdict(logs: dict[str, np.ndarray], rounds: list[dict[str, Seen]], loads: list[Loaded]) -> tuple[Phase, str]:
    late = sum(loaded.client_binds() for loaded in loads)
    if 2 * late > len(loads) and _late_of_request(loads) > load.LATE:
        return "client", f"the client was late in {late} of {len(loads)} loads"
    for name in ("prompt", "output"):
        if np.isnan(logs[name]).any():
            return "cannot tell", ENDS[name]
    shares = _shares(rounds)
    ordered = sorted(shares, key=lambda name: -float(np.median(shares[name])))
    first, second = (np.array(shares[name]) for name in ordered[:2])
    low, _ = stats.paired_bounds(first - second)
    share = _interval(first)
    if low <= 0:
        return "cannot tell", f"{ordered[0]} and {ordered[1]} take about as much of a request"
    verdict: Phase = ordered[0]  # type: ignore[assignment] # a key of `shares`
    by = {"prefill": "prompt", "decode": "output", "queue": "load"}[verdict]
    grows, takes = _interval(logs[by]), f"{verdict} takes {share:.0%} of a request, yet"
    if grows.low <= 0 or grows.high < share.low / 2:
        return "cannot tell", f"{takes} 1 % more {by} takes {grows:.2f} % longer"
    other = {"prompt": "output", "output": "prompt"}.get(by, by)
    if stats.paired_bounds(logs[other] - logs[by])[0] > 0:
        return "cannot tell", f"{takes} its time follows the {other} more than the {by}"
    return verdict, f"{share:.0%} of a request; 1 % more {by} takes {grows:.2f} % longer"


def _late_of_request(loads: Iterable[Loaded]) -> float:
    """Client lag (95th percentile) as a share of the median chunk gap, median over loads."""
    lags = []
    for loaded in loads:
        if gaps := loaded.gaps_ns:
            lags.append(loaded.late_ns / max(float(np.median(gaps)), 1.0))
    return float(np.median(lags)) if lags else 0.0
