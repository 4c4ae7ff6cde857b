"""The sweep: randomised blocks of cells, an anchor between them, one process per cell, resumed where it stopped."""

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from plamo_study.errors import StudyError
from plamo_study.limits import DRIFT_LIMIT
from plamo_study.measure import machine, watch
from plamo_study.measure.cells import Cell, File, Gate, OnEngine
from plamo_study.measure.expected import Expected, at_once, least_blocks, needed_gates
from plamo_study.measure.facts import plainly
from plamo_study.measure.files import model_fact
from plamo_study.measure.frame import drift_by_block
from plamo_study.measure.journal import Journal, latest_rows, read
from plamo_study.measure.plan import Plan
from plamo_study.measure.process import Outcome, TimeUpError, work
from plamo_study.measure.rows import SCHEMA, Conditions, Fact, Results, Row, content_id, row_key
from plamo_study.measure.worker import Job
from plamo_study.models import recipes

START_LIMIT_S = 60.0
CALM_S = 15.0  # longest wait for a calm machine before disturbed rows are measured again
REPEAT = 1000  # added to the replicate of repeated measurements and of further anchors
STARVED_REPEATS = 2
WISHED_BLOCKS, MOST_BLOCKS = 4, 50  # of a plan with a time limit
ANY = ""  # study in keys that ignore the study
TAKEN_OVER = -1  # order of a gate taken over from another study: it took none of this study's time
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


@dataclass(frozen=True)
class Progress:
    """The task that the sweep is about to run, or has just run (`row`), and the expected remaining seconds.

    Under a time limit, `total` grows while cells and blocks are added.
    """

    done: int
    total: int
    task: Task
    row: Row | None
    remaining_s: float


