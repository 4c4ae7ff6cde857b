"""The sweep: randomised blocks of cells, an anchor between them, one process a cell, resumed where it stopped."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import psutil

from plamo_study.errors import StudyError
from plamo_study.limits import DRIFT_LIMIT
from plamo_study.measure import machine, watch
from plamo_study.measure.cells import Cell, Decode, OnEngine, Prefill, Replay
from plamo_study.measure.files import model_fact
from plamo_study.measure.frame import drift_by_block
from plamo_study.measure.journal import Journal, latest_rows
from plamo_study.measure.plan import Plan
from plamo_study.measure.process import Outcome, work
from plamo_study.measure.rows import SCHEMA, Conditions, Fact, Results, Row, content_id, row_key
from plamo_study.measure.worker import Job
from plamo_study.models import registry

START_LIMIT_S = 60.0
CALM_S = 15.0  # a sweep waits so long for a calm machine before it measures disturbed rows again
REPEAT = 1000  # added to the replicate of what is measured again, and of further anchors
STARVED_REPEATS = 2


@dataclass(frozen=True)
class Task:
    """A cell at its place in the sweep."""

    cell: Cell
    replicate: int
    block: int
    order: int
    anchor: bool = False
    engine: str = ""  # folder of another build than the one in use


@dataclass(frozen=True)
class Progress:
    """What the sweep is about to do, or has just done (`row`), and the seconds it expects to need still."""

    done: int
    total: int
    task: Task
    row: Row | None
    remaining_s: float


@dataclass(frozen=True)
class Summary:
    """The rows of a sweep's plan, and how many of them were measured by this call."""

    rows: list[Row]
    measured: int

    @property
    def failed(self) -> list[Row]:
        """Rows that did not end well, or whose computation was wrong; starved ones only where no repeat ended well."""
        ended = {(row.cell, row.engine, row.block) for row in self.rows if row.status != "starved"}
        failed = [row for row in self.rows if row.status != "ok" or row.valid is False]
        return [r for r in failed if r.status != "starved" or (r.cell, r.engine, r.block) not in ended]

    @property
    def unexpected(self) -> list[Row]:
        """Those of them that are not the answer to what their cell asks."""
        return [row for row in self.failed if not asks_whether(row.cell)]


OnProgress = Callable[[Progress], None]


def sweep(
    plan: Plan,
    journal_path: Path,
    on_progress: OnProgress | None = None,
    retry_failed: bool = False,
    beside: Sequence[Path] = (),
) -> Summary:
    """Measure what the journal lacks of `plan`. A worker that crashes or hangs is a row, and the sweep goes on.

    `beside`: folders of other builds, which measure `plan.compared` in the same blocks.

    Rows that something disturbed are measured again as further replicates of their block, when the machine is calm
    again or the sweep ends; blocks that drifted are followed by fresh ones. Both together take no more than
    `plan.extra_blocks` blocks' worth of rows, starved rows apart, which have two more attempts each.
    """
    with Journal(journal_path) as journal, machine.awake():
        run = _Sweep(plan, journal, on_progress, retry_failed, [str(folder.resolve()) for folder in beside])
        run.blocks(range(plan.blocks))
        run.again()
        for extra in range(plan.blocks, plan.blocks + plan.extra_blocks):
            if run.unmarked_blocks(extra) >= plan.blocks or run.budget() < run.per_block:
                break
            run.blocks([extra])
        return Summary(run.rows(), run.measured)


