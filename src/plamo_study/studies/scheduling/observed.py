"""Calls of recorded rows on one machine, from any study, and the step models that are fitted on them.

What a frame of rows says of them is taken once, by `of_rows`, and passed on to what is fitted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import nan
from typing import Any

import numpy as np
import pandas as pd

from plamo_study.analysis import stats
from plamo_study.analysis.timing import NS
from plamo_study.analysis.usable import marked, usable
from plamo_study.errors import StudyError
from plamo_study.measure.cells import Arrival
from plamo_study.studies.chunked import calls as chunked
from plamo_study.studies.scheduling.plan import PARTS, SERVER, SPLIT
from plamo_study.studies.scheduling.steps import AWAKE_S, Calls, StepModel, fit

COLUMNS = ["decoding", "keys", "chunk", "before", "seconds"]
MISSING = "plamo-study measure 10-scheduling"
PROCESS = ["model", "rule", "per_second", "block"]
IDLE = (0.0, 0.005, AWAKE_S, 0.02, 0.08, 0.3, 1.0)  # s: lower bounds of the classes of idle time
ORIGIN = ["model", "scale", "machine", "n_threads", "workload", "per_second", "block", "rule"]
FLASH = ("auto", "on")


@dataclass(frozen=True)
class Observed:
    """What a study's rows say: usable rows of `traffic`, the `calls`, `moves` and `loads` that step models are fitted
    on, and the `command` that measures more."""

    traffic: pd.DataFrame
    calls: pd.DataFrame
    moves: pd.DataFrame
    loads: tuple[float, ...]
    command: str


def of_rows(rows: pd.DataFrame) -> Observed:
    """What these rows say of loads and of calls. A model of several types goes by both names."""
    several = rows.groupby("model")["dtype"].transform("nunique") > 1
    rows = rows.assign(model=rows["model"].where(~several, rows["model"] + " " + rows["dtype"]))
    served = traffic_of(usable(rows))
    return Observed(served, calls(rows), moves(rows), loads(served), command(rows))


def calls(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per call of the stock engine with its usual cache and attention: ORIGIN, COLUMNS and `idle`, the seconds
    without any computation before it began (NaN: unknown).

    Disturbed rows are left out: a disturbance is not a property of a call.
    """
    used = _steady(usable(rows))
    used = used[(used["build"] == "stock") & used["flash_attn"].isin(FLASH) & ~used["kv_unified"]]
    used = used[~used["label"].isin((SERVER, SPLIT))]  # whose calls are not recorded
    used = used[(used["type_k"] == "f16") & (used["type_v"] == "f16") & (used["status"] == "ok")]
    used = used[used["workload"].isin(TAKEN)]
    found: list[Call] = []
    idle: list[float] = []
    origin: list[int] = []  # of each call, the place of its row
    for number, row in enumerate(used.itertuples()):
        of_row = list(TAKEN[row.workload](row))
        found += of_row
        idle += _idle(row, of_row)
        origin += [number] * len(of_row)
    whence = used.assign(rule=used["label"]).iloc[origin]
    made = pd.DataFrame(found, columns=COLUMNS).assign(idle=idle, **{name: whence[name].array for name in ORIGIN})
    return made[made["chunk"] <= whence["n_ubatch"].to_numpy()].reset_index(drop=True)


def _steady(used: pd.DataFrame) -> pd.DataFrame:
    """Undisturbed rows. Where every process was disturbed, all calls measured alone are kept, and no traffic is."""
    hit = marked(used)
    every = hit.groupby([used[name] for name in ("model", "n_threads", "workload", "label")]).transform("all")
    return used[~hit | (every & ((used["workload"] != "traffic") | (used["label"] == PARTS)))]


