"""Greedy answers to distinct prompts, each alone and then beside others: the engine itself, without a server.

The prompts of a call go to the engine together, each in a slot of its own from the first on, in an empty memory; then
all are answered step by step together. Each prompt is asked TURNS times, beside other neighbours and at another place
of the call each time.
"""

import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np

from llama_meter.cells import Answers
from llama_meter.engine import library
from llama_meter.engine.session import Session, SessionConfig
from llama_meter.measure.tolerance import SAME, Parting, parting
from llama_meter.rows import Measured, Request, passed
from llama_meter.serve import load

TURNS = 2
SPARE = 16  # tokens more than asked for: a text cut into tokens anew may have fewer

clock = time.perf_counter_ns


def run(cell: Answers, path: Path, stage: Callable[[str], None]) -> Measured:
    """Answer every prompt alone, then TURNS times beside others.

    `requests`: one an answer beside others; `id` names the prompt by its tokens, and `token_ns` is when its call was
    answered. `series`, one number a request: "differs", the first token that differs from the answer alone (-1: none);
    "gap", the likeliest token's lead there in nats (-1: none). Checks that do not judge: how many prompts and how many
    answers alone are distinct.
    """
    library.capture_log([])
    with Session(path, SessionConfig.of(cell, cell.n_prompt + cell.n_gen, n_seq_max=cell.n_seq)) as session:
        prompts = drawn(cell, path, session)
        names = [sha256(prompt.tobytes()).hexdigest()[:16] for prompt in prompts]
        stage("alone")
        alone = [_answered(session, [prompt], cell.n_gen)[0] for prompt in prompts]
        stage("together")
        began, requests = clock(), []
        parted: list[Parting] = []
        for call in calls(len(prompts), cell.n_clients):
            together = _answered(session, [prompts[n] for n in call], cell.n_gen)
            for n, (tokens, _) in zip(call, together, strict=True):
                parted.append(parting(alone[n][0], tokens, alone[n][1]))
                when = [clock() - began]
                requests.append(Request(id=names[n], n_prompt=len(prompts[n]), arrived_ns=0, token_ns=when))
    checks: dict[str, float | bool] = {
        "as_alone": all(each.verdict != "other" for each in parted),
        "finite": all(np.isfinite(leads).all() for _, leads in alone),
        "prompts": len(set(names)),
        "answers_alone": len({tokens.tobytes() for tokens, _ in alone}),
    }
    series = {
        "differs": [float(each.token) for each in parted],
        "gap": [each.lead if each.token >= 0 else SAME for each in parted],
    }
    return Measured(checks=checks, series=series, requests=requests, valid=passed(checks))


def drawn(cell: Answers, path: Path, session: Session) -> list[np.ndarray]:
    """The prompts of a cell as token ids: pieces of the held-out text, others for every seed."""
    lengths = [cell.n_prompt] * cell.n_requests
    if cell.lengths == "drawn":
        rng = np.random.default_rng(cell.seed)
        lengths = rng.integers(cell.n_prompt // 2, cell.n_prompt + 1, cell.n_requests).tolist()
    texts = load.of_lengths(path, [n + SPARE for n in lengths], [cell.n_gen] * len(lengths), cell.seed)
    return [session.tokenize(text.text.encode())[:n] for text, n in zip(texts, lengths, strict=True)]


def calls(n_prompts: int, n_at_once: int) -> list[list[int]]:
    """Numbers of the prompts of each call: all prompts once a turn, in a turn's own order.

    From turn to turn half of a call moves on, so that neighbours and places change.
    """
    turns = [np.roll(np.arange(n_prompts), -turn * (n_at_once // 2)).tolist() for turn in range(TURNS)]
    return [order[at : at + n_at_once] for order in turns for at in range(0, n_prompts, n_at_once)]


def _answered(session: Session, prompts: Sequence[np.ndarray], n_gen: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Evaluate prompts in one call, and continue them together, in slots 0, 1, ...

    Of each its likeliest tokens (n_gen,) and their leads over the second in nats.
    """
    session.clear()
    rows = np.concatenate(list(session.evaluate(enumerate(prompts)).values()))
    tokens: list[np.ndarray] = []
    leads: list[np.ndarray] = []
    for step in range(n_gen):
        if step:
            session.decode(dict(enumerate(tokens[-1].tolist())))
            rows = session.outputs(len(prompts))
        second, largest = np.partition(rows, (-2, -1), axis=1)[:, -2:].T
        tokens.append(rows.argmax(axis=1))
        leads.append(largest - second)
    return list(zip(np.stack(tokens, axis=1), np.stack(leads, axis=1), strict=True))


RUNS = {Answers: run}
