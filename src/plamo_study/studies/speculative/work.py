"""A cell of kind "speculate": rounds of speculation (`loop`), and what explains their time and their tokens.

A token that verification chooses otherwise than the reference fails the row unless rounding explains it: the target
alone, in calls as long as a verification and without taking anything back, then deviates from itself by as much as
the two tokens differ.
"""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from llama_meter.cells import TERMS, Speculate
from llama_meter.engine import library
from llama_meter.engine.session import Session
from llama_meter.limits import FIRST_TOKEN
from llama_meter.measure import sessions, texts, watch
from llama_meter.measure.plan import change
from llama_meter.measure.tolerance import BOTH_MOVE, near_tie, tolerance
from llama_meter.rows import Measured, passed
from plamo_study.studies.speculative import drafters
from plamo_study.studies.speculative.drafters import Draft
from plamo_study.studies.speculative.speculation import Loop, Reference, clock

PROMPT_LINES = 12  # lines of a text from which each prompt takes its first tokens
ALONE = 3  # calls of every length, saves and restores timed alone, after an untimed one
WARM_ROUNDS = 2
STEPS = 24  # of plain decode, timed beside the rounds


def config(cell: Speculate, n_seq: int, n_rs_seq: int) -> sessions.SessionConfig:
    """Configuration of a context with room for the prompt, the answer and a draft beyond its end."""
    room = cell.depth + cell.n_gen + 3 * (cell.n_draft + 1)
    return sessions.config(cell, room, n_seq_max=n_seq, n_rs_seq=n_rs_seq, swa_full=True)


def run(cell: Speculate, path: Path, stage: Callable[[str], None], *others: Path) -> Measured:
    """Measure one cell. `samples_ns`: a list per prompt with the total of each round's terms.

    `series`, by round: the terms of `TERMS` in ns; by round and sequence: "drafted", "accepted" and
    "sequence"; by token that differs from the reference: "gap" and "rounding", relative to the largest logit.
    Timed alone after the rounds: "plain ns", steps of plain decode of all sequences; and "columns" and "column ns",
    tokens and time of calls.
    """
    cell.check()
    log: list[str] = []
    library.capture_log(log)
    start = clock()
    with ExitStack() as stack:
        n_states = cell.n_draft if cell.back == "tail" else 0
        session = stack.enter_context(Session(path, config(cell, cell.n_seq, n_states)))
        smaller = [stack.enter_context(Session(other, config(cell, 1, 0))) for other in others]
        for drafter in smaller:
            drafters.check_vocabulary(session, drafter)
        load_ns, loops, warmup, shaped, counted = clock() - start, [], [], [], 0
        for number, prompts in enumerate(_prompts(cell, session)):
            stage(f"reference {number}")
            start = clock()
            references = {
                seq: Reference(session, seq, prompt, _room(cell), cell.temperature, cell.seed)
                for seq, prompt in prompts.items()
            }
            Loop(cell, session, references, _drafts(cell, session, references, smaller)).run(WARM_ROUNDS)
            drafts = _drafts(cell, session, references, smaller)
            warmup.append(clock() - start)
            loop = Loop(cell, session, references, drafts)
            stage(f"rounds {number}")
            before = session.n_evaluated
            with watch.timed():
                loop.run(cell.n_gen)
            counted += session.n_evaluated - before
            stage(f"others {number}")
            shaped += [_explained(cell, session, references[seq], at, token) for seq, at, token in loop.others]
            loop.prove()
            loops.append(loop)
        stage("alone")
        alone = _alone(cell, session, loop) if _taken_apart(cell) else {}
        alone |= _plain(cell, session, loop) if cell.n_draft else {}
    return _measured(cell, loops, shaped, alone, warmup, load_ns, counted)


def _taken_apart(cell: Speculate) -> bool:
    """Whether rounds are compared with their parts: one sequence, drafts of one length, each taken back at once."""
    return cell.n_seq == 1 and cell.n_draft > 0 and cell.drafter in ("", "even") and cell.back != "joined"


def _room(cell: Speculate) -> int:
    """Tokens that a reference needs: the answer, and drafts beyond its end."""
    return cell.n_gen + 2 * (cell.n_draft + 1)


def _prompts(cell: Speculate, session: Session) -> list[dict[int, np.ndarray]]:
    """Prompts by repetition and sequence, (depth,) int32 each: random, or excerpts of the text."""
    if not cell.text:
        rng = np.random.default_rng(cell.seed)
        drawn = rng.integers(FIRST_TOKEN, session.n_vocab, (cell.repetitions, cell.n_seq, cell.depth), dtype=np.int32)
        return [dict(enumerate(prompts)) for prompts in drawn]
    text = texts.planned(cell.text, cell.text_sha256)
    pieces = [
        session.tokenize(excerpt) for excerpt in texts.excerpts(text, cell.repetitions * cell.n_seq, PROMPT_LINES)
    ]
    cut = [piece[: cell.depth] for piece in pieces]
    return [dict(enumerate(cut[n : n + cell.n_seq])) for n in range(0, len(cut), cell.n_seq)]


