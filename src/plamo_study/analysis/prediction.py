"""Study 01's arithmetic: this machine's ceilings, the time they allow each phase, and what was measured beside it."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import pandas as pd

from plamo_study.analysis import phase_asymmetry as study
from plamo_study.analysis import roofline, stats
from plamo_study.analysis.roofline import Band, Ceilings, Model
from plamo_study.analysis.usable import main_rows, model_names

DECODE_DEPTH = 128 + 512 / 2  # mean depth of the decode cell: 128 tokens of prompt, 512 steps
CEILING = {"memory": "read", "compute": "matmul"}


def ceilings(rows: pd.DataFrame) -> pd.DataFrame:
    """Per ceiling, device and thread count: `best` sample and `usual` (median over processes), in B/s or FLOP/s."""
    found = rows[rows["workload"].isin(["read", "matmul"]) & (rows["status"] == "ok") & (rows["n_prompt"] == 0)]
    found = found[found["label"] == ""]  # labelled ones are the kernels of single types (notebook 04)
    best, usual = _rate(found, lambda samples: min(chain(*samples))), _rate(found, study.median_sample)
    entries = []
    for (ceiling, layers, threads), group in found.groupby(["workload", "n_gpu_layers", "n_threads"]):
        key = {"ceiling": ceiling, "n_gpu_layers": layers, "n_threads": threads}
        entries.append(key | {"best": best[group.index].max(), "usual": stats.median(usual[group.index].tolist())})
    return pd.DataFrame(entries)


def limits(rows: pd.DataFrame) -> Ceilings:
    """The ceilings of the main set-up, best-of, as the roofline takes them."""
    best = _main_ceilings(rows)["best"]
    return Ceilings(read=float(best["read"]), matmul=float(best["matmul"]))


def usual_limits(rows: pd.DataFrame) -> Ceilings:
    """The same ceilings as they usually are: medians over processes."""
    usual = _main_ceilings(rows)["usual"]
    return Ceilings(read=usual["read"].value, matmul=usual["matmul"].value)


def _main_ceilings(rows: pd.DataFrame) -> pd.DataFrame:
    table = ceilings(rows)
    table = table[table["n_gpu_layers"] == table["n_gpu_layers"].min()]
    return table[table["n_threads"] == table["n_threads"].max()].set_index("ceiling")


def prediction(rows: pd.DataFrame, models: dict[str, Model]) -> pd.DataFrame:
    """What arithmetic says before a phase is timed, per model and `what`.

    Columns: phase, n_prompt, `flops`, `bytes`, the nearer ceiling (`bound`), and the band `low` to `high` in seconds.
    """
    limit = limits(rows)
    entries = [entry for name in model_names(rows) for entry in _predictions(models[name], limit, name)]
    return pd.DataFrame(entries)


def against_prediction(rows: pd.DataFrame, models: dict[str, Model]) -> pd.DataFrame:
    """Prediction beside measurement, for what was measured.

    `measured`: median seconds. `miss`: 1 inside the band, measured/high above it, measured/low below it. `of_best`:
    achieved rate over the nearer ceiling's best sample. `of_usual`: over the same ceiling measured in the same block.
    """
    limit, found, entries = limits(rows), main_rows(rows), []
    for entry in prediction(rows, models).to_dict("records"):
        cells = found[(found["model"] == entry["model"]) & (found["workload"] == entry["phase"])]
        long = cells["n_prompt"] == entry["n_prompt"] if entry["phase"] == "prefill" else cells["n_gen"] == 512
        seconds = study.seconds_by_block(cells[long], study.median_sample)
        if len(seconds):
            entries.append(entry | _compared(entry, seconds, found, limit))
    return pd.DataFrame(entries)


def _compared(entry: dict[str, Any], seconds: pd.Series, found: pd.DataFrame, limit: Ceilings) -> dict[str, Any]:
    memory = entry["bound"] == "memory"
    ceiling = found[found["workload"] == CEILING[entry["bound"]]].set_index("block")
    usual = _rate(ceiling, study.median_sample)
    work, best = (entry["bytes"], limit.read) if memory else (entry["flops"], limit.matmul)
    measured = stats.median(seconds.tolist())
    full = work / best
    share = stats.Estimate(full / measured.value, full / measured.high, full / measured.low, measured.n)
    off = miss(measured.value, entry["low"], entry["high"])
    return {"measured": measured, "miss": off, "of_best": share, "of_usual": study.paired_ratio(work / usual, seconds)}


def _rate(found: pd.DataFrame, statistic: Callable[[list[list[int]]], float]) -> pd.Series:
    """Work per second of ceiling rows, in B/s or FLOP/s, at a statistic of their samples."""
    return (found["n_bytes"] + found["n_flops"]) * study.NS / found["samples_ns"].map(statistic)


def _predictions(model: Model, limit: Ceilings, name: str) -> list[dict[str, Any]]:
    entries = []
    for n in study.PROMPTS:
        moved = roofline.prefill_bytes(model, n)
        band = roofline.prefill_band(model, n, limit)
        what = {"model": name, "what": f"prefill {n}", "phase": "prefill", "n_prompt": n}
        entries.append(what | _band(roofline.prefill_flops(model, n), moved, band))
    flops, moved = roofline.decode_flops(model, DECODE_DEPTH), roofline.decode_bytes(model, DECODE_DEPTH)
    what = {"model": name, "what": "decode step", "phase": "decode", "n_prompt": 0}
    return [*entries, what | _band(flops, moved, roofline.decode_band(model, DECODE_DEPTH, limit))]


def _band(flops: float, moved: float, band: Band) -> dict[str, Any]:
    return {"flops": flops, "bytes": moved, "bound": band.bound, "low": band.low, "high": band.high}


def miss(measured: float, low: float, high: float) -> float:
    """1 inside the band; outside it, the measured time over the edge it lies beyond."""
    return measured / high if measured > high else measured / low if measured < low else 1.0
