"""Notebook 02's tables of bytes, intensities and balance points: what arithmetic says before anything is timed."""

import math
from collections.abc import Mapping, Sequence

import pandas as pd

from plamo_study.analysis import roofline
from plamo_study.analysis.roofline import Ceilings, Model
from plamo_study.measure import planned
from plamo_study.present import published
from plamo_study.present.tables import NOT_AVAILABLE, Columns, Table, significant, table
from plamo_study.studies.roofline import intensity, what_if

TYPES = ("F32", "F16", "Q8_0", "Q4_0")
PARTS = ("weights of the blocks", "output head", "embedding rows", "keys and values read", "keys and values written",
         "scan state", "convolution state")  # fmt: skip


def accounts(known: Mapping[str, Model]) -> Table:
    """Where the bytes of three passes come from, and the intensity that follows."""
    data = intensity.accounts(known)
    entries = []
    for (model, what), group in data.groupby(["model", "pass"], sort=False):
        shares = group.set_index("part")["bytes"] / 1e6
        entry: dict[str, str] = {"model": str(model), "pass": str(what), "GFLOP": f"{group['flops'].sum() / 1e9:,.1f}"}
        entry |= {f"{part} (MB)": _sized(shares[part]) for part in PARTS}
        entries.append(entry | {"FLOPs/byte": significant(3)(group["flops"].sum() / group["bytes"].sum())})
    turned = pd.DataFrame(entries).set_index(["model", "pass"]).T.reset_index()
    turned.columns = [" ".join(name).strip() if name[0] != "index" else "" for name in turned.columns.to_flat_index()]
    return Table(turned)


def by_type(names: Sequence[str], scale: str, here: Mapping[str, Ceilings]) -> Table:
    """Intensity of three passes by weight type, from planned tensor tables, and where each model turns here.

    `here`: this machine's ceilings by type of file, each with its own kernel; n/a for a type that was not measured.
    """
    entries = []
    for name in names:
        for dtype in TYPES:
            model = planned.fact(name, scale, dtype)
            entry = {"model": name, "type": dtype, "weights (MB)": f"{roofline.weight_bytes(model) / 1e6:,.1f}"}
            entry |= {f"{what} (FLOPs/byte)": significant(3)(intensity.intensity(model, tokens, depth, n_seq))
                      for what, tokens, depth, n_seq in intensity.PASSES}  # fmt: skip
            turned = intensity.turning(model, here[dtype].matmul / here[dtype].read) if dtype in here else None
            said = [count(n) for n in turned] if turned else [NOT_AVAILABLE] * 2
            entries.append(entry | dict(zip(("prompt that waits for compute", "batch"), said, strict=True)))
    return Table(pd.DataFrame(entries))


def balances(table_of_machines: pd.DataFrame, known: Mapping[str, Model]) -> Table:
    """Balance points, and from which prompt and batch on each model waits for compute there."""
    turned = intensity.turnings(known, table_of_machines)
    entries = []
    for row in table_of_machines.to_dict("records"):
        entry = {"part": row["name"], "type": row["dtype"], "TFLOP/s": significant(3)(row["compute"] / 1e12)}
        entry |= {"GB/s": f"{row['bandwidth'] / 1e9:,.0f}", "FLOPs/byte": significant(3)(row["balance"])}
        same = turned[(turned["name"] == row["name"]) & (turned["dtype"] == row["dtype"])]
        for one in same.to_dict("records"):
            entry |= {f"{one['model']}: prompt / batch": f"{count(one['prompt'])} / {count(one['batch'])}"}
        entries.append(entry | {"peak by": row["by"]})
    return Table(pd.DataFrame(entries))


def published_points(points: pd.DataFrame) -> Table:
    """The M4 Pro's published rates under the roof of their part, and which files stand behind each side."""
    columns: Columns = {
        "model": ("model", ""),
        "quantity": ("phase", ""),
        "n_prompt": ("prompt", ""),
        "n_seq": ("sequences", ""),
        "value": ("published (t/s)", ",.0f"),
        "bound": ("nearer ceiling", ""),
        "share": ("of its published peak", ".0%"),
    }
    note = f"Bytes are counted of our files. The source has {published.weights('m4-pro-b9596')}."
    return table(points, columns, note)


def gains(known: Mapping[str, Model], limit: Ceilings, factor: float) -> Table:
    """What each change does to each pass."""
    data = what_if.gains(known, limit, factor)
    data["gain"] = [
        " to ".join(f"{end:.2f}" for end in sorted((row["sum"], row["overlap"]))) for row in data.to_dict("records")
    ]
    wide = data.pivot_table(index=["model", "pass"], columns="change", values="gain", aggfunc="first", sort=False)
    return Table(wide[list(what_if.CHANGES)].reset_index().rename_axis(None, axis=1))


def count(value: float) -> str:
    """A number of tokens or sequences; never where there is none."""
    return "never" if math.isinf(value) else f"{value:.0f}"


def _sized(megabytes: float) -> str:
    return "0" if not megabytes else significant(3)(megabytes)
