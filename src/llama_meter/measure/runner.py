"""The sweep decides what is measured next: shuffled blocks of cells, anchors between them, resumed where it stopped.

What a plan asks for is in tasks.py; bench.py measures it, one process per cell.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby
from pathlib import Path
from statistics import median

import msgspec

from llama_meter.cells import Cell, File, Gate, OnEngine
from llama_meter.errors import StudyError
from llama_meter.journal import Journal, journals, latest_rows, read
from llama_meter.limits import DRIFT_LIMIT
from llama_meter.measure import machine, watch
from llama_meter.measure.bench import ANY, Bench, Elsewhere, at_once
from llama_meter.measure.plan import Plan
from llama_meter.measure.process import TimeUpError
from llama_meter.measure.tasks import REPEAT, Task, Tasks, least_blocks, together
from llama_meter.measure.watch import drift_by_block
from llama_meter.models.registry import GIVEN
from llama_meter.rows import Fact, Record, Row, row_key

CALM_S = 15.0  # longest wait for a calm machine before disturbed rows are measured again
COOL_S = 300.0  # longest wait for a hot machine to cool down before a row
STARVED_REPEATS = 2
WISHED_BLOCKS, MOST_BLOCKS = 4, 50  # of a plan with a time limit
AHEAD = 4  # cells whose files are judged together
NO_TIME = 1e-9  # minutes in which nothing starts: the rows are those of earlier calls
TAKEN_OVER = -1  # order of a gate taken over from another study: it took none of this study's time


@dataclass(frozen=True)
class Progress:
    """The task that the sweep is about to run, or has just run (`row`), and the expected remaining seconds.

    Under a time limit, `total` grows while cells and blocks are added. `cools_s`: before the task, the sweep waits so
    many seconds at most for a hot machine to cool down.
    """

    done: int
    total: int
    task: Task
    row: Row | None
    remaining_s: float
    cools_s: float = 0.0


@dataclass(frozen=True)
class Summary:
    """The rows of a sweep's plan, how many of them this call measured, and the cells for which there was no time.

    `lacking`: number of rows that the finding needs but for which there was no time. Cells on a file whose gate failed
    are in neither: nothing is measured with it.
    """

    rows: list[Row]
    measured: int
    left_out: tuple[Cell, ...] = ()
    lacking: int = 0

    @property
    def failed(self) -> list[Row]:
        """Rows that failed or whose result was wrong; starved ones only where no repeat finished."""
        ended = {(row.cell, row.engine, row.block) for row in self.rows if row.status != "starved"}
        failed = [row for row in self.rows if row.status != "ok" or row.valid is False]
        return [r for r in failed if r.status != "starved" or (r.cell, r.engine, r.block) not in ended]

    @property
    def unexpected(self) -> list[Row]:
        """Failed rows that are not the answer to what their cell tests."""
        return [row for row in self.failed if not row.cell.asks_whether]

    @property
    def unseen(self) -> list[File]:
        """Files of a user's own that there was no time for: nothing is measured with them, and no gate refused them."""
        seen = {file for row in self.rows for file in row.cell.files if not isinstance(row.cell, Gate) or row.refuses}
        files = dict.fromkeys(file for cell in self.left_out for file in cell.files if file[1] == GIVEN)
        return [file for file in files if file not in seen]

    @property
    def well(self) -> bool:
        """Whether nothing failed, the finding has its rows, and each file of a user's own has some."""
        return not (self.unexpected or self.lacking or self.unseen)


OnProgress = Callable[[Progress], None]


