"""Memory and effects of kinds of attention and cache. `reserved` is what a context takes by the tensor table."""

import numpy as np
import pandas as pd

from llama_meter.cells import WHOLE_WINDOW
from plamo_study.arithmetic import roofline
from plamo_study.arithmetic.roofline import Model
from plamo_study.read.frame import usable
from plamo_study.stats import estimates

PLAIN = "off/f16/f16"
KINDS = ["model", "whole", "kind", "kv", "state", "compute", "room", "n_ubatch"]


def kind_of(rows: pd.DataFrame) -> pd.Series:
    """The kind of each row, "flash/K/V": flash attention, type of keys, type of values."""
    return rows["flash_attn"] + "/" + rows["type_k"] + "/" + rows["type_v"]


def kinds(rows: pd.DataFrame) -> pd.DataFrame:
    """Per model and kind "flash/K/V", what the engine reserved: `kv`, `state`, `compute`, bytes by its log.

    `whole`: sliding layers keep everything; `room`: tokens the context has room for; `n_ubatch`.
    """
    depths = usable(rows)
    depths = depths[(depths["workload"] == "depth") & (depths["text"] == "")]
    depths, entries = depths.assign(kind=kind_of(depths)), []
    for (model, ladder, kind), cells in depths.groupby(["model", "ladder", "kind"]):
        entry = {"model": model, "whole": ladder == WHOLE_WINDOW, "kind": kind}
        entries.append(entry | _sizes(cells.iloc[0]))
    table = pd.DataFrame(entries, columns=KINDS)
    bits = table["kind"].map(lambda kind: (kind.startswith("on"), -kind.count("f16"), -kind.count("q8_0")))
    return table.assign(bits=bits).sort_values(["model", "whole", "bits"], ignore_index=True).drop(columns="bits")


def _sizes(cell: pd.Series) -> dict[str, float]:
    sizes = {name: float(cell["checks"][f"{name}_bytes"]) for name in ("kv", "state", "compute")}
    room = cell["n_ctx"] + cell["n_ubatch"] + cell["n_gen"] + 1  # one decode step warms up
    return sizes | {"room": int(room), "n_ubatch": int(cell["n_ubatch"])}


def drift(rows: pd.DataFrame) -> pd.DataFrame:
    """Per model and kind: `kld`, nats per token against the plain kind; its interval is over chunks of text."""
    scored, entries = rows[(rows["workload"] == "depth") & (rows["text"] != "") & (rows["verdict"] == "valid")], []
    for row in scored.drop_duplicates("model", keep="last").itertuples():  # chunks give the interval, not processes
        tokens = np.asarray(row.series["tokens"], float)
        for name in row.caches:
            kld = estimates.ratio_of_sums(row.series[f"kld/{name}"], tokens)
            entries.append({"model": row.model, "kind": name, "kld": kld})
    return pd.DataFrame(entries, columns=["model", "kind", "kld"])


def reserved(model: Model, kind: str, room: int, n_ubatch: int, whole: bool) -> dict[str, float]:
    """Bytes a context of `room` tokens should take: `kv`, `state`, and `scores`, written out without flash attention.

    As llama.cpp reserves them: room in steps of 256 cells; sliding layers window + micro-batch, or all if `whole`;
    scores of every head for a micro-batch of queries and all cells, in F32.
    """
    flash, type_k, type_v = kind.split("/")
    (_, sliding, full), window = roofline.layers(model), model["shape"]["window"]
    cells = _padded(room)
    in_window = cells if whole or not window else min(cells, _padded(window + n_ubatch))
    kv = roofline.kv_bytes_per_token(model, type_k, type_v) * (full * cells + sliding * in_window)
    scores = 0.0 if flash == "on" else 4.0 * model["shape"]["heads"] * n_ubatch * cells
    return {"kv": kv, "state": float(roofline.state_bytes(model)), "scores": scores}


def _padded(cells: int, step: int = 256) -> int:
    return -(-cells // step) * step
