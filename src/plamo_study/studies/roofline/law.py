"""What chapter 2 computes from rows: every timed pass against two ceilings, machines side by side, operators by class.

Only usable rows: computed right, in undisturbed blocks. How far off a time is is given twice: with each ceiling's best
sample, and with what the ceilings usually are. Caches are not modelled: small models lie above their roof.
"""

import math
import tomllib
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, product
from typing import Any

import numpy as np
import pandas as pd

from llama_meter import journal, paths, stats
from llama_meter.cells import Read
from llama_meter.errors import StudyError
from llama_meter.journal import LOCAL, OTHERS, REFERENCE
from llama_meter.measure.plan import check_scale
from llama_meter.rows import Fact, Row
from plamo_study.arithmetic import ceilings, roofline
from plamo_study.arithmetic.roofline import Ceilings, Model
from plamo_study.read import frame, recording
from plamo_study.read.frame import STOCK, device_name, main_rows, usable
from plamo_study.read.recording import ONE_MACHINE_S
from plamo_study.stats.estimates import NS

TIMED = ("prefill", "decode", "depth", "naive")
KEY = [
    *("machine", "build", "engine", "model", "dtype", "workload", "n_prompt", "depth", "n_ctx", "n_gen", "n_seq"),
    *("policy", "n_threads", "n_ubatch", "type_k", "type_v", "flash_attn", "n_gpu_layers", "ladder"),
]
NUMBERS = [
    *("tokens", "depth", "n_seq", "n_threads", "flops", "bytes", "intensity", "compute", "read", "low", "high", "miss"),
    *("miss_usual", "share"),
]
SAME_DEPTH, SAME_SHARE = 64, 0.1  # tokens, and share of a depth, by which equal depths may differ
PASS = ["model", "dtype", "phase", "tokens", "n_seq", "policy", "type_k", "type_v", "attention"]
DEPTH = 384.0  # mean depth of the decode cell of chapter 1
LONGEST = 1 << 16  # tokens or sequences up to which a turning point is searched
ON_GPU = " GPU"  # behind a machine's id
PHASES = ("prefill", "decode")
GROUPS = {  # classes of operators: products by the weight they multiply with, everything else by its operation
    "FFN products": ("ffn_up", "ffn_down"),
    "attention products": ("attn_qkv", "attn_output"),
    "Mamba products": ("ssm_in", "ssm_x", "ssm_dt", "ssm_out"),
    "head": ("head",),
    "attention": ("flash_attention", "kq", "softmax", "kqv", "rope", "kv_write"),
    "scan and convolution": ("ssm_scan", "ssm_conv", "state"),
    "norms, copies, other": ("norm", "embedding", "elementwise", "copy", "other"),
}
Studies = Sequence[tuple[str, pd.DataFrame, Mapping[str, Mapping[str, Any]]]]


@dataclass(frozen=True)
class Timed:
    """One kind of pass that a cell timed: new tokens per sequence at a depth, and its seconds, one per process."""

    phase: str
    tokens: int
    depth: float
    seconds: tuple[float, ...]
    n_seq: int = 1
    together: bool = True


# ------------------------------------------------------------------ every timed pass against two ceilings


