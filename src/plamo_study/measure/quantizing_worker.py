"""The worker process for one quantization or importance matrix: a job on stdin, llama.cpp's log on stderr.

It ends when its stdin closes, so it cannot outlive its parent. It knows no recipes: types are llama.cpp's numbers.
"""

import json
import os
import sys
import threading
from pathlib import Path

import msgspec

from plamo_study.errors import StudyError, of_memory
from plamo_study.measure.worker import end_with_parent
from plamo_study.models import imatrix as matrices


class Quantizing(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The child's arguments to the quantizer, which writes `out`. `imatrix`: path of an importance matrix, or empty."""

    source: str
    out: str = ""
    file_type: int
    patterns: list[tuple[str, int]] = []
    metadata: dict[str, int | str] = {}
    imatrix: str = ""
    requantize: bool = False
    n_threads: int = 0


class Evaluating(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The child's job for an importance matrix."""

    source: str
    text: str
    out: str = ""
    chunk: int
    n_threads: int


def main() -> None:
    """Do the one job on stdin; the parent follows the log on stderr."""
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Quantizing | Evaluating)
    threading.Thread(target=end_with_parent, args=(0,), daemon=True).start()
    try:
        _quantize(job) if isinstance(job, Quantizing) else _evaluate(job)
    except Exception as error:
        told = error if isinstance(error, StudyError) else of_memory(error, job.source)
        _say(f"@study {json.dumps([told.what, told.why, told.mend])}" if told else f"@error {error}")
        os._exit(1)
    os._exit(0)  # interpreter teardown would only cost time


def _quantize(job: Quantizing) -> None:
    from plamo_study.engine import quantizer

    quantizer.log_to_stderr()
    quantizer.quantize(
        Path(job.source),
        Path(job.out),
        job.file_type,
        job.patterns,
        job.metadata,
        matrices.read(Path(job.imatrix)).means() if job.imatrix else None,
        job.n_threads,
        job.requantize,
    )


def _evaluate(job: Evaluating) -> None:
    from plamo_study.engine import activations, quantizer
    from plamo_study.engine.session import SessionConfig

    quantizer.log_to_stderr()
    config = SessionConfig(n_ctx_seq=job.chunk, n_threads=job.n_threads, n_threads_batch=job.n_threads)
    text = Path(job.text)
    with activations.InputSquares(job.source, config) as model:
        tokens = model.tokenize(text.read_bytes())
        chunks = len(tokens) // job.chunk
        if not chunks:
            why = f"is {len(tokens)} tokens long, one piece takes {job.chunk}"
            raise StudyError(str(text), why, "give a longer text: some 100 pieces make a usable matrix")
        for i in range(chunks):
            _say(f"@chunk {i} {chunks}")
            model.add(tokens[i * job.chunk : (i + 1) * job.chunk])
        _say(f"@chunk {chunks} {chunks}")
    found = matrices.Imatrix(model.sums, model.counts, text.name, chunks, job.chunk)
    matrices.write(Path(job.out), found)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
