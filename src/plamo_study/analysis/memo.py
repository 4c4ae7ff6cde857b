"""Results computed once per frame: a page of levers asks for the same table dozens of times.

Frames of rows and the results from them are never changed, only copied; callers get a shallow copy.
"""

import weakref
from collections.abc import Callable, Hashable, Mapping
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import pandas as pd

P = ParamSpec("P")
R = TypeVar("R")


def once_a_frame(function: Callable[Concatenate[pd.DataFrame, P], R]) -> Callable[Concatenate[pd.DataFrame, P], R]:
    """Cache a function's results by the identity of its first argument, a frame, while that lives.

    Mappings among the other arguments are also compared by identity.
    """
    kept: dict[int, dict[Hashable, Any]] = {}

    @wraps(function)
    def remembering(frame: pd.DataFrame, *given: P.args, **named: P.kwargs) -> R:
        asked = tuple(map(_told, given)), tuple(sorted(named.items()))
        if id(frame) not in kept:
            kept[id(frame)] = {}
            weakref.finalize(frame, kept.pop, id(frame), None)
        if asked not in kept[id(frame)]:  # the arguments are kept alive, so that no other object gets their id
            kept[id(frame)][asked] = function(frame, *given, **named), given
        found: R = _copied(kept[id(frame)][asked][0])
        return found

    return remembering


def _told(argument: Any) -> Hashable:
    return id(argument) if isinstance(argument, Mapping) else argument


def _copied(found: Any) -> Any:
    if isinstance(found, pd.DataFrame | pd.Series):
        return found.copy(deep=False)
    return {name: _copied(value) for name, value in found.items()} if isinstance(found, dict) else found
