"""The gate of a model file: a separate process loads it, decodes, and compares the logits with the oracle.

Time and memory are limited; a hang, a crash or a refusal of the engine becomes a finding. The file's content is not
checked here: models/check.py does that, and checking.py lets through only files without a blocking finding.
"""

import os
import platform
import re
import resource
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from plamo_study.limits import FIRST_TOKEN
from plamo_study.measure import machine, range_findings, ranges, worker
from plamo_study.measure.process import Outcome, work
from plamo_study.measure.rows import Measured
from plamo_study.models import casts, header
from plamo_study.models.finding import AGAIN, Finding, printable

N_PROMPT, N_STEPS = 16, 4  # tokens prefilled, and decoded one by one after them
TIME_S, BYTES_PER_S = 30.0, 50e6  # time limit: start and arithmetic, and reading the file from a slow disk
MEMORY = 1 << 30  # bytes beside the weights, which may be mapped and repacked: twice the file
LOG_LINES = 10  # of the engine's log, printed before an error
WATCH_S = 0.05  # between two checks of the process's memory
ORACLE_WEIGHTS = 1 << 28  # the largest file, in weights, that the NumPy oracle judges
OTHER = "plamo-study models list names files that are known to work"


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    """A file to examine, and the bytes the process may use."""

    path: str
    memory: int


@dataclass(frozen=True)
class Verdict:
    """What the gate found, and whether the engine in use puts weights on a GPU."""

    findings: list[Finding]
    gpu: bool = False


def gate(path: Path, time_limit_s: float | None = None, memory_limit: int | None = None) -> Verdict:
    """Let the engine load and decode `path` within limits in seconds and in bytes beside the weights."""
    size = path.stat().st_size
    seconds = TIME_S + size / BYTES_PER_S if time_limit_s is None else time_limit_s
    memory = (MEMORY if memory_limit is None else memory_limit) + 2 * size
    outcome = work(Examination(path=str(path.resolve()), memory=memory), seconds, worker=__name__)
    if outcome.status != "ok":
        return Verdict([_failure(outcome, seconds)])
    return Verdict(_verdicts(outcome.measured, outcome.elapsed_ns / 1e9), bool(outcome.measured.checks["gpu"]))


def _failure(outcome: Outcome, seconds: float) -> Finding:
    failure = outcome.failure
    assert failure is not None
    said = next((line for line in reversed(failure.log_tail) if "error" in line), "")
    text = printable(said or failure.why, 300)
    ends = {
        "hang": f"no answer within {seconds:.0f} s",
        "starved": f"no answer within {seconds:.0f} s, but other programs kept the engine from computing",
        "abort": f"the engine aborted: {text}",
        "killed": f"the engine's process was killed ({failure.signal})",
        "error": text,
    }
    code = "memory" if failure.message.startswith("MemoryError") else f"engine-{outcome.status}"
    return Finding("blocking", code, f"{ends[outcome.status]} (stage: {failure.stage})", OTHER)


def _verdicts(measured: Measured, seconds: float) -> list[Finding]:
    checks, found = measured.checks, []
    if checks.get("n_rot") == 0:
        found.append(
            Finding("blocking", "rope-lost", "the engine rotates 0 dimensions: RoPE is lost (lost rotation, D1)", AGAIN)
        )
    for place in ("cpu", "gpu"):
        if checks.get(f"finite_{place}") is False:
            why = f"logits on the {place.upper()} are not finite"
            found.append(
                Finding(
                    "blocking",
                    "logits-not-finite",
                    why,
                    "try ssm_out as BF16 (half-precision overflow, D5), or " + AGAIN,
                )
            )
    if checks.get("gpu_loads") is False:
        found.append(Finding("warning", "gpu-refused", "loads on the CPU but not on the GPU", "use n_gpu_layers = 0"))
    error = checks.get("oracle_error")
    if checks.get("oracle_agrees") is False:
        why = f"logits differ from the reference computation by {error:.2g} (more than {checks['tolerance']:g})"
        found.append(Finding("blocking", "oracle", why, AGAIN))
    found += range_findings.findings(measured)
    if not found:
        judged = (
            f"within {error:.2g} of the oracle (allowed: {checks['tolerance']:g})"
            if error is not None
            else "; ".join(measured.log)
        )
        why = f"loads, decodes {N_PROMPT + N_STEPS} tokens in {seconds:.1f} s with finite logits; {judged}"
        found.append(Finding("note", "gate", why + range_findings.nearest(measured), "nothing to mend"))
    return found


def main() -> None:
    """Examine the one file that the job on stdin names."""
    worker.serve(Examination, _limited)


def _limited(job: Examination) -> Measured:
    _limit_memory(job.memory)
    log: list[str] = []
    try:
        return _examine(Path(job.path), log)
    except Exception:
        print(*"".join(log).splitlines()[-LOG_LINES:], sep="\n", file=sys.stderr)
        raise


