"""Time per token on the released and the patched server, with few and with many requests waiting.

The servers take turns. No client disconnects here, so only the patch's wake-ups can matter. Token times are the
server's own, from the answers that ended while the number of requests was still at its maximum.
"""

from pathlib import Path

import numpy as np

from llama_meter import progress
from llama_meter.measure import machine, result_file
from llama_meter.measure.plan import MODELS
from llama_meter.serve import objectives, questions, server
from llama_meter.serve.client import Target
from llama_meter.serve.load import Loaded
from llama_meter.workloads.serving import built, stock
from plamo_study.read.results import CROWD, PATCHED, RELEASED, Crowd, Crowds
from plamo_study.stats.estimates import NS
from trials.beside import asked, warm

LOADS = {4: 48, 68: 204, 256: 512}  # concurrent requests: total; 0, 64 and 252 wait while 4 are answered
ROUNDS = 4
MS = 1e3


def compare(path: Path, rounds: int = ROUNDS) -> Crowds:
    """Run every load on new servers of each kind, in turn. StudyError if one is not built or a request fails."""
    n_prompt, n_gen = objectives.SHORT["mini"]
    prompts = questions.prompts(path, max(LOADS.values()), n_prompt, n_gen)
    both = {RELEASED: built(stock(path, "mini")), PATCHED: built(stock(path, "mini"), patched=True)}
    loads: list[Crowd] = []
    for number in progress.counted(range(rounds), "both servers in turn"):
        for name in list(both)[:: -1 if number % 2 else 1]:
            with server.started(both[name]) as running:
                target = Target(running.url, usual=questions.OURS["llama-server"])
                for n_clients, n in LOADS.items():
                    warm(target, prompts[0])
                    loads.append(_full(name, number, n_clients, asked(target, prompts[:n], n_clients)))
    return Crowds(machine=machine.facts(), model=MODELS[1], n_prompt=n_prompt, n_gen=n_gen, loads=loads)


def _full(name: str, number: int, n_clients: int, found: Loaded) -> Crowd:
    """Summary of the answers that ended while the crowd was full."""
    ended = np.argsort([answer.ended_ns for answer in found.answers])[: len(found.answers) - n_clients]
    answers = [found.answers[n] for n in ended]
    return Crowd(
        server=name,
        n_clients=n_clients,
        round=number,
        token=[answer.timings["predicted_ms"] / (answer.n_gen - 1) / MS for answer in answers],
        seconds=(answers[-1].ended_ns - found.began_ns) / NS,
        tokens=sum(answer.n_gen for answer in answers),
    )


def write(found: Crowds, place: str) -> Path:
    """Keep the loads; a new comparison replaces the one before it."""
    return result_file.keep(found, place, CROWD)
