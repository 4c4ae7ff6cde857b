"""Study 01's claims, each an estimate against a threshold: holds, does not hold, or inconclusive."""

from typing import Any

import pandas as pd

from plamo_study.analysis import timing
from plamo_study.analysis.claims import above, family, within
from plamo_study.analysis.roofline import Model
from plamo_study.analysis.stats import Estimate
from plamo_study.analysis.usable import main_rows
from plamo_study.studies.phase_asymmetry import analysis
from plamo_study.studies.phase_asymmetry.prediction import against_prediction

PUBLISHED_RATIO = 19.0  # the source's headline for plamo-2-1b on an M4 Pro, data/published/m4-pro-b9596.csv
ALIKE = 0.15  # two gains are called equal within this margin
FLAT = 0.10  # a rate is called flat within this margin
SHARE = 0.7  # of the read bandwidth measured in the same blocks


def claims(rows: pd.DataFrame, models: dict[str, Model]) -> pd.DataFrame:
    """One family of claims; `wanted` is the threshold in words."""
    ratios = analysis.asymmetry(rows).set_index("model")["ratio"]
    gains, shares = analysis.thread_gains(rows), against_prediction(rows, models)
    entries = []
    for model, ratio in ratios.items():
        name = str(model)
        foretold = "prefill over decode is what the two ceilings allow"
        entries.append(within(foretold, name, ratio, *_allowed(shares, name)))
        flat = _flatness(rows, name)
        entries.append(within("the prefill rate is flat from 512 to 2048 tokens", name, flat, 1 - FLAT, 1 + FLAT))
        entries += _thread_claims(name, gains) if ("decode", name) in gains else []
        decode = shares[(shares["model"] == name) & (shares["what"] == "decode step")]["of_usual"].iloc[0]
        entries.append(above("decode reads at most of the bandwidth measured beside it", name, decode, SHARE))
    first = str(ratios.index[0])
    low, high = PUBLISHED_RATIO / (1 + ALIKE), PUBLISHED_RATIO * (1 + ALIKE)
    entries.append(within("the M4 Pro's factor of 19 is found here", first, ratios[first], low, high))
    return family(entries)


def _thread_claims(model: str, gains: dict[tuple[str, str], pd.Series]) -> list[dict[str, Any]]:
    fast, slow = gains["prefill", model], gains["decode", model]
    matmul, read = gains["matmul", ""], gains["read", ""]
    low, high = 1 / (1 + ALIKE), 1 + ALIKE
    return [
        within(
            "twice the threads speed prefill as they speed matrix products",
            model,
            timing.paired_ratio(fast, matmul),
            low,
            high,
        ),
        within(
            "twice the threads speed decode as they speed reading", model, timing.paired_ratio(slow, read), low, high
        ),
        above("twice the threads speed prefill more than decode", model, timing.paired_ratio(fast, slow), 1.0),
    ]


def _allowed(predicted: pd.DataFrame, model: str) -> tuple[float, float]:
    """The least and the largest ratio of prefill to decode rate that the predicted bands of both phases allow."""
    phases = predicted[predicted["model"] == model].set_index("what")
    prompt, step = phases.loc["prefill 512"], phases.loc["decode step"]
    return float(step["low"] * 512 / prompt["high"]), float(step["high"] * 512 / prompt["low"])


def _flatness(rows: pd.DataFrame, model: str) -> Estimate:
    found = main_rows(rows)
    found = found[(found["workload"] == "prefill") & (found["model"] == model)]
    short, long = (
        timing.seconds_by_block(found[found["n_prompt"] == n], timing.median_sample) / n for n in (512, 2048)
    )
    return timing.paired_ratio(short, long)
