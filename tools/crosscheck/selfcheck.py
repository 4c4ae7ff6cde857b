"""The cost of the harness, and whether its rates match those of llama.cpp's own tools: measured, never assumed."""

import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from crosscheck import (
    ceilings as crosscheck_ceilings,
    llama_bench as crosscheck,
    perplexity as crosscheck_perplexity,
    planted as crosscheck_watch,
)
from llama_meter import journal, progress
from llama_meter.cells import Overhead, Prefill, Quality
from llama_meter.measure import files, machine, plan, process, result_file
from llama_meter.measure.process import work
from llama_meter.measure.worker import Job
from llama_meter.models import synthetic
from llama_meter.rows import SCHEMA, Conditions, Row
from llama_meter.stats import Estimate
from plamo_study.laws import checked_ceilings
from plamo_study.plans import quality as plan_quality
from plamo_study.read import disturbances
from plamo_study.stats import coverage

OVERHEAD_LIMIT = 0.01  # of a decode step, at shape
HITS, FALSE_ALARMS = 0.95, 0.05  # least share of disturbed blocks marked, largest of undisturbed ones
READ_LIMIT_S = 1.0
JOURNAL_ROWS = 100_000
APPENDED_ROWS = 200
ALIKE = 0.02  # rates agree with llama-bench's within this margin
STARTS = 5
PERPLEXITY_ROUNDS = 5


class Check(msgspec.Struct, frozen=True):
    """One measured cost: result and requirement as text with units, and whether they agree."""

    name: str
    measured: str
    wanted: str
    ok: bool


def selfcheck(
    scale: str, llama_bench: Path | None, batched_bench: Path | None, rounds: int, perplexity: Path | None = None
) -> list[Check]:
    """All checks on the first model of the studies at `scale`; with llama.cpp's tools, also our figures against theirs.

    With `perplexity` the quality of every type of both models is compared with llama-perplexity's.
    """
    cell = Overhead(model=plan.MODELS[0], scale=scale, dtype=plan.DTYPE[scale], depth=16, n_gen=64)
    cell = plan.change(cell, n_threads=machine.performance_cores())
    path = synthetic.make(*cell.files[0], written)
    progress.tell(0, 1, f"a decode of {cell.model} at {scale}")
    checks = [overhead(cell, path), start_up(), *journal_speed()]
    tools = {
        "llama-bench": (crosscheck.llama_bench, llama_bench),
        "llama-batched-bench": (crosscheck.batched_bench, batched_bench),
    }
    for tool, (compare, binary) in tools.items():
        ratios = compare(cell, path, binary, rounds) if binary else {}
        checks += [alike(f"{what} rate / {tool}'s", ratio) for what, ratio in ratios.items()]
    return checks + (against_perplexity(scale, perplexity, min(rounds, PERPLEXITY_ROUNDS)) if perplexity else [])


def written(done: int, total: int) -> None:
    """Report the progress of writing the model, in MB."""
    progress.tell(done >> 20, total >> 20, "MB of the model written")


def covered(studies: int, place: str) -> list[dict[str, Any]]:
    """The simulated coverage of each interval, and its verdict; kept in data/measured/<place>."""
    total = sum(len(coverage.NOISE) * len(estimator.sizes) for estimator in coverage.ESTIMATORS)
    lines = []
    for line in coverage.simulate(studies):
        lines.append(line)
        progress.tell(len(lines), total, f"{line['estimator']}, {line['noise']}, n = {line['n']}")
    result_file.write(json.dumps({"studies": studies, "lines": lines}, indent=0).encode(), place, coverage.NAME)
    return lines


def against_perplexity(scale: str, binary: Path, rounds: int) -> list[Check]:
    """Figures, time and disk of the whole quality table beside llama-perplexity's, model by model."""
    planned = plan_quality.quality(scale)
    files.make_models(planned)
    checks = []
    for cell in (cell for cell in planned.cells if isinstance(cell, Quality)):
        compared = crosscheck_perplexity.compare(cell, plan.model_file(cell), binary, rounds)
        checks += [Check(*line) for line in crosscheck_perplexity.lines(cell.model, compared)]
    return checks


def ceilings(scale: str, likwid: Path, rounds: int, place: str) -> list[Check]:
    """Our ceilings beside likwid-bench's and NumPy's, kept in data/measured/<place>; only like with like is judged."""
    found = crosscheck_ceilings.side_by_side(scale, likwid, rounds)
    result_file.keep(found, place, checked_ceilings.NAME)
    return [_beside(entry) for entry in checked_ceilings.ratios(checked_ceilings.frame(found)).to_dict("records")]


def _beside(entry: dict[str, Any]) -> Check:
    judged, ratio = entry["verdict"], entry["ratio"]
    measured = f"{ratio:.3f} over {ratio.n} interleaved rounds" + (f": {judged}" if judged else "")
    wanted = f"within {checked_ceilings.MARGIN:.0%} of 1" if judged else "reported"
    return Check(f"{entry['ours']} / {entry['other']}", measured, wanted, judged in ("", "holds"))


