"""mlx-lm's PLaMo 2 beside llama.cpp: the same released weights, tokens and lengths, in turn in the same blocks.

    python tools/mlx_beside.py FOLDER               # FOLDER: pfnet/plamo-2-1b as released, in BF16
    python tools/mlx_beside.py FOLDER --unclipped   # if the gate of mlx-lm fails: without its bound on dt

It needs a Mac with Apple silicon, `pip install -e '.[mlx]'`, and the same weights for llama.cpp:
`plamo-study models convert FOLDER data/models/plamo-2-1b.weights.BF16.gguf --dtype BF16`. Rows go to
data/measured/local/01-mlx.weights.jsonl; a call that was interrupted goes on where it stopped. What is timed, and how
it is proved: mlx_model.py.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import mlx_model
import pandas as pd
import typer
from mlx_model import MlxJob
from rich.table import Table

from llama_meter.cells import Decode, Gate, OnModel, Prefill
from llama_meter.errors import StudyError
from llama_meter.journal import LOCAL, Journal, journal_path, latest_rows, read
from llama_meter.measure import machine, watch
from llama_meter.measure.bench import START_LIMIT_S, Bench, Elsewhere
from llama_meter.measure.plan import MODELS, Plan, change, with_gates
from llama_meter.measure.process import Outcome, work
from llama_meter.measure.runner import CALM_S
from llama_meter.measure.tasks import Task, Tasks
from llama_meter.measure.worker import Job
from llama_meter.rows import Row
from plamo_study.cli import report
from plamo_study.cli.guard import guarded, interruptible
from plamo_study.plans.phase_asymmetry import phase_asymmetry
from plamo_study.read import frame
from plamo_study.read.usable import undisturbed
from plamo_study.show.tables import show
from plamo_study.stats.estimates import median_sample, paired_ratio, seconds_by_block

STUDY, DTYPE, MLX = "01-mlx", "BF16", "mlx"  # MLX: the name of its build in tasks


def planned(scale: str = "weights", gpu: bool = True) -> Plan:
    """Notebook 01's prompts and steps of PLaMo 2 in BF16, all of which both engines measure."""
    asked = phase_asymmetry(scale, gpu).compared
    cells = tuple(change(c, dtype=DTYPE) for c in asked if isinstance(c, OnModel) and c.model == MODELS[0])
    return replace(with_gates(STUDY, scale, cells), compared=cells)


class BesideMlx(Bench):
    """A bench whose tasks of the build MLX run in mlx-lm, on the weights in `folder`; all others in llama.cpp.

    Raises StudyError where mlx-lm is not installed or does not load these weights.
    """

    def __init__(self, plan: Plan, journal: Journal, folder: Path, unclipped: bool):
        if find_spec("mlx_lm") is None:
            raise StudyError("mlx-lm", "is not installed", mlx_model.NEEDS)
        super().__init__(plan, journal, [], Elsewhere(self._work, 1))
        self.asked = partial(MlxJob, folder=str(folder.resolve()), unclipped=unclipped)
        answer = _in_mlx(self.asked(), START_LIMIT_S)
        if answer.failure:
            why = f"mlx-lm does not load it ({answer.failure.why})"
            raise StudyError(str(folder), why, "name a folder that holds PLaMo 2 as released: config.json and weights")
        self.engines[MLX], self.systems[MLX] = self._add_fact("engine", answer.measured.facts), self.systems[""]

    def _work(self, job: Job, time_limit_s: float, engine: str = "", workload: str = "") -> Outcome:
        if engine != MLX:
            return work(job, time_limit_s, engine, workload)
        assert isinstance(job.cell, Prefill | Decode | Gate)
        return _in_mlx(self.asked(cell=job.cell, gguf=job.path, replicate=job.replicate), time_limit_s)


