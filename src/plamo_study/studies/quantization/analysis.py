"""Study 04, speed: ratios of the speeds of two weight types in a phase, for pages beside its own.

Every function takes the frame of the study's rows. Ratios are paired by block. Loss of quality is another study's.
"""

import pandas as pd

from plamo_study.analysis import stats
from plamo_study.analysis.memo import once_a_frame
from plamo_study.analysis.timing import NS, median_sample, paired_ratio
from plamo_study.analysis.usable import main_rows

Series = dict[tuple[str, str, str], pd.Series]


@once_a_frame
def seconds(rows: pd.DataFrame) -> Series:
    """Seconds by block, by (phase, model, dtype): of a whole prompt, or of a decode step (median of its steps)."""
    found = main_rows(rows)
    found = found[found["workload"] == "decode"]
    alone, together = found[found["n_seq"] == 1], found[found["n_seq"] > 1]
    series: Series = {}
    for (model, dtype), group in alone.groupby(["model", "dtype"]):
        by_block = group.set_index("block")
        series["prefill", model, dtype] = by_block["prefill_ns"].map(lambda times: pd.Series(times).median()) / NS
        series["decode", model, dtype] = by_block["samples_ns"].map(median_sample) / NS
    for (model, dtype), group in together.groupby(["model", "dtype"]):
        series["batch", model, dtype] = group.set_index("block")["samples_ns"].map(median_sample) / NS
    return series


def ratio(rows: pd.DataFrame, phase: str, model: str, dtype: str, over: str) -> stats.Estimate | None:
    """Speed of `dtype` over that of `over` in a phase, paired by block; None if either was not measured."""
    known = seconds(rows)
    top, bottom = known.get((phase, model, over)), known.get((phase, model, dtype))
    return None if top is None or bottom is None else paired_ratio(top, bottom)


def asymmetry(rows: pd.DataFrame, model: str) -> pd.DataFrame:
    """Prefill speed over decode speed by `dtype`, smallest first: columns dtype, n_prompt and `ratio`.

    Per token of a prompt of `n_prompt` tokens and per step of one answer, paired by block.
    """
    known, entries = seconds(rows), []
    n_prompt = int(rows[(rows["workload"] == "decode") & ~rows["anchor"] & (rows["n_seq"] == 1)]["n_prompt"].iloc[0])
    for phase, name, dtype in known:
        if (phase, name) == ("decode", model) and ("prefill", model, dtype) in known:
            ratio = paired_ratio(known[phase, model, dtype], known["prefill", model, dtype] / n_prompt)
            entries.append({"dtype": dtype, "n_prompt": n_prompt, "ratio": ratio})
    return pd.DataFrame(entries).sort_values("ratio", key=lambda found: found.map(lambda each: each.value))