class _Sweep:
    def __init__(
        self, plan: Plan, journal: Journal, on_progress: OnProgress | None, retry_failed: bool, beside: list[str]
    ):
        self.plan, self.journal, self.tell, self.measured = plan, journal, on_progress, 0
        self.beside = beside
        needed = any(isinstance(cell, OnEngine) for cell in plan.asked)
        asked = {folder: _asked(folder) for folder in ("", *beside)} if needed else {}
        self.engines = {folder: self._add_fact("engine", facts) for folder, (facts, _) in asked.items()}
        gpus = next((gpus for _, gpus in asked.values() if gpus), [])
        self.machine = self._add_fact("machine", machine.facts() | ({"gpus": gpus} if gpus else {}))
        files = dict.fromkeys(file for cell in plan.asked for file in cell.files)
        self.models = {file: self._add_fact("model", model_fact(*file)) for file in files}
        self.done = {row.key: row for row in latest_rows(journal.records) if row.status == "ok" or not retry_failed}
        self.seconds: dict[Cell, float] = {row.cell: row.elapsed_ns / 1e9 for row in self.done.values()}
        self.tasks: list[Task] = []
        self.per_block = len(plan.cells) + len(beside) * len(plan.compared)

    def blocks(self, numbers: range | list[int]) -> None:
        """Measure these blocks: gates before the first, anchors before each and after the last.

        What was disturbed is measured again at the end of a block in which the machine is calm.
        """
        todo = [task for number in numbers for task in self._block(number)]
        todo += self._anchors(numbers[-1] + 1)
        self.tasks += [task for task in todo if task not in self.tasks]
        for index, task in enumerate(todo):
            if self._key(task) not in self.done:
                if task.block > todo[index - 1].block >= 0 and self._again() and watch.calm():
                    self.again()
                self._do(task, todo[index:])

    def again(self) -> None:
        """Measure once more what was disturbed, waiting a little for the machine to become calm."""
        if todo := self._again():
            watch.wait_until_calm(CALM_S)
        for index, task in enumerate(todo):
            self._do(task, todo[index:])

    def budget(self) -> int:
        """Rows that may still be measured beyond the plan's blocks."""
        spent = sum(task.replicate >= REPEAT and not task.anchor for task in self._all())
        extra = max(task.block for task in self.tasks if not task.anchor) + 1 - self.plan.blocks
        return (self.plan.extra_blocks - extra) * self.per_block - spent

    def rows(self) -> list[Row]:
        """The plan's rows so far, in order of their blocks, each followed by its repeats."""
        return [self.done[self._key(task)] for task in self._all()]

    def _do(self, task: Task, todo: list[Task]) -> None:
        self._report(todo, None)
        row = self._measure(task)
        self.journal.append(row)
        self.done[row.key], self.seconds[task.cell] = row, row.elapsed_ns / 1e9
        self.measured += 1
        self._report(todo, row)

    def _all(self) -> Iterator[Task]:
        """Every task that was done, repeats among them."""
        for planned in self.tasks:
            task = planned
            while self._key(task) in self.done:
                yield task
                if task.anchor:
                    break
                task = _repeated(task)

    def _again(self) -> list[Task]:
        """What is still to be measured again: repeats of disturbed rows within the budget, of starved ones always."""
        last = {(task.cell, task.engine, task.block): task for task in self._all() if not task.anchor}
        marked = watch.disturbed(self.rows())
        starved, disturbed = [], []
        for task in last.values():
            row = self.done[self._key(task)]
            if row.status == "starved" and task.replicate < STARVED_REPEATS * REPEAT:
                starved.append(_repeated(task))
            elif row.status != "starved" and row.key in marked:
                disturbed.append(_repeated(task))
        return starved + disturbed[: max(self.budget(), 0)]

    def unmarked_blocks(self, n_blocks: int) -> int:
        """How many of the first blocks did not drift."""
        drift = drift_by_block(self.rows())
        return sum(drift.get(block, 0.0) <= DRIFT_LIMIT for block in range(n_blocks))

    def _block(self, number: int) -> Iterator[Task]:
        if number == 0:
            yield from (Task(cell, 0, -1, order) for order, cell in enumerate(self.plan.gates))
            files = {file for cell in self.plan.compared for file in cell.files}
            gates = [cell for cell in self.plan.gates if files.issuperset(cell.files)]
            yield from (Task(cell, 0, -1, n, engine=folder) for folder in self.beside for n, cell in enumerate(gates))
        yield from self._anchors(number)
        cells = [(cell, "") for cell in self.plan.cells]
        cells += [(cell, folder) for folder in self.beside for cell in self.plan.compared]
        random.Random(f"{self.plan.seed}/{number}").shuffle(cells)
        yield from (Task(cell, number, number, n + 1, engine=folder) for n, (cell, folder) in enumerate(cells))

    def _anchors(self, number: int) -> list[Task]:
        """The anchor before a block, by as many processes as the plan says."""
        cell, replicates = self.plan.anchor, range(number, number + REPEAT * self.plan.anchors, REPEAT)
        return [Task(cell, n, number, 0, anchor=True) for n in replicates] if cell else []

    def _measure(self, task: Task) -> Row:
        started, load, throttled = datetime.now(UTC), psutil.getloadavg()[0], machine.throttled_us()
        path, *others = [str(registry.model_path(*file)) for file in task.cell.files] or [""]
        job = Job(cell=task.cell, path=path, others=others, replicate=task.replicate)
        outcome = work(job, self.plan.time_limit_s, task.engine, self.plan.worker)
        conditions = Conditions(
            load_1min=round(load, 2),
            throttled_us=machine.throttled_us() - throttled,
            peak_rss_bytes=outcome.measured.peak_rss_bytes,
            timed=outcome.measured.evidence,
            whole=outcome.evidence,
            **machine.power(),
        )
        return self._row(task, outcome, conditions, started)

    def _row(self, task: Task, outcome: Outcome, conditions: Conditions, started: datetime) -> Row:
        model, *others = self._models(task)
        return Row(
            schema=SCHEMA,
            key=self._key(task),
            study=self.plan.study,
            cell=task.cell,
            replicate=task.replicate,
            block=task.block,
            order=task.order,
            anchor=task.anchor,
            model=model,
            others=others,
            engine=self.engines.get(task.engine, ""),
            machine=self.machine,
            status=outcome.status,
            started=started.isoformat(timespec="seconds"),
            elapsed_ns=outcome.elapsed_ns,
            pid=outcome.pid,
            conditions=conditions,
            failure=outcome.failure,
            **{name: getattr(outcome.measured, name) for name in Results.__struct_fields__},
        )

    def _key(self, task: Task) -> str:
        model, *others = self._models(task)
        study = f"{self.plan.study}/anchor" if task.anchor else self.plan.study
        engine = self.engines.get(task.engine, "")
        return row_key(study, task.cell, model, engine, self.machine, task.replicate, *others)

    def _models(self, task: Task) -> list[str]:
        """The facts of its files, the first of several first; an empty name where it has none."""
        return [self.models[file] for file in task.cell.files] or [""]

    def _add_fact(self, what: Literal["model", "engine", "machine"], data: dict) -> str:
        fact = Fact(id=content_id(data), what=what, data=data)
        self.journal.append_fact(fact)
        return fact.id

    def _report(self, todo: list[Task], row: Row | None) -> None:
        if self.tell:
            left = [task.cell for task in todo[1 if row else 0 :] if self._key(task) not in self.done]
            usual = sum(self.seconds.values()) / max(len(self.seconds), 1)
            remaining = sum(self.seconds.get(cell, usual) for cell in left)
            self.tell(Progress(len(self.tasks) - len(left), len(self.tasks), todo[0], row, remaining))


