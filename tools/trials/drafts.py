"""llama-server and our loop in turn, with the same drafters on the same prompts: accepted tokens, and speed.

The server saves and restores the hybrid's state like our way "part put back", and replays the accepted tokens as a
separate draft. Its n-grams differ from ours (`ngram-simple`: one length, last match).
"""

from pathlib import Path

import numpy as np

from llama_meter import http, progress
from llama_meter.cells import Speculate
from llama_meter.engine import builds
from llama_meter.engine.tokenizer import Tokenizer
from llama_meter.errors import StudyError
from llama_meter.measure import machine, process, texts
from llama_meter.measure.plan import DTYPE, MODELS, change
from llama_meter.measure.worker import Job
from llama_meter.models import synthetic
from llama_meter.serve import client, server
from llama_meter.serve.client import Answer, Prompt, Target
from llama_meter.serve.server import Setup
from llama_meter.workloads import speculative
from plamo_study.laws.drafting import NGRAMS, OURS, PLAIN, SERVER, Beside, Run
from plamo_study.plans import speculative as plan

ROUNDS = 6
NGRAM = 3  # tokens of the server's n-gram
LIMIT_S = 120.0
MS = 1e3


def compare(rounds: int = ROUNDS) -> Beside:
    """Run both on both embedded models: plain, with a draft model and with n-grams. StudyError if one fails."""
    threads = server.threads()
    runs: list[Run] = []
    for number in progress.counted(range(rounds), "our loop and llama-server in turn"):
        for cell in _cells(threads):
            both = [_ours, _served]
            runs += [one(cell, number) for one in both[:: -1 if number % 2 else 1]]
    return Beside(machine=machine.facts(), n_draft=plan.USUAL, n_threads=threads, runs=runs)


def _cells(threads: int) -> list[Speculate]:
    text = texts.sha256(texts.read(plan.TEXT))
    usual = Speculate(scale="mini", dtype=DTYPE["mini"], depth=plan.DEPTH, n_gen=plan.GENERATED)
    base = change(usual, n_threads=threads, n_gpu_layers=0, text=plan.TEXT, text_sha256=text, repetitions=4)
    cells = []
    for model in MODELS:
        own = change(base, model=model)
        cells += [own, change(own, n_draft=plan.USUAL, drafter="lookup")]
        by_model = change(own, n_draft=plan.USUAL, drafter="model", draft_dtype=base.dtype)
        cells.append(change(by_model, draft=plan.DRAFTERS[model]))
    return cells


def _drafter(cell: Speculate) -> str:
    return (cell.draft or NGRAMS) if cell.n_draft else PLAIN


def _files(cell: Speculate) -> list[Path]:
    return [synthetic.make(*file) for file in cell.files]


def _ours(cell: Speculate, number: int) -> Run:
    path, *others = map(str, _files(cell))
    outcome = process.work(Job(cell=cell, path=path, others=others), LIMIT_S, workload=plan.WORKLOAD)
    if outcome.status != "ok" or not outcome.measured.valid:
        why = outcome.failure.message if outcome.failure else f"wrong: {outcome.measured.checks}"
        raise StudyError("our loop", f"{outcome.status} ({why})", "plamo-study run 08 --scale mini")
    found = outcome.measured
    return Run(
        who=OURS,
        model=cell.model,
        drafter=_drafter(cell),
        round=number,
        tokens=int(found.checks["tokens"]),
        seconds=sum(map(sum, found.samples_ns)) / 1e9,
        drafted=int(sum(found.series["drafted"])),
        accepted=int(sum(found.series["accepted"])),
        plain=float(np.mean(found.series.get("plain ns", [0.0]))) / 1e9,
    )


def _served(cell: Speculate, number: int) -> Run:
    path, *others = _files(cell)
    setup = Setup("llama-server", path, 1, cell.depth + 2 * cell.n_gen, cell.n_threads,
                  libraries=builds.installed_libraries(), options=_options(cell, others))  # fmt: skip
    pieces = texts.excerpts(texts.planned(cell.text, cell.text_sha256), cell.repetitions, speculative.PROMPT_LINES)
    with server.started(setup) as running:
        answers = http.run(_asked(cell, running.url, path, pieces))
    told = [answer.timings for answer in answers]
    missing = next((answer.failure or "no timings" for answer in answers if answer.failure or not answer.timings), "")
    if cell.draft and not missing and not any(each.get("draft_n") for each in told):
        missing = "it drafted nothing"
    if missing:
        raise StudyError(SERVER, f"gave no answer ({missing})", "read its log: plamo-study server start MODEL")
    return Run(
        who=SERVER,
        model=cell.model,
        drafter=_drafter(cell),
        round=number,
        tokens=sum(answer.n_gen - 1 for answer in answers),
        seconds=sum(each["predicted_ms"] for each in told) / MS,
        drafted=int(sum(each.get("draft_n", 0) for each in told)),
        accepted=int(sum(each.get("draft_n_accepted", 0) for each in told)),
    )


def _options(cell: Speculate, others: list[Path]) -> tuple[str, ...]:
    longest = str(cell.n_draft)
    if cell.drafter == "lookup":
        lengths = ("--spec-ngram-simple-size-n", str(NGRAM), "--spec-ngram-simple-size-m", longest)
        return ("--spec-type", "ngram-simple", *lengths)
    if cell.drafter == "model":
        return ("--spec-type", "draft-simple", "-md", str(others[0]), "--spec-draft-n-max", longest, "-td",
                str(cell.n_threads))  # fmt: skip
    return ()


async def _asked(cell: Speculate, url: str, path: Path, pieces: list[bytes]) -> list[Answer]:
    """Answers to the prompts of our loop, one by one, after a warm-up request."""
    with Tokenizer(path) as tokenizer:
        cut = [tokenizer.encode(piece.decode(), add_special=True)[: cell.depth].tolist() for piece in pieces]
    usual = {"ignore_eos": True, "cache_prompt": False}
    targets = [Target(url, usual={**usual, "prompt": tokens}) for tokens in cut]
    asked = Prompt("", "", cell.n_gen)
    async with targets[0].connected() as web:
        await client.ask(web, targets[0], asked)
        return [await client.ask(web, target, asked) for target in targets]
