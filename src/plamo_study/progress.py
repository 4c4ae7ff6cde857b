"""What long work tells whoever watches: which step of how many. Nobody is told unless the command line listens."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Told = Callable[[int, int, str], None]
_listeners: list[Told] = []


def listen(told: Told) -> None:
    """From now on call `told(done, total, what)` at every step."""
    _listeners.append(told)


def tell(done: int, total: int, what: str) -> None:
    """Say how far the work is."""
    for told in _listeners:
        told(done, total, what)


def counted(items: Sequence[Item], what: str) -> Iterator[Item]:
    """The items, telling before each how many are done."""
    for done, item in enumerate(items):
        tell(done, len(items), what)
        yield item
    tell(len(items), len(items), what)