def _repeated(task: Task) -> Task:
    """The same cell in the same block once more: a replicate of its own."""
    return replace(task, replicate=task.replicate + REPEAT, order=task.order + REPEAT)


def asks_whether(cell: Cell) -> bool:
    """Whether a cell asks if a batch is right: then a wrong result or an abort is its answer and no failure."""
    return isinstance(cell, Replay) or (isinstance(cell, Prefill | Decode) and cell.policy == "packed")


def engine_facts(folder: str = "") -> dict:
    """What an engine, by default the one in use, says of itself, asked in a process of its own.

    Raises
    ------
    StudyError
        The engine does not load.

    """
    return _asked(folder)[0]


def _asked(folder: str) -> tuple[dict, list[dict]]:
    """What an engine says of itself, and the GPUs it finds here, which are facts of the machine."""
    outcome = work(Job(), START_LIMIT_S, folder)
    if outcome.status != "ok":
        why = outcome.failure.message or "\n".join(outcome.failure.log_tail[-3:]) if outcome.failure else outcome.status
        raise StudyError(
            f"the engine {folder}".strip(),
            f"does not load ({why})",
            "unset LLAMA_CPP_LIB_PATH, or name a folder with libllama",
        )
    facts = dict(outcome.measured.facts)
    return facts, facts.pop("gpus")
