"""A cell of kind "serving": a llama-server is started, asked every prompt alone, and then loaded.

Answers are compared with those of each prompt alone. The server belongs to the worker's process group and so ends with
it. A crash is a result, not an error: the requests in flight record how the server ended.
"""

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from llama_meter.cells import DISTINCT, Serving
from llama_meter.errors import StudyError
from llama_meter.measure import watch
from llama_meter.measure.tolerance import SAME
from llama_meter.rows import Measured, Request, passed
from llama_meter.serve import client, load, server
from llama_meter.serve.client import Answer, Client, Prompt, Target, clock
from llama_meter.serve.load import Loaded
from llama_meter.serve.server import Server, Setup

ROOM = 64  # tokens of a slot beside prompt and answer
TOP = 2  # likeliest tokens whose log probabilities are asked for alone


@dataclass(frozen=True)
class Done:
    """Outcome of a cell: every prompt alone, the load, and how the server ended."""

    alone: list[Answer]
    loaded: Loaded
    ended: str
    steps: Sequence[tuple[float, float]]  # of the search for the knee: rate, and share that met
    seed: int  # of arrivals at random times; 0: none


def run(cell: Serving, path: Path, stage: Callable[[str], None]) -> Measured:
    """Measure one cell.

    `requests`: times since the load began; "due" is when a request was to be sent. `samples_ns`: from due to end, of
    answered requests. `series`, one number per request: "n_prompt" and "n_gen" by the server's count, "prompt_ms" and
    "answer_ms" by its own clock, "differs" the first token that differs from the answer alone (-1: none), "gap"
    the likeliest token's lead there (nats). "lag" (s): the client's median, 95th percentile and maximum.
    "rates", "met": the steps of the knee search; "seed": of arrivals at random times, drawn anew for every server: they
    would share the luck of one draw.
    """
    n = min(cell.n_requests, DISTINCT)
    prompts = load.of_lengths(path, [cell.n_prompt] * n, [cell.n_gen] * n, cell.seed)
    setup = Setup.of(cell, path, cell.n_prompt + cell.n_gen + ROOM)
    stage("start")
    begin = clock()
    with server.started(setup) as running:
        load_ns, target = clock() - begin, Target(running.url)
        done = client.over(target, lambda web: _done(web, target, running, stage, prompts, cell))
        rss = 0 if done.ended else psutil.Process(running.process.pid).memory_info().rss
    return measured(done, load_ns, rss)


async def _done(
    web: Client, target: Target, running: Server, stage: Callable[[str], None], prompts: list[Prompt], cell: Serving
) -> Done:
    stage("warm")
    await client.ask(web, target, prompts[0])
    stage("alone")
    alone = [await client.ask(web, target, prompt, top=TOP) for prompt in prompts]
    alone_s = median((answer.ended_ns - answer.sent_ns) / 1e9 for answer in alone)
    requests = [Prompt(f"{i}", prompts[i % len(prompts)].text, cell.n_gen) for i in range(cell.n_requests)]
    seed = 0 if cell.n_clients else secrets.randbits(32)
    steps: Sequence[tuple[float, float]] = ()
    stage("serve")
    with watch.timed(running.process.pid):
        if cell.n_clients:
            loaded = await load.closed(web, target, requests, cell.n_clients)
        elif cell.pattern == "knee":
            loaded, steps = await load.sought(web, target, requests, cell, alone_s, seed)
        else:
            due = load.arrivals(cell.n_requests, cell.per_second, seed)
            loaded = await load.opened(web, target, requests, due)
    ended = running.ended(1.0 if any(answer.failure for answer in loaded.answers) else 0.0)
    return Done(alone, loaded, ended, steps, seed)


def measured(done: Done, load_ns: int, rss: int) -> Measured:
    """Measured values of a cell, as `run` describes them. StudyError where the server refused a request."""
    answers, began = done.loaded.answers, done.loaded.began_ns
    if refused := [answer.failure for answer in [*done.alone, *answers] if answer.refused]:
        raise StudyError("the server", f"refused {len(refused)} requests: {refused[0]}", "look at its options")
    partings = [client.parted(done.alone[n % len(done.alone)], answer) for n, answer in enumerate(answers)]
    verdicts = [parting.verdict for parting in partings]
    lag = sorted(done.loaded.lag_ns) or [0]
    checks: dict[str, float | bool] = {
        "as_alone": "other" not in verdicts,
        "answered": not any(answer.failure for answer in [*answers, *done.alone]),
        "alive": not done.ended,
        "differ": len(verdicts) - verdicts.count("same"),
        "near_ties": verdicts.count("near-tie"),
        "client_binds": float(done.loaded.client_binds()),
    }
    series = {
        "n_prompt": [float(answer.n_prompt) for answer in answers],
        "n_gen": [float(answer.n_gen) for answer in answers],
        "prompt_ms": [answer.timings.get("prompt_ms", 0.0) for answer in answers],
        "answer_ms": [answer.timings.get("predicted_ms", 0.0) for answer in answers],
        "differs": [float(parting.token) for parting in partings],
        "gap": [SAME if math.isnan(parting.lead) else parting.lead for parting in partings],
        "lag": [lag[len(lag) // 2] / 1e9, done.loaded.late_ns / 1e9, lag[-1] / 1e9],
    }
    if done.steps:
        series |= {name: [step[i] for step in done.steps] for i, name in enumerate(("rates", "met"))}
    if done.seed:
        series["seed"] = [float(done.seed)]
    return Measured(
        samples_ns=[[answer.ended_ns - answer.due_ns for answer in answers if not answer.failure]],
        warmup_ns=[answer.ended_ns - answer.sent_ns for answer in done.alone],
        load_ns=load_ns,
        n_evaluated=sum(answer.n_prompt + answer.n_gen for answer in answers),
        checks=checks,
        series=series,
        requests=[request_of(answer, began, done.ended) for answer in answers],
        valid=passed(checks),
        peak_rss_bytes=rss,
    )


def request_of(answer: Answer, began_ns: int, ended: str = "") -> Request:
    """An answer as rows keep it, times since the load began; `ended`: how the server ended, if it did."""
    return Request(
        id=answer.prompt.id,
        n_prompt=answer.n_prompt,
        arrived_ns=answer.due_ns - began_ns,
        token_ns=[stamp - began_ns for stamp in answer.token_ns],
        failure=answer.failure and "; ".join(filter(None, (answer.failure, ended))),
        sent_ns=answer.sent_ns - began_ns,
        byte_ns=answer.byte_ns and answer.byte_ns - began_ns,
        ended_ns=answer.ended_ns - began_ns,
        divided=answer.divided,
    )


RUNS = {Serving: run}
