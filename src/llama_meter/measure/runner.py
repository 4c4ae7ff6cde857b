"""The sweep: what of a plan is measured next, and its rows: one process each, resumed where an earlier call stopped."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from itertools import count, groupby
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any, Literal

import msgspec

from llama_meter.cells import Cell, File, Gate, OnEngine
from llama_meter.disk import plainly
from llama_meter.errors import MORE_MEMORY, StudyError, says_memory
from llama_meter.journal import Journal, latest_rows
from llama_meter.limits import DRIFT_LIMIT
from llama_meter.measure import machine, watch
from llama_meter.measure.files import digest, model_fact
from llama_meter.measure.plan import REPEAT, Plan, Task, Tasks, together
from llama_meter.measure.process import Outcome, TimeUpError, work
from llama_meter.measure.worker import Job
from llama_meter.models import recipes
from llama_meter.models.registry import FILE_SCALE
from llama_meter.rows import SCHEMA, Conditions, Fact, Results, Row, content_id, row_key

CALM_S = 15.0  # longest wait for a calm machine before disturbed rows are measured again
STARVED_REPEATS = 2
WISHED_BLOCKS, MOST_BLOCKS = 4, 50  # of a plan with a time limit
AHEAD = 4  # cells whose files are judged together
START_LIMIT_S = 300.0  # of an engine that only says what it is: on a Mac the first start compiles Metal's shaders
WORKER_BYTES = 1 << 28  # of a process without its model
ORACLE_TIMES = 2  # multiple of a model's file in memory: the engine's pages, and the weights in the oracle at a time


@dataclass(frozen=True)
class Elsewhere:
    """Where simulations run instead of here: a function that runs a job like `process.work`, and how many at once."""

    work: Callable[..., Outcome]
    at_once: int


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
        return [row for row in self.failed if not row.cell.may_fail]

    @property
    def unseen(self) -> list[File]:
        """Files of a user's own that there was no time for: nothing is measured with them, and no gate refused them."""
        seen = {file for row in self.rows for file in row.cell.files if not isinstance(row.cell, Gate) or row.refuses}
        files = dict.fromkeys(file for cell in self.left_out for file in cell.files if file[1] == FILE_SCALE)
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

    `retry_failed`: measure rows of earlier calls anew that failed, or came out wrong where that is no answer.
    `beside`: folders of other builds, which measure `plan.compared` in the same blocks.
    `minutes`: time limit of the plan's rows, including earlier calls, gates, anchors and repeats; 0: none, and the plan
    is measured whole. The plan's last cells are dropped where they do not fit; where all fit, blocks are added. Nothing
    starts when the time is up. A cell that runs then is stopped: it leaves no row, and the next call measures it.
    `elsewhere`: where the cells of a simulation run. Their rows still name this machine: they do not depend on it. Jobs
    started there are awaited.

    Nothing is measured with a file whose gate failed; the cells of other files are.

    Once the least blocks are complete, disturbed rows are measured again as further replicates of their block, after a
    short wait for a calm machine, and blocks that drifted are followed by fresh ones. A call adds at most
    `plan.extra_blocks` blocks' worth of rows, apart from starved rows, which get two more attempts each.

    Raises
    ------
    StudyError
        A plan whose cells run the engine was to run elsewhere.

    """
    if elsewhere and any(isinstance(cell, OnEngine) for cell in plan.every_cell):
        why = "runs the engine, and its rows are those of one machine"
        raise StudyError(plan.study, why, "measure it here")
    with Journal(journal_path) as journal, machine.awake():
        bench = Bench(plan, journal, [str(folder.resolve()) for folder in beside], elsewhere)
        run = _Sweep(bench, on_progress, retry_failed, 60 * minutes or math.inf)
        run.run()
        rows = run.rows()
        measured_cells = {row.cell for row in rows if not row.anchor}
        left_out = tuple(cell for cell in plan.cells if cell not in measured_cells and not run.refuses(cell))
        return Summary(rows, run.measured, left_out, sum(map(run.is_left, run.parts.needed())))


class Bench:
    """Measures tasks of a plan. Facts are written to the journal first: rows name them."""

    def __init__(self, plan: Plan, journal: Journal, beside: Sequence[str], elsewhere: Elsewhere | None):
        self.plan, self.journal, self.beside, self.elsewhere = plan, journal, beside, elsewhere
        self.began, self.began_ns = datetime.now(UTC), machine.awake_or_not_ns()
        on_engine = [cell for cell in plan.every_cell if isinstance(cell, OnEngine)]
        engines = {folder: dict(engine_facts(folder)) for folder in ("", *beside)} if on_engine else {}
        boards = [facts.pop("gpus") for facts in engines.values()]
        gpus = next(filter(None, boards), None)
        if not gpus and any(cell.n_gpu_layers for cell in on_engine):
            raise StudyError("layers on a GPU", "the engine finds none here", "leave n_gpu_layers out, or give 0")
        lasting = {folder: machine.lasting_engine(facts) for folder, facts in engines.items()}
        self.engines = {folder: self._add_fact("engine", facts) for folder, facts in lasting.items()}
        here = machine.facts() | ({"gpus": gpus} if gpus else {})
        self.machine = self._add_fact("machine", machine.lasting(here))
        self.systems = {
            folder: self._add_fact("system", machine.updated(here, facts))
            for folder, facts in (engines or {"": {}}).items()
        }
        files = dict.fromkeys(file for cell in plan.every_cell for file in cell.files)
        with ThreadPoolExecutor() as threads:  # mostly hashing, which releases the GIL
            facts = dict(zip(files, threads.map(lambda file: model_fact(*file), files), strict=True))
        self.hashes = {file: fact["sha256"] for file, fact in facts.items()}
        self.models = {file: self._add_fact("model", fact) for file, fact in facts.items()}
        self.keys: dict[Task, str] = {}

    def now(self) -> datetime:
        """Wall time as it was when this bench began, and as much later as has passed since.

        Rows of a block are compared because they began close together: a clock that is set would tear it apart.
        """
        return self.began + timedelta(microseconds=(machine.awake_or_not_ns() - self.began_ns) / 1000)

    def key(self, task: Task) -> str:
        """The key of a task's row."""
        if task not in self.keys:
            study = f"{self.plan.study}/anchor" if task.anchor else self.plan.study
            (model, *others), engine = self._models(task), self.engines.get(task.engine, "")
            self.keys[task] = row_key(study, task.cell, model, engine, self.machine, task.replicate, *others)
        return self.keys[task]

    def at_once(self, cell: Cell) -> int:
        """How many such cells run side by side."""
        return self.elsewhere.at_once if self.elsewhere else at_once(cell)

    def measure(self, task: Task, left_s: float) -> Row:
        """The row of a task, measured in a worker. TimeUpError where it did not end within `left_s` seconds.

        StudyError where another file lies in a file's place by then: its gate and its facts are those of the first.
        """
        before, started = machine.state(), self.now()
        path, *paths = [str(recipes.model_path(*file)) for file in task.cell.files] or [""]
        job = Job(cell=task.cell, path=path, others=paths, replicate=task.replicate)
        do = self.elsewhere.work if self.elsewhere else partial(work, ends_at=monotonic() + left_s)
        outcome = do(job, self.plan.time_limit_s, task.engine, self.plan.workload)
        for file in task.cell.files:
            if digest(*file) != self.hashes[file]:
                why = "was replaced while it was measured: this row is not kept"
                raise StudyError(str(recipes.model_path(*file)), why, "run the command again: it is judged anew")
        conditions = Conditions(
            before=before,
            peak_rss_bytes=outcome.measured.peak_rss_bytes,
            timed=outcome.measured.evidence,
            whole=outcome.evidence,
            **msgspec.structs.asdict(machine.state()),
        )
        model, *others = self._models(task)
        return Row(
            schema=SCHEMA,
            key=self.key(task),
            study=self.plan.study,
            cell=task.cell,
            replicate=task.replicate,
            block=task.block,
            order=task.order,
            anchor=task.anchor,
            model=model,
            others=others,
            engine=self.engines.get(task.engine, ""),
            system=self.systems[task.engine],
            machine=self.machine,
            status=outcome.status,
            started=started.isoformat(timespec="seconds"),
            elapsed_ns=outcome.elapsed_ns,
            pid=outcome.pid,
            conditions=conditions,
            failure=outcome.failure,
            **{name: getattr(outcome.measured, name) for name in Results.__struct_fields__},
        )

    def _models(self, task: Task) -> list[str]:
        """Ids of the facts of its files, in order; one empty id where it has no file."""
        return [self.models[file] for file in task.cell.files] or [""]

    def _add_fact(self, what: Literal["model", "engine", "machine", "system"], data: dict[str, Any]) -> str:
        data = plainly(data)
        fact = Fact(id=content_id(data), what=what, data=data)
        self.journal.append_fact(fact)
        return fact.id


