"""Measure a plan for whoever listens, a terminal, a notebook or a machine at home: one way from a plan to its rows."""

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TypedDict, Unpack

from llama_meter.engine import builds
from llama_meter.errors import NOT_MEASURED, StudyError
from llama_meter.measure import files, plan, runner, watch
from llama_meter.measure.asked import NOTHING, Sweep
from plamo_study.live import live
from plamo_study.read.recording import check_device
from plamo_study.studies import registry as studies

MORE = "give more minutes (--minutes, or -p minutes), or measure when the machine is idle: what was measured is kept"
ON_GPU = {"GGML_CUDA=ON", "GGML_VULKAN=ON"}  # options of builds that are made for a GPU
DEVICE = "PLAMO_STUDY_DEVICE"  # environment variables, which kernels inherit
MEASURED = "PLAMO_STUDY_MEASURED"  # the studies that the command has measured before it runs notebooks


class How(TypedDict, total=False):
    """How a sweep runs, as `runner.sweep` describes it."""

    minutes: float
    retry_failed: bool
    beside: Sequence[Path]
    elsewhere: runner.Elsewhere | None


def measure(
    planned: plan.Plan,
    path: Path,
    listener: live.Listener,
    asked: Sweep = NOTHING,
    announces: bool = False,
    **how: Unpack[How],
) -> runner.Summary:
    """Write the files that a plan lacks, measure what its journal lacks, and say all of it to `listener`.

    `minutes` are for measuring: writing files is not counted. `asked`: what of the plan a user chose. `announces`: say
    what to know beforehand. Raises StudyError for a program that the plan needs and that is not built.
    """
    listener.begin(live.beforehand([planned], how.get("minutes", 0.0)) if announces else [])
    if planned.program:
        builds.program(planned.program)
    with listener.writing() as on_bytes:
        files.make_models(planned, on_bytes)
    with listener.measuring():
        summary = runner.sweep(planned, path, listener.progress, **how)
        for row in summary.unexpected:
            if row.refuses:
                listener.refuse(row)
    for said in live.unseen(planned, summary, asked):
        listener.fail(said, NOT_MEASURED)
    listener.end(summary, live.no_time(planned, summary, asked))
    return summary


def says_something(planned: plan.Plan, summary: runner.Summary) -> bool:
    """Whether anything was measured with a file, where a plan has any, or a file was refused."""
    on_files = {cell for cell in planned.cells if cell.files} or set(planned.cells)
    return any(row.refuses or row.cell in on_files for row in summary.rows)


def lacking(summary: runner.Summary) -> str:
    """Why a finding lacks rows: how many processes did not run in time, and how many were disturbed."""
    hit = len(watch.disturbed(summary.rows))
    disturbed = f", and {hit} of the {len(summary.rows)} that ended were disturbed" if hit else ""
    return f"the time was up before {summary.lacking} processes that its finding needs had ended{disturbed}"


def build(study: str, scale: str, device: str = "auto", asked: Sweep = NOTHING) -> plan.Plan:
    """The plan of a study for the engine and machine at hand, and a device; "auto": the one that `--device` named.

    `asked`: files and values of a user's own, for a study that varies them.
    """
    if study not in studies.STUDIES:
        raise StudyError(f"study {study!r}", f"unknown; known: {', '.join(studies.STUDIES)}", "plamo-study run")
    plan.check_scale(scale)
    device = os.environ.get(DEVICE, "auto") if device == "auto" else device
    gpu, planned = _offloads(os.environ.get("LLAMA_CPP_LIB_PATH", ""), device), studies.plan(study)
    return planned(scale, gpu=gpu, sweep=asked) if asked != NOTHING else planned(scale, gpu=gpu)


@cache
def _offloads(engine: str, device: str) -> bool:
    """Whether layers go to a GPU: the engine in use is asked in a process of its own, once.

    StudyError for an unknown device, where a GPU is asked for and the engine has none, and for a build made for a GPU
    that finds none: its rows would be a CPU's under a GPU's name.
    """
    check_device(device)
    if device == "cpu":
        return False
    facts = runner.engine_facts()
    if facts["gpu_offload"]:
        return True
    if device == "gpu":
        why = "the engine in use was built without a GPU backend, or sees no GPU"
        raise StudyError("device gpu", why, "plamo-study engine list, or the device cpu or auto")
    if set(facts.get("options", ())) & ON_GPU:
        why = "was built for a GPU and finds none: it would measure the CPU"
        raise StudyError(f"engine {engine}", why, "nvidia-smi or vulkaninfo, which must list one; or the device cpu")
    return False