def sweep(
    plan: Plan,
    journal_path: Path,
    on_progress: OnProgress | None = None,
    retry_failed: bool = False,
    beside: Sequence[Path] = (),
    minutes: float = 0,
    elsewhere: Elsewhere | None = None,
) -> Summary:
    """Measure the rows of `plan` that the journal lacks. A worker's crash or hang becomes a row, and the sweep goes on.

    `beside`: folders of other builds, which measure `plan.compared` in the same blocks.
    `minutes`: time limit of the plan's rows, including earlier calls, gates, anchors and repeats; 0: as long as its
    blocks take. The plan's last cells are dropped where they do not fit; where all fit, blocks are added. Nothing
    starts when the time is up. A cell that runs then is stopped: it leaves no row, and the next call measures it.
    `elsewhere`: where the cells of a simulation run. Their rows still name this machine: they do not depend on it. Jobs
    started there are awaited.

    Nothing is measured with a file whose gate failed; the cells of other files are.

    Disturbed rows are measured again as further replicates of their block, when the machine is calm again or the sweep
    ends; blocks that drifted are followed by fresh ones. A call adds at most `plan.extra_blocks` blocks' worth of
    rows, apart from starved rows, which get two more attempts each.

    Before a timed row a machine that reports thermal pressure is given COOL_S to cool down, but no time that the
    finding needs. Where it stays hot all the same, the rest of the block is measured without a wait. What is measured
    while it is hot is marked.

    Raises
    ------
    StudyError
        A plan whose cells run the engine was to run elsewhere.

    """
    if elsewhere and any(isinstance(cell, OnEngine) for cell in plan.asked):
        why = "runs the engine, and its rows are those of one machine"
        raise StudyError(plan.study, why, "measure it here")
    with Journal(journal_path) as journal, machine.awake():
        run = _Sweep(plan, journal, on_progress, retry_failed, [str(folder.resolve()) for folder in beside], elsewhere)
        if minutes:
            run.within(60 * minutes)
        else:
            run.whole()
        rows = run.rows()
        measured_cells = {row.cell for row in rows if not row.anchor}
        left_out = tuple(cell for cell in plan.cells if cell not in measured_cells and not run.refuses(cell))
        return Summary(rows, run.measured, left_out, len(run.lacking()) if minutes else 0)