@dataclass(frozen=True)
class Summary:
    """The rows of a sweep's plan, how many of them this call measured, and the cells for which there was no time.

    `lacking`: number of rows that the finding needs but for which there was no time.
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


class NoTimeError(StudyError):
    """A finding is expected to need more time than the limit: nothing was measured.

    `needed_s`: seconds that would be enough.
    """

    def __init__(self, what: str, why: str, mend: str, needed_s: float):
        super().__init__(what, why, mend)
        self.needed_s = needed_s


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True)
class Elsewhere:
    """Where simulations run instead of here: a function that runs a job like `process.work`, and how many at once."""

    work: Callable[..., Outcome]
    at_once: int


def sweep(
    plan: Plan,
    journal_path: Path,
    on_progress: OnProgress | None = None,
    retry_failed: bool = False,
    beside: Sequence[Path] = (),
    minutes: float = 0,
    elsewhere: Elsewhere | None = None,
    at_most: float = 0,
) -> Summary:
    """Measure the rows of `plan` that the journal lacks. A worker's crash or hang becomes a row, and the sweep goes on.

    `beside`: folders of other builds, which measure `plan.compared` in the same blocks.
    `minutes`: time limit of the plan's rows, including earlier calls, gates, anchors and repeats; 0: as long as its
    blocks take. The plan's last cells are dropped where they do not fit; where all fit, blocks are added. A cell that
    is not expected to fit is not started, and one still running when the time is up is stopped: it leaves no row, and
    the next call measures it. This call ends within those minutes.
    `at_most`: a larger limit in minutes, for the rows that the finding needs only.
    `elsewhere`: where the cells of a simulation run. Their rows still name this machine: they do not depend on it. Jobs
    started there are awaited.

    Disturbed rows are measured again as further replicates of their block, when the machine is calm again or the sweep
    ends; blocks that drifted are followed by fresh ones. Together they add at most `plan.extra_blocks` blocks' worth of
    rows, apart from starved rows, which get two more attempts each.

    Raises
    ------
    StudyError
        A plan whose cells run the engine was to run elsewhere.
    NoTimeError
        The rows that its finding needs are expected to take longer than `minutes`, or `at_most`.

    """
    if elsewhere and any(isinstance(cell, OnEngine) for cell in plan.asked):
        why = "runs the engine, and its rows are those of one machine"
        raise StudyError(plan.study, why, f"plamo-study run {plan.study[:2]} --hosts FILE")
    with Journal(journal_path) as journal, machine.awake():
        run = _Sweep(plan, journal, on_progress, retry_failed, [str(folder.resolve()) for folder in beside], elsewhere)
        if minutes:
            run.within(60 * minutes, 60 * max(minutes, at_most))
        else:
            run.whole()
        rows = run.rows()
        found = {row.cell for row in rows if not row.anchor}
        left_out = tuple(cell for cell in plan.cells if cell not in found)
        return Summary(rows, run.measured, left_out, len(run.lacking()) if minutes else 0)


def check_time(plan: Plan, minutes: float) -> None:
    """Check, before model files are written, that a plan without any rows here has enough time; 0: no limit.

    Raises
    ------
    NoTimeError
        The plan is expected to take longer.

    """
    if minutes and not all(recipes.model_path(*file).exists() for gate in needed_gates(plan) for file in gate.files):
        _check_time(plan.study, 60 * minutes, 0.0, *Expected(plan, {}).least())


def _check_time(study: str, limit_s: float, spent: float, gates: float, others: float) -> None:
    if (needed := spent + gates + others) > limit_s:
        raise NoTimeError(
            f"{study} in {limit_s / 60:.3g} minutes",
            f"the gates of its files take about {gates:.0f} s, and what its finding needs {others:.0f} s more: nothing "
            "could be said",
            f"give it {math.ceil(needed / 60)} minutes or more; 0: as many as it takes",
            needed,
        )


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
        self.beside, self.elsewhere = beside, elsewhere
        needed = any(isinstance(cell, OnEngine) for cell in plan.asked)
        asked = {folder: _asked(folder) for folder in ("", *beside)} if needed else {}
        self.engines = {folder: self._add_fact("engine", facts) for folder, (facts, _) in asked.items()}
        gpus = next((gpus for _, gpus in asked.values() if gpus), [])
        self.machine = self._add_fact("machine", machine.facts() | ({"gpus": gpus} if gpus else {}))
        files = dict.fromkeys(file for cell in plan.asked for file in cell.files)
        with ThreadPoolExecutor() as threads:  # mostly hashing, which releases the GIL
            facts = threads.map(lambda file: model_fact(*file), files)
        self.models = {file: self._add_fact("model", fact) for file, fact in zip(files, facts, strict=True)}
        self.done = {row.key: row for row in latest_rows(journal.records) if row.status == "ok" or not retry_failed}
        self.seconds: dict[Cell, float] = {row.cell: row.elapsed_ns / 1e9 for row in self.done.values()}
        self.tasks: list[Task] = []
        self.keys: dict[Task, str] = {}
        self.cells = plan.cells
        self.limit_s = self.ends_at = math.inf  # under a time limit: seconds of all rows, and when this call ends
        self.late = False  # whether something no longer fitted in it

    def whole(self) -> None:
        """Measure the plan's blocks, and fresh ones after them if some drifted."""
        plan = self.plan
        self._blocks(range(plan.blocks))
        self._again()
        for extra in range(plan.blocks, plan.blocks + plan.extra_blocks):
            if self._unmarked_blocks(extra) >= plan.blocks or self._budget() < self._per_block:
                break
            self._blocks([extra])

    def within(self, seconds: float, most: float) -> None:
        """Measure the needed cells, then others as long as all fit WISHED_BLOCKS times, then more blocks of them.

        `most`: seconds in which all of it must end, even if something still lacks. The choice follows from the rows, so
        repeating the same call measures nothing new. Nothing is repeated until the least blocks are complete.
        """
        self.limit_s, self.ends_at = most, time.monotonic() + most
        self._check_time()
        self.cells, least, wished = (), self._least, min(self.plan.blocks, WISHED_BLOCKS)
        needed: set[File] = {file for cell in self.plan.cells[: self.plan.needed] for file in cell.files}
        self._each(self._gates(needed))  # together: gates are not timed, and run side by side
        self._each(self._anchors(0))
        for cells in self._together(self.plan.cells):
            first = [Task(cell, 0, 0, len(self.cells) + n, engine=folder) for n, cell in enumerate(cells, 1)
                     for folder in self._folders(cell)]  # fmt: skip
            block = self._spent(task for task in self.tasks if task.block == 0)
            fits = not self.late and self._spent(self.tasks) + (wished - 1) * block < seconds
            if len(self.cells) >= self.plan.needed and not fits and not self._any_done(first):
                break
            self._each([*self._gates({file for cell in cells for file in cell.files}), *first])
            self.cells += cells
        self._each(self._anchors(1))
        if least == 1:
            self._again(seconds)
        for number in range(1, MOST_BLOCKS if self.plan.grows and self.plan.blocks > 1 else self.plan.blocks):
            spent = self._spent(self._all())
            todo = [*self._shuffled(number), *self._anchors(number + 1)]
            fits = not self.late and spent + spent / number <= seconds
            if number >= least and not fits and not self._any_done(todo):
                break
            self._each(todo)
            if number + 1 >= least:
                self._again(seconds)

    def lacking(self) -> list[Task]:
        """The tasks that the finding needs and that are not done."""
        return [task for task in self._needed() if self._key(task) not in self.done]

    def rows(self) -> list[Row]:
        """The plan's rows so far, in order of their blocks, each followed by its repeats."""
        return [self.done[self._key(task)] for task in self._all()]

    @property
    def _per_block(self) -> int:
        return sum(len(self._folders(cell)) for cell in self.cells)

    def _blocks(self, numbers: Sequence[int]) -> None:
        """Measure these blocks: gates before the first, anchors before each and after the last.

        Disturbed rows are measured again at the end of a block in which the machine is calm.
        """
        todo = [task for number in numbers for task in self._block(number)]
        todo += self._anchors(numbers[-1] + 1)
        self._plan(todo)
        for number, block in groupby(todo, key=lambda task: task.block):
            tasks = list(block)
            if number > numbers[0] and self._key(tasks[0]) not in self.done and self._repeats() and watch.calm():
                self._again()
            self._each(tasks)

    def _again(self, seconds: float = math.inf) -> None:
        """Repeat disturbed rows after a short wait for a calm machine, while less than `seconds` is spent."""
        if self._spent(self._all()) < seconds and not self.late and (todo := self._repeats()):
            watch.wait_until_calm(min(CALM_S, max(self._left_s(), 0)))
            self._each(todo, planned=False)

    @property
    def _least(self) -> int:
        """Fewest blocks that a statement about a cell needs."""
        return least_blocks(self.plan)[0]

    def _needed(self) -> list[Task]:
        """The tasks that the finding needs: gates, and the least blocks of the needed cells."""
        gates = [Task(gate, 0, -1, self.plan.gates.index(gate)) for gate in needed_gates(self.plan)]
        cells = self.plan.cells[: self.plan.needed]
        return gates + [Task(cell, number, number, 0) for number in range(self._least) for cell in cells]

    def _check_time(self) -> None:
        """Raise NoTimeError where the missing tasks that are needed are expected to exceed the time limit."""
        for task in self._needed():
            if isinstance(task.cell, Gate) and self._key(task) not in self.done:
                self._take_over(task)
        if lacking := self.lacking():
            gates = sum(self._takes(task) for task in lacking if isinstance(task.cell, Gate))
            others = sum(self._takes(task) for task in lacking if not isinstance(task.cell, Gate))
            _check_time(self.plan.study, self.limit_s, self._spent(self._needed()), gates, others)

    def _takes(self, task: Task) -> float:
        """Expected seconds of a task, out of the time limit."""
        return self._expected.seconds(task.cell) / self._at_once(task.cell)

    def _at_once(self, cell: Cell) -> int:
        return self.elsewhere.at_once if self.elsewhere else at_once(cell)

    @cached_property
    def _expected(self) -> Expected:
        """Read only under a time limit."""
        return Expected(self.plan, self.seconds)

    def _left_s(self) -> float:
        """Seconds left of the time limit, from which the rows of all earlier calls count too."""
        if self.limit_s == math.inf:
            return math.inf
        return min(self.limit_s - self._spent(self._all()), self.ends_at - time.monotonic())

    def _plan(self, todo: Iterable[Task]) -> None:
        self.tasks += [task for task in todo if task not in self.tasks]

    def _each(self, todo: Sequence[Task], planned: bool = True) -> None:
        """Measure those of `todo` that are not done; tasks that are not timed run side by side."""
        if planned:
            self._plan(todo)
        for task in todo:
            if isinstance(task.cell, Gate) and self._key(task) not in self.done:
                self._take_over(task)
        left = [task for task in todo if self._key(task) not in self.done]
        for _, group in groupby(left, key=lambda task: task.cell.is_timed):
            tasks = list(group)
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
        if known := self._passed.get(self._key_in(ANY, task)):
            row = msgspec.structs.replace(known, key=self._key(task), study=self.plan.study, order=TAKEN_OVER)
            self.journal.append(row)
            self.done[row.key] = row

    @cached_property
    def _passed(self) -> dict[str, Row]:
        """Read only where a gate would have to run."""
        return _passed_elsewhere(self.journal.path)

    def _started(self, task: Task) -> Row | None:
        """Measure a cell; None where it does not fit in the remaining time, or did not end in it."""
        if self.limit_s < math.inf and (self.late or self._takes(task) > self._left_s()):
            self.late = True
            return None
        self._report(task, None)
        try:
            return self._measure(task)
        except TimeUpError:
            self.late = True
            return None

    def _keep(self, measured: Iterable[tuple[Task, Row | None]]) -> None:
        for task, row in measured:
            if row is None:
                continue
            self.journal.append(row)
            self.done[row.key], self.seconds[task.cell] = row, row.elapsed_ns / 1e9
            self.measured += 1
            self._report(task, row)

    def _any_done(self, tasks: Iterable[Task]) -> bool:
        return any(self._key(task) in self.done for task in tasks)

    def _spent(self, tasks: Iterable[Task]) -> float:
        """Seconds taken by those of these tasks that are done; tasks that ran side by side share their time."""
        keys = {self._key(task) for task in tasks}
        return spent_s((self.done[key] for key in keys if key in self.done), self._at_once)

    def _budget(self) -> int:
        """Rows that may still be measured beyond the plan's blocks."""
        spent = sum(task.replicate >= REPEAT and not task.anchor for task in self._all())
        last = max(task.block for task in self.tasks if not task.anchor)
        return (self.plan.extra_blocks - max(last + 1 - self.plan.blocks, 0)) * self._per_block - spent

    def _all(self) -> Iterator[Task]:
        """Every task that is done, including repeats."""
        for planned in self.tasks:
            task = planned
            while self._key(task) in self.done:
                yield task
                if task.anchor:
                    break
                task = _repeated(task)

    def _repeats(self) -> list[Task]:
        """The tasks still to be repeated: disturbed rows within the budget, starved ones always.

        Under a time limit a disturbed row is repeated only once, or the next call would go on.
        """
        once = REPEAT if self.limit_s < math.inf else math.inf
        last = {(task.cell, task.engine, task.block): task for task in self._all() if not task.anchor}
        marked = watch.disturbed(self.rows())
        starved, disturbed = [], []
        for task in last.values():
            row = self.done[self._key(task)]
            if row.status == "starved" and task.replicate < STARVED_REPEATS * REPEAT:
                starved.append(_repeated(task))
            elif row.status != "starved" and row.key in marked and task.replicate < once:
                disturbed.append(_repeated(task))
        return starved + disturbed[: max(self._budget(), 0)]

    def _unmarked_blocks(self, n_blocks: int) -> int:
        """How many of the first blocks did not drift."""
        drift = drift_by_block(self.rows())
        return sum(drift.get(block, 0.0) <= DRIFT_LIMIT for block in range(n_blocks))

    def _block(self, number: int) -> Iterator[Task]:
        if number == 0:
            yield from self._gates()
        yield from self._anchors(number)
        yield from self._shuffled(number)

    def _gates(self, files: set[File] | None = None) -> list[Task]:
        """The gates of these files, by default of all; for other builds, those of the compared files."""
        gates = [(n, gate) for n, gate in enumerate(self.plan.gates) if files is None or files.issuperset(gate.files)]
        compared = {file for cell in self.plan.compared for file in cell.files}
        other = [(n, gate) for n, gate in gates if compared.issuperset(gate.files)]
        found = [Task(gate, 0, -1, n) for n, gate in gates]
        return found + [Task(gate, 0, -1, n, engine=folder) for folder in self.beside for n, gate in other]

    def _shuffled(self, number: int) -> list[Task]:
        cells = [(cell, folder) for cell in self.cells for folder in self._folders(cell)]
        random.Random(f"{self.plan.seed}/{number}").shuffle(cells)
        return [Task(cell, number, number, n + 1, engine=folder) for n, (cell, folder) in enumerate(cells)]

    def _folders(self, cell: Cell) -> list[str]:
        """The builds that measure a cell."""
        return ["", *(self.beside if cell in self.plan.compared else ())]

    def _together(self, cells: Sequence[Cell]) -> Iterator[tuple[Cell, ...]]:
        """Cells in order: singly where they are timed, else in groups that can run side by side."""
        for timed, group in groupby(cells, key=lambda cell: cell.is_timed):
            alike = tuple(group)
            size = 1 if timed else HANDFUL
            yield from (alike[start : start + size] for start in range(0, len(alike), size))

    def _anchors(self, number: int) -> list[Task]:
        """The anchor before a block, in as many processes as the plan says."""
        cell, replicates = self.plan.anchor, range(number, number + REPEAT * self.plan.anchors, REPEAT)
        return [Task(cell, n, number, 0, anchor=True) for n in replicates] if cell else []

    def _measure(self, task: Task) -> Row:
        started, load, throttled = datetime.now(UTC), psutil.getloadavg()[0], machine.throttled_us()
        path, *others = [str(recipes.model_path(*file)) for file in task.cell.files] or [""]
        job = Job(cell=task.cell, path=path, others=others, replicate=task.replicate)
        do = self.elsewhere.work if self.elsewhere else partial(work, ends_at=time.monotonic() + self._left_s())
        outcome = do(job, self.plan.time_limit_s, task.engine, self.plan.workload)
        conditions = Conditions(
            load_1min=round(load, 2),
            gpu_used=machine.gpu_used(),
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
        if task not in self.keys:
            self.keys[task] = self._key_in(f"{self.plan.study}/anchor" if task.anchor else self.plan.study, task)
        return self.keys[task]

    def _key_in(self, study: str, task: Task) -> str:
        model, *others = self._models(task)
        return row_key(
            study, task.cell, model, self.engines.get(task.engine, ""), self.machine, task.replicate, *others
        )

    def _models(self, task: Task) -> list[str]:
        """Ids of the facts of its files, in order; one empty id where it has no file."""
        return [self.models[file] for file in task.cell.files] or [""]

    def _add_fact(self, what: Literal["model", "engine", "machine"], data: dict) -> str:
        data = plainly(data)
        fact = Fact(id=content_id(data), what=what, data=data)
        self.journal.append_fact(fact)
        return fact.id

    def _report(self, task: Task, row: Row | None) -> None:
        if self.tell:
            left = [task.cell for task in self.tasks if self._key(task) not in self.done]
            usual = sum(self.seconds.values()) / max(len(self.seconds), 1)
            remaining = sum(self.seconds.get(cell, usual) for cell in left)
            self.tell(Progress(len(self.tasks) - len(left), len(self.tasks), task, row, remaining))


def spent_s(rows: Iterable[Row], beside: Callable[[Cell], int] = at_once) -> float:
    """Seconds that rows took; rows that ran side by side share their time, and gates of another study take none."""
    return sum(row.elapsed_ns / 1e9 / beside(row.cell) for row in rows if row.order != TAKEN_OVER)


def _passed_elsewhere(path: Path) -> dict[str, Row]:
    """Gates that passed, in the journals beside this one, by their key without the study."""
    rows: list[Row] = []
    for beside in path.parent.glob("*.jsonl"):
        with suppress(StudyError):  # a damaged journal adds nothing; its own study reports it
            rows += latest_rows(read(beside)) if beside != path else []
    passed = [row for row in rows if isinstance(row.cell, Gate) and row.valid and not row.anchor]
    return {
        row_key(ANY, row.cell, row.model, row.engine, row.machine, row.replicate, *row.others): row for row in passed
    }


def _repeated(task: Task) -> Task:
    """The next repeat of a task: the same cell and block, as a new replicate."""
    return replace(task, replicate=task.replicate + REPEAT, order=task.order + REPEAT)


def engine_facts(folder: str = "") -> dict:
    """The facts that an engine, by default the one in use, reports about itself, in a separate process.

    Raises
    ------
    StudyError
        The engine does not load.

    """
    return _asked(folder)[0]


def _asked(folder: str) -> tuple[dict, list[dict]]:
    """The facts an engine reports about itself, and the GPUs it finds, which are facts of the machine."""
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
