"""Greedy answers to distinct prompts, each alone and then beside others: the engine itself, without a server.

The prompts of a call go to the engine together, each in a slot of its own from the first on, in an empty memory; then
all are answered step by step together. Each prompt is asked TURNS times, beside other neighbours and at another place
of the call each time.
"""

import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from llama_meter.cells import Answers
from llama_meter.engine import library
from llama_meter.engine.session import Session, SessionConfig
from llama_meter.measure.tolerance import SAME, parting
from llama_meter.oracle.compare import relative_error
from llama_meter.rows import Measured, Request, passed
from llama_meter.serve import load

TURNS = 2
SPARE = 16  # tokens more than asked for: a text cut into tokens anew may have fewer

clock = time.perf_counter_ns


def run(cell: Answers, path: Path, stage: Callable[[str], None]) -> Measured:
    """Answer every prompt alone, then TURNS times beside others.

    `requests`: one an answer beside others; `id` names the prompt by its tokens. `series`, one number a request:
    "differs", the first token that differs from the answer alone (-1: none); "gap", the likeliest token's lead there
    in nats (-1: none); "error", the relative error of the logits after the prompt against those alone; "place", the
    prompt's place in its call. Checks that do not judge: how many prompts and how many answers alone are distinct.
    """
    library.capture_log([])
    start = clock()
    with Session(path, SessionConfig.of(cell, cell.n_prompt + cell.n_gen, n_seq_max=cell.n_seq)) as session:
        load_ns = clock() - start
        prompts = drawn(cell, path, session)
        stage("alone")
        alone = [_answered(session, [prompt], cell.n_gen, clock()) for prompt in prompts]
        stage("together")
        began, requests = clock(), []
        verdicts: list[str] = []
        series: dict[str, list[float]] = {name: [] for name in ("differs", "gap", "error", "place")}
        for call in calls(len(prompts), cell.n_clients):
            logits, tokens, _, stamps = _answered(session, [prompts[n] for n in call], cell.n_gen, began)
            for place, n in enumerate(call):
                expected, said, leads, _ = alone[n]
                parted = parting(said[0], tokens[place], leads[0])
                verdicts.append(parted.verdict)
                series["differs"].append(float(parted.token))
                series["gap"].append(parted.lead if parted.token >= 0 else SAME)
                series["error"].append(relative_error(logits[place], expected[0]))
                series["place"].append(float(place))
                name = sha256(prompts[n].tobytes()).hexdigest()[:16]
                requests.append(Request(id=name, n_prompt=len(prompts[n]), arrived_ns=0, token_ns=stamps))
    checks: dict[str, float | bool] = {
        "as_alone": "other" not in verdicts,
        "finite": all(np.isfinite(logits).all() for logits, *_ in alone),
        "prompts": len({request.id for request in requests}),
        "answers_alone": len({said.tobytes() for _, said, *_ in alone}),
    }
    evaluated = (1 + TURNS) * sum(map(len, prompts)) + (1 + TURNS) * len(prompts) * (cell.n_gen - 1)
    return Measured(
        load_ns=load_ns, n_evaluated=evaluated, checks=checks, series=series, requests=requests, valid=passed(checks)
    )


def drawn(cell: Answers, path: Path, session: Session) -> list[np.ndarray]:
    """The prompts of a cell as token ids: pieces of the held-out text, others for every seed."""
    lengths = [cell.n_prompt] * cell.n_requests
    if cell.lengths == "drawn":
        rng = np.random.default_rng(cell.seed)
        lengths = rng.integers(cell.n_prompt // 2, cell.n_prompt + 1, cell.n_requests).tolist()
    longer = [n + SPARE for n in lengths]
    texts = load.of_lengths(path, longer, [cell.n_gen] * len(lengths), cell.seed)
    return [session.tokenize(text.text.encode())[:n] for text, n in zip(texts, lengths, strict=True)]


def calls(n_prompts: int, n_at_once: int) -> list[list[int]]:
    """Numbers of the prompts of each call: all prompts once a turn, in a turn's own order.

    From turn to turn half of a call moves on, so that neighbours and places change.
    """
    turns = [np.roll(np.arange(n_prompts), -turn * (n_at_once // 2)).tolist() for turn in range(TURNS)]
    return [order[at : at + n_at_once] for order in turns for at in range(0, n_prompts, n_at_once)]


def _answered(session: Session, prompts: Sequence[np.ndarray], n_gen: int, began: int) -> Any:
    """Prompts evaluated in one call and continued together, in slots 0, 1, ...

    Logits after the prompts (n, n_vocab), the likeliest tokens (n, n_gen), their leads over the second in nats, and
    the time of each step in ns since `began`.
    """
    session.clear()
    rows = logits = np.concatenate(list(session.evaluate(enumerate(prompts)).values()))
    tokens: list[np.ndarray] = []
    leads, stamps = [], []
    for step in range(n_gen):
        if step:
            session.decode(dict(enumerate(tokens[-1].tolist())))
            rows = session.outputs(len(prompts)).copy()
        two = np.sort(np.partition(rows, -2, axis=1)[:, -2:], axis=1)
        tokens.append(rows.argmax(axis=1))
        leads.append(two[:, 1] - two[:, 0])
        stamps.append(clock() - began)
    return logits, np.stack(tokens, axis=1), np.stack(leads, axis=1), stamps


RUNS = {Answers: run}
