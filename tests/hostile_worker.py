"""Feeds hostile files to check and convert in a process that may use 1 GiB, and prints one JSON line for each.

    python tests/hostile_worker.py check FOLDER NUMBER...    mutated GGUF files through check, without its gate
    python tests/hostile_worker.py gate FOLDER NUMBER...     the same, and what passes through the engine
    python tests/hostile_worker.py convert FOLDER NUMBER...  mutated released folders through convert

FOLDER is empty at first and holds nothing afterwards but `base`. NUMBER may be a range, 0:500.
"""

import json
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hostile
import hostile_released

from plamo_study.errors import StudyError
from plamo_study.measure import checking, machine
from plamo_study.models.finding import Finding

LIMIT_S, LIMIT_BYTES = 5.0, 1 << 30
ENGINE_S = 3.5  # of these, for the engine's own process; the rest is for what lies around it


def main() -> None:
    """Run one mode over the numbers given."""
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
    mode, folder = sys.argv[1], Path(sys.argv[2])
    each = convert(folder) if mode == "convert" else checked(folder, gate=mode == "gate")
    for number in numbers(sys.argv[3:]):
        print(json.dumps(each(number)), flush=True)
    print(json.dumps({"peak_rss": machine.peak_rss()}), flush=True)


def numbers(words: list[str]) -> Iterator[int]:
    for word in words:
        first, _, last = word.partition(":")
        yield from range(int(first), int(last or int(first) + 1))


def checked(folder: Path, gate: bool) -> Callable[[int], dict[str, Any]]:
    """Write one mutant, check it, remove it."""
    (folder / "base").mkdir()
    originals, path = hostile.bases(folder / "base"), folder / "mutant.gguf"

    def one(number: int) -> dict[str, Any]:
        name, made = hostile.mutant(originals, number)
        path.write_bytes(made)
        said = outcome(lambda: checking.check(path, gate=gate, time_limit_s=ENGINE_S, memory_limit=LIMIT_BYTES))
        path.unlink()
        return {"name": name, "number": number, "left": left(folder)} | said

    return one


def convert(folder: Path) -> Callable[[int], dict[str, Any]]:
    """Copy the released folder, mutate the copy, convert it; a file that comes of it is checked."""
    import released

    from plamo_study.models import convert

    (folder / "base").mkdir()
    bases = [
        released.write_released(path, folder / "base" / f"{path.stem}-{shards}", shards=shards)
        for path in hostile.bases(folder / "base")
        for shards in (1, 3)
    ]
    copy, out = folder / "copy", folder / "out" / "model.gguf"

    def one(number: int) -> dict[str, Any]:
        shutil.copytree(bases[number // len(hostile_released.KINDS) % len(bases)], copy)
        name = hostile_released.mutate_safetensors(copy, number)
        said = outcome(lambda: [convert.convert(copy, out, "F16")] and checking.check(out, gate=False))
        whole = out.exists()
        out.unlink(missing_ok=True)
        shutil.rmtree(copy)
        unexpected = left(folder)
        shutil.rmtree(folder / "out", ignore_errors=True)
        return {"name": name, "number": number, "whole": whole, "left": unexpected} | said

    return one


def outcome(attempt: Callable[[], list[Finding]]) -> dict[str, Any]:
    """How it ended, in how many seconds. Anything but findings and StudyError is an accident.

    On a busy machine the CPU time counts, which others do not stretch.
    """
    start, spent, found, error, accident = time.perf_counter(), cpu_seconds(), [], "", ""
    try:
        found = attempt()
    except StudyError as raised:
        error = str(raised)
    except BaseException as raised:
        accident = f"{type(raised).__name__}: {raised}"[:500]
    return {
        "seconds": min(time.perf_counter() - start, cpu_seconds() - spent),
        "blocking": sorted({f.code for f in found if f.severity == "blocking"}),
        "others": sorted({f.code for f in found if f.severity != "blocking"}),
        "printable": all(f.evidence.isprintable() for f in found),
        "error": error[:300],
        "accident": accident,
    }


def cpu_seconds() -> float:
    """CPU time of this process and of its ended children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def left(folder: Path) -> list[str]:
    """Files that should not be there."""
    files = (path for path in folder.rglob("*") if path.is_file() and folder / "base" not in path.parents)
    return sorted(str(path.relative_to(folder)) for path in files)


if __name__ == "__main__":
    main()
