"""Results computed once per frame: a page asks for the same table dozens of times.

Frames of rows and the results from them are never changed, only copied; callers get a shallow copy.
"""

import weakref
from collections.abc import Callable, Hashable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import pandas as pd

P = ParamSpec("P")
R = TypeVar("R")


def once_a_frame(function: Callable[P, R]) -> Callable[P, R]:
    """Cache a function's results by the identity of its first argument, one or several frames, while these live.

    Mappings among the other arguments are also compared by identity.
    """
    kept: dict[tuple[int, ...], dict[Hashable, Any]] = {}

    @wraps(function)
    def remembering(*given: P.args, **named: P.kwargs) -> R:
        frames = (given[0],) if isinstance(given[0], pd.DataFrame) else tuple(cast("Any", given[0]))
        ids, asked = tuple(map(id, frames)), (tuple(map(_told, given[1:])), tuple(sorted(named.items())))
        if ids not in kept:
            kept[ids] = {}
            for frame in frames:
                weakref.finalize(frame, kept.pop, ids, None)
        if asked not in kept[ids]:
            kept[ids][asked] = function(*given, **named), given[1:]  # kept alive, so that no other object gets their id
        return cast("R", _copied(kept[ids][asked][0]))

    return remembering


def _told(argument: Any) -> Hashable:
    return id(argument) if isinstance(argument, Mapping) else argument


def _copied(found: Any) -> Any:
    if isinstance(found, pd.DataFrame | pd.Series):
        return found.copy(deep=False)
    return {name: _copied(value) for name, value in found.items()} if isinstance(found, dict) else found
