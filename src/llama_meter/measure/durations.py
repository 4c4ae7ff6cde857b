"""Expected durations of cells: as measured here before, else on the reference machine, else for similar cells.

Times of the reference machine are scaled by the relative speed of this one: in what it has measured so far, else in a
probe of its ceilings. This is the one clock: sweeps, shares of minutes and forecasts read it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from statistics import median
from typing import TypeVar

import msgspec

from llama_meter import journal, paths
from llama_meter.cells import Cell, Decode, File, Gate, MatMul, OnModel, Prefill, Read
from llama_meter.errors import StudyError
from llama_meter.limits import LEAST_BLOCKS
from llama_meter.measure import machine
from llama_meter.measure.plan import Plan
from llama_meter.models import given, recipes
from llama_meter.models.registry import GIVEN
from llama_meter.rows import Measured, Row

USUAL_S = {"mini": 0.5, "shape": 12.0}  # of an unknown cell
USUAL_GATE_S = {"mini": 1.0, "shape": 60.0}
USUAL_PARTS_S = {"mini": 1.0, "shape": 20.0}  # of a gate that judges parts only
USUAL_BYTES = 1.5e9  # of a file at shape: a given one takes as much more or less as it is larger or smaller
WORKER_BYTES = 1 << 28  # of a process without its model
ORACLE_TIMES = 2  # multiple of a model's file in memory: the engine's pages, and the weights in the oracle at a time
Gated = tuple[str, int]  # model, and tokens that its oracle sees
K = TypeVar("K")


class Durations:
    """Expected seconds of a plan's cells.

    `own`: what cells took here, which may grow meanwhile. `pace`: time here over that on the reference machine, while
    nothing that was measured here says it.
    """

    def __init__(self, plan: Plan, own: Mapping[Cell, float], pace: float = 1.0):
        self.plan, self.own, self.pace = plan, own, pace

    def seconds(self, cell: Cell) -> float:
        """Wall time of one process, in seconds."""
        if cell in self.own:
            return self.own[cell]
        there, pace = self._there(cell), self._pace()
        if there is not None:
            return pace * there
        usual = USUAL_S if not isinstance(cell, Gate) else USUAL_PARTS_S if cell.judges else USUAL_GATE_S
        if self.plan.scale != GIVEN:
            return pace * usual[self.plan.scale]
        n_bytes = sum(given.FILES[file].n_bytes for file in cell.files) if cell.files else USUAL_BYTES
        return pace * (usual["mini"] + (usual["shape"] - usual["mini"]) * n_bytes / USUAL_BYTES)

    def least(self) -> tuple[float, float]:
        """Seconds that a finding needs: for its gates, and for the least blocks of its cells with their anchors."""
        gates, (blocks, anchors) = needed_gates(self.plan), least_blocks(self.plan)
        anchor = [self.plan.anchor] * anchors if self.plan.anchor else []
        timed = [*self.plan.cells[: self.plan.needed] * blocks, *anchor]
        return self._sum(gates), self._sum(timed)

    def lacking(self, had: Mapping[Cell, int]) -> float:
        """Seconds of all gates and blocks with their anchors, but for the processes that there are of each cell."""
        plan = self.plan
        wanted = Counter([*plan.gates, *plan.cells * plan.blocks])
        if plan.anchor:
            wanted[plan.anchor] += (plan.blocks + 1) * plan.anchors
        todo = (wanted - Counter(had)).items()
        return sum(n * self.seconds(cell) / at_once(cell) for cell, n in todo)

    def _sum(self, cells: Iterable[Cell]) -> float:
        return sum(self.seconds(cell) / at_once(cell) for cell in cells)

    def _there(self, cell: Cell) -> float | None:
        cells, gates, _ = _recorded(paths.MEASURED / "reference", _of_files(self.plan.scale))
        duration = cells.get(_alike(cell))
        return gates.get((cell.model, cell.n_prompt)) if duration is None and isinstance(cell, Gate) else duration

    def _pace(self) -> float:
        """Time here relative to the reference machine."""
        ratios = [took / there for cell, took in list(self.own.items()) if (there := self._there(cell))]
        return median(ratios) if ratios else self.pace


def lasts(plan: Plan, rows: Iterable[Row] = (), pace: float = 1.0) -> float:
    """Seconds that a plan still takes here, as long as all its blocks take; `rows`: those of this machine."""
    ended = [row for row in rows if row.status == "ok"]
    own = {row.cell: row.elapsed_ns / 1e9 for row in ended}
    return Durations(plan, own, pace).lacking(Counter(row.cell for row in ended))


def rate(measured: Measured | Row) -> float:
    """Bytes or FLOP a second of a ceiling, by the median of its samples."""
    return (measured.n_bytes or measured.n_flops) * 1e9 / median(sample[0] for sample in measured.samples_ns)


def pace(scale: str, probed: Mapping[Cell, float]) -> float:
    """Time here over that on the reference machine, by rates of ceilings; 1.0 where it has none of them.

    A process reads and multiplies, so its pace lies between the two: the slower one never promises too much.
    """
    _, _, rates = _recorded(paths.MEASURED / "reference", _of_files(scale))
    return max((there / here for cell, here in probed.items() if (there := rates.get(_alike(cell)))), default=1.0)


def least_blocks(plan: Plan) -> tuple[int, int]:
    """The least blocks of a plan, and the number of anchor processes around them."""
    blocks = min(plan.blocks, LEAST_BLOCKS)
    return blocks, (blocks + 1) * plan.anchors


def needed_gates(plan: Plan) -> list[Cell]:
    """The gates of the files that a plan's needed cells run on."""
    files: set[File] = {file for cell in plan.cells[: plan.needed] for file in cell.files}
    return [gate for gate in plan.gates if files.issuperset(gate.files)]


