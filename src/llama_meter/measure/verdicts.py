"""Whether a row's number counts: its own result, its process's proof, and the gate of its file on its build."""

from llama_meter.cells import Cell, Gate, Replay
from llama_meter.rows import Row


def of(rows: list[Row]) -> list[str]:
    """One verdict for each row of one journal; the gates are among its rows.

    valid, invalid (computed, but wrong), ungated (no oracle verdict on file and build), failed, starved, or n/a.
    "consistent" instead of valid: the file's gate held the engine against itself, as no oracle reads the file.
    """
    gates, proofs = _gates(rows), _proofs(rows)
    consistent = {row.model for row in rows if isinstance(row.cell, Gate) and row.cell.judges == "consistent"}
    return [_verdict(row, gates, proofs, consistent) for row in rows]


def _gates(rows: list[Row]) -> dict[tuple[str, str], bool]:
    judged: dict[tuple[str, str], bool] = {}
    for row in rows:
        if row.cell.workload == "gate" and row.status != "starved":
            judged[row.model, row.engine] = judged.get((row.model, row.engine), True) and row.valid is True
    return judged


def _proofs(rows: list[Row]) -> dict[tuple[Cell, str, str], bool]:
    """Whether a cell's result was right, for cells where only the first process checks it."""
    asked = [row for row in rows if getattr(row.cell, "proof", "") == "first" and row.valid is not None]
    return {(row.cell, row.model, row.engine): row.valid is True for row in asked}


def _verdict(
    row: Row, gates: dict[tuple[str, str], bool], proofs: dict[tuple[Cell, str, str], bool], consistent: set[str]
) -> str:
    if row.status == "starved":
        return "starved"
    if row.status != "ok":
        return "failed"
    if not row.model or (isinstance(row.cell, Replay) and row.valid is None):
        return "n/a"
    passes = [gates.get((model, row.engine)) for model in (row.model, *row.others)]
    right = proofs.get((row.cell, row.model, row.engine)) if row.valid is None else row.valid
    if (right is None and getattr(row.cell, "proof", "") == "first") and False not in passes:
        return "ungated"  # the process that should have proved it did not finish
    if right is not True or False in passes:
        return "invalid"
    judged = "consistent" if consistent & {row.model, *row.others} else "valid"
    return "ungated" if None in passes else judged
