"""Are a server's answers right under load? The same prompts alone and at once, greedily; no reference, no model file.

Two questions in turn. *Identical*: copies of one prompt at once. *Different*: several prompts at once, with other
neighbours each time. Every answer is held against its prompt's answers alone. Neither question
does for the other: states exchanged between equal prompts change nothing, and some faults need them.

**Alone** every prompt is asked ALONE times, the others in between. If its answers differ then, by more than a near-tie,
the server samples, has a cache of prompts, or answers strangers as well, and nothing can be told. Nor can it where
repeats return in a fraction of the first's time: they are read from a cache of answers.

**Near-ties.** Batches of other shapes round differently, and between two nearly equally likely tokens rounding decides
(`measure/tolerance.py`). A type finer than BF16 moves the lead less than is allowed there (F16: 0.03). What was rounded
in earlier layers moves it too: the largest lead that it turned at a server known to be right was 0.012 (commit
53f8ee5). If most prompts part at near-ties, rounding is a poor explanation: cannot tell.

**Without log probabilities** a server at which most prompts part is wrong, and less than that is cannot tell: if
rounding turns one prompt of eight (probability 0.12), it turns five or more with probability 0.001.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np

from llama_meter.measure.tolerance import Parting
from llama_meter.serve import client, load
from llama_meter.serve.client import Answer, Client, Prompt, Target

PROMPTS, ALONE = 8, 2  # prompts; times each is asked alone
TOGETHER, ROUNDS, COPIED = (4, 2), 6, 3  # different prompts at once; rounds of each; rounds of identical ones
TOKENS, CHARACTERS = 24, (600, 50)  # of an answer; of the first prompt, and more with each
TOP = 2  # likeliest tokens whose log probabilities are asked for
MOST = PROMPTS // 2  # prompts that rounding may turn
CACHED, LEAST_S = 0.2, 0.005  # share of the first answer's time in which no repeat is written; s that can be told apart
Right = Literal["right", "wrong", "cannot tell"]


class Rightness(msgspec.Struct, frozen=True, kw_only=True):
    """Whether answers depend on neighbours; `prompts`: first differing token by number of each prompt that is affected.

    `compared` answers under load; copies of one prompt at once got at most `distinct` answers; `other` differ where
    rounding cannot explain it, `near_ties` where it can, `unknown` where the server gives no log probabilities;
    `failed` did not end. `gap`: the largest lead (nats) at a near-tie.
    """

    verdict: Right
    why: str
    compared: int = 0
    distinct: int = 0
    other: int = 0
    near_ties: int = 0
    unknown: int = 0
    failed: int = 0
    prompts: dict[str, int] = {}
    log_probabilities: bool = False
    gap: float = 0.0


def unknown(why: str) -> Rightness:
    """The verdict where nothing was compared."""
    return Rightness(verdict="cannot tell", why=why)


def at_once(concurrency: int) -> tuple[int, ...]:
    """How many are asked at once, the most first: at least as many as the user's own requests."""
    return max(TOGETHER[0], concurrency), *TOGETHER[1:]


def prompts() -> list[Prompt]:
    """The prompts, of different lengths and beginnings."""
    first, more = CHARACTERS
    return [load.of_characters(PROMPTS, first + more * i, TOKENS, seed=1)[i] for i in range(PROMPTS)]


@dataclass
class Sample:
    """What came of the questions: answers alone by prompt, and answers under load with the number of their prompt.

    `gone`: how a request without neighbours failed after all of a load had; empty if it was answered.
    """

    alone: list[list[Answer]]
    beside: list[tuple[int, Answer]] = field(default_factory=list)
    copies: list[tuple[int, list[Answer]]] = field(default_factory=list)
    gone: str = ""

    @property
    def compared(self) -> list[tuple[int, Answer]]:
        """All answers under load, each with the number of its prompt."""
        return [*self.beside, *((number, answer) for number, answers in self.copies for answer in answers)]


async def ask(web: Client, target: Target, concurrency: int, until: float) -> Rightness:
    """Ask both questions, each load only if it ends by `until` (time.monotonic) when it takes as long as the last."""
    of_all = prompts()
    sample = Sample(await _alone(web, target, of_all))
    if failed := [answer for answers in sample.alone for answer in answers if answer.failure]:
        return unknown(f"asked alone, {len(failed)} of {sum(map(len, sample.alone))} failed: {failed[0].failure}")
    if not changing(sample.alone):
        await _at_once(web, target, of_all, at_once(concurrency), until, sample)
    return judged(sample)


async def _alone(web: Client, target: Target, of_all: Sequence[Prompt]) -> list[list[Answer]]:
    top = TOP
    turns = [[await client.ask(web, target, prompt, top=top) for prompt in of_all]]
    if any(answer.failure for answer in turns[0]):  # perhaps it does not support log probabilities
        top, turns = 0, []
    while len(turns) < ALONE:
        turns.append([await client.ask(web, target, prompt, top=top) for prompt in of_all])
    return [list(answers) for answers in zip(*turns, strict=True)]


