"""Throughput, waits and memory of replicas, beside what their parts and the machine's ceilings allow.

Frames in, estimates out. An arrangement is a number of processes and a number of sequences in each.
"""

from itertools import chain, pairwise
from math import nan
from statistics import mean
from typing import Any

import pandas as pd

from plamo_study.analysis import roofline, stats, timing
from plamo_study.analysis.ceilings import limits
from plamo_study.analysis.files import Facts, files
from plamo_study.analysis.stats import Estimate
from plamo_study.analysis.timing import NS
from plamo_study.analysis.usable import usable, verdict_of
from plamo_study.measure.cells import Replicas

KIND = ["model", "dtype", "use_mmap", "policy", "killed"]
CELL = [*KIND, "n_processes", "n_seq"]
TIMES = ["rate", "ttft", "step", "longest", "ready"]
MEMORY = ["grown", "mapped", "own", "rest"]
Key = tuple[Any, ...]


def processes(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per row, all replicas together: CELL, `block`, `verdict`, `total` sequences.

    `rate`: tokens per second, from the common start to the last token. `ttft`: mean s to a sequence's first token.
    `step`: mean s of a step, in which all sequences of a process get a token. `longest`: largest gap in s between two
    tokens of a sequence, including waits for others' prompts. `ready`: s from the first start until all had loaded.
    Bytes of all processes: `grown` (their shares of memory after loading, less those before), `mapped` (of that, pages
    of the file, as the system counts them), `own` (weights elsewhere, as the engine says), `rest` (what is left).
    """
    found = rows[(rows["workload"] == "replicas") & (rows["status"] == "ok")]
    entries = []
    for row in found.itertuples():
        ends = [first + sum(steps) for first, steps in zip(row.prefill_ns, row.samples_ns, strict=True)]
        steps, total = list(chain(*row.samples_ns)), row.n_processes * row.n_seq
        came = [each.token_ns for each in row.requests if each.token_ns]
        gaps = [after - before for each in came for before, after in pairwise(each)]
        entry = {name: getattr(row, name) for name in (*CELL, "block", "verdict")} | {"total": total}
        entry |= {"rate": total * (row.n_gen + 1) / max(ends) * NS, "step": mean(steps) / NS}
        entry |= {"ttft": mean(each[0] for each in came) / NS, "longest": max(gaps) / NS}
        entry |= {"ready": max(row.series["start"]) + row.load_ns / NS}
        entries.append(entry | _memory(row.series, row.n_processes * row.checks["own_bytes"]))
    return pd.DataFrame(entries, columns=[*CELL, "block", "verdict", "total", *TIMES, *MEMORY])


def _memory(series: dict[str, list[float]], own: float) -> dict[str, float]:
    """Memory of a row; private pages where the system reports no shares (macOS), which hides the mapped ones.

    NaN where it reports neither.
    """
    share = "pss" if "pss" in series else "private"
    after, before = (sum(series.get(name, [nan])) for name in (share, f"before {share}"))
    grown, mapped = after - before, sum(series["mapped"])
    known = mapped if series["mapped"] else nan
    return {"grown": grown, "mapped": known, "own": own, "rest": grown - mapped - own}


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per cell without a killed replica: CELL, `total`, TIMES and MEMORY as estimates over runs.

    `verdict`: valid, or how many runs were not; estimates exclude those. Paired by block: `against_one`, `rate` over
    that of one process with as many sequences (`one`); `against_mapped`, of private weights, over the same with mapped
    ones.
    """
    known, entries = _by_cell(usable(rows)), []
    for key, group in processes(rows[rows["killed"] < 0]).groupby(CELL, sort=False):
        entry: dict[str, Any] = dict(zip(CELL, key, strict=True)) | {"total": int(group["total"].iloc[0])}
        entry["verdict"] = verdict_of(group["verdict"])
        if (own := known.get(key)) is not None:
            entry |= {name: stats.median(own[name].tolist()) for name in (*TIMES, *MEMORY)}
            one = known.get(_alike(key, entry["total"]))
            entry["one"] = stats.median(one["rate"].tolist()) if one is not None else None
            mapped = known.get((*key[:2], True, *key[3:])) if not entry["use_mmap"] else None
            entry |= {
                name: timing.paired_ratio(own["rate"], other["rate"]) if other is not None else None
                for name, other in (("against_one", one), ("against_mapped", mapped))
            }
        entries.append(entry)
    names = [*CELL, "total", "verdict", *TIMES, *MEMORY, "one", "against_one", "against_mapped"]
    return pd.DataFrame(entries, columns=names)


def _alike(key: Key, total: int) -> Key:
    """The cell of one process with `total` sequences."""
    return (*key[:-2], 1, total)


def _by_cell(used: pd.DataFrame) -> dict[Key, pd.DataFrame]:
    """Medians of each cell by block."""
    found = processes(used).drop(columns="verdict")
    return {key: group.groupby("block").median(numeric_only=True) for key, group in found.groupby(CELL)}


def predicted(rows: pd.DataFrame, facts: Facts) -> pd.DataFrame:
    """Each arrangement's `rate` as promised and measured, tokens per second.

    `alone`: every replica as fast as one alone on its threads, slowed in proportion if threads outnumber cores.
    `ratio`: measured over `alone`; `promised`: `alone` over that of one process; both paired by block. `slowest` to
    `fastest`: what the ceilings of all cores allow, if every process reads the weights for itself; the `near` ceiling,
    and `miss`: 1 between the two, else times the nearer edge. NaN where the type's own kernel was not measured.
    """
    used, known, entries = usable(rows), files(rows, facts), []
    parts, kernels = _parts(used), set(used[used["workload"] == "matmul"]["dtype"])
    found = _by_cell(used[used["killed"] < 0])
    by_block = {key: _alone(_cell_of(used, key), key, parts) for key in found}
    ceilings = limits(used, {key[:2]: known[key[0], key[1]] for key in found if key[1] in kernels})
    for key, own in found.items():
        cell, alone = _cell_of(used, key), by_block[key]
        entry: dict[str, Any] = dict(zip(CELL, key, strict=True)) | {"measured": stats.median(own["rate"].tolist())}
        if alone is not None:
            entry |= {"alone": stats.median(alone.tolist()), "ratio": timing.paired_ratio(own["rate"], alone)}
            one = by_block.get(_alike(key, cell.n_processes * cell.n_seq))
            entry["promised"] = timing.paired_ratio(alone, one) if one is not None else None
        if cell.dtype in kernels:
            entry |= _allowed(cell, known[key[0], key[1]], ceilings[key[:2]], entry["measured"])
        entries.append(entry)
    names = ["measured", "alone", "ratio", "promised", "slowest", "fastest", "near", "miss"]
    return pd.DataFrame(entries, columns=[*CELL, *names])


def _cell_of(used: pd.DataFrame, key: Key) -> Replicas:
    found = used[used["workload"] == "replicas"].iloc[0]
    told = dict(zip(CELL, key, strict=True)) | {name: int(found[name]) for name in ("n_prompt", "n_gen", "n_threads")}
    return Replicas(**told)


def _parts(used: pd.DataFrame) -> dict[Key, pd.Series]:
    """Seconds by block of a prompt and of a decode step, by workload, file, threads and sequences."""
    found = used[used["workload"].isin(["prefill", "decode"])]
    groups = found.groupby(["workload", "model", "dtype", "n_threads", "n_seq"])
    return {key: timing.median_by_block(group) for key, group in groups}


def _alone(cell: Replicas, key: Key, parts: dict[Key, pd.Series]) -> pd.Series | None:
    """Tokens per second by block, of replicas that do not disturb one another but share the cores."""
    prompt = parts.get(("prefill", *key[:2], cell.threads_each, 1))
    step = parts.get(("decode", *key[:2], cell.threads_each, cell.n_seq))
    if prompt is None or step is None:
        return None
    crowd = max(cell.threads_each * cell.n_processes / cell.n_threads, 1.0)
    return _tokens(cell) / (crowd * (cell.n_seq * prompt + cell.n_gen * step)).dropna()


def _tokens(cell: Replicas) -> int:
    return cell.n_processes * cell.n_seq * (cell.n_gen + 1)


def _allowed(
    cell: Replicas, model: roofline.Model, ceilings: roofline.Ceilings, measured: Estimate
) -> dict[str, float | str]:
    """What the ceilings allow: prompts one by one, then steps at the mean depth, the weights read by each process."""
    depth = cell.n_prompt + cell.n_gen / 2
    flops = cell.n_seq * roofline.prefill_flops(model, cell.n_prompt)
    flops += cell.n_gen * roofline.decode_flops(model, depth, cell.n_seq)
    moved = cell.n_seq * roofline.prefill_bytes(model, cell.n_prompt)
    moved += cell.n_gen * roofline.decode_bytes(model, depth, cell.n_seq)
    band = roofline.band(cell.n_processes * flops, cell.n_processes * moved, ceilings)
    tokens = _tokens(cell)
    miss = roofline.miss(tokens / measured.value, band.low, band.high)
    return {"slowest": tokens / band.high, "fastest": tokens / band.low, "near": band.bound, "miss": miss}


def crashes(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per run with a killed replica: CELL, `block`, `lost` and `finished` requests, `got` (tokens that the
    killed one's sequences had each), and `right`: whether all others finished with the tokens they get alone."""
    entries = []
    for row in rows[(rows["workload"] == "replicas") & (rows["killed"] >= 0) & (rows["status"] == "ok")].itertuples():
        finished, total = int(row.checks["finished"]), row.n_processes * row.n_seq
        entry = {name: getattr(row, name) for name in (*CELL, "block", "verdict")}
        entry |= {"finished": finished, "lost": total - finished, "got": len(row.samples_ns[row.killed]) + 1}
        entries.append(entry | {"of": row.n_gen + 1, "right": bool(row.checks["second_path"])})
    return pd.DataFrame(entries, columns=[*CELL, "block", "verdict", "finished", "lost", "got", "of", "right"])


def weights(rows: pd.DataFrame, facts: Facts) -> pd.DataFrame:
    """One line per cell, MEMORY as estimates; `copies`: weights in memory, mapped or own, over `file` (bytes)."""
    found, known = table(rows), files(rows, facts)
    found = found[found["policy"] == "per_sequence"].dropna(subset=["grown"])
    sizes = [int(known[row.model, row.dtype]["file_bytes"]) for row in found.itertuples()]
    copies = [(row.mapped.value + row.own.value) / size for row, size in zip(found.itertuples(), sizes, strict=True)]
    return found.assign(file=sizes, copies=copies)