class _Sweep:
    def __init__(
        self,
        plan: Plan,
        journal: Journal,
        on_progress: OnProgress | None,
        retry_failed: bool,
        beside: list[str],
        elsewhere: Elsewhere | None,
    ):
        self.plan, self.journal, self.tell, self.measured = plan, journal, on_progress, 0
        self.elsewhere = elsewhere
        self.bench, self.asked = Bench(plan, journal, beside, elsewhere), Tasks(plan, beside)
        self.done = {row.key: row for row in latest_rows(journal.records) if row.status == "ok" or not retry_failed}
        self.before = frozenset(self.done)  # keys of the rows of earlier calls
        self.seconds: dict[Cell, float] = {row.cell: row.elapsed_ns / 1e9 for row in self.done.values()}
        self.tasks: list[Task] = []
        self.refused: dict[tuple[File, str], Row] = {}  # failed gates, by file and build
        for task in self.asked.gates():
            if row := self.done.get(self.bench.key(task)):
                self._note_gate(task, row)
        self.cells = plan.cells
        self.limit_s = self.ends_at = math.inf  # under a time limit: seconds of all rows, and when this call ends
        self.late = False  # whether something no longer fitted in it
        self.cools = True  # whether a hot machine is worth a wait: not in a block in which one was in vain

    def whole(self) -> None:
        """Measure the plan's blocks, and fresh ones after them if some drifted."""
        plan = self.plan
        self._blocks(range(plan.blocks))
        self._again()
        for extra in range(plan.blocks, plan.blocks + plan.extra_blocks):
            if self._unmarked_blocks(extra) >= plan.blocks or self._budget() < self._per_block:
                break
            self._blocks([extra])

    def within(self, seconds: float) -> None:
        """Measure cells in the order of need, while those begun fit the blocks that they should have, then more blocks.

        Needed cells should have the least blocks, and others WISHED_BLOCKS. The choice follows from the rows, so
        repeating the same call measures disturbed rows only. Nothing is repeated until the least blocks are complete.
        """
        self.limit_s, self.ends_at = seconds, self.bench.clock.seconds() + seconds
        self.cells, least, wished = (), least_blocks(self.plan), min(self.plan.blocks, WISHED_BLOCKS)
        self._measure([*self._next_gates(self.plan.cells[:1]), *self.asked.anchors(0)])
        for cells in together(self.plan.cells):
            first = [
                Task(cell, 0, 0, len(self.cells) + n, engine=folder)
                for n, cell in enumerate(cells, 1)
                for folder in self.asked.builds(cell)
            ]
            gates = self._next_gates(cells)
            block, more = self._spent(task for task in self.tasks if task.block == 0), self._expected_s(first)
            blocks = least if len(self.cells) < self.plan.needed else wished
            begun = self._spent(self.tasks) + self._expected_s(filter(self._is_left, gates)) + more
            fits = not self.late and begun + (blocks - 1) * (block + more) <= seconds
            if self.cells and not fits and not self._any_done(first):
                break
            self._measure([*gates, *first])
            self.cells += cells
        self._measure(self.asked.anchors(1))
        if least == 1:
            self._again(seconds)
        for number in range(1, MOST_BLOCKS if self.plan.grows and self.plan.blocks > 1 else self.plan.blocks):
            spent = self._spent(self._all())
            todo = [*self.asked.shuffled(number, self.cells), *self.asked.anchors(number + 1)]
            fits = not self.late and spent + spent / number <= seconds
            if number >= least and not fits and not self._any_done(todo):
                break
            self.cools = True
            self._measure(todo)
            if number + 1 >= least:
                self._again(seconds)
        self._recall()

    def _next_gates(self, cells: Sequence[Cell]) -> list[Task]:
        """The gates of these cells' files; where one is left, with those of the next cells, beside which it runs.

        All gates where a plan has no cells.
        """
        if not self.plan.cells:
            return self.asked.gates()
        near = self.plan.cells[len(self.cells) : len(self.cells) + AHEAD]
        own, ahead = (self.asked.gates({file for cell in of for file in cell.files}) for of in (cells, (*cells, *near)))
        return ahead if any(map(self._is_left, own)) else own

    def _recall(self) -> None:
        """Count the rows of earlier calls in, such as those of another sweep: also where no time was left for them."""
        blocks = ((*self.asked.shuffled(n, self.plan.cells), *self.asked.anchors(n)) for n in range(MOST_BLOCKS))
        every = [*self.asked.gates(), *chain.from_iterable(blocks)]
        self._plan([task for task in every if self.bench.key(task) in self.done])

    def lacking(self) -> list[Task]:
        """The tasks that the finding needs and that are not done."""
        return [task for task in self.asked.needed() if self._is_left(task)]

    def refuses(self, cell: Cell, engine: str = "") -> bool:
        """Whether a gate of one of a cell's files failed, so that it is not measured.

        The anchor of a file that computes at all goes on as long as there is anything beside it: only its steadiness
        matters.
        """
        gates = [row for file in cell.files if (row := self.refused.get((file, engine)))]
        if not gates or isinstance(cell, Gate):
            return False
        others = any(all((file, "") not in self.refused for file in other.files) for other in self.plan.cells)
        return cell != self.plan.anchor or not others or any(row.status != "ok" for row in gates)

    def _is_left(self, task: Task) -> bool:
        return self.bench.key(task) not in self.done and not self.refuses(task.cell, task.engine)

    def _note_gate(self, task: Task, row: Row) -> None:
        if row.refuses:
            self.refused |= {(file, task.engine): row for file in task.cell.files}

    def rows(self) -> list[Row]:
        """The plan's rows so far, in order of their blocks, each followed by its repeats."""
        return [self.done[self.bench.key(task)] for task in self._all()]

    @property
    def _per_block(self) -> int:
        return sum(len(self.asked.builds(cell)) for cell in self.cells)

    def _blocks(self, numbers: Sequence[int]) -> None:
        """Measure these blocks: gates before the first, anchors before each and after the last.

        Disturbed rows are measured again at the end of a block in which the machine is calm.
        """
        todo = [task for number in numbers for task in self.asked.block(number)]
        todo += self.asked.anchors(numbers[-1] + 1)
        self._plan(todo)
        for number, block in groupby(todo, key=lambda task: task.block):
            tasks = list(block)
            if number > numbers[0] and self.bench.key(tasks[0]) not in self.done and self._repeats() and watch.calm():
                self._again()
            self.cools = True
            self._measure(tasks)

    def _again(self, seconds: float = math.inf) -> None:
        """Repeat disturbed rows after a short wait for a calm machine, while less than `seconds` is spent."""
        own = (task for task in self._all() if self.bench.key(task) not in self.before)
        if self._spent(own) < seconds and not self.late and (todo := self._repeats()):
            self.cools = True
            watch.wait_until_calm(min(CALM_S, max(self._left_s(), 0)))
            self._measure(todo, planned=False)

    def _cool(self, task: Task) -> None:
        """Before a timed task: let a hot machine cool down, not in time that the finding needs."""
        if not (self.cools and task.cell.is_timed and watch.hot(machine.state())):
            return
        spare = self._left_s()
        if spare < math.inf:
            spare -= self._expected_s(self.lacking())
        most_s = min(COOL_S, spare)
        if most_s > 0:
            self._report(task, None, most_s)
            self.cools = watch.wait_until_cool(most_s)

    def _expected_s(self, tasks: Iterable[Task]) -> float:
        """Seconds of tasks: each as before, else the median of the gates, or of the other cells, done so far."""
        usual = {}
        for is_gate in (True, False):
            done = [taken for cell, taken in self.seconds.items() if isinstance(cell, Gate) == is_gate]
            usual[is_gate] = median(done) if done else 0.0
        return sum(self.seconds.get(task.cell, usual[isinstance(task.cell, Gate)]) for task in tasks)

    def _at_once(self, cell: Cell) -> int:
        return self.elsewhere.at_once if self.elsewhere else at_once(cell)

    def _left_s(self) -> float:
        """Seconds left of the time limit, from which the rows of all earlier calls count too."""
        if self.limit_s == math.inf:
            return math.inf
        return min(self.limit_s - self._spent(self._all()), self.ends_at - self.bench.clock.seconds())

    def _plan(self, todo: Iterable[Task]) -> None:
        keys = {self.bench.key(task) for task in self.tasks}  # its place in a block is no part of a row
        self.tasks += [task for task in todo if self.bench.key(task) not in keys]

    def _measure(self, todo: Sequence[Task], planned: bool = True) -> None:
        """Measure those of `todo` that are not done; tasks that are not timed run side by side."""
        if planned:
            self._plan(todo)
        for task in todo:
            if isinstance(task.cell, Gate) and self.bench.key(task) not in self.done:
                self._take_over(task)
        for _, group in groupby(todo, key=lambda task: (isinstance(task.cell, Gate), task.cell.is_timed)):
            if not (tasks := list(filter(self._is_left, group))):
                continue
            n = min(self._at_once(task.cell) for task in tasks)
            if n > 1:
                self._beside(tasks, n)
            else:
                self._keep(zip(tasks, map(self._started, tasks), strict=True))

    def _beside(self, tasks: Sequence[Task], n: int) -> None:
        """Measure `n` at once, and keep each row as soon as it ends; after an interrupt no further ones start."""
        with ThreadPoolExecutor(n) as pool:
            started = {pool.submit(self._started, task): task for task in tasks}
            try:
                self._keep((started[ended], ended.result()) for ended in as_completed(started))
            finally:
                pool.shutdown(cancel_futures=True)

    def _take_over(self, task: Task) -> None:
        """Reuse a gate that the same file passed for another study, on this engine and machine."""
        if earlier := self._passed.get(self.bench.key_in(ANY, task)):
            row, system = earlier
            if system:
                self.journal.append_fact(system)
            row = msgspec.structs.replace(row, key=self.bench.key(task), study=self.plan.study, order=TAKEN_OVER)
            self.journal.append(row)
            self.done[row.key] = row

    @cached_property
    def _passed(self) -> dict[str, tuple[Row, Fact | None]]:
        """Read only where a gate would have to run."""
        return _passed_elsewhere(self.journal)

    def _started(self, task: Task) -> Row | None:
        """Measure a cell; None where the time is up, or should be before it ends, or was."""
        left_s = self._left_s()
        if self.late or left_s <= 0 or self._expected_s([task]) > left_s:
            self.late = True
            return None
        self._cool(task)
        self._report(task, None)
        try:
            return self.bench.measure(task, self._left_s())
        except TimeUpError:
            self.late = True
            return None

    def _keep(self, measured: Iterable[tuple[Task, Row | None]]) -> None:
        for task, row in measured:
            if row is None:
                continue
            self.journal.append(row)
            self.done[row.key], self.seconds[task.cell] = row, row.elapsed_ns / 1e9
            self._note_gate(task, row)
            self.measured += 1
            self._report(task, row)

    def _any_done(self, tasks: Iterable[Task]) -> bool:
        return any(self.bench.key(task) in self.done for task in tasks)

    def _spent(self, tasks: Iterable[Task]) -> float:
        """Seconds taken by those of these tasks that are done; tasks that ran side by side share their time."""
        keys = {self.bench.key(task) for task in tasks}
        return spent_s((self.done[key] for key in keys if key in self.done), self._at_once)

    def _budget(self) -> int:
        """Rows that this call may still measure beyond the plan's blocks."""
        own = (task for task in self._all() if self.bench.key(task) not in self.before)
        spent = sum(task.replicate >= REPEAT and not task.anchor for task in own)
        last = max((task.block for task in self.tasks if not task.anchor), default=0)
        return (self.plan.extra_blocks - max(last + 1 - self.plan.blocks, 0)) * self._per_block - spent

    def _all(self) -> Iterator[Task]:
        """Every task that is done, including repeats."""
        for planned in self.tasks:
            task = planned
            while self.bench.key(task) in self.done:
                yield task
                if task.anchor:
                    break
                task = task.repeated

    def _repeats(self) -> list[Task]:
        """The tasks still to be repeated: disturbed rows within the budget, starved ones always.

        Under a time limit a call repeats a disturbed row only once, and the next call repeats it again.
        """
        once = REPEAT if self.limit_s < math.inf else math.inf
        last = {(task.cell, task.engine, task.block): task for task in self._all() if not task.anchor}
        marked = watch.disturbed(self.rows())
        starved, disturbed = [], []
        for task in last.values():
            row = self.done[self.bench.key(task)]
            if row.status == "starved" and task.replicate < STARVED_REPEATS * REPEAT:
                starved.append(task.repeated)
            elif row.status != "starved" and row.key in marked and (row.key in self.before or task.replicate < once):
                disturbed.append(task.repeated)
        return starved + disturbed[: max(self._budget(), 0)]

    def _unmarked_blocks(self, n_blocks: int) -> int:
        """How many of the first blocks did not drift."""
        drift = drift_by_block(self.rows())
        return sum(drift.get(block, 0.0) <= DRIFT_LIMIT for block in range(n_blocks))

    def _report(self, task: Task, row: Row | None, cools_s: float = 0.0) -> None:
        if self.tell:
            left = [task for task in self.tasks if self._is_left(task)]
            remaining = max(min(self._expected_s(left), self._left_s()), 0.0)
            self.tell(Progress(len(self.tasks) - len(left), len(self.tasks), task, row, remaining, cools_s))


def spent_s(rows: Iterable[Row], beside: Callable[[Cell], int] = at_once) -> float:
    """Seconds that rows took; rows that ran side by side share their time, and gates of another study take none."""
    return sum(row.elapsed_ns / 1e9 / beside(row.cell) for row in rows if row.order != TAKEN_OVER)


def _passed_elsewhere(journal: Journal) -> dict[str, tuple[Row, Fact | None]]:
    """Gates that passed, in the journals beside this one, by their key without the study; each with its system."""
    records: list[Record] = [record for record in journal.records if isinstance(record, Fact)]
    for beside in journals(journal.path.parent):
        with suppress(StudyError):  # a damaged journal adds nothing; its own study reports it
            records += read(beside) if beside != journal.path else []
    systems = {record.id: record for record in records if isinstance(record, Fact) and record.what == "system"}
    rows = latest_rows(records)
    passed = [row for row in rows if isinstance(row.cell, Gate) and row.valid and not row.anchor]
    return {
        row_key(ANY, row.cell, row.model, row.engine, row.machine, row.replicate, *row.others): (
            row,
            systems.get(row.system),
        )
        for row in passed
    }