def cells(studies: Studies) -> pd.DataFrame:
    """One line per study, cell and kind of pass; `studies` are (name, rows, facts). Usable rows only.

    Columns: the cell's, `chip` (a GPU's where layers were offloaded), `phase`, `tokens`, `depth`, `n` processes,
    `flops`, `bytes`, `intensity`, `compute` and `read` (its file's ceilings, best), `low`, `high`, `measured`
    (estimate, s), `miss` and `miss_usual` (how far off the band of the best and of the usual ceilings), and `share` (of
    the roof of its own kernels). Ceilings are its own study's, else those of all studies on that machine. A pass whose
    ceilings no study measured on its machine is left out.
    """
    tables, entries = [ceilings.measured([rows]) for _, rows, _ in studies], []
    pooled = pd.concat(tables, ignore_index=True)
    for (name, rows, facts), table in zip(studies, tables, strict=True):
        files = {(fact["name"], fact["dtype"]): dict(fact) for fact in facts.values() if "tensors" in fact}
        runs = usable(rows[rows["workload"].isin(TIMED)])
        runs = runs[runs["samples_ns"].map(len).astype(bool)][[*KEY, "samples_ns", "prefill_ns", "series"]]
        near: dict[ceilings.Place, ceilings.Here] = {}  # the ceilings of a place, its study's first
        for key, group in runs.groupby(KEY, sort=False):
            cell = dict(zip(KEY, key, strict=True))
            model = files[cell["model"].rstrip("*"), cell["dtype"]]
            place = ceilings.Place(cell["machine"], cell["n_threads"], cell["n_gpu_layers"])
            if place not in near:
                near[place] = ceilings.Here((table, pooled), place)
            chip = device_name(facts[cell["machine"]], cell["n_gpu_layers"] != 0)
            for timed in _timed(cell, group):
                try:
                    limits = near[place].limits(model, heads=1 / timed.tokens)  # a decode step computes the head
                except StudyError:
                    continue
                entry = {"study": name, **cell, "n": len(group), "chip": chip, "phase": timed.phase}
                entry |= {"tokens": timed.tokens, "depth": timed.depth, "n_seq": timed.n_seq}
                entries.append(entry | _compared(timed, cell, model, limits))
    if entries:
        return pd.DataFrame(entries)
    columns = dict.fromkeys(["study", *KEY, "n", "chip", "phase", "measured", *NUMBERS])
    return pd.DataFrame(columns=list(columns)).astype(dict.fromkeys(NUMBERS, float))


def _timed(cell: Mapping[str, Any], group: pd.DataFrame) -> Iterator[Timed]:
    n_seq, together = int(cell["n_seq"]), cell["policy"] != "per_sequence"
    samples = list(group["samples_ns"])
    if cell["workload"] == "prefill":
        yield Timed("prefill", cell["n_prompt"], 0, _medians(samples), n_seq, together)
    elif cell["workload"] == "decode":
        depth = cell["depth"] + cell["n_gen"] / 2
        yield Timed("decode", 1, depth, _medians(samples), n_seq)
        fills = [[fill] for fill in group["prefill_ns"] if fill]
        if fills:
            yield Timed("prefill", cell["depth"], 0, _medians(fills), n_seq, together)
    elif cell["workload"] == "naive":
        naive, cached = ([row[i] for row in samples] for i in (0, 1))
        length = cell["n_prompt"] + (cell["n_gen"] - 1) / 2
        yield Timed("prefill, without a cache", round(length), 0, _medians([[row] for row in naive]))
        yield Timed("decode", 1, length, _medians([[row[1:] or row] for row in cached]))
    elif "part_depth" in group["series"].iloc[0]:
        yield from _by_depth(cell, group)


def _by_depth(cell: Mapping[str, Any], group: pd.DataFrame) -> Iterator[Timed]:
    """The rungs of a ladder: at each depth one part of a prompt and a few decode steps."""
    rungs = sorted({float(depth) for series in group["series"] for depth in series["part_depth"]})
    for phase, index, name in (("prefill", 0, "part_depth"), ("decode", 1, "step_depth")):
        for rung, above in zip(rungs, [*rungs[1:], float("inf")], strict=True):
            seconds = []
            for samples, series in zip(group["samples_ns"], group["series"], strict=True):
                at = [ns for ns, depth in zip(samples[index], series[name], strict=True) if rung <= depth < above]
                seconds += [float(np.median(at)) / NS] if at else []
            if seconds:
                yield Timed(phase, cell["n_ubatch"] if phase == "prefill" else 1, rung, tuple(seconds))


def _medians(samples: list[list[list[int]]]) -> tuple[float, ...]:
    """Per process the median over all its samples, in seconds."""
    return tuple(float(np.median(list(chain(*row)))) / NS for row in samples)


