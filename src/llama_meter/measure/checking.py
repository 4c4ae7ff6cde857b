"""All checks of a model file: first what the file itself shows, then the gate that a measurement of it would pass.

The engine gets only files without a blocking finding, in a worker with a limit of time: a hang, a crash or a refusal
becomes a finding.
"""

from pathlib import Path

from llama_meter.cells import Gate
from llama_meter.disk import printable
from llama_meter.errors import MORE_MEMORY, says_memory
from llama_meter.limits import NOT_FINITE
from llama_meter.measure import plan, runner
from llama_meter.measure.process import Outcome, work
from llama_meter.measure.worker import Job
from llama_meter.models.check import Finding, blocking, file_of, inspect, ssm_out_findings
from llama_meter.models.header import AGAIN
from llama_meter.models.registry import ModelFile
from llama_meter.rows import Measured

TIME_S, BYTES_PER_S = 60.0, 5e6  # time limit: a start, and the oracle's arithmetic on a slow core
OTHER = "name another file: one that `make study SCALE=mini` writes is known to work"


def check(path: Path, time_limit_s: float | None = None) -> list[Finding]:
    """Findings about a file, worst first; without a blocking one, the file may be measured.

    `time_limit_s`: of its gate, by default one that grows with the file. Raises StudyError where there is no file.
    """
    findings, header = inspect(path)
    if header is None or blocking(findings):
        return findings
    gpu = bool(runner.engine_facts()["gpu_offload"])
    file = file_of(path, (path.resolve(),), [header], findings)
    passed = [finding for layers in (0, -1)[: 1 + gpu] for finding in through_the_gate(file, layers, time_limit_s)]
    severities = ("blocking", "warning", "note")
    every = findings + passed + ssm_out_findings(header, gpu)
    return sorted(every, key=lambda finding: severities.index(finding.severity))


def through_the_gate(file: ModelFile, n_gpu_layers: int = 0, time_limit_s: float | None = None) -> list[Finding]:
    """Let the engine compute some tokens on the CPU or a GPU, and the oracle judge every part of it."""
    gate = Gate(judges="parts", n_gpu_layers=n_gpu_layers, **plan.LEAN_GATE)
    seconds = TIME_S + file.n_bytes / BYTES_PER_S if time_limit_s is None else time_limit_s
    outcome = work(Job(cell=plan.gate_of(gate, file.file), path=str(file.path)), seconds)
    where = "GPU" if n_gpu_layers else "CPU"
    if outcome.failure:
        return [_failed(outcome, where)]
    return _objections(outcome.measured, where) or [_passed(outcome, where)]


def _failed(outcome: Outcome, where: str) -> Finding:
    failure = outcome.failure
    assert failure is not None
    why = f"{printable(failure.why, 300)} (on the {where}, stage: {failure.stage})"
    if says_memory("\n".join([failure.message, *failure.log_tail])):
        return Finding("blocking", "memory", why, MORE_MEMORY)
    if where == "GPU":
        return Finding("warning", "gpu-refused", why, "use n_gpu_layers = 0")
    return Finding("blocking", f"engine-{outcome.status}", why, OTHER)


def _objections(measured: Measured, where: str) -> list[Finding]:
    """What speaks against a file that the engine loaded and decoded."""
    checks, findings = measured.checks, []
    if checks.get("n_rot") == 0:
        why = "the engine rotates 0 dimensions: RoPE is lost (lost rotation, D1)"
        findings.append(Finding("blocking", "rope-lost", why, AGAIN))
    errors = {name: checks.get(name.replace("_agrees", "_error"), 0.0) for name, ok in checks.items() if ok is False}
    if checks.get("finite_agrees") is False or any(not error < NOT_FINITE for error in errors.values()):
        mend = "try ssm_out as BF16 (half-precision overflow, D5), or " + AGAIN
        findings.append(Finding("blocking", "logits-not-finite", f"logits on the {where} are not finite", mend))
    elif measured.valid is False:
        off = ", ".join(f"{name.removesuffix('_agrees')} by {error:.2g}" for name, error in errors.items())
        why = f"what the {where} computes differs from the reference computation: {off}"
        findings.append(Finding("blocking", "oracle", why, AGAIN))
    return findings


def _passed(outcome: Outcome, where: str) -> Finding:
    checks = outcome.measured.checks
    judged = "the engine agrees with itself; no oracle knows all of this file"
    if "parts_error" in checks:
        judged = (
            f"every part is within {checks['parts_error']:.2g} of the oracle (allowed: {checks['parts_tolerance']:g})"
        )
    why = f"loads and computes on the {where} in {outcome.elapsed_ns / 1e9:.1f} s; {judged}"
    return Finding("note", "gate", why, "nothing to mend")
