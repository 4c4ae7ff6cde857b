"""Study 04, speed: what the kernels timed alone promise.

Each type's matrix product is measured alone, for one column as a rate of bytes
and for many as a rate of FLOPs, and a file's time is the sum over its types; what kernels explain and bytes do not is
the price of dequantization. Loss of quality is another study's.
"""

from collections.abc import Iterator
from typing import Any

import pandas as pd

from plamo_study.analysis.ceilings import MATMUL, at, by_type, loaded, main_place, measured, weighty
from plamo_study.analysis.files import Files

Rates = dict[tuple[str, str], pd.Series]


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