class _Sweep:
    """Decides what is measured next, and keeps the rows: `done` by key, also those of earlier calls."""

    def __init__(self, bench: Bench, on_progress: OnProgress | None, retry_failed: bool, limit_s: float):
        self.bench, self.plan, self.on_progress, self.measured = bench, bench.plan, on_progress, 0
        self.parts = Tasks(self.plan, bench.beside)
        rows = latest_rows(bench.journal.records)
        right = (row.status == "ok" and (row.cell.may_fail or row.valid is not False) for row in rows)
        self.done = {row.key: row for row, well in zip(rows, right, strict=True) if well or not retry_failed}
        self.before = frozenset(self.done)  # keys of the rows of earlier calls
        self.seconds = {row.cell: row.elapsed_ns / 1e9 for row in self.done.values()}  # by cell, of the last row
        self.refused: dict[tuple[File, str], Row] = {}  # failed gates, by file and build
        self.limit_s, self.ends_at = limit_s, monotonic() + limit_s  # of all rows, and of this call
        self.late = False  # whether something no longer fitted in it
        self.cells: tuple[Cell, ...] = ()  # those begun
        self.grows = self.plan.grows and self.plan.blocks > 1
        self.share = cache(bench.at_once)  # tasks that ran side by side share their time
        self.tasks: dict[str, Task] = {}  # by key, done or to do; repeats are not among them
        most = MOST_BLOCKS if self.grows else self.plan.blocks + self.plan.extra_blocks
        self._add(task for task in self.parts.every(most) if bench.key(task) in self.done)
        if limit_s == math.inf:
            self._add(self.parts.every(self.plan.blocks))
        for key, task in self.tasks.items():
            if key in self.done:
                self._note_gate(task, self.done[key])
        self.spent_s = sum(row.elapsed_ns / 1e9 / self.share(row.cell) for row in self.rows())

    def run(self) -> None:
        """Measure the first block in the order of need, as far as its cells fit the time, and then further blocks.

        Without a time limit all cells fit, and the first block is shuffled like all others. Needed cells should have
        the least blocks, others WISHED_BLOCKS. The choice follows from the rows, so repeating the same call measures
        disturbed rows only.
        """
        plan, least = self.plan, self.plan.least_blocks
        limited = self.limit_s < math.inf
        first = plan.cells[:AHEAD] if limited else plan.cells
        later = set(self._gates(plan.cells)) - set(self._gates((*first, *([plan.anchor] if plan.anchor else []))))
        self._measure([*(task for task in self.parts.gates() if task not in later), *self.parts.anchors(0)])
        for cells in together(plan.cells) if limited else [plan.cells]:
            wanted = least if len(self.cells) < plan.needed else min(plan.blocks, WISHED_BLOCKS)
            if self.cells and (self.late or not self._fits((*self.cells, *cells), wanted)):
                break
            begun, gates = len(self.cells), self._gates(cells)
            if any(map(self.is_left, gates)):  # those of the next cells are judged beside it
                gates = self._gates(plan.cells[begun : begun + AHEAD])
            self._measure([*gates, *self.parts.shuffled(0, cells, begun)])
            self.cells += cells
        self._measure(self.parts.anchors(1))
        for number in count(1):
            if number >= least:
                if self.grows:  # else every block comes before a repeat: three quiet processes rank a file
                    self._repeat()
                if not self._goes_on(number):
                    break
            self._measure([*self.parts.shuffled(number, self.cells), *self.parts.anchors(number + 1)])
        while self._repeat():
            pass

    def _goes_on(self, n_blocks: int) -> bool:
        """Whether another block follows: as there is time, else as planned and a fresh one for each that drifted."""
        if self.limit_s < math.inf:
            wanted = MOST_BLOCKS if self.grows else self.plan.blocks
            return n_blocks < wanted and not self.late and self._fits(self.cells, n_blocks + 1)
        if n_blocks < self.plan.blocks or self._budget() < self._per_block:
            return n_blocks < self.plan.blocks
        drifted = sum(drift > DRIFT_LIMIT for drift in watch.drift_by_block(self.rows()).values())
        return n_blocks < self.plan.blocks + min(drifted, self.plan.extra_blocks)

    @property
    def _per_block(self) -> int:
        return sum(len(self.parts.builds(cell)) for cell in self.cells)

    def _budget(self) -> int:
        """Rows that this call may still add to what the plan, or its time, asks for."""
        most = self.plan.blocks if self.limit_s == math.inf else MOST_BLOCKS
        added = (task for task in self._all() if task.replicate >= REPEAT or task.block >= most)
        had = sum(not task.anchor and self.bench.key(task) not in self.before for task in added)
        return self.plan.extra_blocks * self._per_block - had

    def _gates(self, cells: Sequence[Cell]) -> list[Task]:
        """The gates of these cells' files."""
        files = {file for cell in cells for file in cell.files}
        return [task for task in self.parts.gates() if files.issuperset(task.cell.files)]

    def _fits(self, cells: Sequence[Cell], n_blocks: int) -> bool:
        """Whether so many blocks of these cells, their gates and anchors fit the time limit."""
        anchors = self._expected_s(self.parts.anchors(0))
        block = self._expected_s(self.parts.shuffled(0, cells)) + anchors
        return self._expected_s(self._gates(cells)) + n_blocks * block + anchors <= self.limit_s

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

    def is_left(self, task: Task) -> bool:
        """Whether a task is still to be measured."""
        return self.bench.key(task) not in self.done and not self.refuses(task.cell, task.engine)

    def rows(self) -> list[Row]:
        """The plan's rows so far, in order of their blocks, repeats at the end of each."""
        return sorted((self.done[self.bench.key(task)] for task in self._all()), key=lambda row: (row.block, row.order))

    def _note_gate(self, task: Task, row: Row) -> None:
        if row.refuses:
            self.refused |= {(file, task.engine): row for file in task.cell.files}

    def _expected_s(self, tasks: Iterable[Task]) -> float:
        """Seconds of tasks on files that no gate refused: each as before, else the median of gates or other cells."""
        usual = {}
        for is_gate in (True, False):
            done = [taken for cell, taken in self.seconds.items() if isinstance(cell, Gate) == is_gate]
            usual[is_gate] = median(done) if done else 0.0
        return sum(
            self.seconds.get(task.cell, usual[isinstance(task.cell, Gate)]) / self.share(task.cell)
            for task in tasks
            if not self.refuses(task.cell, task.engine)
        )

    def _left_s(self) -> float:
        """Seconds left of the time limit, of which the rows of all earlier calls took their share."""
        return min(self.limit_s - self.spent_s, self.ends_at - monotonic())

    def _add(self, tasks: Iterable[Task]) -> None:
        for task in tasks:
            self.tasks.setdefault(self.bench.key(task), task)  # its place in a block is no part of a row

    def _measure(self, todo: Sequence[Task]) -> None:
        """Measure those of `todo` that are not done; tasks that are not timed run side by side."""
        self._add(task for task in todo if task.anchor or task.replicate < REPEAT)
        for _, group in groupby(todo, key=lambda task: (isinstance(task.cell, Gate), task.cell.is_timed)):
            if not (tasks := list(filter(self.is_left, group))):
                continue
            n = min(self.bench.at_once(task.cell) for task in tasks)
            if n == 1:
                self._keep(zip(tasks, map(self._started, tasks), strict=True), n)
                continue
            with ThreadPoolExecutor(n) as pool:
                started = {pool.submit(self._started, task): task for task in tasks}
                try:
                    self._keep(((started[ended], ended.result()) for ended in as_completed(started)), n)
                finally:  # after an interrupt no further ones start
                    pool.shutdown(cancel_futures=True)

    def _started(self, task: Task) -> Row | None:
        """Measure a cell; None where the time is up, or should be before it ends, or was."""
        left_s = self._left_s()
        if self.late or left_s <= 0 or self._expected_s([task]) * self.share(task.cell) > left_s:
            self.late = True
            return None
        self._report(task, None)
        try:
            return self.bench.measure(task, left_s)
        except TimeUpError:
            self.late = True
            return None

    def _keep(self, measured: Iterable[tuple[Task, Row | None]], n: int) -> None:
        """Write rows as soon as they end; `n` at once share their time."""
        for task, row in measured:
            if row is None:
                continue
            self.bench.journal.append(row)
            self.done[row.key], self.seconds[task.cell] = row, row.elapsed_ns / 1e9
            self.spent_s += row.elapsed_ns / 1e9 / n
            self._note_gate(task, row)
            self.measured += 1
            self._report(task, row)

    def _all(self) -> Iterator[Task]:
        """Every task that is done, including repeats."""
        for planned in self.tasks.values():
            task = planned
            while self.bench.key(task) in self.done:
                yield task
                if task.anchor:
                    break
                task = task.repeated

    def _repeat(self) -> bool:
        """Measure disturbed rows again, within what a call may add, and starved ones; whether there were any."""
        last = {(task.cell, task.engine, task.block): task for task in self._all() if not task.anchor}
        marked = watch.disturbed(self.rows())
        starved, disturbed = [], []
        for task in last.values():
            row = self.done[self.bench.key(task)]
            if row.status == "starved" and task.replicate < STARVED_REPEATS * REPEAT:
                starved.append(task.repeated)
            elif row.status != "starved" and row.key in marked:
                disturbed.append(task.repeated)
        todo = starved + disturbed[: max(self._budget(), 0)]
        if not todo or self.late or self._left_s() <= 0:
            return False
        watch.wait_until_calm(min(CALM_S, self._left_s()))
        self._measure(todo)
        return True

    def _report(self, task: Task, row: Row | None) -> None:
        if self.on_progress:
            left = [task for task in self.tasks.values() if self.is_left(task)]
            remaining = max(min(self._expected_s(left), self._left_s()), 0.0)
            self.on_progress(Progress(len(self.tasks) - len(left), len(self.tasks), task, row, remaining))


def at_once(cell: Cell) -> int:
    """How many such cells run side by side: timed ones run alone, others as cores and memory allow."""
    if cell.is_timed:
        return 1
    sizes = [path.stat().st_size for file in cell.files if (path := recipes.model_path(*file)).exists()]
    return machine.at_once(cell.n_threads, WORKER_BYTES + ORACLE_TIMES * sum(sizes))


def engine_facts(folder: str = "") -> dict[str, Any]:
    """The facts that an engine, by default the one in use, reports about itself, in a separate process.

    `gpus` among them are those that it finds, which are facts of the machine. StudyError where it does not load.
    """
    outcome = work(Job(), START_LIMIT_S, folder)
    if outcome.failure:
        why = outcome.failure.message or "\n".join(outcome.failure.log_tail[-3:])
        mend = "set up again with `make clean study`"
        if says_memory("\n".join([why, *outcome.failure.log_tail])):
            mend = MORE_MEMORY
        elif folder or "LLAMA_CPP_LIB_PATH" in os.environ:
            mend = "unset LLAMA_CPP_LIB_PATH, or name a folder with libllama"
        raise StudyError(f"the engine {folder}".strip(), f"does not load ({why})", mend)
    return dict(outcome.measured.facts)