def _compared(timed: Timed, cell: Mapping[str, Any], model: Model, limits: tuple[Ceilings, Ceilings]) -> dict[str, Any]:
    how = {"n_ubatch": int(cell["n_ubatch"]), "type_k": cell["type_k"], "type_v": cell["type_v"]}
    flops, moved = roofline.work(model, timed.tokens, timed.depth, timed.n_seq, **how, together=timed.together)
    best, usual = (roofline.band(flops, moved, limit) for limit in limits)
    measured = stats.median(timed.seconds)
    return {
        "flops": flops,
        "bytes": moved,
        "intensity": flops / moved,
        "compute": limits[0].matmul,
        "read": limits[0].read,
        "low": best.low,
        "high": best.high,
        "measured": measured,
        "share": best.low / measured.value,
        "miss": roofline.miss(measured.value, best.low, best.high),
        "miss_usual": roofline.miss(measured.value, usual.low, usual.high),
    }


# ------------------------------------------------------------------ intensity, and the balance point of a machine


def intensity(model: Model, n_tokens: int, depth: float = 0, n_seq: int = 1, **how: Any) -> float:
    """FLOPs per byte of evaluating `n_tokens` new tokens of each sequence; the rest as `roofline.parts` takes it."""
    flops, moved = roofline.work(model, n_tokens, depth, n_seq, **how)
    return flops / moved


def curve(models: Mapping[str, Model]) -> pd.DataFrame:
    """Intensity by tokens in a pass: a prompt of `n` tokens (one micro-batch of any length), or `n` sequences.

    Columns model, phase, n and intensity.
    """
    entries = []
    for name, model in models.items():
        for n in (2**k for k in range(12)):
            prompt, steps = intensity(model, n, n_ubatch=n), intensity(model, 1, DEPTH, n, n_ubatch=n)
            entries.append({"model": name, "phase": "prefill, one prompt", "n": n, "intensity": prompt})
            entries.append({"model": name, "phase": "decode, many sequences", "n": n, "intensity": steps})
    return pd.DataFrame(entries, columns=["model", "phase", "n", "intensity"])


def turning(model: Model, balance: float) -> tuple[float, float]:
    """(prompt tokens, sequences decoded together) from which a pass is compute-bound; infinite up to `LONGEST`.

    Below its balance, FLOPs per second over bytes per second, a machine waits for memory. Any number of columns is
    allowed; the micro-batch is as long as the prompt.
    """
    by_prompt = bisect_left(range(1, LONGEST + 1), balance, key=lambda n: intensity(model, n, n_ubatch=n))
    by_batch = bisect_left(range(1, LONGEST + 1), balance, key=lambda n: intensity(model, 1, DEPTH, n, n_ubatch=n))
    prompt, batch = (math.inf if at == LONGEST else float(at + 1) for at in (by_prompt, by_batch))
    return prompt, batch


# ------------------------------------------------------------------ machines side by side


def published() -> list[dict[str, Any]]:
    """Parts with their published bandwidth, memory and peaks by type, each with its sources."""
    entries: list[dict[str, Any]] = tomllib.loads((paths.PUBLISHED / "hardware.toml").read_text("utf-8"))["part"]
    return entries


def balances(here: Mapping[str, Ceilings], name: str) -> pd.DataFrame:
    """This machine with each kernel of `here`, and other parts as published, by balance point (FLOPs/byte).

    Columns name, dtype (this machine's: the kernel), compute (FLOP/s), bandwidth (B/s), balance, by (its source).
    """
    entries: list[dict[str, Any]] = [
        {"name": name, "dtype": kernel, "compute": limit.matmul, "bandwidth": limit.read, "by": "measured"}
        for kernel, limit in here.items()
    ]
    for part in published():
        for kind, peak in part["peak"].items():
            entry = {"name": part["name"], "dtype": kind, "compute": peak, "bandwidth": part["bandwidth"]}
            entries.append(entry | {"by": part["peak_by"]})
    table = pd.DataFrame(entries)
    return table.assign(balance=table["compute"] / table["bandwidth"]).sort_values("balance", ignore_index=True)


