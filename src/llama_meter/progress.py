"""Progress reports of long work: which step of how many. Without a listener, nothing is reported."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Told = Callable[[int, int, str], None]
_listeners: list[Told] = []


def listen(told: Told) -> None:
    """Call `told(done, total, what)` at every step from now on."""
    _listeners.append(told)


def tell(done: int, total: int, what: str) -> None:
    """Report progress to every listener."""
    for told in _listeners:
        told(done, total, what)


def counted(items: Sequence[Item], what: str) -> Iterator[Item]:
    """Yield the items, reporting before each how many are done."""
    for done, item in enumerate(items):
        tell(done, len(items), what)
        yield item
    tell(len(items), len(items), what)
