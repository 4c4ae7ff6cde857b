"""A cell of kind "arrival": sequences decode, a prompt arrives and is evaluated in pieces between or in their steps.

Tokens are fixed beforehand, so every sequence can be compared with itself alone: after the last call its logits must be
those of one prefill of all its tokens. How the engine splits mixed calls is recorded in a second context, untimed.
"""

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from llama_meter.cells import Arrival, Calls
from llama_meter.engine import library
from llama_meter.engine.nodes import MicroBatches
from llama_meter.engine.session import Session, SessionConfig
from llama_meter.limits import FIRST_TOKEN
from llama_meter.measure import proof, watch
from llama_meter.measure.proof import Prompts
from llama_meter.rows import Measured, Request, passed
from plamo_study.studies.latency.metrics import before, calls

WARM_STEPS = 2
clock = time.perf_counter_ns


def run(cell: Arrival, path: Path, stage: Callable[[str], None]) -> Measured:
    """Do one cell. `samples_ns`: one number per call, in the order of `calls`.

    `requests`: the decoding sequences and the prompt, times since the first timed call. `series`: "micro-batch": tokens
    of each micro-batch of mixed calls in order, "of call": the call of each.
    """
    library.capture_log([])
    start = clock()
    with Session(path, config(cell)) as session:
        load_ns = clock() - start
        rng = np.random.default_rng(cell.seed)
        totals = lengths(cell).items()
        tokens = {seq: rng.integers(FIRST_TOKEN, session.n_vocab, n, dtype=np.int32) for seq, n in totals}
        made, first = calls(cell), before(cell)
        stage("warm-up")
        start = clock()
        _fill(cell, session, tokens)
        _evaluate(session, tokens, (*made[: min(first, WARM_STEPS)], *made[first : first + 2]))  # the shapes timed
        warmup = clock() - start
        _fill(cell, session, tokens)
        stage("arrival")
        started = session.n_evaluated
        with watch.timed():
            stamps, logits = _evaluate(session, tokens, made)
        evaluated = session.n_evaluated - started
        stage("alone")
        alone = {seq: proof.alone(session, seq, stream) for seq, stream in tokens.items()}
    stage("micro-batches")
    checks = proof.checks(cell, logits, alone, evaluated, sum(n for call in made for _, n in call))
    return Measured(
        samples_ns=[np.diff(stamps).tolist()],
        warmup_ns=[warmup],
        load_ns=load_ns,
        n_evaluated=evaluated,
        checks=checks,
        series=_formed(cell, path, tokens) if cell.way == "together" else {},
        requests=_requests(cell, [stamp - stamps[0] for stamp in stamps]),
        valid=passed(checks),
    )


def config(cell: Arrival) -> SessionConfig:
    """Session settings: room for the longest sequence in each, and a batch as long as the longest call."""
    n_batch = max(cell.n_batch, *(sum(n for _, n in call) for call in calls(cell)))
    changes = {"n_seq_max": cell.n_seq + 1, "n_batch": n_batch, "kv_unified": cell.kv_unified, "swa_full": False}
    return SessionConfig.of(cell, max(lengths(cell).values()), **changes)


def lengths(cell: Arrival) -> dict[int, int]:
    """Tokens of every sequence at the end, those it starts from included."""
    totals = Counter({seq: cell.depth for seq in range(cell.n_seq)})
    for call in calls(cell):
        totals.update(dict(call))
    return dict(totals)


def _fill(cell: Arrival, session: Session, tokens: Prompts) -> None:
    """Clear the memory and prefill every decoding sequence's first tokens, each in its own calls."""
    session.clear()
    if cell.depth:
        session.prefill({seq: tokens[seq][: cell.depth] for seq in range(cell.n_seq)})


def _evaluate(session: Session, tokens: Prompts, made: Calls) -> tuple[list[int], dict[int, np.ndarray]]:
    """Run the calls; the times (ns) before the first and after each, and every sequence's last logits."""
    logits: dict[int, np.ndarray] = {}
    parts, past = [], list(session.n_past)
    for call in made:
        parts.append([(seq, tokens[seq][past[seq] : past[seq] + n]) for seq, n in call])
        for seq, n in call:
            past[seq] += n
    stamps = [clock()]
    for part in parts:
        logits |= {seq: rows[-1].copy() for seq, rows in session.evaluate(part).items()}
        stamps.append(clock())
    return stamps, logits


def _requests(cell: Arrival, ends: list[int]) -> list[Request]:
    """Token times of every decoding sequence, and of the prompt's first and following tokens."""
    token_ns: dict[int, list[int]] = {seq: [] for seq in range(cell.n_seq + 1)}
    due = cell.n_arriving
    for call, end in zip(calls(cell), ends[1:], strict=True):
        for seq, n in call:
            due -= n if seq == cell.n_seq else 0
            if seq < cell.n_seq or due <= 0:
                token_ns[seq].append(end)
    arrived = ends[before(cell)]
    decoding = [
        Request(id=f"decoding {seq}", n_prompt=cell.depth, arrived_ns=0, token_ns=token_ns[seq])
        for seq in range(cell.n_seq)
    ]
    prompt = Request(id="prompt", n_prompt=cell.n_arriving, arrived_ns=arrived, token_ns=token_ns[cell.n_seq])
    return [*decoding, prompt]


def _formed(cell: Arrival, path: Path, tokens: Prompts) -> dict[str, list[float]]:
    """The micro-batches of a decode step and of the first two mixed calls: tokens, and the call each belongs to."""
    first, sizes, of_call = before(cell) - 1, [], []
    with MicroBatches(path, config(cell)) as session:
        _fill(cell, session, tokens)
        for number, call in enumerate(calls(cell)[first : first + 3], first):
            session.sizes.clear()
            _evaluate(session, tokens, (call,))
            sizes += [float(size) for size in session.sizes]
            of_call += [float(number)] * len(session.sizes)
    return {"micro-batch": sizes, "of call": of_call}