def _limit_memory(n_bytes: int) -> None:
    """Limit allocations (Linux), and end the process when its resident memory exceeds the limit (everywhere)."""
    if not machine.MACOS:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = n_bytes if hard == resource.RLIM_INFINITY else min(n_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    threading.Thread(target=_watch_memory, args=(n_bytes,), daemon=True).start()


def _watch_memory(n_bytes: int) -> None:
    process = psutil.Process()
    while process.memory_info().rss <= n_bytes:
        time.sleep(WATCH_S)
    print(f"@error MemoryError: more than {n_bytes:,} bytes", file=sys.stderr, flush=True)
    os._exit(1)


def _examine(path: Path, log: list[str]) -> Measured:
    worker.stage("start")
    from plamo_study.engine import library

    library.capture_log(log)
    gpu = bool(library.describe()["gpu_offload"])
    checks: dict[str, float | bool] = {"gpu": gpu}
    worker.stage("load")
    tokens, logits, seen = _probed(path)
    checks["finite_cpu"] = bool(np.isfinite(logits).all())
    if found := re.search(r"\bn_rot\s*=\s*(\d+)", "".join(log)):
        checks["n_rot"] = int(found.group(1))
    if gpu:
        checks |= _on_gpu(path)
    notes: list[str] = []
    if checks["finite_cpu"]:
        worker.stage("oracle")
        checks |= _against_oracle(path, tokens, logits, notes)
    worst = ranges.worst(seen, (casts.host(platform.machine()), "Metal", "CUDA"))
    return Measured(checks=checks, log=notes, facts={"ranges": worst})


def _on_gpu(path: Path) -> dict[str, float | bool]:
    from plamo_study.engine.session import EngineError

    worker.stage("load on the GPU")
    try:
        return {"finite_gpu": bool(np.isfinite(_logits(path, -1)).all())}
    except EngineError:
        return {"gpu_loads": False}


def _probed(path: Path) -> tuple[np.ndarray, np.ndarray, Any]:
    """Random tokens (n,), the CPU's logits after each (n, n_vocab), and the ranges of what entered its products."""
    from plamo_study.engine.ranges import InputRanges

    with InputRanges(path, _config(0, n_threads=1)) as model:  # it stops at every product: more threads would wait
        tokens = np.random.default_rng(0).integers(FIRST_TOKEN, model.n_vocab, N_PROMPT + N_STEPS)
        worker.stage("prefill")
        model.evaluate(tokens[:N_PROMPT])
        rows = [model.logits(N_PROMPT)]
        worker.stage("decode")
        model.phase = "decode"
        for at in range(N_PROMPT, len(tokens)):
            model.evaluate(tokens[at : at + 1])
            rows.append(model.logits())
        return tokens, np.concatenate(rows), model.found


def _logits(path: Path, n_gpu_layers: int) -> np.ndarray:
    """The engine's logits after each random token, (n, n_vocab), the last of them decoded one by one."""
    from plamo_study.engine.session import Session

    with Session(path, _config(n_gpu_layers)) as session:
        tokens = np.random.default_rng(0).integers(FIRST_TOKEN, session.n_vocab, N_PROMPT + N_STEPS)
        rows = [session.prefill({0: tokens[:N_PROMPT]}, every=True)[0]]
        for token in tokens[N_PROMPT:]:
            session.decode({0: int(token)})
            rows.append(session.logits()[None])
    return np.concatenate(rows)


def _config(n_gpu_layers: int, n_threads: int = 0) -> Any:
    from plamo_study.engine.session import SessionConfig

    threads = n_threads or psutil.cpu_count(logical=False) or 1
    return SessionConfig(N_PROMPT + N_STEPS, n_threads=threads, n_threads_batch=threads, n_gpu_layers=n_gpu_layers)


def _against_oracle(path: Path, tokens: np.ndarray, logits: np.ndarray, notes: list[str]) -> dict[str, float | bool]:
    from plamo_study.errors import StudyError
    from plamo_study.measure.tolerance import LOOSEST, TOLERANCE
    from plamo_study.oracle.compare import agreement
    from plamo_study.oracle.forward import Oracle

    tensors = header.read(path).tensors
    n_weights = sum(int(np.prod(t.dims, dtype=object)) for t in tensors)
    if n_weights > ORACLE_WEIGHTS:
        notes.append(f"{n_weights:,} weights are too many for the oracle")
        return {}
    tolerance = max(TOLERANCE.get(t.type_name, LOOSEST) for t in tensors)
    try:
        verdict = agreement(logits, Oracle(path, round_activations=True).logits(tokens), tolerance)
    except (StudyError, ValueError) as error:
        notes.append(f"the oracle cannot judge it: {getattr(error, 'why', error)}")
        return {}
    return {"oracle_error": verdict.max_relative_error, "oracle_agrees": verdict.ok, "tolerance": tolerance}


if __name__ == "__main__":
    main()
