"""A cell of kind "serving": a server is started, asked every prompt alone, and then loaded; its answers are compared.

The server belongs to the worker's process group and so ends with it. A crash is a result, not an error: the requests
in flight record how the server ended.
"""

import math
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from llama_meter import http
from llama_meter.cells import Serving, Traffic
from llama_meter.engine import builds
from llama_meter.errors import StudyError
from llama_meter.measure import machine, watch
from llama_meter.measure.parting import SAME
from llama_meter.rows import Measured, Request, passed
from llama_meter.serve import client, load, questions, server
from llama_meter.serve.client import Answer, Prompt, Target, clock
from llama_meter.serve.load import Loaded
from llama_meter.serve.objectives import DISTINCT
from llama_meter.serve.server import Server, Setup

ROOM = 64  # tokens of a slot beside prompt and answer
FLOOR = 20  # empty requests that time HTTP alone


@dataclass(frozen=True)
class Done:
    """Outcome of a cell: every prompt alone, the load, the seconds of empty requests, and how the server ended."""

    alone: list[Answer]
    loaded: Loaded
    floor_s: list[float]
    ended: str
    steps: list[tuple[float, float, float]]  # of the search for the knee: rate, share that met the objectives, lag
    switches: int = 0  # times that the server's threads were scheduled under the load; 0 where not counted
    seed: int = 0  # of arrivals at random times


def run(cell: Serving, path: Path, stage: Callable[[str], None]) -> Measured:
    """Measure one cell.

    `requests`: times since the load began; "due" is when a request was to be sent. `samples_ns`: from due to end, of
    answered requests. `series`, one number per request: "n_prompt" and "n_gen" by the server's count, "prompt_ms" and
    "answer_ms" by llama-server's, "differs" the first token that differs from the answer alone (-1: none), "gap"
    the likeliest token's lead there (nats). "lag" (s): the client's median, 95th percentile and maximum.
    "floor" (s): empty requests. "switches": times that the server's threads were
    scheduled. "rates", "met", "late": the steps of the knee search; "seed": of arrivals at random times,
    drawn anew for every server: they would share the luck of one draw.
    """
    asked = questions.prompts(path, min(cell.n_requests, DISTINCT), cell.n_prompt, cell.n_gen, cell.seed)
    stage("start")
    begin = clock()
    with server.started(setup(cell, cell.server, path)) as running:
        load_ns = clock() - begin
        target = Target(running.url, usual=questions.OURS[cell.server])
        done = http.run(_loaded(cell, running, target, asked, stage))
        rss = resident(running, done)
    return measured(done, load_ns, rss)


def setup(cell: Serving | Traffic, kind: server.Kind, path: Path) -> Setup:
    """A server with the slots, lengths and threads of a cell, and the engine that this worker has."""
    folder = os.environ.get("LLAMA_CPP_LIB_PATH")
    return Setup(
        kind,
        path,
        cell.n_seq,
        cell.n_prompt + cell.n_gen + ROOM,
        cell.n_threads,
        cell.n_batch,
        cell.n_ubatch,
        cell.flash_attn,
        cell.n_gpu_layers,
        Path(folder) if folder else builds.installed_libraries(),
    )


def resident(running: Server, done: Done) -> int:
    """Resident memory of the server in bytes; 0 if it has ended."""
    return psutil.Process(running.process.pid).memory_info().rss if not done.ended else 0


async def floors(web: http.Client, target: Target, kind: server.Kind) -> list[float]:
    """Seconds of empty requests: the cost of HTTP alone."""
    return [await _empty(web, target.url + server.READY[kind]) for _ in range(FLOOR)]


async def _loaded(
    cell: Serving, running: Server, target: Target, asked: list[Prompt], stage: Callable[[str], None]
) -> Done:
    async with target.connected() as web:
        stage("warm")
        await client.ask(web, target, asked[0])
        floor = await floors(web, target, cell.server)
        stage("alone")
        top = 2 if cell.server == "llama-server" else 0
        alone = [await client.ask(web, target, prompt, top=top) for prompt in asked]
        if cell.server == "llama_cpp.server":  # it counts tokens only without streaming
            counts = {prompt.id: await client.ask_whole(web, target, prompt) for prompt in asked}
        stage("serve")
        requests = [Prompt(f"{n}", asked[n % len(asked)].text, cell.n_gen) for n in range(cell.n_requests)]
        steps: list[tuple[float, float, float]] = []
        seed = 0
        before = _timeslices(running.process.pid)
        with watch.timed(running.process.pid):
            if not cell.n_clients:
                seed = secrets.randbits(32)
            if cell.pattern == "knee":
                loaded, steps = await load.sought(web, target, requests, cell, median(map(_seconds, alone)), seed)
            elif cell.n_clients:
                loaded = await load.closed(web, target, requests, cell.n_clients)
            else:
                due = load.arrivals(cell.pattern, cell.n_requests, cell.per_second, seed)
                loaded = await load.opened(web, target, requests, due)
        switches = max(_timeslices(running.process.pid) - before, 0)  # a dead server's threads are not counted
        ended = running.ended(1.0 if any(answer.failure for answer in loaded.answers) else 0.0)
        if cell.server == "llama_cpp.server":
            for n, answer in enumerate(loaded.answers):
                answer.n_prompt, answer.n_gen = counts[asked[n % len(asked)].id][1:]
    return Done(alone, loaded, floor, ended, steps, switches, seed)


def _timeslices(pid: int) -> int:
    """How often the living threads of a process have been scheduled so far; 0 where it is not counted."""
    return sum(times for _, _, times in machine.threads(pid).values())


async def _empty(web: http.Client, url: str) -> float:
    begin = clock()
    await web.get(url)
    return (clock() - begin) / 1e9


def _seconds(answer: Answer) -> float:
    return (answer.ended_ns - answer.sent_ns) / 1e9


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
        "floor": done.floor_s,
        "switches": [float(done.switches)],
    }
    if done.steps:
        series |= {name: [step[i] for step in done.steps] for i, name in enumerate(("rates", "met", "late"))}
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
