"""Scheduling policies: whether the next call decodes a token for running answers, and how much of a prompt it reads.

A policy maps a `Queue` to (decode, chunk). Prompts come in order of arrival, one per call: several would mix
up PLaMo 2's sequences in the stock engine. The same functions drive the simulated clock and the real engine.
"""

from collections.abc import Callable
from dataclasses import dataclass

from llama_meter.errors import StudyError


@dataclass(slots=True)
class Queue:
    """State that a policy may use before a call."""

    left: int = 0  # tokens still to read of the next prompt; 0: no prompt, or no room for it
    decoding: int = 0  # sequences being answered
    slots: int = 1  # sequences that fit


WHOLE = 1 << 62
CUTS = ("chunked", "decode first")  # policies whose number is a chunk size
Step = tuple[bool, int]
Policy = Callable[[Queue], Step]


def one_at_a_time(queue: Queue) -> Step:
    """First come, first served: a prompt is read when no other request is being answered."""
    return True, 0 if queue.decoding else queue.left


def shared(queue: Queue) -> Step:
    """The whole prompt in the next call, together with every running answer's next token."""
    return True, queue.left


def chunked(size: int) -> Policy:
    """At most `size` tokens of the prompt in every call, together with every running answer's next token."""
    return lambda queue: (True, min(size, queue.left))


def decode_first(size: int) -> Policy:
    """Running answers come first: chunks are read only while at most half of the slots decode."""
    return lambda queue: (True, min(size, queue.left) if queue.decoding <= queue.slots // 2 else 0)


def named(name: str) -> Policy:
    """A new policy by its name, followed by a number if the policy takes one.

    Raises StudyError for an unknown name.
    """
    words, _, number = name.rpartition(" ")
    if name in PLAIN:
        return PLAIN[name]()
    if words in SIZED and number.isdecimal() and int(number) > 0:
        return SIZED[words](int(number))
    names = ", ".join([*PLAIN, *(f"{sized} N" for sized in SIZED)])
    raise StudyError(f"policy {name!r}", f"unknown; known: {names}", "choose one of them")


def chunk(name: str) -> int:
    """Most prompt tokens per call of a policy by its name; WHOLE if it has no chunk size."""
    words, _, number = name.rpartition(" ")
    return int(number) if words in CUTS else WHOLE


PLAIN: dict[str, Callable[[], Policy]] = {
    "one at a time": lambda: one_at_a_time,
    "shared": lambda: shared,
}
SIZED: dict[str, Callable[[int], Policy]] = {
    "chunked": chunked,
    "decode first": decode_first,
}