def disturbed(place: str, seed: int) -> list[Check]:
    """Plant busy processes beside half of forty short sweeps, and count the blocks the watch marks; kept in `place`."""
    found = crosscheck_watch.trial(seed)
    disturbances.write(found, place)
    return barks(found)


def barks(found: disturbances.Trial) -> list[Check]:
    """The checks of a trial: all sweeps, by load, and the effect of the machine's other guests."""
    lines = []
    for entry in disturbances.by_load(found).to_dict("records"):
        hits, alarms = entry["hits"], entry["alarms"]
        lines += [
            (f"{entry['planted']} planted: disturbed blocks marked", hits, f"at least {HITS:.0%}", hits.value >= HITS),
            (
                f"{entry['planted']} planted: clean blocks marked",
                alarms,
                f"at most {FALSE_ALARMS:.0%}",
                alarms.value <= FALSE_ALARMS,
            ),
        ]
    n, slower = len(disturbances.taken(found.sweeps)), disturbances.slowdown(found)
    seen = f"{n} blocks; the rows marked in {slower.n} of them took {slower:.2f} times as long"
    checks = [Check(name, f"{rate:.1%} of {rate.n}", wanted, ok) for name, rate, wanted, ok in lines if rate.n]
    return [*checks, Check("nothing planted, CPUs given to other guests", seen, "reported", True)]


def overhead(cell: Overhead, path: Path) -> Check:
    """Share of a decode step spent outside llama_decode and llama_synchronize."""
    found = process.measured_once(cell, path).checks
    outside, step = found["outside_ns"], found["step_ns"]
    wanted = f"under {OVERHEAD_LIMIT:.0%} at shape"
    measured = f"{outside / 1e3:.1f} us of {step / 1e3:,.0f} us ({outside / step:.2%}) per decode step, {cell.scale}"
    return Check("outside llama_decode", measured, wanted, cell.scale != "shape" or outside / step < OVERHEAD_LIMIT)


def start_up() -> Check:
    """Measure the time for a worker to start, load the engine's libraries, answer and end."""
    seconds = (
        median(work(Job(), process.ONCE_S).elapsed_ns for _ in progress.counted(range(STARTS), "worker start-up")) / 1e9
    )
    return Check("worker start-up", f"{seconds:.2f} s, median of {STARTS}", "reported", True)


def journal_speed() -> list[Check]:
    """Synced rows appended per second, and the time to read a long journal."""
    row = example_row()
    with tempfile.TemporaryDirectory() as folder:
        short, long = Path(folder) / "short.jsonl", Path(folder) / "long.jsonl"
        with journal.Journal(short) as opened:
            start = time.perf_counter()
            for number in range(APPENDED_ROWS):
                opened.append(msgspec.structs.replace(row, key=str(number)))
            rate = APPENDED_ROWS / (time.perf_counter() - start)
        line = msgspec.json.encode(row) + b"\n"
        long.write_bytes(line * JOURNAL_ROWS)
        start = time.perf_counter()
        n_read = len(journal.read(long))
        seconds = time.perf_counter() - start
    measured = f"{n_read:,} rows of {len(line):,} bytes in {seconds:.2f} s"
    return [
        Check("journal, synced appends", f"{rate:,.0f} rows/s", "reported", True),
        Check(
            "journal, reading", measured, f"{JOURNAL_ROWS:,} rows in under {READ_LIMIT_S:.0f} s", seconds < READ_LIMIT_S
        ),
    ]


def alike(name: str, ratio: Estimate) -> Check:
    """Whether our rate over another tool's is 1 within the margin."""
    verdict = ratio.within(1 - ALIKE, 1 + ALIKE)
    measured = f"{ratio:.3f} over {ratio.n} interleaved rounds: {verdict}"
    return Check(name, measured, f"within {ALIKE:.0%} of 1", verdict == "holds")


def example_row() -> Row:
    """A row of a prefill's size, to time the journal."""
    cell = Prefill(model=plan.MODELS[0], scale="mini", dtype="F16", n_prompt=512, n_threads=2, repetitions=3)
    checks: dict[str, float | bool] = {
        "second_path_error": 1.234e-3,
        "second_path": True,
        "finite": True,
        "evaluated": True,
        "n_rot": 64,
    }
    return Row(
        schema=SCHEMA,
        key="0" * 16,
        study="selfcheck",
        cell=cell,
        replicate=0,
        block=0,
        order=0,
        model="0" * 16,
        engine="0" * 16,
        machine="0" * 16,
        status="ok",
        started="2026-01-01T00:00:00+00:00",
        elapsed_ns=10**9,
        pid=1,
        conditions=Conditions(load_1min=1.0),
        samples_ns=[[10**9]] * 3,
        warmup_ns=[10**9],
        load_ns=10**7,
        n_evaluated=1536,
        checks=checks,
        valid=True,
    )
