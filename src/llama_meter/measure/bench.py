"""What measures a task: the engines, the machine and the files at hand, each known as a fact, and a worker for each."""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Literal

import msgspec

from llama_meter.cells import Cell, OnEngine
from llama_meter.disk import plainly
from llama_meter.errors import MORE_MEMORY, StudyError, says_memory
from llama_meter.journal import Journal
from llama_meter.measure import machine, watch
from llama_meter.measure.files import digest, model_fact
from llama_meter.measure.plan import Plan
from llama_meter.measure.process import Outcome, work
from llama_meter.measure.tasks import Task
from llama_meter.measure.worker import Job
from llama_meter.models import recipes
from llama_meter.rows import SCHEMA, Conditions, Fact, Results, Row, content_id, row_key

START_LIMIT_S = 300.0  # of an engine that only says what it is: on a Mac the first start compiles Metal's shaders
ANY = ""  # study in keys that ignore the study
WORKER_BYTES = 1 << 28  # of a process without its model
ORACLE_TIMES = 2  # multiple of a model's file in memory: the engine's pages, and the weights in the oracle at a time


@dataclass(frozen=True)
class Elsewhere:
    """Where simulations run instead of here: a function that runs a job like `process.work`, and how many at once."""

    work: Callable[..., Outcome]
    at_once: int


class Clock:
    """Wall time as it was when this clock began, and as much later as has passed since.

    Rows are compared within a block because they began close together. A wall clock that is set meanwhile would tear a
    block apart, or place its rows before those that were measured first. Limits of time go by `seconds`.
    """

    def __init__(self) -> None:
        self.began, self.began_ns = datetime.now(UTC), machine.awake_or_not_ns()

    def now(self) -> datetime:
        """The time now, in UTC."""
        return self.began + timedelta(microseconds=(machine.awake_or_not_ns() - self.began_ns) / 1000)

    def seconds(self) -> float:
        """Seconds of the clock by which workers end."""
        return time.monotonic()


class Bench:
    """Measures tasks of a plan. Facts are written to the journal first: rows name them."""

    def __init__(self, plan: Plan, journal: Journal, beside: Sequence[str], elsewhere: Elsewhere | None):
        self.plan, self.journal, self.elsewhere, self.clock = plan, journal, elsewhere, Clock()
        needed = any(isinstance(cell, OnEngine) for cell in plan.asked)
        asked = {folder: _asked(folder) for folder in ("", *beside)} if needed else {}
        engines = {folder: facts for folder, (facts, _) in asked.items()}
        lasting = {folder: machine.lasting_engine(facts) for folder, facts in engines.items()}
        self.engines = {folder: self._add_fact("engine", facts) for folder, facts in lasting.items()}
        gpus = next((gpus for _, gpus in asked.values() if gpus), [])
        layers = max((abs(cell.n_gpu_layers) for cell in plan.asked if isinstance(cell, OnEngine)), default=0)
        if layers and not gpus:
            raise StudyError("layers on a GPU", "the engine finds none here", "leave n_gpu_layers out, or give 0")
        here = machine.facts() | ({"gpus": gpus} if gpus else {})
        self.machine = self._add_fact("machine", machine.lasting(here))
        self.systems = {
            folder: self._add_fact("system", machine.updated(here, facts))
            for folder, facts in (engines or {"": {}}).items()
        }
        files = dict.fromkeys(file for cell in plan.asked for file in cell.files)
        with ThreadPoolExecutor() as threads:  # mostly hashing, which releases the GIL
            facts = dict(zip(files, threads.map(lambda file: model_fact(*file), files), strict=True))
        self.hashes = {file: fact["sha256"] for file, fact in facts.items()}
        self.models = {file: self._add_fact("model", fact) for file, fact in facts.items()}
        self.keys: dict[Task, str] = {}

    def key(self, task: Task) -> str:
        """The key of a task's row."""
        if task not in self.keys:
            self.keys[task] = self.key_in(f"{self.plan.study}/anchor" if task.anchor else self.plan.study, task)
        return self.keys[task]

    def key_in(self, study: str, task: Task) -> str:
        """The key that a task has in another study; ANY: in whichever."""
        (model, *others), engine = self._models(task), self.engines.get(task.engine, "")
        return row_key(study, task.cell, model, engine, self.machine, task.replicate, *others)

    def measure(self, task: Task, left_s: float) -> Row:
        """The row of a task, measured in a worker. TimeUpError where it did not end within `left_s` seconds.

        StudyError where another file lies in a file's place by then: its gate and its facts are those of the first.
        """
        before = watch.before_row() if task.cell.is_timed else machine.state()
        started = self.clock.now()
        path, *paths = [str(recipes.model_path(*file)) for file in task.cell.files] or [""]
        job = Job(cell=task.cell, path=path, others=paths, replicate=task.replicate)
        do = self.elsewhere.work if self.elsewhere else partial(work, ends_at=self.clock.seconds() + left_s)
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

    def _add_fact(self, what: Literal["model", "engine", "machine", "system"], data: dict) -> str:
        data = plainly(data)
        fact = Fact(id=content_id(data), what=what, data=data)
        self.journal.append_fact(fact)
        return fact.id


def at_once(cell: Cell) -> int:
    """How many such cells run side by side: timed ones run alone, others as cores and memory allow."""
    if cell.is_timed:
        return 1
    sizes = [path.stat().st_size for file in cell.files if (path := recipes.model_path(*file)).exists()]
    return machine.at_once(cell.n_threads, WORKER_BYTES + ORACLE_TIMES * sum(sizes))


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
    if outcome.failure:
        why = outcome.failure.message or "\n".join(outcome.failure.log_tail[-3:])
        mend = "set up again with `make clean study`"
        if says_memory("\n".join([why, *outcome.failure.log_tail])):
            mend = MORE_MEMORY
        elif folder or "LLAMA_CPP_LIB_PATH" in os.environ:
            mend = "unset LLAMA_CPP_LIB_PATH, or name a folder with libllama"
        raise StudyError(f"the engine {folder}".strip(), f"does not load ({why})", mend)
    facts = dict(outcome.measured.facts)
    return facts, facts.pop("gpus")