def recordings(source: str, scale: str, device: str = "auto") -> Studies:
    """The rows of every machine: the tracked ones, and where `source` is live also those measured or added here.

    A recording for each journal and machine; the released engine has one name, also with CUDA. `device`: which of the
    rows measured or added here, as for `of_device`.
    StudyError for an unknown scale, or where there are none.
    """
    check_scale(scale)
    tracked = _recordings((REFERENCE, OTHERS), scale)
    studies = [study for study in tracked if study[0] not in ONE_MACHINE_S]
    studies += _recordings((LOCAL,), scale, device) if source == "live" else []
    if not studies:
        raise StudyError("machines", f"no rows at scale {scale}", f"plamo-study run 01 --scale {scale}")
    named = frame.distinct_machines(
        *({name: facts[name] for name in rows["machine"].unique()} for _, rows, facts in studies)
    )
    return [(study, rows, {**facts, **names}) for (study, rows, facts), names in zip(studies, named, strict=True)]


def _recordings(
    places: tuple[str, ...], scale: str, device: str = "auto"
) -> Iterator[tuple[str, pd.DataFrame, dict[str, dict[str, Any]]]]:
    for path in (path for place in places for path in journal.journals(paths.MEASURED / place, scale)):
        records, study = journal.read(path), path.name.partition(".")[0]
        for rows in recording.by_machine(records).values():
            if of_device := recording.of_device(rows, device):
                recorded = recording.of_rows(of_device, records, study, "recorded", scale)
                yield study, recording.as_released(recorded.rows), recorded.facts


def hosts() -> pd.DataFrame:
    """The recorded machines by letter: `host`, `chip`, `cache` (bytes), `read` (B/s, most threads), `days` and `rows`.

    `read`: the median of a machine's own read ceilings, NaN where it measured none.
    """
    facts, rows = dict[str, dict[str, Any]](), list[Row]()
    for path in (path for place in (REFERENCE, OTHERS) for path in journal.journals(paths.MEASURED / place)):
        records = journal.read(path)
        facts |= {record.id: record.data for record in records if isinstance(record, Fact)}
        rows += journal.latest_rows(records)
    entries = []
    for name, (letter, _) in frame.HOSTS.items():
        measured = [row for row in rows if row.machine == name]
        read = [
            (cell.n_threads, 1e9 * cell.array_bytes / np.median(row.samples_ns))
            for row in measured
            if isinstance(cell := row.cell, Read) and row.status == "ok" and not cell.n_gpu_layers
        ]
        rates = [rate for threads, rate in read if threads == max(read)[0]]
        days = sorted({row.started[:10] for row in measured})
        entries.append(
            {
                "host": letter,
                "chip": f"{frame.processor_name(facts[name])}, {frame.cores(facts[name])}",
                "gpu": ", ".join(gpu["chip"] for gpu in facts[name].get("gpus", ())),
                "cache": facts[name].get("last_level_cache_bytes", np.nan),
                "read": np.median(rates) if rates else np.nan,
                "days": f"{days[0]} to {days[-1]}" if len(days) > 1 else days[0],
                "rows": len(measured),
            }
        )
    return pd.DataFrame(entries)


def passes(studies: Studies) -> pd.DataFrame:
    """Every usable pass of the engine as released, with all threads, on every machine that measured its ceilings.

    `machine` (a GPU counts as one of its own: it has other ceilings), `chip`, PASS, `depth`, `study`, `measured`
    (estimate, s), `low` (s: its roof), `share` of the roof, and the ceilings that made it: `read` (B/s) and `compute`
    (FLOP/s), the best samples of all of the machine's studies. StudyError if no pass has measured ceilings.
    """
    timed = cells(studies)
    if timed.empty:
        raise StudyError("machines", "no pass was timed on a machine with measured ceilings", "plamo-study run 01")
    timed = timed[(timed["build"] == STOCK) & (timed["ladder"] == "")]
    timed = timed.assign(machine=timed["machine"].where(timed["n_gpu_layers"] == 0, timed["machine"] + ON_GPU))
    timed = timed.loc[(timed["phase"] != timed["workload"]).sort_values(kind="stable").index]  # own cells come first
    most = timed.groupby("machine")["n_threads"].transform("max")
    timed = timed[timed["n_threads"] == most]
    # "auto" chooses flash attention on every backend that was run here, so the two are one kind
    timed = timed.assign(attention=timed["flash_attn"].replace("auto", "on"))
    timed = timed.assign(read=timed.groupby("machine")["read"].transform("max"))
    timed = timed.assign(compute=timed.groupby(["machine", "dtype"])["compute"].transform("max"))
    timed = timed.assign(low=np.maximum(timed["bytes"] / timed["read"], timed["flops"] / timed["compute"]))
    timed = timed.assign(share=timed["low"] / timed["measured"].map(lambda took: took.value))
    return timed[["machine", "chip", *PASS, "depth", "study", "measured", "low", "share", "compute", "read"]]


