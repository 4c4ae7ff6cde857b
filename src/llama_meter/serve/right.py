"""Are a server's answers right under load? The same prompts alone and at once, greedily; no reference, no model file.

Two questions in turn. *Identical*: copies of one prompt at once; their distinct answers are counted. *Different*:
several prompts at once, with other neighbours each time. Every answer is held against its prompt's answers alone.
Neither question does for the other: states exchanged between equal prompts change nothing, and some faults need them.

**Alone** every prompt is asked ALONE times, the others in between. If its answers differ then, by more than a near-tie,
the server samples, or answers strangers as well, and nothing can be told.

**Near-ties.** Batches of other shapes round differently. Where an answer parts from the one alone, the likeliest
token's lead over the second (nats, by the log probabilities alone) says whether rounding may have done it
(`measure/tolerance.py`). A type finer than BF16 moves it less than is allowed there (F16: 0.03). What was rounded in
earlier layers moves it too: the largest lead that it turned at a server known to be right was 0.012
(commit 53f8ee5). If most prompts part at near-ties, rounding is a poor explanation: cannot tell.

**Without log probabilities** repetition decides. Rounding chooses between two tokens, so a prompt parts in one way: at
one character, with one other character there. What depends on neighbours parts in several. Two prompts that part in
several ways each are wrong, and so is a server at which most prompts part; less than that is cannot tell. If rounding
turns one prompt of eight (probability 0.12), it turns five or more with probability 0.001, and two prompts in two ways
each, for which each needs two near-ties, with at most C(8, 2) * 0.12 ** 4 = 0.006.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np

from llama_meter import http
from llama_meter.measure.parting import Parting, parting
from llama_meter.measure.tolerance import NEAR_TIE
from llama_meter.serve import client, load, questions
from llama_meter.serve.client import Answer, Prompt, Target

PROMPTS, ALONE, ALONE_UNKNOWN = 8, 2, 3  # prompts; times each is asked alone, with log probabilities and without
TOGETHER, ROUNDS, COPIED = (4, 2), 6, 3  # different prompts at once; rounds of each; rounds of identical ones
TOKENS, CHARACTERS = 24, (600, 50)  # of an answer; of the first prompt, and more with each
TOP = 2  # likeliest tokens whose log probabilities are asked for
MOST = PROMPTS // 2  # prompts that rounding may turn
CACHED, LEAST_S = 0.2, 0.005  # share of the first answer's time in which no repeat is written; s that can be told apart
SEVERAL = 2  # prompts that part in several ways
DYING, DYING_S = 20, 0.5  # most requests to a server after all at once failed, until one finds none; s between them
Right = Literal["right", "wrong", "cannot tell"]


class Rightness(msgspec.Struct, frozen=True, kw_only=True):
    """Whether answers depend on neighbours; `prompts`: first differing token by number of each prompt that is affected.

    `misses`: what this verdict would miss or mistake. `compared` answers under load, `identical` of them beside copies
    of the same prompt, which got at most `distinct` answers at once; `other` differ where rounding cannot explain it,
    `near_ties` where it can, `unknown` where the server gives no log probabilities; `failed` did not end. `gap`: the
    largest lead (nats) at a near-tie.
    """

    verdict: Right
    why: str
    misses: str = ""
    compared: int = 0
    identical: int = 0
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
    return Rightness(verdict="cannot tell", why=why, misses=MISSED["cannot tell"])


def at_once(concurrency: int) -> tuple[int, ...]:
    """How many are asked at once, the most first: at least as many as the user's own requests."""
    return max(TOGETHER[0], concurrency), *TOGETHER[1:]


def most_requests(concurrency: int) -> int:
    """Most requests that both questions take: alone without log probabilities, after one try with them."""
    together = at_once(concurrency)
    return PROMPTS * (1 + ALONE_UNKNOWN) + ROUNDS * sum(together) + COPIED * together[0] + DYING


def most_prompt_tokens() -> int:
    """Tokens of the longest prompt, if a token has two characters or more."""
    first, more = CHARACTERS
    return (first + PROMPTS * more) // 2


def prompts() -> list[Prompt]:
    """The prompts, of different lengths and beginnings."""
    first, more = CHARACTERS
    return [questions.of_characters(PROMPTS, first + more * i, TOKENS, seed=1)[i] for i in range(PROMPTS)]


