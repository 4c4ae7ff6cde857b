"""Cost of a shipment, the prompt length from which it pays, and the effect of splitting the work on waiting requests.

Frames in, estimates out. A process is one number: the median of its repetitions.
"""

from collections.abc import Mapping
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from plamo_study.analysis import clustered, stats, timing
from plamo_study.analysis.timing import NS
from plamo_study.analysis.usable import of_cell, usable
from plamo_study.studies.disaggregation import sizes
from plamo_study.studies.disaggregation.measures import PHASES, waits
from plamo_study.studies.disaggregation.plan import LINKS, REPEATED

CELL = ["model", "n_prompt", "type_k", "flash_attn", "link_bps", "n_threads"]
HANDLED = ("save", "check", "load")  # on either side, whatever the link
USUAL = {"type_k": "f16", "flash_attn": "on"}
LOADED = ["model", "per_second"]
WAITS = {"ttft": "first token", "itl": "token gap", "largest": "longest gap", "throughput": "throughput"}
Facts = Mapping[str, Mapping[str, Any]]


def processes(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per process: CELL, `block`, seconds of PHASES, `n_bytes`, and `identical`.

    The last: whether all logits are bit-identical to the sender's.
    """
    found = rows[(rows["workload"] == "shipment") & (rows["status"] == "ok")]
    entries = []
    for row in found.itertuples():
        entry = {name: getattr(row, name) for name in (*CELL, "block", "n_bytes")}
        entry |= {phase: median(sample[n] for sample in row.samples_ns) / NS for n, phase in enumerate(PHASES)}
        entries.append(entry | {"identical": bool(row.checks["identical"])})
    return pd.DataFrame(entries, columns=[*CELL, "block", "n_bytes", *PHASES, "identical"])


def by_length(rows: pd.DataFrame) -> pd.DataFrame:
    """Processes with the usual cache, attention and threads and no link limit: the basis of curves over length."""
    found = processes(usable(rows))
    usual = (found["type_k"] == USUAL["type_k"]) & (found["flash_attn"] == USUAL["flash_attn"])
    return found[usual & (found["link_bps"] == 0) & (found["n_threads"] == found["n_threads"].max())]


def shares(rows: pd.DataFrame, links: tuple[int, ...] = LINKS) -> pd.DataFrame:
    """Time to ship over time to evaluate again, by model, link and length: `ratio`, paired by block.

    Shipping: the measured time of both sides, plus the bytes over the link by formula.
    """
    entries = []
    for (model, n), group in by_length(rows).groupby(["model", "n_prompt"]):
        known = group.drop_duplicates("block", keep="last").set_index("block")
        for link in links:
            ratio = timing.paired_ratio(_shipping(known, link), known["prefill"])
            entries.append({"model": model, "link": link, "n_prompt": int(n), "ratio": ratio})
    return pd.DataFrame(entries, columns=["model", "link", "n_prompt", "ratio"])


def _shipping(found: pd.DataFrame, link: int) -> pd.Series:
    """Seconds to ship over a link of `link` bits per second: measured on both sides, plus the bytes by formula."""
    return found[list(HANDLED)].sum(axis=1) + 8 * found["n_bytes"] / link


def crossings(rows: pd.DataFrame, links: tuple[int, ...] = LINKS) -> pd.DataFrame:
    """Length in tokens from which shipping beats evaluating again, as `first`: `model`, `link`.

    Only models and links whose interval lies within the measured lengths: over others shipping wins at all lengths, at
    none, or the interval leaves it open.
    """
    entries = []
    for model, found in by_length(rows).drop_duplicates(["model", "n_prompt", "block"], keep="last").groupby("model"):
        for link in links:
            ratio = found.assign(ratio=_shipping(found, link) / found["prefill"])
            wide = ratio.pivot(index="n_prompt", columns="block", values="ratio").dropna(axis=1)
            if wide.size:
                first = stats.crossing(np.log2(wide.index.astype(float)), wide.to_numpy())
                if np.isfinite([first.value, first.low, first.high]).all():
                    tokens = clustered.mapped(first, lambda at: float(2.0**at))
                    entries.append({"model": model, "link": link, "first": tokens})
    return pd.DataFrame(entries, columns=["model", "link", "first"])


def predicted(rows: pd.DataFrame, facts: Facts) -> pd.DataFrame:
    """Every prediction beside what was measured, per cell: `what`, `promised`, `measured`, `ratio` paired by block.

    bytes: by formula. send: the bytes over the link. save, load and prefill of the longest prompts: extrapolated from
    the two longest prompts of at most REPEATED tokens.
    """
    used = usable(rows)
    found, entries = processes(used), []
    for key, group in found.groupby(CELL, sort=False):
        cell = dict(zip(CELL, key, strict=True))
        known = group.drop_duplicates("block", keep="last").set_index("block")
        size = sizes.size(facts[cell["model"]]["shape"], cell["n_prompt"], cell["type_k"], cell["type_k"]).total
        promises = {"bytes": pd.Series(size, known.index)}
        if cell["link_bps"]:
            promises["send"] = 8 * size / known["link_bps"]
        elif cell["n_prompt"] > (most := REPEATED[str(used["scale"].iloc[0])]):
            alike = of_cell(found, cell, [name for name in CELL if name != "n_prompt"])
            promises |= _from_shorter(alike[alike["n_prompt"] <= most], cell["n_prompt"], size)
        for what, promised in promises.items():
            measured = known["n_bytes" if what == "bytes" else what].astype(float)
            entry = {**cell, "what": what, "ratio": timing.paired_ratio(measured, promised)}
            entries.append(entry | {"promised": float(promised.median()), "measured": float(measured.median())})
    return pd.DataFrame(entries, columns=[*CELL, "what", "promised", "measured", "ratio"])


def _from_shorter(found: pd.DataFrame, n_prompt: int, n_bytes: float) -> dict[str, pd.Series]:
    """Seconds of save, load and prefill of a longer prompt by block, extrapolated from the two longest in `found`.

    Saving and loading grow with the bytes; prefill time per token grows with the prompt's length.
    """
    lengths = sorted(found["n_prompt"].unique())[-2:]
    if len(lengths) < 2:
        return {}
    usual = found.drop_duplicates(["n_prompt", "block"], keep="last").set_index("block")
    near, far = (usual[usual["n_prompt"] == n] for n in lengths)
    moved = (n_bytes - far["n_bytes"]) / (far["n_bytes"] - near["n_bytes"])
    promises = {what: far[what] + moved * (far[what] - near[what]).clip(lower=0) for what in ("save", "load")}
    each_near, each_far = (part["prefill"] / part["n_prompt"] for part in (near, far))
    longer = (n_prompt - far["n_prompt"]) / (far["n_prompt"] - near["n_prompt"])
    promises["prefill"] = n_prompt * (each_far + longer * (each_far - each_near).clip(lower=0))
    return {what: promised.dropna() for what, promised in promises.items()}


def services(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per process of a load: LOADED, `mode`, `block`, and WAITS as `measures.waits` defines them.

    `per_second`: the rate at which requests really arrived.
    """
    entries = []
    for row in rows[(rows["workload"] == "service") & (rows["status"] == "ok")].itertuples():
        known = {name: value for name, (value, _) in waits(row.requests).items()}
        entry = {"model": row.model, "block": row.block, "mode": row.label, "per_second": known["arrivals"]}
        entries.append(entry | {name: known[metric] for name, metric in WAITS.items()})
    return pd.DataFrame(entries, columns=[*LOADED, "block", "mode", *WAITS])


def compared(rows: pd.DataFrame) -> pd.DataFrame:
    """Per model and load: `NAME_ratio` of WAITS, the split engine over the shared one, paired by block."""
    entries = []
    for key, group in services(usable(rows)).groupby(LOADED):
        modes = {
            mode: own.drop_duplicates("block", keep="last").set_index("block") for mode, own in group.groupby("mode")
        }
        if modes.keys() >= {"shared", "split"}:
            ratios = {
                f"{name}_ratio": timing.paired_ratio(modes["split"][name], modes["shared"][name]) for name in WAITS
            }
            entries.append(dict(zip(LOADED, key, strict=True)) | ratios)
    return pd.DataFrame(entries, columns=[*LOADED, *(f"{name}_ratio" for name in WAITS)])


def capacity(rows: pd.DataFrame) -> pd.DataFrame:
    """Maximum requests per second of each arrangement, by formula, from parts measured alone in the same blocks.

    `shared`: one engine prefills a prompt, then does its share of the batched steps. `split`: the slower of half the
    threads prefilling and half of them decoding. `two`: the same with all threads on each side, on two machines.
    """
    used, entries = usable(rows), []
    asked = used[used["workload"] == "service"]
    for model, group in asked.groupby("model"):
        cell = group.iloc[0]
        own = used[used["model"] == model]
        prompts = own[(own["workload"] == "prefill") & (own["n_prompt"] == cell["n_prompt"])]
        steps = own[(own["workload"] == "decode") & (own["n_seq"] == cell["n_seq"])]
        read, write = (
            {int(n): timing.median_by_block(g) for n, g in each.groupby("n_threads")} for each in (prompts, steps)
        )
        if not read or set(read) != set(write):
            continue
        most, half = max(read), min(read)
        answer = (cell["n_gen"] - 1) / cell["n_seq"]
        per_request = {
            "shared": read[most] + answer * write[most],
            "split": np.maximum(read[half], answer * write[half]),
            "two": np.maximum(read[most], answer * write[most]),
        }
        entry: dict[str, Any] = {"model": model}
        for name, seconds in per_request.items():
            known = seconds.dropna()
            entry[name] = stats.rate(1.0, known.tolist())
            entry[f"{name}_ratio"] = timing.paired_ratio(per_request["shared"], known)
        entries.append(entry)
    names = [name + end for name in ("shared", "split", "two") for end in ("", "_ratio")]
    return pd.DataFrame(entries, columns=["model", *names])