def _drafts(
    cell: Speculate, session: Session, references: dict[int, Reference], smaller: list[Session]
) -> dict[int, Draft]:
    """Drafter of each sequence; a draft model can serve only one sequence."""
    if cell.drafter == "lookup":
        return dict.fromkeys(references, drafters.lookup)
    if cell.drafter == "model":
        model = drafters.Model(smaller[0])
        model.clear()
        return dict.fromkeys(references, model)
    drafts: dict[int, Draft] = {}
    for seq, reference in references.items():
        rng = np.random.default_rng([cell.seed, seq])
        if cell.drafter == "even":
            counts = drafters.evenly(cell.n_draft, rng)
        else:  # an adaptive length depends on the outcome of the last draft, so its draws have to be independent
            strata = 1 if cell.drafter == "adapts" else drafters.STRATA
            counts = drafters.accepted(cell.accepts, cell.n_draft, rng, strata)
        drafts[seq] = drafters.forced(reference.tokens, counts, session.n_vocab)
    return drafts


def _explained(cell: Speculate, session: Session, reference: Reference, at: int, token: int) -> tuple[float, float]:
    """Gap between the logits of the reference's token and another one at a position, and the effect of rounding there.

    Rounding: the same tokens in calls of k + 1, without taking any back. Both relative to the largest logit.
    """
    expected, width = reference.expected(at), cell.n_draft + 1
    session.clear()
    session.set_state(0, reference.state, reference.n_prompt)
    for start in range(reference.n_prompt, at, width):
        rows = session.verify({0: reference.tokens[start : start + width]})[0]
    moved = np.abs(rows[(at - 1 - reference.n_prompt) % width] - expected).max()
    largest = np.abs(expected).max()
    return float((expected[reference.tokens[at]] - expected[token]) / largest), float(moved / largest)


def _alone(cell: Speculate, session: Session, loop: Loop) -> dict[str, list[float]]:
    """Calls of 1 to k + 1 tokens in ns, equal lengths in a row, for which the engine keeps its graph."""
    lengths = range(1, cell.n_draft + 2)
    repeated = [_call(session, loop, n) for n in lengths for _ in range(ALONE + 1)]
    return {
        "columns": [float(n) for n in lengths for _ in range(ALONE)],
        "column ns": [ns for i, ns in enumerate(repeated) if i % (ALONE + 1)],
    }


def _plain(cell: Speculate, session: Session, drafted: Loop) -> dict[str, list[float]]:
    """Times (ns) of plain decode steps on the same loaded weights, in a context that keeps no states for drafts."""
    plain = change(cell, n_draft=0, drafter="", draft="", accepts=0.0)
    with Session(session, config(plain, cell.n_seq, 0)) as steps:
        Loop(plain, steps, drafted.references, {}).run(WARM_ROUNDS)
        loop = Loop(plain, steps, drafted.references, {})
        loop.run(min(STEPS, cell.n_gen))
    drafted.error = max(drafted.error, loop.error)
    return {"plain ns": [float(sum(times.values())) for times in loop.rounds]}


def _call(session: Session, loop: Loop, n: int) -> float:
    """Nanoseconds of one verification of `n` tokens after each prompt."""
    session.clear()
    for seq, reference in loop.references.items():
        session.set_state(seq, reference.state, reference.n_prompt)
    call = {
        seq: reference.tokens[reference.n_prompt : reference.n_prompt + n] for seq, reference in loop.references.items()
    }
    start = clock()
    for logits in loop.verify(call).values():
        logits.argmax(axis=1)
    return float(clock() - start)


def _measured(
    cell: Speculate,
    loops: list[Loop],
    shaped: list[tuple[float, float]],
    alone: dict[str, list[float]],
    warmup: list[int],
    load_ns: int,
    counted: int,
) -> Measured:
    error = max(loop.error for loop in loops)
    rounds = [times for loop in loops for times in loop.rounds]
    series = {term: [float(times[term]) for times in rounds] for term in TERMS}
    series |= {name: [float(n) for loop in loops for n in loop.counts[name]] for name in loops[0].counts}
    series |= {"gap": [gap for gap, _ in shaped], "rounding": [rounding for _, rounding in shaped]} | alone
    tokens = sum(series["accepted"]) + len(series["accepted"])
    checks: dict[str, float | bool] = {"second_path_error": error, "second_path": error <= tolerance(cell)}
    checks |= {"finite": bool(np.isfinite(error)), "removes": float(loops[0].way.removes), "tokens": tokens}
    checks |= {"other_tokens": len(shaped), "evaluated": counted >= tokens}
    checks["lossless"] = all(near_tie(gap, BOTH_MOVE * rounding) for gap, rounding in shaped)
    return Measured(
        samples_ns=[[sum(times.values()) for times in loop.rounds] for loop in loops],
        warmup_ns=warmup,
        load_ns=load_ns,
        n_evaluated=counted,
        checks=checks,
        series=series,
        valid=passed(checks),
    )


RUNS = {Speculate: run}