def _in_mlx(job: MlxJob, time_limit_s: float) -> Outcome:
    """A worker that finds mlx_model.py, which lies beside this file and is not installed."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, [before])])
    try:
        return work(job, time_limit_s, workload=mlx_model.__name__)
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def measure(plan: Plan, journal_file: Path, folder: Path, unclipped: bool = False) -> list[Row]:
    """Every row of the plan on both engines: gates, then blocks in random order between anchors, then repeats.

    Disturbed rows are measured once more, after a short wait for a calm machine.
    """
    with Journal(journal_file) as journal, machine.awake():
        bench, tasks = BesideMlx(plan, journal, folder, unclipped), Tasks(plan, [MLX])
        done = {row.key: row for row in latest_rows(journal.records)}

        def rows(of: Sequence[Task]) -> Iterator[Row]:
            for task in of:
                if (key := bench.key(task)) not in done:
                    report.console.print(f"{task.cell.workload} {task.cell.files[0][0]}, {task.engine or 'llama.cpp'}")
                    done[key] = bench.measure(task, float("inf"))
                    journal.append(done[key])
                yield done[key]

        asked = [task for number in range(plan.blocks) for task in tasks.block(number)] + tasks.anchors(plan.blocks)
        measured = list(rows(asked))
        marked = watch.disturbed(measured)
        again = [
            task.repeated for task, row in zip(asked, measured, strict=True) if row.key in marked and not task.anchor
        ]
        if any(bench.key(task) not in done for task in again):
            watch.wait_until_calm(CALM_S)
        return measured + list(rows(again))


def compared(rows: pd.DataFrame) -> pd.DataFrame:
    """A line a cell: `what`, seconds of `llama` and `mlx` (medians over blocks), `ratio` (llama.cpp's over mlx-lm's,
    paired by block) and `verdict` of each engine's rows, the gate's included."""
    timed = rows[~rows["anchor"] & (rows["block"] >= 0)]
    lines = []
    for (workload, n_prompt), own in timed.groupby(["workload", "n_prompt"]):
        of = {name: group for name, group in own.groupby(own["build"].eq("stock").map({True: "llama", False: "mlx"}))}
        seconds = {name: seconds_by_block(_last(undisturbed(group)), median_sample) for name, group in of.items()}
        verdicts = {name: "/".join(sorted(set(group["verdict"]))) for name, group in of.items()}
        what = f"prompt of {n_prompt}" if workload == "prefill" else f"step after {n_prompt}"
        line = {"what": what, **{name: values.median() for name, values in seconds.items()}}
        ratio = paired_ratio(seconds["llama"], seconds["mlx"])
        lines.append(line | {"ratio": ratio} | {f"{name} is": said for name, said in verdicts.items()})
    return pd.DataFrame(lines)


def _last(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.drop_duplicates("block", keep="last")


def beside(
    folder: Annotated[Path, typer.Argument(help="released weights of PLaMo 2, as Hugging Face has them")],
    unclipped: Annotated[bool, typer.Option(help="lift mlx-lm's lower bound on dt, which the model lacks")] = False,
) -> None:
    """Measure PLaMo 2 in mlx-lm beside llama.cpp; exit code 1 where mlx-lm's answer is not the oracle's."""
    interruptible()
    plan = planned()
    path = journal_path(plan.study, plan.scale, LOCAL)
    rows = measure(plan, path, folder, unclipped)
    table = compared(frame.frame(rows, frame.facts(read(path))))
    shown = Table("", "llama.cpp", "mlx-lm", "mlx-lm is so many times as fast", "llama.cpp is", "mlx-lm is")
    for line in table.to_dict("records"):
        times = (f"{1e3 * line[name]:,.2f} ms" for name in ("llama", "mlx"))
        shown.add_row(line["what"], *times, show(line["ratio"], ".3g"), line["llama is"], line["mlx is"])
    report.console.print(shown)
    if (table["mlx is"] != "valid").any():
        report.console.print("mlx-lm's answers are not the oracle's: its speed is that of another computation")
        raise typer.Exit(1)


if __name__ == "__main__":
    guarded(lambda: typer.run(beside))
