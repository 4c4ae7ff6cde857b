"""The process that a model file is examined in: the engine loads and decodes it, the oracle judges the logits.

The file's content is not checked here: measure/checking.py lets through only files without a blocking finding.
"""

import os
import re
import resource
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil

from llama_meter.engine import library
from llama_meter.engine.session import EngineError, Session, SessionConfig
from llama_meter.errors import StudyError
from llama_meter.limits import FIRST_TOKEN
from llama_meter.measure import machine, worker
from llama_meter.measure.checking import N_PROMPT, N_STEPS, Examination
from llama_meter.measure.tolerance import LOOSEST, TOLERANCE
from llama_meter.models import header
from llama_meter.oracle.compare import agreement
from llama_meter.oracle.forward import Oracle
from llama_meter.rows import Measured

LOG_LINES = 10  # of the engine's log, printed before an error
WATCH_S = 0.05  # between two checks of the process's memory
ORACLE_WEIGHTS = 1 << 28  # the largest file, in weights, that the NumPy oracle judges

Checks = dict[str, float | bool]


def examined(job: Examination) -> Measured:
    """What the engine and the oracle make of a file; an error is preceded by the end of the engine's log."""
    _limit_memory(job.memory)
    log: list[str] = []
    library.capture_log(log)
    try:
        return _examined(Path(job.path), log)
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


def _examined(path: Path, log: list[str]) -> Measured:
    gpu = bool(library.describe()["gpu_offload"])
    worker.stage("load")
    tokens, logits = _decoded(path)
    checks: Checks = {"gpu": gpu, "finite_cpu": bool(np.isfinite(logits).all())}
    if match := re.search(r"\bn_rot\s*=\s*(\d+)", "".join(log)):
        checks["n_rot"] = int(match.group(1))
    if gpu:
        worker.stage("load on the GPU")
        checks |= _on_gpu(path, tokens)
    notes: list[str] = []
    if checks["finite_cpu"]:
        worker.stage("oracle")
        checks |= _against_oracle(path, tokens, logits, notes)
    return Measured(checks=checks, log=notes)


def _decoded(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens (n,), and the CPU's logits after each (n, n_vocab)."""
    with Session(path, _config(0, n_threads=1)) as model:
        tokens = np.random.default_rng(0).integers(FIRST_TOKEN, model.n_vocab, N_PROMPT + N_STEPS)
        worker.stage("prefill")
        rows = [model.prefill({0: tokens[:N_PROMPT]}, every=True)[0]]
        worker.stage("decode")
        for token in tokens[N_PROMPT:].tolist():
            model.decode({0: token})
            rows.append(model.logits()[None])
        return tokens, np.concatenate(rows)


def _on_gpu(path: Path, tokens: np.ndarray) -> Checks:
    try:
        with Session(path, _config(-1, n_threads=psutil.cpu_count(logical=False) or 1)) as session:
            rows = [session.prefill({0: tokens[:N_PROMPT]}, every=True)[0]]
            for token in tokens[N_PROMPT:]:
                session.decode({0: int(token)})
                rows.append(session.logits()[None])
    except EngineError:
        return {"gpu_loads": False}
    return {"finite_gpu": bool(np.isfinite(np.concatenate(rows)).all())}


def _config(n_gpu_layers: int, n_threads: int) -> SessionConfig:
    return SessionConfig(N_PROMPT + N_STEPS, n_threads=n_threads, n_threads_batch=n_threads, n_gpu_layers=n_gpu_layers)


def _against_oracle(path: Path, tokens: np.ndarray, logits: np.ndarray, notes: list[str]) -> Checks:
    """The oracle's verdict; none, and a note why, for a file that is too large or that it does not understand."""
    tensors = header.read(path).tensors
    n_weights = sum(tensor.n_elements for tensor in tensors)
    if n_weights > ORACLE_WEIGHTS:
        notes.append(f"{n_weights:,} weights are too many for the oracle")
        return {}
    tolerance = max(TOLERANCE.get(header.type_name(t), LOOSEST) for t in tensors)
    try:
        verdict = agreement(logits, Oracle(path, "CPU").logits(tokens), tolerance)
    except (StudyError, ValueError) as error:
        notes.append(f"the oracle cannot judge it: {getattr(error, 'why', error)}")
        return {}
    return {"oracle_error": verdict.max_relative_error, "oracle_agrees": verdict.ok, "tolerance": tolerance}


RUNS = {Examination: examined}
