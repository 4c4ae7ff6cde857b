"""Study 04's arithmetic: what bytes say a type gains, what the engine's kernels say, and what was measured.

Bytes: a decode step takes as long as what it reads; a prefill takes as long as its FLOPs, whatever the type. Kernels:
each type's matrix product is measured alone, for one column as a rate of bytes and for many as a rate of FLOPs, and a
file's time is the sum over its types. What bytes miss and kernels do not is the price of dequantization.
"""

from typing import Any

import pandas as pd

from plamo_study.analysis import roofline, stats
from plamo_study.analysis.ceilings import MATMUL, PLAIN, at, by_type, loaded, main_place, measured, weighty
from plamo_study.analysis.memo import once_a_frame
from plamo_study.analysis.timing import paired_ratio
from plamo_study.studies.quantization.analysis import REFERENCE, Files, seconds

LOADED = "loaded"  # the weights as the engine lays them out when it loads a model, beside PLAIN, as the file holds them


def predicted(rows: pd.DataFrame, known: Files) -> pd.DataFrame:
    """What bytes say beforehand, per model, dtype and phase: `predicted` speed over the reference's.

    1 for prefill; for decode the bytes of the reference's step over those of this type's.
    """
    depth, n_seq = _decode_depth(rows), _together(rows)
    entries = []
    for (model, dtype), fact in known.items():
        reference = known.get((model, REFERENCE))
        if reference is None:
            continue
        for phase, n in (("decode", 1), ("batch", n_seq)):
            gain = roofline.decode_bytes(reference, depth, n) / roofline.decode_bytes(fact, depth, n)
            entries.append({"model": model, "dtype": dtype, "phase": phase, "predicted": gain})
        entries.append({"model": model, "dtype": dtype, "phase": "prefill", "predicted": 1.0})
    return pd.DataFrame(entries)


def against_prediction(rows: pd.DataFrame, known: Files) -> pd.DataFrame:
    """Predicted and measured ratio over the reference, `miss` = measured / predicted, and what the kernels explain.

    `kernels`: the ratio that the kernels' own rates give; None where a rate is lacking, and for batches, whose kernels
    were not measured. `left`: measured / kernels, paired by block.
    """
    spent, entries = seconds(rows), []
    by_kernels = kernel_seconds(rows, known)
    for entry in predicted(rows, known).to_dict("records"):
        key, reference = ((entry["phase"], entry["model"], d) for d in (entry["dtype"], REFERENCE))
        if key not in spent or reference not in spent or entry["dtype"] == REFERENCE:
            continue
        measured, kernels, left = paired_ratio(spent[reference], spent[key]), None, None
        if key in by_kernels and reference in by_kernels:
            kernels = paired_ratio(by_kernels[reference], by_kernels[key])
            left = paired_ratio(spent[reference] * by_kernels[key], spent[key] * by_kernels[reference])
        entries.append(
            entry | {"measured": measured, "miss": measured.scaled(1 / entry["predicted"])}
            | {"kernels": kernels, "left": left}
        )  # fmt: skip
    columns = ["model", "dtype", "phase", "predicted", "measured", "miss", "kernels", "left"]
    return pd.DataFrame(entries, columns=columns)


def kernels(rows: pd.DataFrame) -> pd.DataFrame:
    """Per tensor type the rates of its matrix product: `read` (B/s, one column), `compute` (FLOP/s, many columns).

    `read_plain` and `compute_plain`: the same with the weights as the file holds them, None where that was not
    measured apart.
    """
    rates = _rates(rows)
    entries = []
    for dtype in dict.fromkeys(dtype for dtype, _, _ in rates):
        entry: dict[str, Any] = {"dtype": dtype}
        for name, columns in (("read", "one"), ("compute", "many")):
            for suffix, label in (("", LOADED), ("_plain", PLAIN)):
                found = rates.get((dtype, columns, label))
                entry[name + suffix] = None if found is None else stats.median(found.tolist())
        entries.append(entry)
    return pd.DataFrame(entries, columns=["dtype", "read", "read_plain", "compute", "compute_plain"])


def packing(rows: pd.DataFrame) -> pd.DataFrame:
    """What packing a type's weights at load gains: `dtype`, `columns` (one, many) and `gain` over plain, paired."""
    rates = _rates(rows)
    entries = [
        {"dtype": dtype, "columns": columns, "gain": paired_ratio(rates[dtype, columns, LOADED], plain)}
        for (dtype, columns, label), plain in rates.items()
        if label == PLAIN and (dtype, columns, LOADED) in rates
    ]
    return pd.DataFrame(entries, columns=["dtype", "columns", "gain"])


def kernel_seconds(rows: pd.DataFrame, known: Files) -> dict[tuple[str, str, str], pd.Series]:
    """Seconds by block that the kernels' rates give a file's decode step and prompt; unknown types are left out."""
    rates, found = _rates(rows), {}
    n_prompt = int(rows[rows["workload"] == "decode"]["n_prompt"].max())
    for (model, dtype), fact in known.items():
        amounts = weighty(by_type(fact))
        if any((kind, columns, LOADED) not in rates for kind in amounts for columns in ("one", "many")):
            continue
        read = [amount["bytes"] / rates[kind, "one", LOADED] for kind, amount in amounts.items()]
        compute = [2 * n_prompt * a["multiplied"] / rates[kind, "many", LOADED] for kind, a in amounts.items()]
        found["decode", model, dtype] = pd.concat(read, axis=1).sum(axis=1, skipna=False).dropna()
        found["prefill", model, dtype] = pd.concat(compute, axis=1).sum(axis=1, skipna=False).dropna()
    return found


@once_a_frame
def _rates(rows: pd.DataFrame) -> dict[tuple[str, str, str], pd.Series]:
    """Rates by block, in B/s or FLOP/s, by (tensor type, one or many columns, as loaded or plain)."""
    table, place = measured([rows]), main_place(rows)
    products = at(table, place, MATMUL)
    found: dict[tuple[str, str, str], pd.Series] = {}
    for dtype, group in products.groupby("dtype"):
        as_loaded = loaded(table, place, str(dtype))
        layouts = {LOADED: as_loaded} | ({} if len(as_loaded) == len(group) else {PLAIN: group.drop(as_loaded.index)})
        for layout, lines in layouts.items():
            one, many = lines[lines["columns"] == 1].set_index("block"), lines[lines["many"]].set_index("block")
            found[str(dtype), "one", layout] = one["n_bytes"] / one["usual"]
            found[str(dtype), "many", layout] = many["n_flops"] / many["usual"]
    return {key: rates for key, rates in found.items() if len(rates)}


def _decode_depth(rows: pd.DataFrame) -> float:
    """Mean depth of the steps of a lone sequence."""
    alone = rows[(rows["workload"] == "decode") & ~rows["anchor"] & (rows["n_seq"] == 1)].iloc[0]
    return float(alone["n_prompt"] + alone["n_gen"] / 2)


def _together(rows: pd.DataFrame) -> int:
    return int(rows[(rows["workload"] == "decode") & ~rows["anchor"]]["n_seq"].max())
