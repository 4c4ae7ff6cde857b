"""To how many tokens the oracle judged the files of some rows; the gates of other studies and machines count."""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from llama_meter import journal
from llama_meter.cells import Gate
from llama_meter.journal import REFERENCE
from llama_meter.rows import Fact, Record, Row

if TYPE_CHECKING:
    import pandas as pd

Judged = dict[tuple[str, str, tuple[str, ...]], int]  # by a file's hash, the engine's commit and what it corrects


def judged(
    rows: "pd.DataFrame", facts: Mapping[str, dict[str, Any]], records: Iterable[Record], scale: str
) -> list[int]:
    """For each row, the number of tokens to which its file was judged on its build of the engine; 0 for none."""
    known: Judged = {}
    for held in (_of(records), _of_gates(scale)):
        known |= {at: max(n, known.get(at, 0)) for at, n in held.items()}
    return [
        known.get(_at(facts[fact], facts[engine]), 0) if fact and engine else 0
        for fact, engine in zip(rows["fact"], rows["engine"], strict=True)
    ]


def reach(rows: "pd.DataFrame") -> "pd.Series":
    """The longest sequence of each row in tokens: what it starts from, what arrives, and what it generates."""
    lengths = [rows[name].fillna(0).astype(int) for name in ("n_prompt", "n_gen", "n_arriving") if name in rows]
    return sum(lengths[1:], lengths[0])


def _of(records: Iterable[Record]) -> Judged:
    records = list(records)
    facts = {record.id: record.data for record in records if isinstance(record, Fact)}
    known: Judged = {}
    for row in records:
        if isinstance(row, Row) and isinstance(row.cell, Gate) and row.valid and row.cell.judged != "consistent":
            at, n = (
                _at(facts[row.model], facts[row.engine]),
                row.cell.n_prompt + (row.cell.n_gen if "judged_to" in row.checks else 0),
            )
            known[at] = max(n, known.get(at, 0))
    return known


@cache
def _of_gates(scale: str) -> Judged:
    return _of(journal.read(journal.journal_path("00-gates", scale, REFERENCE)))


def _at(model: Mapping[str, Any], engine: Mapping[str, Any]) -> tuple[str, str, tuple[str, ...]]:
    return str(model.get("sha256")), str(engine.get("commit")).removesuffix("-dirty"), tuple(engine.get("corrects", ()))
