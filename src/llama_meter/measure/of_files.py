"""Both phases of any files: a plan of prompts and decode steps, and its rows as rates with intervals and verdicts."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from statistics import median

from llama_meter import stats
from llama_meter.cells import Cell, Decode, Prefill, columns
from llama_meter.limits import RIGHT
from llama_meter.measure import verdicts, watch
from llama_meter.measure.asked import Sweep
from llama_meter.measure.plan import Plan, change, files_of, lean, on_file, thread_counts
from llama_meter.models.registry import GIVEN
from llama_meter.rows import Row

N_PROMPT, N_GEN, N_DEPTH = (512,), (32,), (128,)  # tokens read, steps written, tokens before the first step


def plan(sweep: Sweep) -> Plan:
    """A plan for `sweep.files`: each reads `n_prompt` tokens and writes `n_gen` tokens after `n_depth` others.

    `sweep.n_seq`: sequences that are written together, beside one. Raises StudyError where a file's context is too
    short for a length that was asked for.
    """
    threads = (sweep.n_threads or thread_counts())[0]
    base = change(Prefill(scale=GIVEN, n_threads=threads), **sweep.settings())
    cells: list[Cell] = []
    for file in files_of(GIVEN, sweep):
        cells += [on_file(change(base, n_prompt=n, repetitions=2), file) for n in sweep.n_prompt or N_PROMPT]
        for depth in sweep.n_depth or N_DEPTH:
            for n_gen in sweep.n_gen or N_GEN:
                step = on_file(change(base, workload="decode", depth=depth, n_gen=n_gen), file)
                cells += [change(step, n_seq=n, policy="shared") if n > 1 else step for n in sweep.n_seq or (1,)]
    return lean("phases", GIVEN, tuple(dict.fromkeys(cells)))


@dataclass(frozen=True)
class Rate:
    """What a cell's processes measured: tokens per second over processes, and whether they count.

    `verdicts`: of its rows, most severe first; `disturbed`: processes that something disturbed, of `n`.
    """

    cell: Cell
    rate: stats.Estimate
    verdicts: tuple[str, ...]
    disturbed: int
    n: int

    @property
    def right(self) -> bool:
        """Whether every process computed the right result."""
        return set(self.verdicts) <= set(RIGHT)


def rates(rows: Iterable[Row]) -> list[Rate]:
    """Tokens per second of every prompt and decode cell among `rows`, which are of one journal with its gates.

    A process counts once: tokens of a prompt, or of a step over all sequences, over the median of its times.
    """
    rows = list(rows)
    judged, causes = dict(zip((row.key for row in rows), verdicts.of(rows), strict=True)), watch.causes(rows)
    by: dict[Cell, list[Row]] = {}
    for row in rows:
        if isinstance(row.cell, Prefill | Decode) and not row.anchor:
            by.setdefault(row.cell, []).append(row)
    speeds = []
    for cell, own in by.items():
        seconds = [median(chain(*row.samples_ns)) / 1e9 for row in own if any(row.samples_ns)]
        tokens = cell.n_prompt * cell.n_seq if isinstance(cell, Prefill) else cell.n_seq  # type: ignore[union-attr]
        said = sorted({judged[row.key] for row in own}, key=lambda verdict: verdict in RIGHT)
        disturbed = sum(row.key in causes for row in own)
        speeds.append(Rate(cell, stats.rate(tokens, seconds), tuple(said), disturbed, len(own)))
    return sorted(speeds, key=_order)


def _order(rate: Rate) -> tuple[object, ...]:
    """Files by name, prompts before steps, the shorter and the fewer first."""
    values = columns(rate.cell)
    return rate.cell.files, values["workload"] != "prefill", values["n_prompt"], values["n_gen"], values["n_seq"]
