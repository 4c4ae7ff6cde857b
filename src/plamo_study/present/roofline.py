"""Notebook 02's sentences and tables: the words around numbers that come from rows, never the other way round."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
from IPython.display import Markdown

from plamo_study.analysis import context_memory, every_cell, intensity, prediction, what_if
from plamo_study.analysis.roofline import Ceilings, Model
from plamo_study.measure.collect import Recording
from plamo_study.present import evidence
from plamo_study.present.balance import count
from plamo_study.present.evidence import chips, condition, escaped
from plamo_study.present.tables import Columns, Table, folded, significant, table

TRACE = "02-trace"
WORST = 10
GROUPS = ["study", "kind", "verdict"]


def merged(recordings: Sequence[Recording]) -> Recording:
    """All rows and facts as one recording."""
    facts: dict[str, dict[str, Any]] = {}
    for recording in recordings:
        facts |= recording.facts
    first = recordings[0]
    rows = pd.concat([recording.rows for recording in recordings], ignore_index=True)
    return Recording(rows, facts, first.study, first.scale, first.source)


def cells(recordings: Sequence[Recording]) -> pd.DataFrame:
    """Every timed cell of every study, predicted and measured, with its `kind`."""
    found = every_cell.cells([(r.study, r.rows, r.facts) for r in recordings])
    return found.assign(kind=[every_cell.kind(row) for row in found.to_dict("records")])


def traced(recordings: Sequence[Recording], show: Callable[..., Any], *arguments: Any) -> Any:
    """What `show` makes of the operator timeline's rows, or a sentence where there are none at this scale."""
    found = next((recording for recording in recordings if recording.study == TRACE), None)
    if found is None:
        return Markdown(
            f"No operator timeline is recorded at scale {recordings[0].scale}: `plamo-study measure {TRACE}`."
        )
    return show(found, *arguments)


def home(recordings: Sequence[Recording]) -> Recording:
    """The study whose ceilings this notebook calls this machine's: of those with both, the timeline's last."""
    known = [recording for recording in recordings if {"read", "matmul"} <= set(recording.rows["workload"])]
    return min(known, key=lambda recording: recording.study == TRACE)


def limits(recordings: Sequence[Recording]) -> tuple[Ceilings, str]:
    """This machine's ceilings, best samples, and the type of the matrix product."""
    rows = home(recordings).rows
    dtype = rows[(rows["workload"] != "matmul") & (rows["model"] != "")]["dtype"].mode().iloc[0]
    same = rows[(rows["workload"] != "matmul") | (rows["dtype"] == dtype)]
    return prediction.limits(same[same["n_prompt"].eq(0) | same["workload"].ne("matmul")]), str(dtype)


def models(recordings: Sequence[Recording]) -> dict[str, Model]:
    """The models of the study whose ceilings are shown, by name."""
    found = home(recordings)
    return {name: found.facts[name] for name in sorted(n for n in found.rows["model"].unique() if n)[:2]}


def finding(recordings: Sequence[Recording], found: pd.DataFrame) -> Markdown:
    """The study in one paragraph: how well two ceilings and a tensor table predict every time measured."""
    limit, dtype = limits(recordings)
    off = every_cell.off(found)
    worst = found.loc[off.idxmax()]
    shares = found[found["verdict"] == "valid"].groupby("kind")["share"].median()
    reached = " and ".join(f"{kind} {shares[kind]:.0%}" for kind in ONE if kind in shares)
    return Markdown(
        next(filter(None, (evidence.disturbed(recording.rows) for recording in recordings)), "")
        + f"**Two measured ceilings and the tensor table predict {len(found)} timed cells with a median miss of "
        f"{off.median():.2f} times the band's edge, {off.max():.2f} times at worst** ({escaped(str(worst['model']))}, "
        f"{_pass(worst)}). {chips(home(recordings))} turns from memory to compute at "
        f"{limit.matmul / limit.read:.1f} FLOPs per byte ({dtype}); of its roof, {reached} reach in the median. "
        f"Condition: {condition(merged(recordings))}"
    )


ONE = ("prefill, one prompt", "decode, one sequence")


def guess(recordings: Sequence[Recording], guessed: float) -> Markdown:
    """The reader's guess of the tokens a pass needs before it waits for compute, beside what arithmetic says."""
    limit, _ = limits(recordings)
    name, model = next(iter(models(recordings).items()))
    needed = intensity.turning(model, limit.matmul / limit.read)[0]
    return Markdown(
        f"Your guess was **{guessed:g}** tokens; from the measured ceilings and the tensor table of "
        f"{escaped(name)}: **{needed:g}**."
    )


def studies(recordings: Sequence[Recording], found: pd.DataFrame) -> Table:
    """Which studies the cells come from, and how many processes ended without a time."""
    entries = []
    for recording in recordings:
        own = found[found["study"] == recording.study]
        crashed = every_cell.crashed([(recording.study, recording.rows, recording.facts)])
        entry = {"study": recording.study, "machine": chips(recording), "rows": len(recording.rows)}
        entry |= {
            "timed cells": len(own),
            "models": ", ".join(sorted(set(own["model"]))),
            "types": ", ".join(sorted(set(own["dtype"]))),
        }
        entries.append(entry | {"builds": ", ".join(sorted(set(own["build"]))), "without a time": crashed})
    return Table(pd.DataFrame(entries).astype(str))


