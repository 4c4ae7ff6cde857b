"""Study 01 with offloaded layers: the GPU against the CPU, paired by block."""

from typing import Any

import pandas as pd

from plamo_study.analysis import stats
from plamo_study.analysis.timing import median_sample, paired_ratio, seconds_by_block
from plamo_study.analysis.usable import model_names, usable

OFFLOADED_PROMPT, OFFLOADED_STEPS = 128, 32  # tokens of the cells that are measured at every thread count


def offload(rows: pd.DataFrame) -> pd.DataFrame:
    """`cpu`, `gpu` (seconds) and `gain` of the GPU over all CPU threads, per model and phase: a prompt of
    OFFLOADED_PROMPT tokens, the first OFFLOADED_STEPS decode steps.

    Empty where nothing was offloaded.
    """
    found, entries = usable(rows), []
    found = found[found["n_threads"] == found["n_threads"].max()]
    for model in model_names(found[found["n_gpu_layers"] != 0]):
        of_model = found[found["model"] == model]
        prompts = of_model[(of_model["workload"] == "prefill") & (of_model["n_prompt"] == OFFLOADED_PROMPT)]
        steps = first_steps(of_model[of_model["workload"] == "decode"], OFFLOADED_STEPS)
        for phase, cells in (("prefill", prompts), ("decode", steps)):
            on_gpu = cells["n_gpu_layers"] != 0
            cpu, gpu = (seconds_by_block(cells[where], median_sample) for where in (~on_gpu, on_gpu))
            entry: dict[str, Any] = {"model": model, "phase": phase, "gain": paired_ratio(cpu, gpu)}
            entries.append(entry | {"cpu": stats.median(cpu.tolist()), "gpu": stats.median(gpu.tolist())})
    return pd.DataFrame(entries, columns=["model", "phase", "cpu", "gpu", "gain"])


def first_steps(found: pd.DataFrame, n: int) -> pd.DataFrame:
    """Decode rows cut to their first `n` steps."""
    return found.assign(samples_ns=[[steps[:n] for steps in samples] for samples in found["samples_ns"]])