async def _at_once(
    web: Client, target: Target, of_all: Sequence[Prompt], together: Sequence[int], until: float, sample: Sample
) -> None:
    """Ask both questions in turn, with neighbours drawn anew each time; stop where all of a load fail."""
    draw, spent = np.random.default_rng(1), 0.0
    for turn in range(ROUNDS):
        loads = [np.resize(draw.permutation(PROMPTS), n).tolist() for n in together]
        copied = [turn] * together[0] if turn < COPIED else []
        for numbers in [*loads, copied] if copied else loads:
            begin = time.monotonic()
            if begin + spent > until:
                return
            answers = (await load.closed(web, target, [of_all[n] for n in numbers], len(numbers))).answers
            spent = time.monotonic() - begin
            if numbers is copied:
                sample.copies.append((turn, answers))
            else:
                sample.beside += zip(numbers, answers, strict=True)
            if all(answer.failure for answer in answers):
                after = await client.ask(web, target, of_all[0])
                sample.gone = "" if after.status else after.failure
                return


def _parted(alone: Sequence[Answer], answer: Answer) -> Parting:
    """Where an answer parts from the one alone that it follows furthest; nowhere if it is one of them."""
    partings = [client.parted(reference, answer) for reference in alone]
    return min(partings, key=lambda parted: (parted.verdict != "same", -parted.token))


def changing(alone: Sequence[Sequence[Answer]]) -> int:
    """How many prompts get answers alone that differ by more than a near-tie."""
    return sum(any(client.parted(answers[0], answer).verdict == "other" for answer in answers[1:]) for answers in alone)


def cached(alone: Sequence[Sequence[Answer]]) -> bool:
    """Whether repeats are read from a cache of answers: nobody writes them in so small a part of the first's time.

    Where tokens come one by one, only the time from the first to the last counts: a cache of prompts does not save it.
    """
    singly = all(len(answers[0].chunk_ns) > 1 for answers in alone)

    def seconds(answer: Answer) -> float:
        return (answer.ended_ns - (answer.chunk_ns[0] if singly and answer.chunk_ns else answer.sent_ns)) / 1e9

    first = np.median([seconds(answers[0]) for answers in alone])
    repeat = np.median([min(map(seconds, answers[1:])) for answers in alone])
    return bool(first > LEAST_S and repeat < CACHED * first)


def judged(sample: Sample) -> Rightness:
    """The verdict on answers alone and under load, by the rules of this module."""
    counts = {"other": 0, "near_ties": 0, "unknown": 0}
    tokens: dict[int, int] = {}  # by prompt the first token that is no near-tie
    tied: dict[int, float] = {}
    unsure = set()  # prompts whose leads are not known
    for number, answer in sample.compared:
        parted = _parted(sample.alone[number], answer)
        if parted.verdict == "near-tie":
            counts["near_ties"] += 1
            tied[number] = max(parted.lead, tied.get(number, 0.0))
        elif parted.verdict == "other":
            tokens[number] = min(parted.token, tokens.get(number, parted.token))
            counts["other" if parted.lead >= 0 else "unknown"] += 1
            unsure |= set() if parted.lead >= 0 else {number}
    if len(unsure) > MOST:
        counts |= {"other": counts["other"] + counts["unknown"], "unknown": 0}
    facts: dict[str, Any] = counts | {
        "compared": len(sample.compared),
        "distinct": max((len({a.text for a in answers if not a.failure}) for _, answers in sample.copies), default=0),
        "failed": sum(bool(answer.failure) for _, answer in sample.compared),
        "prompts": {str(number + 1): token for number, token in sorted(tokens.items())},
        "log_probabilities": all(any(gap == gap for gap in answers[0].gaps) for answers in sample.alone),
        "gap": max(tied.values(), default=0.0),
    }
    verdict, why = _verdict(sample, facts, len(tied), len(unsure))
    return Rightness(verdict=verdict, why=why, **facts)


def _verdict(sample: Sample, facts: dict[str, Any], tied: int, unsure: int) -> tuple[Right, str]:
    n, failed = facts["compared"], [answer.failure for _, answer in sample.compared if answer.failure]
    alone = {answers[0].text for answers in sample.alone}
    if facts["other"]:
        which = " and ".join(facts["prompts"])
        return (
            "wrong",
            f"{facts['other']} of {n} answers differ: prompt {which}, from token {min(facts['prompts'].values())}",
        )
    if sample.gone:
        return "wrong", f"asked alone it answered everything, asked together it was gone: {failed[-1]}"
    if changed := changing(sample.alone):
        why = "get another answer alone: it samples, has a cache of prompts, or other users"
        return "cannot tell", f"{changed} of {PROMPTS} prompts {why}"
    if cached(sample.alone):
        why = "repeated prompts come back in a fraction of the first's time: a cache answers, and nothing is computed"
        return "cannot tell", why
    if unsure:
        why = f"{facts['unknown']} answers to {unsure} of {PROMPTS} prompts differ, which rounding may do"
        return "cannot tell", why + "; the server gives no log probabilities there"
    if failed:
        return "cannot tell", f"{len(failed)} of {n} failed: {failed[0]}"
    if not (sample.beside and sample.copies):
        return "cannot tell", "there was no time for both questions"
    if tied > MOST:
        return "cannot tell", f"{tied} of {PROMPTS} prompts part at near-ties, more than rounding should turn"
    if len(alone) == 1:
        return "cannot tell", "all prompts get the same answer alone, so that mixed ones would look right"
    near = f", {facts['near_ties']} but for a near-tie" if facts["near_ties"] else ""
    return "right", f"{n} answers given beside others are those given alone{near}"
