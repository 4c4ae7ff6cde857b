"""Study 01's arithmetic: this machine's ceilings, the time they allow each phase, and what was measured beside it."""

from typing import Any

import pandas as pd

from plamo_study.analysis import roofline, stats, timing
from plamo_study.analysis.ceilings import by_block, main_place, measured
from plamo_study.analysis.own_ceilings import CEILING, limits
from plamo_study.analysis.roofline import Band, Ceilings, Model, miss
from plamo_study.analysis.usable import main_rows, model_names
from plamo_study.studies.phase_asymmetry import analysis

DECODE_DEPTH = 128 + 512 / 2  # mean depth of the decode cell: 128 tokens of prompt, 512 steps


def prediction(rows: pd.DataFrame, models: dict[str, Model]) -> pd.DataFrame:
    """What arithmetic says before a phase is timed, per model and `what`.

    Columns: phase, n_prompt, `flops`, `bytes`, the nearer ceiling (`bound`), and the band `low` to `high` in seconds.
    """
    names = model_names(rows)
    entries = [entry for name in names for entry in _predictions(models[name], limits(rows, models[name]), name)]
    return pd.DataFrame(entries)


def against_prediction(rows: pd.DataFrame, models: dict[str, Model]) -> pd.DataFrame:
    """Prediction beside measurement, for what was measured.

    `measured`: median seconds. `miss`: 1 inside the band, measured/high above it, measured/low below it. `of_best`:
    achieved rate over the nearer ceiling's best sample. `of_usual`: over the same ceiling measured in the same block.
    """
    found, entries = main_rows(rows), []
    for entry in prediction(rows, models).to_dict("records"):
        cells = found[(found["model"] == entry["model"]) & (found["workload"] == entry["phase"])]
        long = cells["n_prompt"] == entry["n_prompt"] if entry["phase"] == "prefill" else cells["n_gen"] == 512
        seconds = timing.seconds_by_block(cells[long], timing.median_sample)
        if len(seconds):
            entries.append(entry | _compared(entry, seconds, rows, models[entry["model"]]))
    return pd.DataFrame(entries)


def _compared(entry: dict[str, Any], seconds: pd.Series, rows: pd.DataFrame, model: Model) -> dict[str, Any]:
    memory, limit = entry["bound"] == "memory", limits(rows, model)
    usual = by_block(measured([rows]), main_place(rows), model)[CEILING[entry["bound"]]]
    work, best = (entry["bytes"], limit.read) if memory else (entry["flops"], limit.matmul)
    spent = stats.median(seconds.tolist())
    full = work / best
    off = miss(spent.value, entry["low"], entry["high"])
    shares = {"of_best": spent.per(full), "of_usual": timing.paired_ratio(work / usual, seconds)}
    return {"measured": spent, "miss": off} | shares


def _predictions(model: Model, limit: Ceilings, name: str) -> list[dict[str, Any]]:
    entries = []
    for n in analysis.PROMPTS:
        moved = roofline.prefill_bytes(model, n)
        band = roofline.prefill_band(model, n, limit)
        what = {"model": name, "what": f"prefill {n}", "phase": "prefill", "n_prompt": n}
        entries.append(what | _band(roofline.prefill_flops(model, n), moved, band))
    flops, moved = roofline.decode_flops(model, DECODE_DEPTH), roofline.decode_bytes(model, DECODE_DEPTH)
    what = {"model": name, "what": "decode step", "phase": "decode", "n_prompt": 0}
    return [*entries, what | _band(flops, moved, roofline.decode_band(model, DECODE_DEPTH, limit))]


def _band(flops: float, moved: float, band: Band) -> dict[str, Any]:
    return {"flops": flops, "bytes": moved, "bound": band.bound, "low": band.low, "high": band.high}
