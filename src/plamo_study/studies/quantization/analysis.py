"""Study 04, speed: ratios of two weight types, and what the kernels timed alone promise.

Ratios are paired by block. Promises: each type's matrix product is measured alone, for one column as a rate of bytes
and for many as a rate of FLOPs, and a file's time is the sum over its types; what kernels explain and bytes do not is
the price of dequantization. Loss of quality is another study's.
"""

from collections.abc import Iterator
from typing import Any

import pandas as pd

from plamo_study.analysis import stats
from plamo_study.analysis.ceilings import MATMUL, at, by_type, loaded, main_place, measured, weighty
from plamo_study.analysis.files import Files
from plamo_study.analysis.timing import NS, median_sample, paired_ratio
from plamo_study.analysis.usable import main_rows

Series = dict[tuple[str, str, str], pd.Series]
Rates = dict[tuple[str, str], pd.Series]


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


def ratio(known: Series, phase: str, model: str, dtype: str, over: str) -> stats.Estimate | None:
    """Speed of `dtype` over that of `over` in a phase, paired by block; None if either was not measured.

    `known`: the `seconds` of the rows.
    """
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


def kernel_seconds(rows: pd.DataFrame, known: Files) -> pd.DataFrame:
    """Seconds of a file by its kernels' rates: model, dtype, phase ("reads" a prompt, "writes" a token), block.

    `kernels` holds the seconds. Files that hold a tensor type whose kernel was not measured are left out.
    """
    entries = list(_entries(rows, known))
    return pd.concat(entries) if entries else pd.DataFrame(columns=["block", "kernels", "model", "dtype", "phase"])


def _entries(rows: pd.DataFrame, known: Files) -> Iterator[pd.DataFrame]:
    rates, prompts = _rates(rows), rows[rows["workload"] == "decode"]["n_prompt"]
    for (model, dtype), fact in known.items() if rates else ():
        amounts, n_prompt = weighty(by_type(fact)), int(prompts.max())
        if any((kind, columns) not in rates for kind in amounts for columns in ("one", "many")):
            continue
        spent: dict[str, list[Any]] = {
            "writes": [amount["bytes"] / rates[kind, "one"] for kind, amount in amounts.items()],
            "reads": [2 * n_prompt * a["multiplied"] / rates[kind, "many"] for kind, a in amounts.items()],
        }
        for phase, parts in spent.items():
            whole = pd.concat(parts, axis=1).sum(axis=1, skipna=False).dropna()
            yield whole.rename("kernels").reset_index().assign(model=model, dtype=dtype, phase=phase)


def _rates(rows: pd.DataFrame) -> Rates:
    """Rates by block, in B/s or FLOP/s, by (tensor type, one or many columns), of weights as the engine loads them."""
    table = measured([rows])
    if table.empty:
        return {}
    place, found = main_place(rows), Rates()
    for dtype in at(table, place, MATMUL)["dtype"].unique():
        lines = loaded(table, place, str(dtype))
        one, many = lines[lines["columns"] == 1].set_index("block"), lines[lines["many"]].set_index("block")
        found[str(dtype), "one"] = one["n_bytes"] / one["usual"]
        found[str(dtype), "many"] = many["n_flops"] / many["usual"]
    return {key: rates for key, rates in found.items() if len(rates)}
