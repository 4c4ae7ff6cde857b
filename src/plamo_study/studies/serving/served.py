"""A cell of kind "traffic" that llama-server serves: the same requests at the same times, over HTTP.

The server schedules by its own rule: every call holds a token of each running answer, and as much of waiting prompts
as the batch has room for. Answers are compared with those of each prompt alone.
"""

from collections.abc import Callable
from pathlib import Path

from llama_meter import http
from llama_meter.cells import Traffic
from llama_meter.measure import watch
from llama_meter.rows import Measured
from llama_meter.serve import client, load, questions, server
from llama_meter.serve.client import Prompt, Target, clock
from llama_meter.serve.server import Kind, Server
from llama_meter.simulate import traffic
from llama_meter.simulate.loop import Load
from plamo_study.studies.serving import work as serving
from plamo_study.studies.serving.work import Done

KIND: Kind = "llama-server"


def run(cell: Traffic, path: Path, stage: Callable[[str], None]) -> Measured:
    """Measure one cell; times and series are those of `serving.run`."""
    asked = traffic.drawn(cell)
    prompts = questions.of_lengths(path, asked.prompt, asked.output, cell.seed)
    stage("start")
    begin = clock()
    with server.started(serving.setup(cell, KIND, path)) as running:
        load_ns = clock() - begin
        target = Target(running.url, usual=questions.OURS[KIND])
        done = http.run(_done(asked, prompts, running, target, stage))
        rss = serving.resident(running, done)
    return serving.measured(done, load_ns, rss)


async def _done(
    asked: Load, prompts: list[Prompt], running: Server, target: Target, stage: Callable[[str], None]
) -> Done:
    async with target.connected() as web:
        stage("alone")
        alone = [await client.ask(web, target, prompt, top=2) for prompt in prompts]
        floor = await serving.floors(web, target, KIND)
        stage("serve")
        with watch.timed(running.process.pid):
            loaded = await load.opened(web, target, prompts, asked.arrives)
        ended = running.ended(1.0 if any(answer.failure for answer in loaded.answers) else 0.0)
    return Done(alone, loaded, floor, ended, [])