def moves(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per move of a sequence to another slot: `model`, `per_second` of the load, and `seconds`."""
    used = usable(rows)
    found = used[used["workload"] == "traffic"].itertuples()
    entries = [(row.model, row.per_second, seconds) for row in found for seconds in row.series.get("moves", ())]
    return pd.DataFrame(entries, columns=["model", "per_second", "seconds"])


Call = tuple[int, int, int, int, float]


def _traffic(row: Any) -> Iterator[Call]:
    whole = (map(int, row.series[name]) for name in COLUMNS[:-1])
    return zip(*whole, (ns / NS for ns in row.samples_ns[0]), strict=True)  # type: ignore[arg-type, return-value]


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


def of_model(found: pd.DataFrame, model: str, n_threads: int, moved: pd.DataFrame, missing: str) -> StepModel:
    """Step model of the calls of one model and number of threads. StudyError if steps or chunks are missing.

    `moved`: `moves`, of any models. `missing`: the command that measures more.
    """
    took = moved[moved["model"] == model]["seconds"].tolist()
    own = found[(found["model"] == model) & (found["n_threads"] == n_threads)]
    name, awake, asleep = f"{model} on {n_threads} threads", own["idle"] < AWAKE_S, own["idle"] >= AWAKE_S
    return fit(name, table(own[awake]), took, missing, table(own[asleep]))


def table(found: pd.DataFrame) -> Calls:
    """Calls in the form that `fit` takes."""
    whole = {name: found[name].to_numpy(dtype=np.int64) for name in COLUMNS[:-1]}
    return Calls(**whole, seconds=found["seconds"].to_numpy(dtype=float))


def parts_of(found: pd.DataFrame) -> pd.DataFrame:
    """The calls that were measured alone, in cells made for it."""
    return found[(found["workload"] != "traffic") | (found["rule"] == PARTS)]


# ------------------------------------------------------------------ fits


def traffic_of(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of loads that a policy served."""
    served = ~rows["label"].isin((PARTS, SERVER))
    return rows[(rows["workload"] == "traffic") & served & (rows["status"] == "ok")]


def loads(served: pd.DataFrame) -> tuple[float, ...]:
    """Loads (1/s) at which several policies were measured; each is predicted from the others."""
    policies_at = served.groupby("per_second")["label"].nunique()
    return tuple(sorted(policies_at[policies_at > 1].index))


def fitted(seen: Observed, without: float = 0.0) -> dict[str, StepModel]:
    """Step model by model: fitted on the calls measured alone, and on those of traffic at all loads but `without`."""
    found = seen.calls
    known = found["per_second"].isin(set(seen.loads) - {without})
    own = pd.concat([parts_of(found), found[(found["workload"] == "traffic") & known]])
    return _models(own, seen, without)


def paced(seen: Observed, known: dict[str, StepModel], without: float = 0.0) -> tuple[dict[str, StepModel], pd.Series]:
    """Step models by model, and each process's pace by PROCESS: the seconds of its calls over those that `known`
    predicts, `fitted` without the same load. The models are fitted on the same calls, divided by the pace of their
    process."""
    found = seen.calls[seen.calls["n_threads"] == seen.calls["n_threads"].max()]
    found = found.assign(said=_said(known, found))
    awake = found[found["said"].notna() & ~(found["idle"] >= AWAKE_S)].groupby(PROCESS)
    pace = (awake["seconds"].sum() / awake["said"].sum()).rename("pace").sort_index()
    found = found.join(pace, on=PROCESS)
    found["seconds"] /= found["pace"].fillna(1.0)
    own = found["per_second"].isin(set(seen.loads) - {without}) | (found["workload"] != "traffic")
    return _models(found[own | (found["rule"] == PARTS)], seen, without), pace


def half(seen: Observed) -> dict[str, StepModel]:
    """Step models of the parts with half of the threads; empty if there is only one thread."""
    if seen.calls["n_threads"].nunique() < 2:
        return {}
    return with_threads(seen, int(parts_of(seen.calls)["n_threads"].min()))


def with_threads(seen: Observed, n_threads: int) -> dict[str, StepModel]:
    """Step model by model, of the parts that were measured with `n_threads` threads."""
    own = parts_of(seen.calls)
    return _models(own[own["n_threads"] == n_threads], seen)


def after_idle(own: pd.DataFrame, known: dict[str, StepModel]) -> pd.DataFrame:
    """Extra time of a prompt's first call over the fit `known`, by idle time before it: `model`, `idle` (one
    of IDLE), `calls`, `more` (s, median) and `more_p90` (s), over processes."""
    own = own[(own["workload"] == "traffic") & (own["rule"] != PARTS) & (own["decoding"] == 0) & (own["before"] == 0)]
    entries = []
    own = own.assign(
        more=own["seconds"] - _said(known, own), since=pd.cut(own["idle"], [*IDLE, np.inf], right=False, labels=IDLE)
    )
    for (model, since), of in own.groupby(["model", "since"], observed=True):
        by_process = of.groupby("block")["more"]
        entry: dict[str, Any] = {"model": model, "idle": since, "calls": len(of)}
        entry |= {"more": stats.median(by_process.median().tolist())}
        entries.append(entry | {"more_p90": stats.median(by_process.quantile(0.9).tolist())})
    return pd.DataFrame(entries, columns=["model", "idle", "calls", "more", "more_p90"])


def elsewhere(rows: pd.DataFrame, other: pd.DataFrame) -> pd.DataFrame:
    """Predictions of this traffic's calls by a fit on another study: `model`, `kind`, `calls`, `refused` (calls
    outside its measured range) and `ratio`, measured over predicted, by process."""
    own = calls(rows)
    own = own[(own["workload"] == "traffic") & (own["rule"] != PARTS) & (own["idle"] < AWAKE_S)]  # NaN: neither
    foreign, moved = _same(calls(other), own), moves(rows)
    entries = []
    for model, group in own.groupby("model"):
        try:
            known = of_model(foreign, str(model), int(group["n_threads"].max()), moved, "")
        except StudyError:
            continue
        of_group = table(group)
        group = group.assign(said=known.of(of_group), kind=of_group.kinds)
        for name, of in group.groupby("kind"):
            inside = of[of["said"].notna()]
            by_process = (inside["seconds"] / inside["said"]).groupby(inside["block"]).median()
            entry = {"model": model, "kind": name, "calls": len(of), "refused": int(of["said"].isna().sum())}
            entries.append(entry | {"ratio": stats.median(by_process.tolist())})
    return pd.DataFrame(entries, columns=["model", "kind", "calls", "refused", "ratio"])


def _models(own: pd.DataFrame, seen: Observed, without: float = 0.0) -> dict[str, StepModel]:
    """A step model for each model of these calls, with the moves at all loads but `without`."""
    threads = int(own["n_threads"].max()) if len(own) else 0
    moved = seen.moves[seen.moves["per_second"] != without]
    return {name: of_model(own, name, threads, moved, seen.command) for name in sorted(own["model"].unique())}


def _same(other: pd.DataFrame, own: pd.DataFrame) -> pd.DataFrame:
    """Calls of another study on the same machine and at the same scale."""
    return other[other["machine"].isin(set(own["machine"])) & other["scale"].isin(set(own["scale"]))]


def command(rows: pd.DataFrame) -> str:
    """The command that measures more of these rows."""
    return f"{MISSING} --scale {rows['scale'].iloc[0]}"


def _said(known: dict[str, StepModel], found: pd.DataFrame) -> pd.Series:
    """Seconds of each call by its model's fit; NaN outside the measured range."""
    by_model = found[COLUMNS].groupby(found["model"])
    each = [pd.Series(known[str(name)].of(table(of)), of.index) for name, of in by_model]
    return pd.concat(each) if each else pd.Series(dtype=float)
