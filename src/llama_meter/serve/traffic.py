"""A server's own traffic between two readings of its /metrics: tokens, and seconds by phase.

llama-server (started with --metrics) and vLLM count both. No request is sent to the model.
"""

import asyncio
import re
from collections.abc import Mapping

import msgspec

from llama_meter import http
from llama_meter.errors import StudyError
from llama_meter.serve import client
from llama_meter.serve.client import Target

# Names of each server's counters: seconds by phase, and tokens of prompts and answers.
SECONDS: dict[str, dict[str, str]] = {
    "llama-server": {
        "prefill": "llamacpp:prompt_seconds_total",
        "decode": "llamacpp:tokens_predicted_seconds_total",
    },
    "vLLM": {
        "queue": "vllm:request_queue_time_seconds_sum",
        "prefill": "vllm:request_prefill_time_seconds_sum",
        "decode": "vllm:request_decode_time_seconds_sum",
    },
}
TOKENS = {
    "llama-server": ("llamacpp:prompt_tokens_total", "llamacpp:tokens_predicted_total"),
    "vLLM": ("vllm:prompt_tokens_total", "vllm:generation_tokens_total"),
}
COUNTER = re.compile(  # name{labels} number [time]; a label's value may hold anything
    r"""(?P<name>[\w:]+)(?:\{(?:[^"}]|"(?:[^"\\]|\\.)*+")*+\})?\s+(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)(?=\s|$)"""
)
MOST_COUNTED = float(1 << 53)


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic between two readings: tokens of prompts and answers, and each phase's share of the server's time."""

    seconds: float
    prompt_tokens: float
    output_tokens: float
    shares: dict[str, float]


def watched(target: Target, seconds: float) -> Traffic:
    """Traffic between two readings of a server's /metrics, `seconds` apart.

    Raises StudyError if it has no known counters, or if nothing happened in between.
    """

    async def looked(web: http.Client) -> tuple[dict[str, float], dict[str, float]]:
        before = await look(web, target)
        await asyncio.sleep(seconds)
        return before, await look(web, target)

    return between(*client.over(target, looked), seconds)


async def look(web: http.Client, target: Target) -> dict[str, float]:
    """The numbers of a server's /metrics by name. StudyError where it has none or does not answer."""
    where = f"{target.url}/metrics"
    status, body = await http.look(web, where, "probe without --watch")
    if status != 200:
        raise StudyError(where, f"HTTP {status}", "llama-server shows it when started with --metrics")
    return parsed(body.decode(errors="replace"))


def parsed(text: str) -> dict[str, float]:
    """Numbers by name from Prometheus's text format; those of one name with several labels are summed."""
    totals: dict[str, float] = {}
    for line in text.splitlines():
        if read := COUNTER.match(line):
            number = float(read["number"])
            totals[read["name"]] = totals.get(read["name"], 0.0) + (number if number < MOST_COUNTED else 0.0)
    return totals


def between(before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> Traffic:
    """Traffic between two readings, `seconds` apart. StudyError if counters are unknown, were reset or did not grow."""
    for server, phases in SECONDS.items():
        names = (*phases.values(), *TOKENS[server])
        if all(name in before and name in after for name in names):
            grown = {name: after[name] - before[name] for name in names}
            spent = sum(grown[name] for name in phases.values())
            if min(grown.values()) < 0:
                raise StudyError("/metrics", "the server was started anew in between", "look again")
            if spent <= 0:
                raise StudyError("/metrics", f"nothing was answered in {seconds:g} s", "look for longer")
            shares = {phase: grown[name] / spent for phase, name in phases.items()}
            read, written = (grown[name] for name in TOKENS[server])
            return Traffic(seconds=seconds, prompt_tokens=read, output_tokens=written, shares=shares)
    servers = " or ".join(SECONDS)
    raise StudyError("/metrics", f"counts nothing that {servers} counts", "probe without --watch")
