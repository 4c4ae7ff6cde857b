"""Is another backend right? Gates, the three tests, the batching law, a lost rotation and planted inputs, side by side.

The predictions come from the casts read in the engine's source, and from the law that holds on the CPU. Each backend
is represented by the machine that ran it last.
"""

from dataclasses import dataclass
from typing import Any

import pandas as pd

from llama_meter.cells import ROTATION
from llama_meter.models import casts
from plamo_study.laws import batching_tests as law, numeric_range
from plamo_study.read.recording import elsewhere, read
from plamo_study.show import evidence

STUDY, SCALE = "04-backends", "mini"
NAMES = {"stock": "CPU", "blas": "OpenBLAS"}  # builds that compute on the CPU
COLUMNS = ["backend", "gates", "error", "hybrid", "control", "law", "planted", "rotation", "rotation_error", "machine"]
Facts = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Backend:
    """One backend's rows, the facts they refer to, and the machine."""

    name: str
    rows: pd.DataFrame
    facts: Facts
    machine: str


def recorded() -> list[Backend]:
    """Every backend that was run, the CPU first, each with the rows of one machine."""
    newest = read(STUDY, "recorded", SCALE)
    recordings = [newest, *elsewhere(newest)] if newest else []
    backends: dict[str, Backend] = {}
    for recording in sorted(recordings, key=lambda run: str(run.rows["started"].max()), reverse=True):
        rows = recording.rows
        (machine,) = (recording.facts[name] for name in rows["machine"].unique())
        for (build, layers), own in rows[rows["build"] != ""].groupby(["build", "n_gpu_layers"], sort=False):
            on_cpu = NAMES.get(str(build), str(build))
            name = casts.of_device(machine["gpus"][0]) if layers else on_cpu
            backends.setdefault(name, Backend(name, own, recording.facts, evidence.chip(machine)))
    return [
        backends[name]
        for name in sorted(backends, key=[*NAMES.values(), *casts.ON_GPUS, casts.TENSOR, *backends].index)
    ]


def verdicts() -> pd.DataFrame:
    """One line per backend: is it right where it should be, and wrong where it was predicted to be.

    Columns: backend; as shares: gates (embedded models that agree with the oracle), hybrid and control (of the three
    tests that hold), law (batches as the law says), planted (inputs as predicted); error (largest against the oracle),
    rotation (what a file without rotation does) and rotation_error; machine.
    """
    asked = [backend for backend in recorded() if (backend.rows["workload"] == "gate").any()]
    return pd.DataFrame([_verdict(backend) for backend in asked], columns=COLUMNS)


def _verdict(backend: Backend) -> dict[str, Any]:
    rows, facts = backend.rows, backend.facts
    gates = rows[(rows["workload"] == "gate") & (rows["status"] == "ok")]
    replayed, tests = law.checked(rows, facts), law.three_tests(rows)
    holds = tests["error"] <= tests["limit"]
    of_hybrid = tests["model"].map(lambda model: facts[model]["shape"]["arch"] == law.HYBRID)
    entry: dict[str, Any] = {"backend": backend.name, "gates": (gates["verdict"] == "valid").mean()}
    entry["error"] = max(max(checks["prefill_error"], checks["decode_error"]) for checks in gates["checks"])
    entry |= {"hybrid": holds[of_hybrid].mean(), "control": holds[~of_hybrid].mean()}
    entry |= {"law": replayed[replayed["label"] == ""]["exact"].mean()}
    entry |= {"planted": numeric_range.planted(rows, facts)["agrees"].astype(bool).mean()}
    return entry | _rotation(rows) | {"machine": backend.machine}


def _rotation(rows: pd.DataFrame) -> dict[str, Any]:
    rotated = rows[rows["label"] == ROTATION]
    status = "not run" if rotated.empty else str(rotated.iloc[-1]["status"])
    said = {"hang": "never returns", "ok": "answers wrongly"}.get(status, status)
    error = rotated.iloc[-1]["checks"]["error"] if status == "ok" else float("nan")
    return {"rotation": said, "rotation_error": error}