@dataclass
class Asked:
    """What came of the questions: answers alone by prompt, and answers under load with the number of their prompt.

    `n`: most that were asked at once. `gone`: how a request failed that was sent after all at once had failed; empty
    if it was answered.
    """

    alone: list[list[Answer]]
    n: int
    beside: list[tuple[int, Answer]] = field(default_factory=list)
    copies: list[tuple[int, list[Answer]]] = field(default_factory=list)
    gone: str = ""

    @property
    def compared(self) -> list[tuple[int, Answer]]:
        """All answers under load, each with the number of its prompt."""
        return [*self.beside, *((number, answer) for number, answers in self.copies for answer in answers)]


async def ask(web: http.Client, target: Target, concurrency: int, until: float, top: int = TOP) -> Rightness:
    """Ask both questions, the last one begun before `until` (time.monotonic), and judge; `top` 0: by repetition."""
    together, of_all = at_once(concurrency), prompts()
    alone = await _alone(web, target, of_all, top)
    if failed := [answer for answers in alone for answer in answers if answer.failure]:
        why = f"asked alone, {len(failed)} of {sum(map(len, alone))} failed: {failed[0].failure}"
        needed = f"; a slot needs some {most_prompt_tokens() + TOKENS:,} tokens for this" if failed[0].room else ""
        return unknown(why + needed)
    asked = Asked(alone, together[0])
    if not changing(alone):
        await _at_once(web, target, of_all, together, until, asked)
    return judged(asked)


async def _alone(web: http.Client, target: Target, of_all: Sequence[Prompt], top: int) -> list[list[Answer]]:
    first = [await client.ask(web, target, prompt, top=top) for prompt in of_all]
    if any(answer.failure for answer in first):  # perhaps it does not support log probabilities
        top = 0
        first = [await client.ask(web, target, prompt) for prompt in of_all]
        if any(answer.failure for answer in first):
            return [[answer] for answer in first]
    turns = [first]
    for _ in range((ALONE if _has_leads(first) else ALONE_UNKNOWN) - 1):
        turns.append([await client.ask(web, target, prompt, top=top) for prompt in of_all])
    if len(turns) < ALONE_UNKNOWN and changing(list(zip(*turns, strict=True))):  # once more: is only the first other?
        turns.append([await client.ask(web, target, prompt, top=top) for prompt in of_all])
    return [list(answers) for answers in zip(*turns, strict=True)]


async def _at_once(
    web: http.Client,
    target: Target,
    of_all: Sequence[Prompt],
    together: Sequence[int],
    until: float,
    asked: Asked,
) -> None:
    """Ask both questions in turn, with neighbours drawn anew each time; stop where all of a load fail."""
    draw = np.random.default_rng(1)
    for turn in range(ROUNDS):
        loads = [np.resize(draw.permutation(PROMPTS), n).tolist() for n in together]
        copied = [turn] * together[0] if turn < COPIED else []
        for numbers in [*loads, copied] if copied else loads:
            if time.monotonic() > until:
                return
            got = (await load.closed(web, target, [of_all[n] for n in numbers], len(numbers))).answers
            if numbers is copied:
                asked.copies.append((turn, got))
            else:
                asked.beside += zip(numbers, got, strict=True)
            if all(answer.failure for answer in got):
                asked.gone = await _gone(web, target, of_all[0], until)
                return


async def _gone(web: http.Client, target: Target, prompt: Prompt, until: float) -> str:
    """How a request fails that finds no server; empty if one answers, or something still holds its port.

    A process that aborts holds its port while the system writes its memory to disk.
    """
    for _ in range(DYING):
        after = await client.ask(web, target, prompt)
        if after.failure.startswith(http.UNREACHED):
            return after.failure
        if not after.failure or time.monotonic() > until:
            break
        await asyncio.sleep(DYING_S)
    return ""


def _has_leads(answers: Sequence[Answer]) -> bool:
    return all(any(gap == gap for gap in answer.gaps) for answer in answers)


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
        begun = answer.chunk_ns[0] if singly and answer.chunk_ns else answer.sent_ns
        return max(answer.ended_ns - begun, 0) / 1e9

    first = np.median([seconds(answers[0]) for answers in alone])
    repeat = np.median([min(map(seconds, answers[1:]), default=first) for answers in alone])
    return bool(first > LEAST_S and repeat < CACHED * first)


def _ways(alone: Sequence[Answer], answer: Answer) -> tuple[int, str]:
    """Where an answer parts from the one alone that it follows furthest (characters), and what stands there."""
    said = answer.text
    at = max(parting(reference.text, said).token for reference in alone)
    return at, said[at : at + 1]


