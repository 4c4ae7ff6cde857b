"""Is nothing lost, and nothing measured twice, when `make study` is killed again and again?

    python tools/killed.py                                    # ten kills at random moments, then whole runs
    python tools/killed.py --kills 3 --minutes 5 01 07        # of these notebooks alone

It runs in a copy of this checkout, which shares its environment and is removed, so that no row of yours is touched. It
exits with 1 where a row is lost or doubled, a process is left, or what is left behind looks done and is not. A run ends
with its minutes, in which a busy machine measures less, and the next goes on: whole runs follow one another until one
has nothing to measure.
"""

import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import nbformat
import psutil
import typer

from llama_meter import journal, paths
from llama_meter.errors import StudyError
from llama_meter.rows import Row
from plamo_study.cli import report
from plamo_study.cli.guard import guarded

SIGNALS = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
MARK = "PLAMO_STUDY_KILLED"  # in the environment of all that a run starts
WHOLE = 6  # runs that are left alone, at most
ENDS_S = 60.0  # that what a killed run started has to end


def copied(into: Path, notebooks: Sequence[str]) -> None:
    """Copy what git knows of this checkout, of notebooks those that begin so; its environment is shared."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=paths.ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        left_out = notebooks and name.endswith(".ipynb") and not Path(name).name.startswith(tuple(notebooks))
        if (source := paths.ROOT / name).is_file() and not left_out:
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, into / name)
    (into / ".venv").symlink_to((paths.ROOT / ".venv").resolve())
    for name in ("requirements.lock", "pyproject.toml"):
        os.utime(into / name, (0, 0))  # older than the environment, which is not set up anew


def study(root: Path, scale: str, minutes: float) -> "subprocess.Popen[bytes]":
    """Start `make study` in a copy, in a process group of its own; its words go to the file `said`."""
    environment = os.environ | {"PYTHONPATH": str(root / "src"), MARK: str(root)}
    environment.pop("PLAMO_STUDY_ROOT", None)
    with (root / "said").open("a") as said:
        command = ["make", "study", f"SCALE={scale}", f"MINUTES={minutes:g}"]
        return subprocess.Popen(command, cwd=root, env=environment, stdout=said, stderr=said, start_new_session=True)


def started(root: Path) -> list[psutil.Process]:
    """Processes that runs in this copy started, directly or not."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # a zombie has no environment
            if process.environ().get(MARK) == str(root):
                processes.append(process)
    return processes


def rows(root: Path) -> Counter[str]:
    """How often each key of a row stands in its journal, by journal and key."""
    return Counter(
        f"{path.relative_to(root)} {record.key}"
        for path in sorted((root / "data/measured/local").rglob("*.jsonl"))
        for record in journal.read(path)
        if isinstance(record, Row)
    )


def unfinished(root: Path) -> list[str]:
    """What lies below `reports` and looks done but is not: notebooks with cells that did not run, cut pages."""
    names = []
    for path in (path for path in (root / "reports").glob("*.ipynb") if ".partial" not in path.name):
        cells = nbformat.read(path, as_version=4).cells
        if any(cell.cell_type == "code" and cell.source and not cell.execution_count for cell in cells):
            names.append(path.name)
    return names + [
        path.name for path in (root / "reports").glob("*.html") if not path.read_text().rstrip().endswith("</html>")
    ]


def partial(root: Path) -> list[str]:
    """Files below `reports` and `data` that are being written, or were."""
    files = [path for part in ("reports", "data") for path in (root / part).rglob("*") if ".partial" in path.name]
    return [str(path.relative_to(root)) for path in files]


def faults(root: Path, before: Counter[str]) -> list[str]:
    """What is wrong once a run has ended, as sentences; `before`: the rows that there were when it began."""
    until = time.monotonic() + ENDS_S
    while (left := started(root)) and time.monotonic() < until:
        time.sleep(0.1)
    now = rows(root)
    wrong = {
        "processes left": [" ".join(process.cmdline()[:4]) for process in left if process.is_running()],
        "rows doubled": [key for key, n in now.items() if n > 1],
        "rows lost": list(before - now),
        "not whole": unfinished(root),
        "tracebacks": ["see above"] * ("Traceback" in (root / "said").read_text(errors="replace")),
    }
    return [f"{what}: {', '.join(items[:3])} ({len(items)})" for what, items in wrong.items() if items]


def killed(
    notebooks: Annotated[list[str] | None, typer.Argument(help="beginnings of notebooks' names; without, all")] = None,
    kills: Annotated[int, typer.Option(min=1, help="runs that are killed")] = 10,
    scale: Annotated[str, typer.Option(help="mini or shape")] = "mini",
    minutes: Annotated[float, typer.Option(min=0.1, help="that each run may measure")] = 20.0,
    within: Annotated[float, typer.Option(min=1, help="seconds, at most, that a run is left alone")] = 120.0,
    seed: Annotated[int, typer.Option(help="of the moments")] = 0,
) -> None:
    """Kill `make study` at random moments, run it until it has nothing to measure, and say what was lost or doubled."""
    if not shutil.which("make"):
        raise StudyError("make", "not found", "Debian: apt-get install make")
    drawn, wrong = random.Random(seed), []
    with tempfile.TemporaryDirectory(prefix="killed-") as folder:
        root = Path(folder).resolve()
        copied(root, notebooks or [])
        for number in range(kills + WHOLE):
            before, began = rows(root), time.monotonic()
            process, sent = study(root, scale, minutes), None
            if number < kills:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(drawn.uniform(0, within))
                if process.poll() is None:
                    sent = SIGNALS[number % len(SIGNALS)]
                    os.killpg(process.pid, sent)
            code = process.wait()
            problems = faults(root, before)
            more, last = len(rows(root) - before), number == kills + WHOLE - 1
            done = number > kills and not more
            problems += [f"left behind: {name}" for name in partial(root)] * (number >= kills)
            problems += [f"exit code {code}"] * bool(code and (done or last))
            problems += [f"{WHOLE} whole runs, and the last measured {more} rows more"] * bool(more and last)
            how = sent.name if sent else f"exit code {code}"
            seconds, n = time.monotonic() - began, sum(rows(root).values())
            report.console.print(
                f"run {number + 1}: {how} after {seconds:.0f} s, {n} rows; {'; '.join(problems) or 'right'}"
            )
            wrong += problems
            if problems:
                report.console.print((root / "said").read_text(errors="replace")[-2000:], markup=False)
            (root / "said").write_text("")
            if done:
                break
        for process in started(root):
            process.kill()
    raise typer.Exit(bool(wrong))


if __name__ == "__main__":
    guarded(lambda: typer.run(killed))
