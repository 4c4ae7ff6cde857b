"""What a plan asks for, task by task: its gates, its shuffled blocks, and the anchors between them."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from llama_meter.cells import Cell, File
from llama_meter.limits import LEAST_BLOCKS
from llama_meter.measure.plan import Plan

REPEAT = 1000  # added to the replicate of repeated measurements and of further anchors
HANDFUL = 8  # cells that are not timed


@dataclass(frozen=True)
class Task:
    """A cell at its place in the sweep."""

    cell: Cell
    replicate: int
    block: int
    order: int
    anchor: bool = False
    engine: str = ""  # folder of a build other than the one in use

    @property
    def repeated(self) -> "Task":
        """Its next repeat: the same cell and block, as a new replicate."""
        return replace(self, replicate=self.replicate + REPEAT, order=self.order + REPEAT)


@dataclass(frozen=True)
class Tasks:
    """The tasks of a plan; `beside`: folders of the other builds that measure what it compares."""

    plan: Plan
    beside: Sequence[str]

    def gates(self, files: set[File] | None = None) -> list[Task]:
        """The gates of these files, by default of all; for other builds, those of the compared files."""
        gates = [(n, gate) for n, gate in enumerate(self.plan.gates) if files is None or files.issuperset(gate.files)]
        compared = {file for cell in self.plan.compared for file in cell.files}
        other = [(n, gate) for n, gate in gates if compared.issuperset(gate.files)]
        tasks = [Task(gate, 0, -1, n) for n, gate in gates]
        return tasks + [Task(gate, 0, -1, n, engine=folder) for folder in self.beside for n, gate in other]

    def anchors(self, number: int) -> list[Task]:
        """The anchor before a block, in as many processes as the plan says."""
        cell, replicates = self.plan.anchor, range(number, number + REPEAT * self.plan.anchors, REPEAT)
        return [Task(cell, n, number, 0, anchor=True) for n in replicates] if cell else []

    def shuffled(self, number: int, cells: Sequence[Cell]) -> list[Task]:
        """These cells in a block's own order; the builds of a cell follow one another, since they are compared."""
        order = random.Random(f"{self.plan.seed}/{number}")
        mixed = [(cell, self.builds(cell)) for cell in order.sample(cells, len(cells))]
        tasks = [(cell, folder) for cell, folders in mixed for folder in order.sample(folders, len(folders))]
        return [Task(cell, number, number, n + 1, engine=folder) for n, (cell, folder) in enumerate(tasks)]

    def block(self, number: int) -> list[Task]:
        """A whole block: anchors, then cells; gates before the first."""
        return (self.gates() if number == 0 else []) + self.anchors(number) + self.shuffled(number, self.plan.cells)

    def builds(self, cell: Cell) -> list[str]:
        """The builds that measure a cell."""
        return ["", *(self.beside if cell in self.plan.compared else ())]

    def needed(self) -> list[Task]:
        """The tasks that the finding needs: gates, and the least blocks of the needed cells."""
        gates = [Task(gate, 0, -1, self.plan.gates.index(gate)) for gate in needed_gates(self.plan)]
        cells = self.plan.cells[: self.plan.needed]
        return gates + [Task(cell, n, n, 0) for n in range(least_blocks(self.plan)) for cell in cells]


def least_blocks(plan: Plan) -> int:
    """The blocks that any statement about a plan's cells needs."""
    return min(plan.blocks, LEAST_BLOCKS)


def needed_gates(plan: Plan) -> list[Cell]:
    """The gates of the files that a plan's needed cells run on."""
    files: set[File] = {file for cell in plan.cells[: plan.needed] for file in cell.files}
    return [gate for gate in plan.gates if files.issuperset(gate.files)]


def together(cells: Sequence[Cell]) -> Iterator[tuple[Cell, ...]]:
    """Cells in order: singly where they are timed, else in groups that can run side by side."""
    for timed, group in groupby(cells, key=lambda cell: cell.is_timed):
        alike = tuple(group)
        size = 1 if timed else HANDFUL
        yield from (alike[start : start + size] for start in range(0, len(alike), size))
