"""All checks of a model file: first what the file itself shows, then what the engine makes of it.

The engine gets only files without a blocking finding. Its gate is a process of its own, measure/gate_worker.py, with
limits of time and memory: it loads the file, decodes, and compares the logits with the oracle. A hang, a crash or a
refusal of the engine becomes a finding.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from llama_meter.errors import MORE_MEMORY, says_memory
from llama_meter.measure.process import Outcome, work
from llama_meter.models.check import inspect, ssm_out_findings
from llama_meter.models.finding import AGAIN, Finding, blocking, ordered, printable
from llama_meter.rows import Measured

WORKER = "llama_meter.measure.gate_worker"
N_PROMPT, N_STEPS = 16, 4  # tokens prefilled, and decoded one by one after them
TIME_S, BYTES_PER_S = 30.0, 50e6  # time limit: start and arithmetic, and reading the file from a slow disk
MEMORY = 1 << 30  # bytes beside the weights, which may be mapped and repacked: twice the file
OTHER = "plamo-study models list" + " names files that are known to work"


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    """A file to examine, and the bytes the process may use."""

    path: str
    memory: int


@dataclass(frozen=True)
class Verdict:
    """What the gate found, and whether the engine in use puts weights on a GPU."""

    findings: list[Finding]
    gpu: bool = False


def check(
    path: Path,
    time_limit_s: float | None = None,
    memory_limit: int | None = None,
) -> list[Finding]:
    """Findings about a file, worst first; without a blocking one, the file may be measured.

    The engine loads and decodes it in a worker that gets `time_limit_s` seconds and `memory_limit` bytes beside the
    weights (None: limits that grow with the file). Raises StudyError where there is no file.
    """
    findings, header = inspect(path)
    if header is None or blocking(findings):
        return ordered(findings)
    verdict = through_the_gate(path, time_limit_s, memory_limit)
    return ordered(findings + verdict.findings + ssm_out_findings(header, verdict.gpu))


def through_the_gate(path: Path, time_limit_s: float | None = None, memory_limit: int | None = None) -> Verdict:
    """Let the engine load and decode `path` within limits in seconds and in bytes beside the weights."""
    size = path.stat().st_size
    seconds = TIME_S + size / BYTES_PER_S if time_limit_s is None else time_limit_s
    memory = (MEMORY if memory_limit is None else memory_limit) + 2 * size
    outcome = work(Examination(path=str(path.resolve()), memory=memory), seconds, workload=WORKER)
    if outcome.status != "ok":
        return Verdict([_failure(outcome, seconds)])
    measured = outcome.measured
    findings = _objections(measured) or [_passed(measured, outcome.elapsed_ns / 1e9)]
    return Verdict(findings, bool(measured.checks["gpu"]))


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
    why = f"{ends[outcome.status]} (stage: {failure.stage})"
    if says_memory("\n".join([failure.message, *failure.log_tail])):
        return Finding("blocking", "memory", why, MORE_MEMORY)
    return Finding("blocking", f"engine-{outcome.status}", why, OTHER)


def _objections(measured: Measured) -> list[Finding]:
    """What speaks against a file that the engine loaded and decoded."""
    checks, findings = measured.checks, []
    if checks.get("n_rot") == 0:
        why = "the engine rotates 0 dimensions: RoPE is lost (lost rotation, D1)"
        findings.append(Finding("blocking", "rope-lost", why, AGAIN))
    for place in ("cpu", "gpu"):
        if checks.get(f"finite_{place}") is False:
            mend = "try ssm_out as BF16 (half-precision overflow, D5), or " + AGAIN
            findings.append(
                Finding("blocking", "logits-not-finite", f"logits on the {place.upper()} are not finite", mend)
            )
    if checks.get("gpu_loads") is False:
        findings.append(
            Finding("warning", "gpu-refused", "loads on the CPU but not on the GPU", "use n_gpu_layers = 0")
        )
    if checks.get("oracle_agrees") is False:
        off, allowed = checks["oracle_error"], checks["tolerance"]
        why = f"logits differ from the reference computation by {off:.2g} (more than {allowed:g})"
        findings.append(Finding("blocking", "oracle", why, AGAIN))
    return findings


def _passed(measured: Measured, seconds: float) -> Finding:
    checks = measured.checks
    judged = "; ".join(measured.log)  # why the oracle did not
    if "oracle_error" in checks:
        judged = f"within {checks['oracle_error']:.2g} of the oracle (allowed: {checks['tolerance']:g})"
    why = f"loads, decodes {N_PROMPT + N_STEPS} tokens in {seconds:.1f} s with finite logits; {judged}"
    return Finding("note", "gate", why, "nothing to mend")
