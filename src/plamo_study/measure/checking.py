"""All checks of a model file: first what the file itself shows, then what the engine makes of it.

The engine gets only files without blocking findings, in a separate process with limits of time and memory.
"""

from pathlib import Path

from plamo_study.measure import checkup, machine
from plamo_study.models.check import inspect
from plamo_study.models.finding import Finding, blocking, ordered
from plamo_study.models.gguf_file import Progress
from plamo_study.models.tensor_check import ssm_out_findings


def check(
    path: Path,
    sha256: str = "",
    gate: bool = True,
    time_limit_s: float | None = None,
    memory_limit: int | None = None,
    progress: Progress | None = None,
) -> list[Finding]:
    """Findings about a file, worst first; without a blocking one, the file may be measured.

    `sha256`: 64 hex digits it should have. `gate`: let the engine load and decode it, in a worker that gets
    `time_limit_s` seconds and `memory_limit` bytes beside the weights (None: limits that grow with the file).
    `progress` is called with (bytes done, total bytes) while weights are scanned.
    Raises StudyError where there is no file, or `sha256` is no hash.
    """
    found, header = inspect(path, sha256, progress)
    gpu = machine.MACOS
    if header and gate and not blocking(found):
        verdict = checkup.gate(path, time_limit_s, memory_limit)
        found, gpu = found + verdict.findings, verdict.gpu
    return ordered(found + (ssm_out_findings(header, gpu) if header else []))
