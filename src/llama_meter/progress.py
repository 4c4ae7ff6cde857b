"""Progress reports of long work: which step of how many. Without a listener, nothing is reported."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Listener = Callable[[int, int, str], None]
_listeners: list[Listener] = []


def listen(listener: Listener) -> None:
    """Call `listener(done, total, what)` at every step from now on."""
    _listeners.append(listener)


def tell(done: int, total: int, what: str) -> None:
    """Report progress to every listener."""
    for listener in _listeners:
        listener(done, total, what)


def counted(items: Sequence[Item], what: str) -> Iterator[Item]:
    """Yield the items, reporting before each how many are done."""
    for done, item in enumerate(items):
        tell(done, len(items), what)
        yield item
    tell(len(items), len(items), what)
