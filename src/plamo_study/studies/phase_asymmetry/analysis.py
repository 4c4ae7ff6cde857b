"""Study 01: how far apart prefill and decode are, and which ceiling each stands under.

Every function takes the frame of the study's rows. Estimates are over processes; comparisons are paired by block.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd

from plamo_study.analysis import stats
from plamo_study.analysis.timing import NS, median_sample, paired_ratio, seconds_by_block
from plamo_study.analysis.usable import main_rows, model_names, usable

PROMPTS = (128, 512, 2048)
GENERATED = (16, 64, 128, 256, 512)
EXPERIMENT = {"prefill": {"n_prompt": 128}, "decode": {"n_gen": 32}}  # cells measured at every thread count
OFFLOADED_PROMPT, OFFLOADED_STEPS = EXPERIMENT["prefill"]["n_prompt"], EXPERIMENT["decode"]["n_gen"]


def prefill(rows: pd.DataFrame) -> pd.DataFrame:
    """Per model and prompt length: `rate` (t/s), `ttft` and `ttft_p95` (s), `noise` between processes, `n` of them."""
    found = main_rows(rows)
    return _by(found[found["workload"] == "prefill"], ["model", "n_prompt"], _prefill_entry)


def decode(rows: pd.DataFrame, generated: Sequence[int] = GENERATED) -> pd.DataFrame:
    """Per model and output length: `seconds`, `rate` (t/s), `itl` and `itl_p95` (s), `noise`, `n` processes.

    Shorter outputs are the first steps of the longest run: the same computation, so the same numbers.
    """
    found = main_rows(rows)
    found = found[(found["workload"] == "decode") & (found["n_gen"] >= max(generated))]
    parts = []
    for n in generated:
        parts.append(_by(first_steps(found, n), ["model"], _decode_entry).assign(generated=n))
    return pd.concat(parts, ignore_index=True)


def asymmetry(rows: pd.DataFrame, n_prompt: int = 512, n_gen: int = 512) -> pd.DataFrame:
    """Per model: `ratio` = prefill rate of `n_prompt` tokens over decode rate of `n_gen` tokens."""
    found = main_rows(rows)
    fast = found[(found["workload"] == "prefill") & (found["n_prompt"] == n_prompt)]
    slow = found[(found["workload"] == "decode") & (found["n_gen"] == n_gen)]
    entries = []
    for model in model_names(fast):
        prompt, step = (
            seconds_by_block(fast[fast["model"] == model], median_sample) / n_prompt,
            seconds_by_block(slow[slow["model"] == model]) / n_gen,
        )
        entries.append({"model": model, "ratio": paired_ratio(step, prompt)})
    return pd.DataFrame(entries)


def crossover(rows: pd.DataFrame) -> pd.DataFrame:
    """Per model and prompt length: `tokens` of output that take as long as the prompt, at the mean ITL of 512 steps."""
    found = main_rows(rows)
    entries = []
    for (model, n_prompt), group in found[found["workload"] == "prefill"].groupby(["model", "n_prompt"]):
        steps = found[(found["workload"] == "decode") & (found["model"] == model) & (found["n_gen"] == 512)]
        tokens = paired_ratio(seconds_by_block(group, median_sample), seconds_by_block(steps) / 512)
        entries.append({"model": model, "n_prompt": n_prompt, "tokens": tokens})
    return pd.DataFrame(entries)


def request_map(rows: pd.DataFrame, n: int = 24) -> pd.DataFrame:
    """Share of a request spent in prefill over (input length x output length), inside the measured ranges.

    Prefill time is interpolated between the measured lengths (log-log), decode time is the measured running sum.
    Columns: model, n_in, n_in_next, n_out, n_out_next (edges of a map field) and share.
    """
    ins, outs = np.geomspace(min(PROMPTS), max(PROMPTS), n + 1), np.geomspace(min(GENERATED), max(GENERATED), n + 1)
    fast, slow, parts = prefill(rows), decode(rows), []
    for model in model_names(fast):
        t_in = _interpolate(fast[fast["model"] == model], "n_prompt", "ttft", np.sqrt(ins[1:] * ins[:-1]))
        t_out = _interpolate(slow[slow["model"] == model], "generated", "seconds", np.sqrt(outs[1:] * outs[:-1]))
        i, o = (axis.ravel() for axis in np.meshgrid(np.arange(n), np.arange(n)))
        edges = {"n_in": ins[i], "n_in_next": ins[i + 1], "n_out": outs[o], "n_out_next": outs[o + 1]}
        parts.append(pd.DataFrame({"model": model, **edges, "share": t_in[i] / (t_in[i] + t_out[o])}))
    return pd.concat(parts, ignore_index=True)


def thread_gains(rows: pd.DataFrame) -> dict[tuple[str, str], pd.Series]:
    """What full threads gain on the CPU, by (what, model) and block: time with fewer threads over time with all."""
    found = usable(rows)
    found = found[found["n_gpu_layers"] == 0]
    many, few = found["n_threads"].max(), found["n_threads"].min()
    gains: dict[tuple[str, str], pd.Series] = {}
    for what in ("read", "matmul", "prefill", "decode"):
        cells = found[found["workload"] == what]
        for field, value in EXPERIMENT.get(what, {}).items():
            cells = cells[cells[field] == value]
        for model, group in cells.groupby("model"):
            slow, fast = (
                seconds_by_block(group[group["n_threads"] == threads], median_sample) for threads in (few, many)
            )
            gains[what, str(model)] = (slow / fast).dropna() if few != many else pd.Series(dtype=float)
    return gains


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


def threads_experiment(rows: pd.DataFrame) -> pd.DataFrame:
    """`gain` of full threads over fewer for both ceilings and for each model's phases (1 = none)."""
    entries = [
        {"what": what, "model": model, "gain": gain_estimate(gain)}
        for (what, model), gain in thread_gains(rows).items()
    ]
    return pd.DataFrame(entries)


