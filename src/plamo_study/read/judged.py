"""To how many tokens the oracle judged the files of some rows, and how; gates of other studies and machines count."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from llama_meter import journal
from llama_meter.cells import Gate
from llama_meter.journal import LOCAL, REFERENCE
from llama_meter.limits import DEEP_POSITIONS
from llama_meter.measure.tolerance import tolerance
from llama_meter.rows import Fact, Record, Row

if TYPE_CHECKING:
    import pandas as pd

At = tuple[str, str, tuple[str, ...], bool]  # a file's hash, the engine's commit, what it corrects, whether on a GPU


class Reach(NamedTuple):
    """To how many tokens a gate judged a file, at how many positions, by which errors (0: not looked at), and where."""

    tokens: int = 0
    positions: int = 0
    of_parts: float = 0.0
    of_logits: float = 0.0
    machine: str = ""

    def __str__(self) -> str:
        """The gate in words."""
        limits = {"parts": self.of_parts, "logits": self.of_logits}
        within = " and ".join(f"{what} within {limit:.2g}" for what, limit in limits.items() if limit)
        return f"{self.tokens:,} tokens, {self.positions:,} positions, {within}"


def judged(
    rows: "pd.DataFrame", facts: Mapping[str, dict[str, Any]], records: Iterable[Record], scale: str, live: bool = False
) -> "pd.DataFrame":
    """`rows` with the columns judged, the tokens to which its file was judged on its build of the engine, and how.

    The deepest gate counts, and with equal depth that with the narrower limits. `live`: gates that were measured here
    count too.
    """
    known: dict[At, Reach] = {}
    for held in (_of(records), *(_of_gates(scale, place) for place in (REFERENCE, LOCAL)[: 1 + live])):
        known |= {at: _deeper(reach, known.get(at, Reach())) for at, reach in held.items()}
    on_gpu = rows["n_gpu_layers"].fillna(0).ne(0)
    reached = [
        known.get(_at(facts[fact], facts[engine], gpu), Reach()) if fact and engine else Reach()
        for fact, engine, gpu in zip(rows["fact"], rows["engine"], on_gpu, strict=True)
    ]
    how = [
        f"{reach}{'' if reach.machine == machine else ', on another machine'}" if reach.tokens else ""
        for reach, machine in zip(reached, rows["machine"], strict=True)
    ]
    return rows.assign(judged=[reach.tokens for reach in reached], judged_how=how)


def reach(rows: "pd.DataFrame") -> "pd.Series":
    """The longest sequence of each row in tokens: what it starts from, what arrives, and what it generates."""
    parts = ("n_prompt", "depth", "n_ctx", "n_tokens", "n_gen", "n_arriving")
    lengths = [rows[name].fillna(0).astype(int) for name in parts if name in rows]
    return sum(lengths[1:], lengths[0])


def _of(records: Iterable[Record]) -> dict[At, Reach]:
    records = list(records)
    facts = {record.id: record.data for record in records if isinstance(record, Fact)}
    known: dict[At, Reach] = {}
    for row in records:
        if isinstance(row, Row) and isinstance(row.cell, Gate) and row.valid and row.cell.judges != "consistent":
            at = _at(facts[row.model], facts[row.engine], row.cell.n_gpu_layers != 0)
            known[at] = _deeper(_reach(row, row.cell), known.get(at, Reach()))
    return known


def _reach(row: Row, gate: Gate) -> Reach:
    of_parts = float(row.checks.get("parts_tolerance", 0))
    if gate.judges == "depth":
        return Reach(int(row.checks["judged_to"]), DEEP_POSITIONS, of_parts, machine=row.machine)
    of_logits = float(row.checks.get("tolerance") or tolerance(gate)) if not gate.judges else 0.0
    return Reach(gate.n_prompt, gate.n_prompt, of_parts, of_logits, row.machine)


def _deeper(one: Reach, other: Reach) -> Reach:
    """The deeper of two; of equal ones that which judges parts."""
    return max(one, other, key=lambda reach: (reach.tokens, bool(reach.of_parts), -reach.of_parts, -reach.of_logits))


def _of_gates(scale: str, place: str) -> dict[At, Reach]:
    return _of(journal.read(journal.journal_path("A-gates", scale, place)))


def _at(model: Mapping[str, Any], engine: Mapping[str, Any], on_gpu: bool) -> At:
    commit, corrects = str(engine.get("commit")).removesuffix("-dirty"), tuple(engine.get("corrects", ()))
    return str(model.get("sha256")), commit, corrects, on_gpu
