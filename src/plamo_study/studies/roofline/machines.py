"""The same passes on pairs of machines: the input of chapter 2's forecasts of one machine's times from another's.

Each time comes with what a forecast can start from: the bytes per second that the machine reads, and the roof, the time
that the nearer of its two measured ceilings allows.
"""

from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

import numpy as np
import pandas as pd

from llama_meter import journal, paths
from llama_meter.cells import Read
from llama_meter.errors import StudyError
from llama_meter.journal import LOCAL, OTHERS, REFERENCE
from llama_meter.measure.plan import check_scale
from llama_meter.rows import Fact, Row
from plamo_study.read import frame, recording
from plamo_study.read.frame import STOCK
from plamo_study.read.recording import (
    ONE_MACHINE_S,
    as_released,
    by_machine,
    check_device,
    check_source,
    of_device,
)
from plamo_study.studies.roofline import every_cell

SAME_DEPTH, SAME_SHARE = 64, 0.1  # tokens, and share of a depth, by which equal depths may differ
PASS = ["model", "dtype", "phase", "tokens", "n_seq", "policy", "type_k", "type_v", "attention"]
MACHINE = ["machine", "chip"]
ON_GPU = " GPU"  # behind a machine's id
Studies = list[tuple[str, pd.DataFrame, dict[str, dict[str, Any]]]]


def recordings(source: str, scale: str, device: str = "auto") -> Studies:
    """The rows of every machine: the tracked ones, and where `source` is live also those measured or added here.

    A recording for each journal and machine; the released engine has one name, also with CUDA. `device`: which of the
    rows measured or added here, as for `of_device`.
    StudyError for an unknown source, scale or device, or where there are none.
    """
    check_source(source)
    check_scale(scale)
    check_device(device)
    tracked = [paths.MEASURED / place for place in (REFERENCE, OTHERS)]
    studies = [study for study in _of(tracked, scale) if study[0] not in ONE_MACHINE_S]
    if source == "live":
        studies += _of([paths.MEASURED / LOCAL], scale, device)
    if not studies:
        raise StudyError("machines", f"no rows at scale {scale}", f"plamo-study run 01 --scale {scale}")
    shown = {name: facts[name] for _, rows, facts in studies for name in rows["machine"].unique()}
    (named,) = frame.told_apart(shown)
    return [
        (study, rows, facts | {name: named[name] for name in facts.keys() & named}) for study, rows, facts in studies
    ]


def hosts() -> pd.DataFrame:
    """The recorded machines by letter: `host`, `chip`, `cache` (bytes), `read` (B/s, most threads), `days` and `rows`.

    `read`: the median of a machine's own read ceilings, NaN where it measured none.
    """
    facts, rows = dict[str, dict[str, Any]](), list[Row]()
    for place in (REFERENCE, OTHERS):
        for path in journal.journals(paths.MEASURED / place):
            records = journal.read(path)
            facts |= {record.id: record.data for record in records if isinstance(record, Fact)}
            rows += journal.latest_rows(records)
    entries = []
    for name, (letter, _) in frame.HOSTS.items():
        own = [row for row in rows if row.machine == name]
        read = [
            (cell.n_threads, 1e9 * cell.array_bytes / np.median(row.samples_ns))
            for row in own
            if isinstance(cell := row.cell, Read) and row.status == "ok" and not cell.n_gpu_layers
        ]
        rates = [rate for threads, rate in read if threads == max(read)[0]]
        days = sorted({row.started[:10] for row in own})
        entries.append(
            {
                "host": letter,
                "chip": f"{frame.processor_name(facts[name])}, {frame.cores(facts[name])}",
                "gpu": ", ".join(gpu["chip"] for gpu in facts[name].get("gpus", ())),
                "cache": facts[name].get("last_level_cache_bytes", np.nan),
                "read": np.median(rates) if rates else np.nan,
                "days": f"{days[0]} to {days[-1]}" if len(days) > 1 else days[0],
                "rows": len(own),
            }
        )
    return pd.DataFrame(entries)


def _of(
    folders: list[Any], scale: str, device: str = "auto"
) -> Iterator[tuple[str, pd.DataFrame, dict[str, dict[str, Any]]]]:
    for path in (path for folder in folders for path in journal.journals(folder, scale)):
        records, study = journal.read(path), path.name.partition(".")[0]
        for rows in by_machine(records).values():
            if own := of_device(rows, device):
                recorded = recording.of_rows(own, records, study, "recorded", scale)
                yield study, as_released(recorded.rows), recorded.facts