def judged(asked: Asked) -> Rightness:
    """The verdict on answers alone and under load, by the rules of this module."""
    alone, compared = asked.alone, asked.compared
    counts = {"other": 0, "near_ties": 0, "unknown": 0}
    tokens: dict[int, int] = {}  # by prompt the first token that is no near-tie
    tied: dict[int, float] = {}
    ways: dict[int, set[tuple[int, str]]] = {}  # of prompts whose leads are not known
    for number, answer in compared:
        parted = _parted(alone[number], answer)
        if parted.verdict == "same":
            continue
        kind = "near_ties" if parted.verdict == "near-tie" else "other" if parted.lead >= 0 else "unknown"
        counts[kind] += 1
        if kind == "near_ties":
            tied[number] = max(parted.lead, tied.get(number, 0.0))
        else:
            tokens[number] = min(parted.token, tokens.get(number, parted.token))
        if kind == "unknown":
            ways.setdefault(number, set()).add(_ways(alone[number], answer))
    turned = sum(len(way) >= SEVERAL for way in ways.values()) >= SEVERAL or len(ways) > MOST
    if turned:
        counts = counts | {"other": counts["other"] + counts["unknown"], "unknown": 0}
    facts: dict[str, Any] = counts | {
        "compared": len(compared),
        "identical": sum(len(answers) for _, answers in asked.copies),
        "distinct": max((len({a.text for a in answers if not a.failure}) for _, answers in asked.copies), default=0),
        "failed": sum(bool(answer.failure) for _, answer in compared),
        "prompts": {str(number + 1): token for number, token in sorted(tokens.items())},
        "log_probabilities": _has_leads([answers[0] for answers in alone]),
        "gap": max(tied.values(), default=0.0),
    }
    verdict, why = _verdict(asked, facts, len(tied), len(ways))
    return Rightness(verdict=verdict, why=why, misses=_missed(verdict, asked, facts), **facts)


def _verdict(asked: Asked, facts: dict[str, Any], tied: int, unsure: int) -> tuple[Right, str]:
    n, failed = facts["compared"], [answer.failure for _, answer in asked.compared if answer.failure]
    if facts["other"]:
        which = " and ".join(facts["prompts"])
        why = f"{facts['other']} of {n} answers differ: prompt {which}, from token {min(facts['prompts'].values())}"
        return "wrong", why + (f"; then the server was gone ({failed[-1]})" if asked.gone else "")
    if asked.gone:
        return "wrong", f"asked alone it answered everything, asked together it was gone: {failed[-1]}"
    if changed := changing(asked.alone):
        if len(asked.alone[0]) > ALONE and not changing([answers[1:] for answers in asked.alone]):
            why = "get another answer cold than warm: first one, then always another, as a cache of prompts does it"
            return "cannot tell", f"{changed} of {PROMPTS} prompts {why}"
        return "cannot tell", f"{changed} of {PROMPTS} prompts get another answer alone: it samples, or has other users"
    if cached(asked.alone):
        why = "repeated prompts come back in a fraction of the first's time: a cache answers, and nothing is computed"
        return "cannot tell", why
    if unsure:
        why = f"{facts['unknown']} answers to {unsure} of {PROMPTS} prompts differ, which rounding may do"
        return "cannot tell", why + "; the server gives no log probabilities there"
    if failed:
        return "cannot tell", f"{len(failed)} of {n} failed: {failed[0]}"
    if not (asked.beside and asked.copies):
        return "cannot tell", "there was no time for both questions"
    if tied > MOST:
        return "cannot tell", f"{tied} of {PROMPTS} prompts part at near-ties, more than rounding should turn"
    if len(texts := {answers[0].text for answers in asked.alone}) == 1:
        same = "the same answer" if texts.pop() else "no text"
        return "cannot tell", f"all prompts get {same} alone, so that mixed ones would look right"
    near = f", {facts['near_ties']} but for a near-tie" if facts["near_ties"] else ""
    return "right", f"{n} answers given beside others are those given alone{near}"


MISSED: dict[Right, str] = {
    "right": "more than {n} at once, longer prompts or answers, what happens to fewer than one answer in {rare}, and "
    "whatever changes no likeliest token by more than {tie:g} nats",
    "wrong": "no fault, but take for one: rounding by more than {tie:g} nats, or strangers who came in between",
    "cannot tell": "everything: this is no verdict",
}


def _missed(verdict: Right, asked: Asked, facts: dict[str, Any]) -> str:
    """What a verdict would miss or mistake. None of n answers wrong bounds their share by 3 / n with 95 %."""
    said = MISSED[verdict].format(n=asked.n, rare=max(facts["compared"] // 3, 1), tie=NEAR_TIE)
    alike = PROMPTS - len({answers[0].text for answers in asked.alone})
    return said + (f"; {alike} of {PROMPTS} answers alone are repeated ones" if alike and verdict == "right" else "")
