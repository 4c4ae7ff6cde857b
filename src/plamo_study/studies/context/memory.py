"""Study 05's other half: kinds of attention and cache, what they cost and what they change, and the loop without one.

Speed and memory from the frame of 05-memory, predictions from 05-drift, the loop from 05-naive.
"""

from typing import Any

import numpy as np
import pandas as pd

from plamo_study.analysis import clustered, growth, stats
from plamo_study.analysis.memo import once_a_frame
from plamo_study.analysis.timing import NS, paired_ratio
from plamo_study.analysis.usable import usable
from plamo_study.studies.context import analysis

PLAIN = "off/f16/f16"
WHOLE = "swa_full"
LITTLE = 0.01  # nats per token: a change of predictions below it is called little
SOURCE_PROMPT, SOURCE_OUTPUT, SOURCE_COUNT = 1000, 500, 500_000  # the source's naive loop


def kind_of(rows: pd.DataFrame) -> pd.Series:
    """How each row attends and what it keeps: flash attention, type of keys, type of values."""
    return rows["flash_attn"] + "/" + rows["type_k"] + "/" + rows["type_v"]


@once_a_frame
def kinds(rows: pd.DataFrame) -> pd.DataFrame:
    """Per model and kind "flash/K/V", at the deepest: times against no flash attention with F16, and bytes reserved.

    `prefill`, `decode`: seconds per token; `prefill_gain`, `decode_gain`: times as fast as the plain kind with as much
    of the window kept; `whole`: sliding layers keep everything. `kv`, `state`, `compute`: bytes, by the engine's log;
    `rss`: largest resident size before any memory was filled; `room`: tokens the context has room for, `n_ubatch`.
    """
    found = usable(rows)
    found = found[(found["workload"] == "depth") & (found["text"] == "")]
    found = found.assign(kind=kind_of(found))
    entries = []
    for (model, label), group in found.groupby(["model", "label"]):
        timed = analysis.samples(group)
        timed = timed[timed["depth"] == timed["depth"].max()]
        for kind, cells in group.groupby("kind"):
            entry = {"model": model, "whole": label == WHOLE, "kind": kind, "depth": int(timed["depth"].max())}
            entries.append(entry | _speeds(timed, str(kind)) | _sizes(cells))
    table = pd.DataFrame(entries)
    bits = table["kind"].map(lambda kind: (kind.startswith("on"), -kind.count("f16"), -kind.count("q8_0")))
    return table.assign(bits=bits).sort_values(["model", "whole", "bits"], ignore_index=True).drop(columns="bits")


def window(rows: pd.DataFrame) -> pd.DataFrame:
    """Per model and kind, at the deepest: sliding layers that keep everything over those that keep their window.

    `prefill`, `decode`: ratio of times; `kv`: ratio of bytes reserved for keys and values.
    """
    table, found, entries = kinds(rows), analysis.samples(rows), []
    found = found[found["depth"] == found["depth"].max()]
    found = found.assign(kind=kind_of(found))
    for (model, kind), group in found[found["label"] == WHOLE].groupby(["model", "kind"]):
        same = found[(found["model"] == model) & (found["kind"] == kind) & (found["label"] != WHOLE)]
        sizes = table[(table["model"] == model) & (table["kind"] == kind)].set_index("whole")["kv"]
        entry: dict[str, Any] = {"model": model, "kind": kind, "kv": sizes[True] / sizes[False]}
        for phase in analysis.PHASES:
            whole, kept = (part[part["phase"] == phase].set_index("block")["seconds"] for part in (group, same))
            entry[phase] = paired_ratio(whole, kept)
        entries.append(entry)
    return pd.DataFrame(entries)


def _speeds(timed: pd.DataFrame, kind: str) -> dict[str, Any]:
    entry: dict[str, Any] = {}
    names = kind_of(timed)
    for phase in analysis.PHASES:
        of_phase = timed["phase"] == phase
        own, plain = (timed[of_phase & (names == k)].set_index("block")["seconds"] for k in (kind, PLAIN))
        entry |= {phase: stats.median(own.tolist()), f"{phase}_gain": paired_ratio(plain, own)}
    return entry


def _sizes(cells: pd.DataFrame) -> dict[str, float]:
    checks = cells["checks"].iloc[0]
    sizes = {name: float(checks[f"{name}_bytes"]) for name in ("kv", "state", "compute")}
    asked = cells.iloc[0]
    room = asked["n_prompt"] + asked["n_ubatch"] + asked["n_gen"] + 1  # one decode step warms up
    counts = {"room": int(room), "n_ubatch": int(asked["n_ubatch"]), "n": len(cells)}
    return sizes | {"rss": float(cells["peak_rss_bytes"].max())} | counts


