"""A cell of kind "speculate": rounds of speculation (`Loop`), and what explains their time and their tokens.

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
from llama_meter.engine.session import Session, SessionConfig, random_tokens
from llama_meter.measure import texts, watch
from llama_meter.measure.plan import change
from llama_meter.measure.tolerance import BOTH_MOVE, near_tie, tolerance
from llama_meter.rows import Measured, passed
from plamo_study.studies.speculative import speculation
from plamo_study.studies.speculative.speculation import Draft, Loop, Reference, clock

PROMPT_LINES = 12  # lines of a text from which each prompt takes its first tokens
ALONE = 3  # calls of every length, saves and restores timed alone, after an untimed one
WARM_ROUNDS = 2
STEPS = 24  # of plain decode, timed beside the rounds


def config(cell: Speculate, n_seq: int, n_rs_seq: int) -> SessionConfig:
    """Configuration of a context with room for the prompt, the answer and a draft beyond its end."""
    room = cell.depth + cell.n_gen + 3 * (cell.n_draft + 1)
    return SessionConfig.of(cell, room, n_seq_max=n_seq, n_rs_seq=n_rs_seq, swa_full=True)


def run(cell: Speculate, path: Path, stage: Callable[[str], None], *others: Path) -> Measured:
    """Measure one cell. `samples_ns`: a list per prompt with the total of each round's terms.

    `series`, by round: the terms of `TERMS` in ns; by round and sequence: "drafted", "accepted" and
    "sequence"; by token that differs from the reference: "gap" and "rounding", relative to the largest logit.
    Timed alone after the rounds: "plain ns", steps of plain decode of all sequences; and "columns" and "column ns",
    tokens and time of calls.
    """
    library.capture_log([])
    start = clock()
    with ExitStack() as stack:
        n_states = cell.n_draft if cell.back == "tail" else 0
        session = stack.enter_context(Session(path, config(cell, cell.n_seq, n_states)))
        smaller = [stack.enter_context(Session(other, config(cell, 1, 0))) for other in others]
        load_ns, counted = clock() - start, 0
        loops, warmup, moved = list[Loop](), list[int](), list[tuple[float, float]]()
        for number, prompts in enumerate(_prompts(cell, session)):
            stage(f"reference {number}")
            start, room = clock(), cell.n_gen + 2 * (cell.n_draft + 1)  # the answer, and drafts beyond its end
            references = {seq: Reference(session, prompt, room) for seq, prompt in enumerate(prompts)}
            Loop(cell, session, references, _drafts(cell, session, references, smaller)).run(WARM_ROUNDS)
            loop = Loop(cell, session, references, _drafts(cell, session, references, smaller))
            warmup.append(clock() - start)
            stage(f"rounds {number}")
            before = session.n_evaluated
            with watch.timed():
                loop.run(cell.n_gen)
            counted += session.n_evaluated - before
            stage(f"others {number}")
            moved += [_explained(cell, session, references[seq], at, token) for seq, at, token in loop.others]
            loops.append(loop)
        stage("alone")
        alone = _alone(cell, loop) | (_plain(cell, session, loop) if cell.n_draft else {})
    rounds = [times for loop in loops for times in loop.rounds]
    series = {term: [float(times[term]) for times in rounds] for term in TERMS} | alone
    series |= {name: [float(n) for loop in loops for n in loop.counts[name]] for name in loops[0].counts}
    series |= {"gap": [gap for gap, _ in moved], "rounding": [rounding for _, rounding in moved]}
    tokens, error = sum(series["accepted"]) + len(series["accepted"]), max(loop.error for loop in loops)
    checks: dict[str, float | bool] = {"second_path_error": error, "second_path": error <= tolerance(cell)}
    checks |= {"removes": float(loops[0].removes), "tokens": tokens, "evaluated": counted >= tokens}
    checks["lossless"] = all(near_tie(gap, BOTH_MOVE * rounding) for gap, rounding in moved)
    return Measured(
        samples_ns=[[sum(times.values()) for times in loop.rounds] for loop in loops],
        warmup_ns=warmup,
        load_ns=load_ns,
        n_evaluated=counted,
        checks=checks,
        series=series,
        valid=passed(checks),
    )


def _prompts(cell: Speculate, session: Session) -> list[list[np.ndarray]]:
    """Prompts by repetition and sequence, (depth,) int32 each: random, or excerpts of the text."""
    n = cell.repetitions * cell.n_seq
    if cell.text:
        excerpts = texts.excerpts(texts.read(cell.text), n, PROMPT_LINES)
        prompts = [session.tokenize(excerpt)[: cell.depth] for excerpt in excerpts]
    else:
        prompts = list(random_tokens(cell.seed, session.n_vocab, n, cell.depth))
    return [prompts[at : at + cell.n_seq] for at in range(0, n, cell.n_seq)]


def _drafts(
    cell: Speculate, session: Session, references: dict[int, Reference], smaller: list[Session]
) -> dict[int, Draft]:
    """Drafter of each sequence; a draft model can serve only one sequence."""
    if cell.drafter in ("lookup", "model"):
        return dict.fromkeys(references, speculation.by_model(smaller[0]) if smaller else speculation.lookup)
    drafts: dict[int, Draft] = {}
    for seq, reference in references.items():
        rng = np.random.default_rng([cell.seed, seq])
        if cell.drafter == "even":
            counts = speculation.evenly(cell.n_draft, rng)
        else:
            counts = speculation.accepted(cell.accepts, cell.n_draft, rng)
        drafts[seq] = speculation.forced(reference.tokens, counts, session.n_vocab)
    return drafts


def _explained(cell: Speculate, session: Session, reference: Reference, at: int, token: int) -> tuple[float, float]:
    """Gap between the logits of the reference's token and another one at a position, and the effect of rounding there.

    Rounding: the same tokens in calls of k + 1, without taking any back. Both relative to the largest logit.
    """
    expected, width = reference.expected(at), cell.n_draft + 1
    session.clear()
    session.set_state(0, reference.state, reference.n_prompt)
    for start in range(reference.n_prompt, at, width):
        rows = session.evaluate([(0, reference.tokens[start : start + width])], slice(None))[0]
    moved = np.abs(rows[(at - 1 - reference.n_prompt) % width] - expected).max()
    largest = np.abs(expected).max()
    return float((expected[reference.tokens[at]] - expected[token]) / largest), float(moved / largest)


def _alone(cell: Speculate, loop: Loop) -> dict[str, list[float]]:
    """Calls of 1 to k + 1 tokens in ns, equal lengths in a row, for which the engine keeps its graph.

    Of one sequence, and of drafts of one length: those whose rounds are compared with their parts.
    """
    if cell.n_seq > 1 or not cell.n_draft or cell.drafter not in ("", "even"):
        return {}
    lengths = range(1, cell.n_draft + 2)
    taken = [(float(n), [_call(loop, n) for _ in range(ALONE + 1)][1:]) for n in lengths]
    return {"columns": [n for n, ns in taken for _ in ns], "column ns": [each for _, ns in taken for each in ns]}


def _call(loop: Loop, n: int) -> float:
    """Nanoseconds of one verification of `n` tokens after each prompt."""
    loop.begin()
    call = {seq: each.tokens[each.n_prompt : each.n_prompt + n] for seq, each in loop.references.items()}
    start = clock()
    for logits in loop.verify(call).values():
        logits.argmax(axis=1)
    return float(clock() - start)


def _plain(cell: Speculate, session: Session, drafted: Loop) -> dict[str, list[float]]:
    """Times (ns) of plain decode steps on the same loaded weights, in a context that keeps no states for drafts."""
    plain = change(cell, n_draft=0, drafter="", draft="", accepts=0.0)
    with Session(session, config(plain, cell.n_seq, 0)) as steps:
        Loop(plain, steps, drafted.references, {}).run(WARM_ROUNDS)
        loop = Loop(plain, steps, drafted.references, {})
        loop.run(min(STEPS, cell.n_gen))
    drafted.error = max(drafted.error, loop.error)
    return {"plain ns": [float(sum(times.values())) for times in loop.rounds]}


RUNS = {Speculate: run}