def ceilings(recordings: Sequence[Recording]) -> Table:
    """Both ceilings of this machine at each thread count, best and usual."""
    found = home(recordings)
    _, dtype = limits(recordings)
    rows = found.rows
    same = rows[(rows["workload"] != "matmul") | ((rows["dtype"] == dtype) & (rows["n_prompt"] == 0))]
    return evidence.ceilings(Recording(same, found.facts, found.study, found.scale, found.source))


def machines(recordings: Sequence[Recording], parts: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """This machine and other parts by balance point."""
    limit, dtype = limits(recordings)
    return intensity.machines(parts, limit, chips(home(recordings)), dtype)


def summary(found: pd.DataFrame) -> Table:
    """Predicted against measured over all cells, by study, kind and verdict; the last row is all of them."""
    everything = found.assign(study="all", kind="all", verdict="all")
    data = pd.concat([every_cell.summary(found, GROUPS), every_cell.summary(everything, GROUPS)], ignore_index=True)
    columns: Columns = {
        "study": ("study", ""),
        "kind": ("cells of", ""),
        "verdict": ("verdict", ""),
        "cells": ("cells", ""),
        "inside": ("inside the band", ".0%"),
        "median": ("median miss", ".2f"),
        "worst": ("worst miss", ".2f"),
        "miss_usual": ("median, usual ceilings", ".2f"),
        "miss_known": ("median, and known passes", ".2f"),
        "miss_kernel": ("median, kernel by columns", ".2f"),
        "share": ("share of the roof, median", ".0%"),
    }
    return table(data, columns)


def worst(found: pd.DataFrame) -> Table:
    """The cells furthest from their bands."""
    return _cells(found.assign(off=every_cell.off(found)).sort_values("off", ascending=False).head(WORST))


def all_cells(found: pd.DataFrame) -> Markdown:
    """Every cell in one folded table."""
    shown = _cells(found.sort_values(["study", "model", "kind", "n_prompt", "n_seq"]))
    return folded(f"All {len(found)} cells, predicted and measured", shown)


def _cells(data: pd.DataFrame) -> Table:
    band = [f"{significant(2)(r['low'] * 1e3)} to {significant(2)(r['high'] * 1e3)}" for r in data.to_dict("records")]
    columns: Columns = {
        "study": ("study", ""),
        "build": ("build", ""),
        "model": ("model", ""),
        "dtype": ("type", ""),
        "kind": ("cell of", ""),
        "n_prompt": ("prompt", ""),
        "depth": ("depth", ",.0f"),
        "n_seq": ("sequences", ""),
        "n_threads": ("threads", ""),
        "cache": ("flash / K / V", ""),
        "verdict": ("verdict", ""),
        "intensity": ("FLOPs/byte", significant(3)),
        "bound": ("nearer ceiling", ""),
        "band": ("predicted (ms)", ""),
        "measured": ("measured (ms)", significant(3, 1e3)),
        "miss": ("times the band's edge", ".2f"),
        "miss_usual": ("usual ceilings", ".2f"),
        "miss_known": ("known passes", ".2f"),
        "miss_kernel": ("kernel by columns", ".2f"),
        "share": ("of the roof", ".0%"),
    }
    return table(data.assign(band=band, cache=context_memory.kind_of(data)), columns)


def takeaway(recordings: Sequence[Recording], found: pd.DataFrame) -> Markdown:
    """One sentence a phase with its number and condition."""
    limit, _ = limits(recordings)
    lines = []
    for name, model in models(recordings).items():
        needed, batch = intensity.turning(model, limit.matmul / limit.read)
        gain = what_if.gains({name: model}, limit)
        best = {what: group.loc[group["sum"].idxmax(), "change"] for what, group in gain.groupby("pass", sort=False)}
        firsts = ", ".join(f"{what}: two {change}" for what, change in best.items())
        lines.append(
            f"- **{escaped(name)}** waits for compute here from a prompt of {count(needed)} tokens or a batch of "
            f"{count(batch)} on. What helps most: {firsts}."
        )
    off = every_cell.off(found)
    left = every_cell.summary(found.assign(all=True), ["all"]).iloc[0]
    steps = [f"ceilings as they usually are leave {left['miss_usual']:.2f}"]
    steps.append(f"with the passes that the engine is known to repeat {left['miss_known']:.2f}")
    if not math.isnan(left["miss_kernel"]):
        steps.append(f"with the matrix kernel's own rate at so many columns {left['miss_kernel']:.2f}")
    lines.append(f"- Of the median miss of {off.median():.2f}: {', '.join(steps)}.")
    return Markdown("\n".join(lines))


def _pass(row: Mapping[str, Any]) -> str:
    """A pass in words."""
    several = "s" if row["n_seq"] > 1 else ""
    if row["phase"] == "decode":
        return f"decode of {row['n_seq']} sequence{several} at depth {row['depth']:.0f}"
    at = f" at depth {row['depth']:.0f}" if row["depth"] else ""
    at += f", keys in {row['type_k']}" if row["type_k"] != "f16" else ""
    return f"prefill of {row['n_seq']} prompt{several} of {row['tokens']} tokens{at}"