def common(timed: pd.DataFrame) -> Iterator[tuple[Any, Any]]:
    """Pairs of lines for the same pass on two machines, nearest depths first; a pass that several cells timed counts
    once, by the first of its lines."""
    timed = timed.dropna(subset=PASS)
    alike: dict[int, dict[str, list[Any]]] = {}  # lines by pass and machine
    for number, line in zip(timed.groupby(PASS, sort=False).ngroup(), timed.itertuples(), strict=True):
        alike.setdefault(number, {}).setdefault(line.machine, []).append(line)
    for of_pass in alike.values():
        for source, other in combinations(of_pass.values(), 2):
            yield from _nearest(source, other)


def _nearest(source: list[Any], other: list[Any]) -> Iterator[tuple[Any, Any]]:
    taken: list[tuple[float, float]] = []
    for mine, line in sorted(product(source, other), key=lambda pair: abs(pair[0].depth - pair[1].depth)):
        near, depths = max(SAME_DEPTH, SAME_SHARE * line.depth), (mine.depth, line.depth)
        again = any(abs(depth - before) <= near for pair in taken for depth, before in zip(depths, pair, strict=True))
        if abs(depths[0] - depths[1]) <= near and not again:
            taken.append(depths)
            yield mine, line


def pairs(timed: pd.DataFrame) -> pd.DataFrame:
    """Every pass that two machines ran, one line per pair: the input of a forecast.

    PASS and `depth` (of the second); the chips `source` (forecast from) and `target` (forecast for); and of each, as
    `..._source` and `..._target`: `took` (estimate, s), `roof` (s), `read` (B/s), `share`.
    """
    entries = []
    for source, target in common(timed):
        entry = {name: getattr(source, name) for name in PASS} | {"depth": target.depth}
        for side, line in (("source", source), ("target", target)):
            entry |= {side: line.chip, f"took_{side}": line.measured, f"roof_{side}": line.low}
            entry |= {f"read_{side}": line.read, f"share_{side}": line.share}
        entries.append(entry)
    sides = [f"{name}_{side}" for side in ("source", "target") for name in ("took", "roof", "read", "share")]
    return pd.DataFrame(entries, columns=[*PASS, "depth", "source", "target", *sides])


# ------------------------------------------------------------------ where the time of a phase goes


def operators(rows: pd.DataFrame) -> pd.DataFrame:
    """What each group of operators did in each phase of each recorded request, of one prefill or one mean decode step.

    `model`, `machine`, `block`, `phase`; `what`, one of GROUPS; `ns` (median over the row's recordings), `bytes` and
    `flops` of its products; `value`, its share of the operator time, without the recorder's own.
    """
    group_of = {name: group for group, names in GROUPS.items() for name in names}
    traced, lines = main_rows(rows), []
    for row in traced[traced["workload"] == "trace"].itertuples():
        for phase, name, quantity in (key.split("/") for key in row.series if key.count("/") == 2):
            value = np.median(row.series[f"{phase}/{name}/{quantity}"]) / (row.n_gen if phase == "decode" else 1)
            lines.append((row.model, row.machine, row.block, phase, group_of.get(name), quantity, value))
    columns = ["model", "machine", "block", "phase", "what"]
    table = pd.DataFrame(lines, columns=[*columns, "quantity", "value"])
    table = table.pivot_table(index=columns, columns="quantity", values="value", aggfunc="sum").reset_index()
    return table.assign(value=table["ns"] / table.groupby(["model", "block", "phase"])["ns"].transform("sum"))
