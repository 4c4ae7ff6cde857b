"""The recorded rows of a study: where they lie, how they become a frame, and how deep the oracle judged their files."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from llama_meter import journal
from llama_meter.cells import Gate
from llama_meter.errors import StudyError
from llama_meter.journal import LOCAL, OTHERS, REFERENCE, journal_path
from llama_meter.limits import DEEP_POSITIONS
from llama_meter.measure.tolerance import tolerance
from llama_meter.rows import Cell, Fact, Record, Row
from plamo_study.read import frame
from plamo_study.studies import registry

if TYPE_CHECKING:
    import pandas as pd

CUDA = "cuda"  # the build of `engine build` that is the released engine with this backend
ONE_MACHINE_S = ("your-machine",)  # studies whose recorded rows only their own page shows
File = tuple[str, str, tuple[str, ...], bool]  # its hash, the engine's commit, what that corrects, whether on a GPU


@dataclass(frozen=True)
class Recording:
    """The rows of one study at one scale, all of one machine, the facts they refer to, and their source.

    `left_out`: cells for which there was no time; `lacks`: why a live study has no rows at all.
    """

    rows: "pd.DataFrame"
    facts: dict[str, dict[str, Any]]
    study: str
    scale: str
    source: str
    left_out: tuple[Cell, ...] = ()
    lacks: str = ""


def records(study: str, source: str, scale: str) -> list[Record]:
    """The rows and facts of a study, as they were recorded or measured here."""
    return journal.read(journal_path(study, scale, LOCAL if source == "live" else REFERENCE))


def read(study: str, source: str, scale: str, device: str = "auto") -> Recording | None:
    """The rows of a study recorded here on the machine measured last; None where there are none.

    `device`: which of the live rows, as for `of_device`.
    """
    known = records(study, source, scale)
    rows = journal.latest_rows(known)
    rows = of_device(rows, device) if source == "live" else rows
    return of_rows(rows, known, study, source, scale) if rows else None


def recorded(study: str, scale: str) -> Recording:
    """The tracked rows of a study, at the scale at which a notebook of `scale` shows it.

    Raises StudyError where nothing is recorded.
    """
    at = registry.shown_at(study, scale)
    if (recording := read(study, "recorded", at)) is None:
        path = journal_path(study, at, REFERENCE)
        raise StudyError(str(path), "holds no rows", f"plamo-study measure {study} --scale {at}")
    return recording


def of_device(rows: Sequence[Row], device: str) -> list[Row]:
    """The rows that a page about a device shows: for "cpu", none of a GPU; for "gpu", all or, if no GPU ran one, none.

    Simulations ran on neither, and stay.
    """
    on_cpu = [row for row in rows if not getattr(row.cell, "n_gpu_layers", 0)]
    if device == "cpu":
        return on_cpu
    alone = len(on_cpu) == len(rows) and any(row.engine for row in rows)
    return [] if device == "gpu" and alone else list(rows)


def elsewhere(recording: Recording) -> list[Recording]:
    """The rows of the same study recorded here on other machines, a recording for each."""
    where = recording.study, recording.source, recording.scale
    known, shown = records(*where), set(recording.rows["machine"])
    return [of_rows(rows, known, *where) for machine, rows in by_machine(known).items() if machine not in shown]


def added(study: str, scale: str, board: str = "") -> list[Recording]:
    """The rows of a study in data/measured/others, a recording for each machine.

    `board`: only those of the first machine that has this GPU.
    """
    known = journal.read(journal_path(study, scale, OTHERS))
    recordings, facts = [], frame.facts(known)
    for machine, rows in by_machine(known).items():
        if not board or board in [gpu["chip"] for gpu in facts[machine].get("gpus", ())]:
            recordings.append(of_rows(rows, known, study, "live", scale))
    return [replace(each, rows=as_released(each.rows)) for each in recordings][: 1 if board else None]


def as_released(rows: "pd.DataFrame") -> "pd.DataFrame":
    """A frame in which the released engine has one name, whether its CUDA backend was installed or built beside it."""
    return rows.assign(build=rows["build"].replace(CUDA, frame.STOCK))


def by_machine(known: list[Record]) -> dict[str, list[Row]]:
    """The latest rows of a journal's records, apart by machine."""
    apart: dict[str, list[Row]] = {}
    for row in journal.latest_rows(known):
        apart.setdefault(row.machine, []).append(row)
    return apart


