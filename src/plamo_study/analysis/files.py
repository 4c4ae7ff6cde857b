"""The file of each row of a frame, where a study measures a model in several types."""

from typing import Any

import pandas as pd

Facts = dict[str, dict[str, Any]]
Files = dict[tuple[str, str], dict[str, Any]]


def files(rows: pd.DataFrame, facts: Facts) -> Files:
    """The facts of every file the rows ran on, by (model as frames name it, type or recipe), the largest first.

    A journal may hold facts of an older file of the same name: the last one counts.
    """
    known = [fact for fact in facts.values() if "tensors" in fact]
    found = {(fact["name"] + ("*" if fact["assumptions"] else ""), fact["dtype"]): fact for fact in known}
    measured = set(zip(rows["model"], rows["dtype"], strict=True))
    chosen = {key: fact for key, fact in found.items() if key in measured}
    return dict(sorted(chosen.items(), key=lambda item: (item[0][0], -item[1]["file_bytes"])))