def drift(rows: pd.DataFrame) -> pd.DataFrame:
    """Per model and kind: `kld` (nats per token) against the plain kind, `same_top`, `ppl_ratio`, `p` that it is 1.

    Intervals over chunks; `p_adjusted` over all lines; `detectable`: smallest ppl_ratio - 1 that would be seen;
    `p_little`: that the divergence is LITTLE.
    """
    found, entries = rows[(rows["workload"] == "depth") & (rows["text"] != "") & (rows["verdict"] == "valid")], []
    for row in found.drop_duplicates("model", keep="last").itertuples():  # chunks give the interval, not processes
        tokens = np.asarray(row.series["tokens"], float)
        for name in row.candidates:
            more = np.subtract(row.series[f"nll/{name}"], row.series[f"nll/{PLAIN}"])
            entry: dict[str, Any] = {"model": row.model, "kind": name}
            entry |= {k: clustered.ratio_of_sums(row.series[f"{k}/{name}"], tokens) for k in ("kld", "same_top")}
            entry["ppl_ratio"] = clustered.mapped(clustered.ratio_of_sums(more, tokens), lambda x: float(np.exp(x)))
            entry["p"] = clustered.p_value(more / tokens)
            entry["p_little"] = clustered.p_value(np.asarray(row.series[f"kld/{name}"]) / tokens - LITTLE)
            entry["detectable"] = float(np.expm1(clustered.detectable(more / tokens)))
            entries.append(entry | {"chunks": len(tokens), "n_prompt": row.n_prompt})
    table = pd.DataFrame(entries)
    return table.assign(p_adjusted=clustered.adjusted(table["p"].tolist()) if len(table) else [])


def naive_tokens(n_prompt: float, n_gen: int) -> float:
    """Tokens evaluated for `n_gen` output tokens without a cache: sum of n_prompt + i, i = 0 ... n_gen - 1."""
    return n_gen * n_prompt + n_gen * (n_gen - 1) / 2


def cached_tokens(n_prompt: float, n_gen: int) -> float:
    """Tokens evaluated with a cache: the prompt, then every output token but the last."""
    return n_prompt + n_gen - 1


def naive_pairs(n_prompt: float, n_gen: int) -> float:
    """(query, key) pairs of full causal attention without a cache: sum of l (l + 1) / 2 over the texts' lengths l."""
    lengths = n_prompt + np.arange(n_gen)
    return float((lengths * (lengths + 1) / 2).sum())


def cached_pairs(n_prompt: float, n_gen: int) -> float:
    """The same with a cache: l (l + 1) / 2 of everything evaluated, once."""
    n = cached_tokens(n_prompt, n_gen)
    return n * (n + 1) / 2


def prompt_for(n_tokens: float, n_gen: int) -> float:
    """The prompt length for which the loop without a cache evaluates `n_tokens` tokens."""
    return (n_tokens - n_gen * (n_gen - 1) / 2) / n_gen


def loop(rows: pd.DataFrame) -> pd.DataFrame:
    """Per model and output token: seconds without (`naive`) and with (`cached`) the cache; the first is the prefill."""
    entries = []
    for (model, n_prompt), group in _loops(rows).groupby(["model", "n_prompt"]):
        for i in range(int(group["n_gen"].iloc[0])):
            taken = {w: [s[k][i] / NS for s in group["samples_ns"]] for k, w in enumerate(("naive", "cached"))}
            entry = {"model": model, "output": i + 1, "n_prompt": n_prompt}
            entries.append(entry | {what: stats.median(seconds) for what, seconds in taken.items()})
    return pd.DataFrame(entries)


def loop_totals(rows: pd.DataFrame) -> pd.DataFrame:
    """Per model: seconds for all output tokens both ways, `times` as long without, and tokens evaluated both ways."""
    entries = []
    for (model, n_prompt, n_gen), group in _loops(rows).groupby(["model", "n_prompt", "n_gen"]):
        by_block = group.set_index("block")["samples_ns"]
        naive, cached = (by_block.map(lambda s, k=k: sum(s[k]) / NS) for k in (0, 1))
        entry = {"model": model, "n_prompt": n_prompt, "n_gen": n_gen, "times": paired_ratio(naive, cached)}
        entry |= {"naive": stats.median(naive.tolist()), "cached": stats.median(cached.tolist()), "n": len(group)}
        counts = {f"{k}_tokens": int(group["checks"].iloc[0][f"{k}_tokens"]) for k in ("naive", "cached")}
        entries.append(entry | counts)
    return pd.DataFrame(entries)


def loop_prediction(rows: pd.DataFrame, depth_rows: pd.DataFrame, n_prompt: int, n_gen: int) -> pd.DataFrame:
    """Seconds both ways for any prompt and output, from the depth curves: `naive`, `cached` and `times`, per process.

    Summed over the texts' lengths; a text counts as if read in whole parts, short ones as slow as their share of one.
    Only curves of the machine that ran the loop say anything about it.
    """
    depth_rows = depth_rows[depth_rows["machine"].isin(rows["machine"].unique())]
    reading, writing = (analysis.curves(depth_rows, phase, index="at") for phase in analysis.PHASES)
    lengths, entries = n_prompt + np.arange(n_gen), []
    for model in sorted(set(_loops(rows)["model"]) & set(reading)):
        blocks = reading[model].columns.intersection(writing[model].columns)
        read = {b: growth.total(growth.continued(reading[model][b]), lengths.astype(float)) for b in blocks}
        naive = [float(read[b].sum()) for b in blocks]
        steps = [growth.continued(writing[model][b])(lengths[:-1].astype(float)).sum() for b in blocks]
        cached = [float(read[b][0] + step) for b, step in zip(blocks, steps, strict=True)]
        entry = {"model": model, "n_prompt": n_prompt, "n_gen": n_gen, "times": stats.ratio(naive, cached)}
        entry |= {"naive": stats.median(naive), "cached": stats.median(cached)}
        entries.append(entry | {"extrapolated": bool(lengths[-1] > reading[model].index[-1])})
    return pd.DataFrame(entries, columns=["model", "n_prompt", "n_gen", "times", "naive", "cached", "extrapolated"])


def _loops(rows: pd.DataFrame) -> pd.DataFrame:
    found = usable(rows)
    return found[found["workload"] == "naive"]
