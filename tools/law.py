"""The batching law of PLaMo 2 held against the engine: a drawn grid, three tests, the smallest abort.

python tools/law.py                    # the grids of notebook 03
python tools/law.py --seed 3 --n 60    # a fresh grid of 60 configurations
"""

from typing import Annotated

import pandas as pd
import typer
from rich.table import Table

from llama_meter import journal
from llama_meter.cells import Prefill
from llama_meter.measure.plan import MODELS, model_file
from llama_meter.measure.process import work
from llama_meter.measure.worker import Job
from plamo_study.cli import report
from plamo_study.cli.guard import guarded
from plamo_study.cli.options import Engine, Minutes, use_engine
from plamo_study.cli.terminal import Terminal
from plamo_study.laws import batching as batching_law, batching_tests
from plamo_study.plans import batching_law as plan
from plamo_study.read import recording

PROMPT = 512  # tokens of each packed prompt where the smallest aborting batch is sought
BATCHES = [1024, 2048, 4096]
LIMIT_S = 120.0


def law(
    seed: Annotated[
        list[int] | None, typer.Option(help="seed of a grid, repeatable; each number gives its own grid")
    ] = None,
    n: Annotated[int, typer.Option(min=1, max=100_000, help="configurations of each grid")] = plan.LAW_CELLS,
    n_batch: Annotated[
        list[int] | None,
        typer.Option(min=1, max=1 << 20, help="batch size at which to seek the smallest abort, repeatable"),
    ] = None,
    minutes: Minutes = 0,
    engine: Engine = None,
) -> None:
    """Hold the batching law of PLaMo 2 against the engine; exit code 1 where one configuration ends otherwise."""
    use_engine(engine)
    planned = plan.batching_law("mini", seeds=tuple(seed or plan.LAW_SEEDS), n=n)
    path = journal.journal_path(planned.study, planned.scale, journal.LOCAL)
    summary = report.sweep(planned, path, minutes=minutes)
    if summary.lacking:
        raise typer.Exit(1)
    rows, facts = recording.framed(summary.rows, path)
    table = batching_tests.checked(rows, facts)
    shown = (
        batching_tests.confusion(table),
        batching_tests.by_seed(table),
        batching_tests.separation(table),
        batching_tests.three_tests(rows),
    )
    for frame in (*shown, _smallest(n_batch or BATCHES)):
        _show(frame)
    raise typer.Exit(0 if table["exact"].all() else 1)


def _smallest(sizes: list[int]) -> pd.DataFrame:
    """The smallest number of packed prompts that aborts, by batch size: found by bisection, and predicted."""
    lines = []
    for size in sizes:
        smallest, processes = smallest_abort(MODELS[0], PROMPT, size)
        predicted = batching_law.smallest_abort(PROMPT, size)
        lines.append({"n_batch": size, "smallest abort": smallest, "predicted": predicted, "processes": processes})
    return pd.DataFrame(lines, dtype=object)


def smallest_abort(model: str, n_prompt: int, n_batch: int, most: int = 32) -> tuple[int | None, int]:
    """The smallest number of packed prompts that aborts, by bisection, and how many processes it took.

    None when even `most` do not abort. Aborting is monotone in the number of sequences, which the law proves.
    """
    low, high, processes = 0, most, 1
    if not _aborts(model, n_prompt, n_batch, most):
        return None, processes
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _aborts(model, n_prompt, n_batch, middle) else (middle, high)
        processes += 1
    return high, processes


def _aborts(model: str, n_prompt: int, n_batch: int, n_seq: int) -> bool:
    packed = Prefill(
        model=model, scale="mini", dtype="F16", n_prompt=n_prompt, n_seq=n_seq, n_batch=n_batch, policy="packed"
    )
    return work(Job(cell=packed, path=str(model_file(packed))), LIMIT_S).status == "abort"


def _show(frame: pd.DataFrame) -> None:
    shown = Table(*map(str, frame.columns))
    for row in frame.to_dict("records"):
        shown.add_row(*(f"{value:.2g}" if isinstance(value, float) else str(value) for value in row.values()))
    Terminal().print(shown)


if __name__ == "__main__":
    guarded(lambda: typer.run(law))