def gain_estimate(gain: pd.Series) -> stats.Estimate:
    """The estimate of a by-block ratio."""
    return stats.ratio(gain.tolist(), [1.0] * len(gain))


def first_steps(found: pd.DataFrame, n: int) -> pd.DataFrame:
    """Decode rows cut to their first `n` steps."""
    return found.assign(samples_ns=[[steps[:n] for steps in samples] for samples in found["samples_ns"]])


def _by(found: pd.DataFrame, by: list[str], entry: Callable[[pd.DataFrame], dict[str, Any]]) -> pd.DataFrame:
    return pd.DataFrame([dict(zip(by, key, strict=True)) | entry(group) for key, group in found.groupby(by)])


def _prefill_entry(group: pd.DataFrame) -> dict[str, Any]:
    medians = (group["samples_ns"].map(median_sample) / NS).tolist()
    ttft = stats.median(medians)
    return {
        "rate": ttft.per(int(group["n_prompt"].iloc[0] * group["n_seq"].iloc[0])),
        "ttft": ttft,
        "ttft_p95": stats.percentile([sample / NS for sample in chain(*chain(*group["samples_ns"]))], 0.95),
        "noise": stats.variation(medians),
        "n": len(group),
    }


def _decode_entry(group: pd.DataFrame) -> dict[str, Any]:
    steps = [s / NS for s in chain(*chain(*group["samples_ns"]))]
    seconds = [sum(chain(*samples)) / NS / len(samples) for samples in group["samples_ns"]]
    medians = (group["samples_ns"].map(median_sample) / NS).tolist()
    return {
        "seconds": stats.median(seconds),
        "rate": stats.rate(len(group["samples_ns"].iloc[0][0]), seconds),
        "itl": stats.median(medians),
        "itl_p95": stats.percentile(steps, 0.95),
        "noise": stats.variation(medians),
        "n": len(group),
    }


def _interpolate(table: pd.DataFrame, x: str, estimate: str, at: np.ndarray) -> np.ndarray:
    known = sorted((row[x], row[estimate].value) for row in table.to_dict("records"))
    lengths, seconds = zip(*known, strict=True)
    return np.exp(np.interp(np.log(at), np.log(lengths), np.log(seconds)))