def passes(studies: Studies) -> pd.DataFrame:
    """Every usable pass of the engine as released, with all threads, on every machine that measured its ceilings.

    MACHINE, PASS, `depth`, `study`, `measured` (estimate, s), `low` (s: its roof), `share` of the roof, and the
    ceilings that made it: `read` (B/s) and `compute` (FLOP/s), the best samples of all of the machine's studies.
    StudyError if no pass has measured ceilings.
    """
    timed, _ = every_cell.cells(studies)
    if timed.empty:
        raise StudyError("machines", "no pass was timed on a machine with measured ceilings", "plamo-study run 01")
    timed = _apart(timed[(timed["build"] == STOCK) & (timed["ladder"] == "")])
    timed = timed.loc[(timed["phase"] != timed["workload"]).sort_values(kind="stable").index]  # own cells come first
    most = timed.groupby("machine")["n_threads"].transform("max")
    timed = timed[timed["n_threads"] == most]
    # "auto" chooses flash attention on every backend that was run here, so the two are one kind
    timed = timed.assign(attention=timed["flash_attn"].replace("auto", "on"))
    timed = timed.assign(read=timed.groupby("machine")["read"].transform("max"))
    timed = timed.assign(compute=timed.groupby(["machine", "dtype"])["compute"].transform("max"))
    timed = timed.assign(low=np.maximum(timed["bytes"] / timed["read"], timed["flops"] / timed["compute"]))
    timed = timed.assign(share=timed["low"] / timed["measured"].map(lambda took: took.value))
    return timed[[*MACHINE, *PASS, "depth", "study", "measured", "low", "share", "compute", "read"]]


def _apart(timed: pd.DataFrame) -> pd.DataFrame:
    """Treat a machine's GPU as a separate machine: it has other ceilings."""
    return timed.assign(machine=timed["machine"].where(timed["n_gpu_layers"] == 0, timed["machine"] + ON_GPU))


def machines(timed: pd.DataFrame) -> pd.DataFrame:
    """Per machine: MACHINE, its ceilings `read` (B/s) and `compute` (FLOP/s) for weights of the commonest type,
    `balance` (FLOP a byte), `passes`, and `share`, their median share of the roof."""
    usual = timed["dtype"].mode().iloc[0]
    entries = []
    for (machine, chip), group in timed.groupby(MACHINE, sort=False):
        read, compute = group["read"].max(), group[group["dtype"] == usual]["compute"].max()
        entry = {"machine": machine, "chip": chip, "read": read, "compute": compute, "balance": compute / read}
        entries.append(entry | {"passes": len(group), "share": float(group["share"].median())})
    return pd.DataFrame(entries)


def common(timed: pd.DataFrame) -> Iterator[tuple[Any, Any]]:
    """Pairs of lines for the same pass on two machines, nearest depths first; a pass that several cells timed counts
    once, by the first of its lines."""
    timed = timed.dropna(subset=PASS)
    alike: dict[int, dict[str, list[Any]]] = {}  # lines by pass and machine
    for number, line in zip(timed.groupby(PASS, sort=False).ngroup(), timed.itertuples(), strict=True):
        alike.setdefault(number, {}).setdefault(line.machine, []).append(line)
    for of_pass in alike.values():
        for source, asked in combinations(of_pass.values(), 2):
            yield from _nearest(source, asked)


def _nearest(source: list[Any], asked: list[Any]) -> Iterator[tuple[Any, Any]]:
    taken: list[tuple[float, float]] = []
    for mine, line in sorted(product(source, asked), key=lambda pair: abs(pair[0].depth - pair[1].depth)):
        near, depths = max(SAME_DEPTH, SAME_SHARE * line.depth), (mine.depth, line.depth)
        again = any(abs(depth - other) <= near for pair in taken for depth, other in zip(depths, pair, strict=True))
        if abs(depths[0] - depths[1]) <= near and not again:
            taken.append(depths)
            yield mine, line


def pairs(timed: pd.DataFrame) -> pd.DataFrame:
    """Every pass that two machines ran, one line per pair: the input of a forecast.

    PASS and `depth` (of the second); the chips `known` (forecast from) and `asked` (forecast for); and of each, as
    `..._known` and `..._asked`: `took` (estimate, s), `roof` (s), `read` (B/s), `share`.
    """
    entries = []
    for source, asked in common(timed):
        entry = {name: getattr(source, name) for name in PASS} | {"depth": asked.depth}
        for side, line in (("known", source), ("asked", asked)):
            entry |= {side: line.chip, f"took_{side}": line.measured, f"roof_{side}": line.low}
            entry |= {f"read_{side}": line.read, f"share_{side}": line.share}
        entries.append(entry)
    sides = [f"{name}_{side}" for side in ("known", "asked") for name in ("took", "roof", "read", "share")]
    return pd.DataFrame(entries, columns=[*PASS, "depth", "known", "asked", *sides])
