"""Study 01: how far apart prefill and decode are, and which ceiling each stands under."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import pandas as pd

from plamo_study.analysis import roofline, stats
from plamo_study.analysis.roofline import Band, Ceilings, Model
from plamo_study.analysis.usable import usable

GENERATED = (16, 64, 128, 256, 512)
NS = 1e9


def prefill(rows: pd.DataFrame) -> pd.DataFrame:
    """Per model, threads, offload and prompt length: rate (t/s) and TTFT (s) as estimates, and the noise between processes."""
    found = usable(rows)
    found = found[found["workload"] == "prefill"]
    return _by_cell(found, ["model", "n_gpu_layers", "n_threads", "n_prompt"], _prefill_entry)


def decode(rows: pd.DataFrame, generated: Sequence[int] = GENERATED) -> pd.DataFrame:
    """Per model, threads, offload and output length: seconds, rate (t/s) and ITL (s).

    Shorter outputs are the first steps of the longest run: they are the same computation.
    """
    found = usable(rows)
    found = found[found["workload"] == "decode"]
    parts = []
    for n in generated:
        long_enough = found[found["n_gen"] >= n]
        first = long_enough.assign(samples_ns=long_enough["samples_ns"].map(lambda reps, n=n: [s[:n] for s in reps]))
        longest = first.groupby(["model", "n_gpu_layers", "n_threads"])["n_gen"].transform("max")
        table = _by_cell(first[first["n_gen"] == longest], ["model", "n_gpu_layers", "n_threads"], _decode_entry)
        parts.append(table.assign(generated=n))
    return pd.concat(parts, ignore_index=True)


def asymmetry(rows: pd.DataFrame, n_prompt: int, n_gen: int) -> pd.DataFrame:
    """Per model at full threads: prefill rate over decode rate, paired by block, and both rates."""
    found = usable(rows)
    found = found[found["n_threads"] == found["n_threads"].max()]
    entries = []
    for model, of_model in found[found["model"] != ""].groupby("model"):
        fast = _seconds_per_token(of_model[(of_model["workload"] == "prefill") & (of_model["n_prompt"] == n_prompt)])
        slow = _seconds_per_token(of_model[(of_model["workload"] == "decode") & (of_model["n_gen"] >= n_gen)], n_gen)
        both = pd.concat([fast, slow], axis=1, keys=["prefill", "decode"]).dropna()
        entries.append({"model": model, "ratio": stats.ratio(both["decode"].tolist(), both["prefill"].tolist())})
    return pd.DataFrame(entries)


def threads_experiment(rows: pd.DataFrame) -> pd.DataFrame:
    """What full threads gain over fewer, paired by block: each ceiling, and each phase of each model.

    Columns: what, model, few, many (threads) and gain (an estimate; 1 = no gain).
    """
    found = usable(rows)
    many, few = found["n_threads"].max(), found["n_threads"].min()
    cells = {
        "read bandwidth": found["workload"] == "read",
        "matrix throughput": found["workload"] == "matmul",
        "prefill": (found["workload"] == "prefill") & (found["n_prompt"] == 128),
        "decode": (found["workload"] == "decode") & (found["n_gen"] == 32),
    }
    entries = []
    for what, mask in cells.items():
        for model, group in found[mask].groupby("model"):
            times = group.assign(ns=group["samples_ns"].map(_median_sample)).pivot_table("ns", "block", "n_threads")
            gain = stats.ratio(times[few].tolist(), times[many].tolist()) if many != few else stats.median([])
            entries.append({"what": what, "model": model, "few": few, "many": many, "gain": gain})
    return pd.DataFrame(entries)


def ceilings(rows: pd.DataFrame) -> pd.DataFrame:
    """Per thread count: read bandwidth (B/s) and matrix throughput (FLOP/s), best sample and estimate over processes."""
    found = rows[rows["workload"].isin(["read", "matmul"]) & (rows["status"] == "ok")]
    work = np.where(found["workload"] == "read", found["n_bytes"], found["n_flops"])
    found = found.assign(work=work)
    best = found["work"] * NS / found["samples_ns"].map(lambda samples: min(chain(*samples)))
    usual = found["work"] * NS / found["samples_ns"].map(_median_sample)
    entries = []
    for (workload, threads), group in found.groupby(["workload", "n_threads"]):
        estimate = stats.median(usual[group.index].tolist())
        entries.append({"ceiling": workload, "n_threads": threads, "best": best[group.index].max(), "usual": estimate})
    return pd.DataFrame(entries)


def limits(rows: pd.DataFrame) -> Ceilings:
    """The ceilings at full threads, best-of, as the roofline takes them."""
    table = ceilings(rows)
    best = table[table["n_threads"] == table["n_threads"].max()].set_index("ceiling")["best"]
    return Ceilings(read=float(best["read"]), matmul=float(best["matmul"]))


def prediction(rows: pd.DataFrame, models: dict[str, Model]) -> pd.DataFrame:
    """What arithmetic says before anything is measured: bytes and FLOPs, the nearer ceiling, and the band of seconds."""
    limit = limits(rows)
    entries = []
    for name in rows.loc[rows["model"] != "", "model"].unique():
        model = models[name]
        for n in (128, 512, 2048):
            band = roofline.prefill_band(model, n, limit)
            flops, moved = roofline.prefill_flops(model, n), roofline.weight_bytes(model) * -(-n // 512)
            entries.append(_predicted(name, f"prefill {n}", flops, moved, band))
        band = roofline.decode_band(model, DECODE_DEPTH, limit)
        flops, moved = roofline.decode_flops(model, DECODE_DEPTH), roofline.decode_bytes(model, DECODE_DEPTH)
        entries.append(_predicted(name, "decode step", flops, moved, band))
    return pd.DataFrame(entries)


def against_prediction(rows: pd.DataFrame, models: dict[str, Model]) -> pd.DataFrame:
    """Prediction beside measurement: measured seconds, miss (1 = at the edge of the band) and share of the ceiling."""
    table = prediction(rows, models)
    fast, slow = prefill(rows), decode(rows, (512,))
    many = rows["n_threads"].max()
    measured = {(r.model, f"prefill {r.n_prompt}"): r.ttft for r in fast[fast["n_threads"] == many].itertuples()}
    measured |= {(r.model, "decode step"): r.itl for r in slow[slow["n_threads"] == many].itertuples()}
    table["measured"] = [measured.get((r.model, r.what)) for r in table.itertuples()]
    table = table[table["measured"].notna()]
    limit = limits(rows)
    table["bytes_per_s"] = [r.bytes / r.measured.value for r in table.itertuples()]
    table["flops_per_s"] = [r.flops / r.measured.value for r in table.itertuples()]
    table["share"] = np.where(
        table["bound"] == "memory", table["bytes_per_s"] / limit.read, table["flops_per_s"] / limit.matmul
    )
    table["miss"] = [_miss(r.measured.value, r.low, r.high) for r in table.itertuples()]
    return table.reset_index(drop=True)


DECODE_DEPTH = 128 + 512 / 2  # mean depth of the decode cell: 128 tokens of prompt, 512 steps


def _miss(measured: float, low: float, high: float) -> float:
    """1 inside the band; measured/high above it, measured/low below it."""
    return measured / high if measured > high else measured / low if measured < low else 1.0


def _predicted(model: str, what: str, flops: float, moved: float, band: Band) -> dict:
    return {
        "model": model,
        "what": what,
        "flops": flops,
        "bytes": moved,
        "bound": band.bound,
        "low": band.low,
        "high": band.high,
    }


def _by_cell(found: pd.DataFrame, by: list[str], entry) -> pd.DataFrame:  # noqa: ANN001 - a function of a group
    return pd.DataFrame([dict(zip(by, key, strict=True)) | entry(group) for key, group in found.groupby(by)])


def _prefill_entry(group: pd.DataFrame) -> dict:
    seconds = group["samples_ns"].map(lambda samples: sum(chain(*samples)) / NS).tolist()
    tokens = (group["samples_ns"].map(len) * group["n_prompt"] * group["n_seq"]).tolist()
    medians = (group["samples_ns"].map(_median_sample) / NS).tolist()
    noise = stats.variation(medians)
    return {"rate": stats.throughput(tokens, seconds), "ttft": stats.median(medians), "noise": noise, "n": len(group)}


def _decode_entry(group: pd.DataFrame) -> dict:
    seconds = group["samples_ns"].map(lambda samples: sum(chain(*samples)) / NS).tolist()
    tokens = group["samples_ns"].map(lambda samples: sum(map(len, samples))).tolist()
    steps = [s / NS for s in chain(*chain(*group["samples_ns"]))]
    medians = (group["samples_ns"].map(_median_sample) / NS).tolist()
    return {
        "seconds": stats.median([s / len(r) for s, r in zip(seconds, group["samples_ns"], strict=True)]),
        "rate": stats.throughput(tokens, seconds),
        "itl": stats.median(medians),
        "itl_p95": stats.percentile(steps, 0.95),
        "noise": stats.variation(medians),
        "n": len(group),
    }


def _median_sample(samples: list[list[int]]) -> float:
    return float(np.median(list(chain(*samples))))


def _seconds_per_token(group: pd.DataFrame, n_gen: int | None = None) -> pd.Series:
    """Seconds per token by block: of the whole prompt, or of the first `n_gen` steps."""

    def one(row: pd.Series) -> float:
        samples = [s[:n_gen] for s in row["samples_ns"]]
        tokens = sum(map(len, samples)) if n_gen else len(samples) * row["n_prompt"]
        return sum(chain(*samples)) / NS / tokens

    return group.set_index("block").apply(one, axis=1) if len(group) else pd.Series(dtype=float)
