"""What the next call does: whether those being answered get a token in it, and how much of the next prompt it reads.

A policy sees a `Queue` and answers (decode, chunk). Prompts come in order of arrival, one in a call: several would mix
up PLaMo 2's sequences in the stock engine. The same functions drive the simulated clock and the real engine.
"""

from collections.abc import Callable
from dataclasses import dataclass

from plamo_study.errors import StudyError


@dataclass(slots=True)
class Queue:
    """What a policy may look at before a call."""

    left: int = 0  # tokens still to read of the prompt whose turn it is; 0: none, or there is no room for it
    decoding: int = 0  # sequences being answered
    slots: int = 1  # sequences there is room for
    last: float = 0.0  # seconds of the call before
    chunk: int = 0  # prompt tokens in the call before


WHOLE = 1 << 62
CUTS = ("chunked", "apart", "decode first")  # the number is a size
Step = tuple[bool, int]
Policy = Callable[[Queue], Step]


def one_at_a_time(queue: Queue) -> Step:
    """First come, first served: a prompt is read when nobody else is being answered."""
    return True, 0 if queue.decoding else queue.left


def shared(queue: Queue) -> Step:
    """The whole prompt in the next call, together with everybody's next token."""
    return True, queue.left


def prefill_first(queue: Queue) -> Step:
    """The whole prompt in a call of its own, as soon as there is room; everybody else waits."""
    return not queue.left, queue.left


def chunked(size: int) -> Policy:
    """At most `size` tokens of the prompt in every call, together with everybody's next token."""
    return lambda queue: (True, min(size, queue.left))


def apart(size: int) -> Policy:
    """At most `size` tokens of the prompt in a call of their own, then a token for everybody."""

    def step(queue: Queue) -> Step:
        due = queue.left and not (queue.decoding and queue.chunk)
        return not due, min(size, queue.left) if due else 0

    return step


def decode_first(size: int) -> Policy:
    """Those being answered come first: chunks are read only while at most half of the slots are."""
    return lambda queue: (True, min(size, queue.left) if queue.decoding <= queue.slots // 2 else 0)


def static() -> Policy:
    """Read prompts until all slots are taken or nobody waits, then answer all of them to the end."""
    filling = True

    def step(queue: Queue) -> Step:
        nonlocal filling
        filling = bool(queue.left) and (filling or not queue.decoding)
        return not filling, queue.left if filling else 0

    return step


def budget(milliseconds: float, least: int = 16, most: int = 512) -> Policy:
    """Chunks as large as keep a call under so many milliseconds: halved after a call beyond, doubled below half."""
    size, limit = least, milliseconds / 1e3

    def step(queue: Queue) -> Step:
        nonlocal size
        if queue.chunk == size and queue.last < limit / 2:
            size = min(2 * size, most)
        elif queue.chunk and queue.last > limit:
            size = max(size // 2, least)
        return True, min(size, queue.left)

    return step


def named(name: str) -> Policy:
    """A fresh policy by its name: a word or two, and a number where it takes one.

    Raises StudyError for a name that is no policy's.
    """
    words, _, number = name.rpartition(" ")
    if name in PLAIN:
        return PLAIN[name]()
    if words in SIZED and number.isdecimal() and int(number) > 0:
        return SIZED[words](int(number))
    known = ", ".join([*PLAIN, *(f"{sized} N" for sized in SIZED)])
    raise StudyError(f"policy {name!r}", f"unknown; known: {known}", "choose one of them")


def chunk(name: str) -> int:
    """Tokens of a prompt that a policy of this name reads in a call at most; whole prompts where it names no size."""
    words, _, number = name.rpartition(" ")
    return int(number) if words in CUTS else WHOLE


PLAIN: dict[str, Callable[[], Policy]] = {
    "one at a time": lambda: one_at_a_time,
    "static batches": static,
    "shared": lambda: shared,
    "prefill first": lambda: prefill_first,
}
SIZED: dict[str, Callable[[int], Policy]] = {
    "chunked": chunked,
    "apart": apart,
    "decode first": decode_first,
    "budget": budget,
}
