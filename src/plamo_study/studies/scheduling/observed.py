"""Calls of recorded rows on one machine, from any study, in the form that a step model is fitted on."""

from collections.abc import Iterator
from math import nan
from typing import Any

import numpy as np
import pandas as pd

from plamo_study.analysis.memo import once_a_frame
from plamo_study.analysis.timing import NS
from plamo_study.analysis.usable import marked, usable
from plamo_study.measure.cells import Arrival
from plamo_study.studies.chunked import calls as chunked
from plamo_study.studies.scheduling.plan import PARTS, SERVER, SPLIT
from plamo_study.studies.scheduling.steps import AWAKE_S, Calls, StepModel, fit

COLUMNS = ["decoding", "keys", "chunk", "before", "seconds"]
ORIGIN = ["model", "scale", "machine", "n_threads", "workload", "rule", "per_second", "block"]
FLASH = ("auto", "on")


@once_a_frame
def calls(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per call of the stock engine with its usual cache and attention: ORIGIN, COLUMNS and `idle`, the seconds
    without any computation before it began (NaN: unknown).

    Disturbed rows are left out: a disturbance is not a property of a call.
    """
    used = _steady(usable(rows))
    used = used[(used["build"] == "stock") & used["flash_attn"].isin(FLASH) & ~used["kv_unified"]]
    used = used[~used["label"].isin((SERVER, SPLIT))]  # whose calls are not recorded
    used = used[(used["type_k"] == "f16") & (used["type_v"] == "f16") & (used["status"] == "ok")]
    parts = []
    for row in used.itertuples():
        if row.workload in TAKEN and (found := list(TAKEN[row.workload](row))):
            made = pd.DataFrame(found, columns=COLUMNS).assign(idle=_idle(row, found))
            made = made[made["chunk"] <= row.n_ubatch]
            origin = {name: getattr(row, name) for name in ORIGIN if name != "rule"} | {"rule": row.label}
            parts.append(made.assign(**origin))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=[*COLUMNS, "idle", *ORIGIN])


def _steady(used: pd.DataFrame) -> pd.DataFrame:
    """Undisturbed rows. Where every process was disturbed, all calls measured alone are kept, and no traffic is."""
    hit = marked(used)
    every = hit.groupby([used[name] for name in ("model", "n_threads", "workload", "label")]).transform("all")
    return used[~hit | (every & ((used["workload"] != "traffic") | (used["label"] == PARTS)))]


def moves(rows: pd.DataFrame, model: str) -> list[float]:
    """Seconds of each move of a sequence to another slot."""
    used = usable(rows)
    found = used[(used["workload"] == "traffic") & (used["model"] == model)]["series"]
    return [seconds for series in found for seconds in series.get("moves", ())]


Call = tuple[int, int, int, int, float]


def _traffic(row: Any) -> Iterator[Call]:
    for *what, ns in zip(*(row.series[name] for name in COLUMNS[:-1]), row.samples_ns[0], strict=True):
        yield *map(int, what), ns / NS  # type: ignore[misc] # four whole numbers


def _idle(row: Any, calls: list[Call]) -> list[float]:
    """Idle seconds before each call of traffic: above 0 only where a prompt begins and no request was active before it.

    Every policy begins prompts in order of arrival. The idle time before the first one is unknown: NaN.
    """
    if row.workload != "traffic" or not row.requests:
        return [0.0] * len(calls)
    came = sorted((each.arrived_ns, each.token_ns[-1]) for each in row.requests)
    ended = np.maximum.accumulate([0, *(end for _, end in came)])
    known = [max(arrived - before, 0) / NS for (arrived, _), before in zip(came, ended[:-1], strict=True)]
    gaps = iter([nan, *known[1:]])
    return [next(gaps) if chunk and not before else 0.0 for _, _, chunk, before, _ in calls]


def _decode(row: Any) -> Iterator[Call]:
    for step, ns in enumerate(row.samples_ns[0] if row.policy == "shared" or row.n_seq == 1 else ()):
        yield row.n_seq, row.n_seq * (row.n_prompt + step), 0, 0, ns / NS


def _prefill(row: Any) -> Iterator[Call]:
    if row.n_seq == 1:
        yield from ((0, 0, row.n_prompt, 0, ns / NS) for sample in row.samples_ns for ns in sample)


def _depth(row: Any) -> Iterator[Call]:
    parts, steps = row.samples_ns
    if not row.text and row.label != "swa_full":
        yield from (
            (0, 0, row.n_ubatch, int(at), ns / NS) for at, ns in zip(row.series["part_depth"], parts, strict=True)
        )
        yield from ((1, int(at), 0, 0, ns / NS) for at, ns in zip(row.series["step_depth"], steps, strict=True))


def _arrival(row: Any) -> Iterator[Call]:
    cell = Arrival(
        depth=int(row.n_prompt), n_gen=int(row.n_gen), n_seq=int(row.n_seq), n_arriving=int(row.n_arriving),
        n_chunk=int(row.n_chunk), way=row.way,
    )  # fmt: skip
    held = {seq: cell.depth for seq in range(cell.n_seq)} | {cell.n_seq: 0}
    for call, ns in zip(chunked.calls(cell), row.samples_ns[0], strict=True):
        read = held[cell.n_seq]
        steps = [seq for seq, n in call if seq < cell.n_seq or read >= cell.n_arriving]
        chunk = sum(n for seq, n in call if seq not in steps)
        yield len(steps), sum(held[seq] for seq in steps), chunk, read if chunk else 0, ns / NS
        for seq, n in call:
            held[seq] += n


TAKEN = {"traffic": _traffic, "decode": _decode, "prefill": _prefill, "depth": _depth, "arrival": _arrival}


def fitted(found: pd.DataFrame, model: str, n_threads: int, rows: pd.DataFrame, missing: str) -> StepModel:
    """Step model of the calls of one model and number of threads. StudyError if steps or chunks are missing.

    `rows`: source of the moves. `missing`: the command that measures more.
    """
    own = found[(found["model"] == model) & (found["n_threads"] == n_threads)]
    name, awake, asleep = f"{model} on {n_threads} threads", own["idle"] < AWAKE_S, own["idle"] >= AWAKE_S
    return fit(name, table(own[awake]), moves(rows, model), missing, table(own[asleep]))


def table(found: pd.DataFrame) -> Calls:
    """Calls in the form that `fit` takes."""
    whole = {name: found[name].to_numpy(dtype=np.int64) for name in COLUMNS[:-1]}
    return Calls(**whole, seconds=found["seconds"].to_numpy(dtype=float))


def parts_of(found: pd.DataFrame) -> pd.DataFrame:
    """The calls that were measured alone, in cells made for it."""
    return found[(found["workload"] != "traffic") | (found["rule"] == PARTS)]