def of_rows(rows: Sequence[Row], known: list[Record], study: str, source: str, scale: str) -> Recording:
    """A recording of these rows of a journal's records, reduced to the machine measured last.

    Blocks, drifts and ratios of two machines must never mix.
    """
    facts, last = frame.facts(known), max(rows, key=lambda row: row.started).machine
    framed = frame.frame([row for row in rows if row.machine == last], facts)
    return Recording(judged(framed, facts, known, scale, source == "live"), facts, study, scale, source)


# ------------------------------------------------------------------ how deep files were judged


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

    @property
    def deepness(self) -> tuple[int, bool, float, float]:
        """What the deepest gate has most of; of equally deep ones that counts which judges parts, and more narrowly."""
        return self.tokens, bool(self.of_parts), -self.of_parts, -self.of_logits


def judged(
    rows: "pd.DataFrame", facts: Mapping[str, dict[str, Any]], known: Iterable[Record], scale: str, live: bool = False
) -> "pd.DataFrame":
    """`rows` with the columns judged, the tokens to which its file was judged on its build of the engine, and how.

    Gates of other studies and machines count, and the deepest one. `live`: gates that were measured here count too.
    """
    deepest: dict[File, Reach] = {}
    places = (REFERENCE, LOCAL)[: 1 + live]
    for held in (known, *(journal.read(journal_path("A-gates", scale, place)) for place in places)):
        for file, reached in _reached(list(held)):
            deepest[file] = max(reached, deepest.get(file, Reach()), key=lambda reach: reach.deepness)
    on_gpu = rows["n_gpu_layers"].fillna(0).ne(0)
    of_rows = [
        deepest.get(_file(facts[fact], facts[engine], gpu), Reach()) if fact and engine else Reach()
        for fact, engine, gpu in zip(rows["fact"], rows["engine"], on_gpu, strict=True)
    ]
    how = [
        f"{reached}{'' if reached.machine == machine else ', on another machine'}" if reached.tokens else ""
        for reached, machine in zip(of_rows, rows["machine"], strict=True)
    ]
    return rows.assign(judged=[reached.tokens for reached in of_rows], judged_how=how)


def reach(rows: "pd.DataFrame") -> "pd.Series":
    """The longest sequence of each row in tokens: what it starts from, what arrives, and what it generates."""
    parts = ("n_prompt", "depth", "n_ctx", "n_tokens", "n_gen", "n_arriving")
    return rows[[name for name in parts if name in rows]].fillna(0).astype(int).sum(axis=1)


def _reached(known: list[Record]) -> Iterable[tuple[File, Reach]]:
    """What the gates among some records judged, and how deep."""
    facts = {record.id: record.data for record in known if isinstance(record, Fact)}
    for row in known:
        if not isinstance(row, Row) or not isinstance(row.cell, Gate):
            continue
        if not row.valid or row.cell.judges == "consistent":
            continue
        gate, of_parts = row.cell, float(row.checks.get("parts_tolerance", 0))
        if gate.judges == "depth":
            reached = Reach(int(row.checks["judged_to"]), DEEP_POSITIONS, of_parts, machine=row.machine)
        else:
            of_logits = float(row.checks.get("tolerance") or tolerance(gate)) if not gate.judges else 0.0
            reached = Reach(gate.n_prompt, gate.n_prompt, of_parts, of_logits, row.machine)
        yield _file(facts[row.model], facts[row.engine], gate.n_gpu_layers != 0), reached


def _file(model: Mapping[str, Any], engine: Mapping[str, Any], on_gpu: bool) -> File:
    commit, corrects = str(engine.get("commit")).removesuffix("-dirty"), tuple(engine.get("corrects", ()))
    return str(model.get("sha256")), commit, corrects, on_gpu