def at_once(cell: Cell) -> int:
    """How many such cells run side by side: timed ones run alone, others as cores and memory allow."""
    if cell.is_timed:
        return 1
    sizes = [path.stat().st_size for file in cell.files if (path := recipes.model_path(*file)).exists()]
    return machine.at_once(cell.n_threads, WORKER_BYTES + ORACLE_TIMES * sum(sizes))


def _of_files(scale: str) -> str:
    """Given files are as large as those with random weights."""
    return "shape" if scale == GIVEN else scale


@cache  # reads all journals of the reference machine
def _recorded(folder: Path, scale: str) -> tuple[dict[Cell, float], dict[Gated, float], dict[Cell, float]]:
    """Medians of a folder's journals: seconds of cells, those of gates by model and tokens, and rates of ceilings."""
    cells: dict[Cell, list[float]] = {}
    gates: dict[Gated, list[float]] = {}
    rates: dict[Cell, list[float]] = {}
    for path in journal.journals(folder, scale):
        with suppress(StudyError):  # a damaged journal adds nothing; its own study reports it
            for row in journal.latest_rows(journal.read(path)):
                _note(row, cells, gates, rates)
    return _medians(cells), _medians(gates), _medians(rates)


def _medians(samples: Mapping[K, list[float]]) -> dict[K, float]:
    return {key: median(values) for key, values in samples.items()}


def _note(
    row: Row, cells: dict[Cell, list[float]], gates: dict[Gated, list[float]], rates: dict[Cell, list[float]]
) -> None:
    if row.status == "ok":
        cells.setdefault(_alike(row.cell), []).append(row.elapsed_ns / 1e9)
        if isinstance(row.cell, Gate):
            gates.setdefault((row.cell.model, row.cell.n_prompt), []).append(row.elapsed_ns / 1e9)
        if isinstance(row.cell, Read | MatMul) and row.samples_ns:
            rates.setdefault(_alike(row.cell), []).append(rate(row))


def _alike(cell: Cell) -> Cell:
    """A cell without the fields that depend on the machine."""
    changes: dict[str, object] = {"n_threads": 1}
    if isinstance(cell, OnModel):
        changes["scale"] = _of_files(cell.scale)
    if isinstance(cell, Prefill | Decode):
        changes["proof"] = ""
    if isinstance(cell, Read):
        changes["array_bytes"] = 0
    return msgspec.structs.replace(cell, **changes)
