"""Quantized files, made by llama.cpp in a separate process, since it can abort or hang.

It is in measure/ because it starts processes that drive the engine, which models/ may not. The resulting types are in
models/recipes.py. A child ends when its stdin closes, so it cannot outlive its parent. It knows no recipes: types are
llama.cpp's numbers.
"""

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from llama_meter import children
from llama_meter.disk import growing
from llama_meter.errors import StudyError, of_memory, offer_check, unwritable
from llama_meter.measure import machine, worker
from llama_meter.measure.process import ASSERT
from llama_meter.models import recipes
from llama_meter.models.gguf_file import Progress
from llama_meter.models.recipes import Recipe
from llama_meter.rows import Measured

SILENCE_S = 600.0  # longest wait for a line of the child's log: a tensor of 0.5 G weights takes less
LOG_LINES = 50
TENSOR = re.compile(r"\[ *(\d+)/ *(\d+)\]")  # llama.cpp's log: this tensor is being written
REFUSED = re.compile(r"(?<=failed to quantize: ).*|(?<=error loading model: ).*")
OWN = re.compile(r"^@error \w+: (.*)")
LIFELINE = "0"  # stdin


class Quantizing(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The child's arguments to the quantizer, which writes `out`."""

    source: str
    out: str = ""
    file_type: int
    patterns: list[tuple[str, int]] = []
    metadata: dict[str, int] = {}
    n_threads: int = 0


def quantize(
    source: Path,
    out: Path,
    recipe: Recipe,
    progress: Progress | None = None,
    silence_s: float = SILENCE_S,
) -> Path:
    """Write `source`, quantized by llama.cpp as the recipe says, to `out` and return it; a failure leaves no file.

    `progress` is called with (bytes done, total bytes) of `source`, as the share of its tensors that are done. Raises
    StudyError wherever `recipes.check_source` does, when `out` is `source` or the disk is too full, and when the
    quantizer refuses, aborts, or prints nothing for `silence_s` seconds.
    """
    recipes.check_source(source, recipe)
    size = source.stat().st_size
    file_type, patterns, right = recipes.quantizer_arguments(recipe)
    job = Quantizing(
        source=str(source),
        file_type=file_type,
        patterns=patterns,
        metadata=right,
        n_threads=machine.performance_cores(),
    )

    def on_line(line: str) -> None:
        if progress and (at := TENSOR.match(line)):
            progress(size * int(at[1]) // int(at[2]), size)

    return _make(job, out, on_line, silence_s)


def _make(job: Quantizing, out: Path, on_line: Callable[[str], None], silence_s: float) -> Path:
    """Run the job; its output becomes `out` if it succeeds, and is removed otherwise."""
    if out.resolve() == Path(job.source).resolve():
        raise StudyError(str(out), "is the source itself", "name another file with --out")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(out, error) from error
    with growing(out) as partial:
        code, log = _run(msgspec.structs.replace(job, out=str(partial)), on_line, silence_s)
        if code is None:
            why = f"the engine gave no sign of life for {silence_s:g} s and was stopped"
            raise StudyError(job.source, why, offer_check(job.source))
        if code != 0:
            raise _failure(job, out, code, log)
    return out


def _run(job: Quantizing, on_line: Callable[[str], None], silence_s: float) -> tuple[int | None, list[str]]:
    """One child from spawn to end: its exit code, None when it was silent too long, and the end of its log."""
    command = children.python("-m", worker.__name__, LIFELINE, __name__)
    pipe, log = subprocess.PIPE, deque[str](maxlen=LOG_LINES)
    with children.guard() as guarded:
        child = subprocess.Popen(
            command,
            stdin=pipe,
            stdout=subprocess.DEVNULL,
            stderr=pipe,
            env=children.environment(),
            start_new_session=True,
        )
        assert child.stdin is not None
        assert child.stderr is not None
        try:
            guarded(child.pid)
            with suppress(BrokenPipeError):  # it is gone already; its log says why
                child.stdin.write(msgspec.json.encode(job) + b"\n")
                child.stdin.flush()
            ended = _follow(child.stderr.fileno(), log, on_line, silence_s)
            return (child.wait() if ended else None), list(log)
        finally:
            child.kill()
            child.wait()
            child.stderr.close()
            with suppress(BrokenPipeError):
                child.stdin.close()


def _follow(log_fd: int, log: deque[str], on_line: Callable[[str], None], silence_s: float) -> bool:
    """Read the child's log line by line until it ends (True) or falls silent (False)."""
    rest = b""
    while select.select([log_fd], [], [], silence_s)[0]:
        piece = os.read(log_fd, 1 << 16)
        if not piece:
            return True
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            log.append(line.decode(errors="replace"))
            on_line(log[-1])
    return False


def _failure(job: Quantizing, out: Path, code: int, log: list[str]) -> StudyError:
    for line in log:
        if line.startswith("@study "):
            return StudyError(*json.loads(line.removeprefix("@study ")))
    matches = [match for pattern in (ASSERT, REFUSED, OWN) for line in log if (match := pattern.search(line))]
    messages = [match[match.re.groups].strip() for match in matches]
    why = next(iter(messages + [line for line in log if not line.startswith("@")][-1:]), "no word")
    if "iostream error" in why:  # llama.cpp's only message for a failed write
        return StudyError(str(out), f"cannot be written ({why})", f"free space in {out.parent}")
    ended = f"ended with {signal.Signals(-code).name}" if code < 0 else "refused"
    return StudyError(job.source, f"the engine {ended}: {why}", offer_check(job.source))


def _do(job: Quantizing) -> Measured:
    """In the child: do the job; the parent follows the log on stderr."""
    try:
        _quantize(job)
    except Exception as error:
        refusal = error if isinstance(error, StudyError) else of_memory(error, job.source)
        if refusal:
            _say(f"@study {json.dumps([refusal.what, refusal.why, refusal.mend])}")
        raise
    return Measured()


def _quantize(job: Quantizing) -> None:
    from llama_meter.engine import library, quantizer  # the engine, which only the child loads

    library.log_to_stderr()
    quantizer.quantize(
        Path(job.source),
        Path(job.out),
        job.file_type,
        job.patterns,
        job.metadata,
        job.n_threads,
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


RUNS = {Quantizing: _do}
