"""Notebook 02's sentences and tables: the words around numbers that come from rows, never the other way round."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pandas as pd
from IPython.display import Markdown

from plamo_study.analysis import ceilings as limits_of, peaks
from plamo_study.analysis.ceilings import PLAIN, Kernel, Place
from plamo_study.analysis.roofline import Ceilings, Model
from plamo_study.errors import StudyError
from plamo_study.measure.recording import Recording
from plamo_study.present import evidence
from plamo_study.present.evidence import chips, condition, escaped
from plamo_study.present.processors import processor
from plamo_study.present.tables import Columns, Table, folded, significant, table
from plamo_study.studies.roofline import balance, every_cell, intensity
from plamo_study.studies.roofline.balance import count

TRACE = "02-trace"
WORST = 10


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


def measured(recordings: Sequence[Recording]) -> tuple[list[pd.DataFrame], Place]:
    """The ceilings of the study this notebook is at home in, then those of all studies; and that study's set-up."""
    rows = home(recordings).rows
    return [limits_of.measured([rows]), limits_of.measured([r.rows for r in recordings])], limits_of.main_place(rows)


def limits(recordings: Sequence[Recording]) -> tuple[Ceilings, str]:
    """This machine's ceilings, best samples, with the kernel of the models' type, and that type."""
    rows = home(recordings).rows
    dtype = str(rows[(rows["workload"] != "matmul") & (rows["model"] != "")]["dtype"].mode().iloc[0])
    return limits_of.limits(*measured(recordings), dtype)[0], dtype


def fastest(recordings: Sequence[Recording]) -> tuple[Ceilings, Kernel]:
    """The same with the fastest matrix kernel that any study measured on this machine, and its name."""
    kernel, rate = limits_of.fastest(*measured(recordings))
    return Ceilings(limits(recordings)[0].read, rate.best), kernel


def models(recordings: Sequence[Recording]) -> dict[str, Model]:
    """The models of the study whose ceilings are shown, by name."""
    found = home(recordings)
    return {name: found.facts[name] for name in sorted(n for n in found.rows["model"].unique() if n)[:2]}


def by_type(recordings: Sequence[Recording]) -> Table:
    """Intensity of three passes by weight type, and where each model turns here with that type's own kernels."""
    names, (tables, place), here = [n.rstrip("*") for n in models(recordings)], measured(recordings), {}
    for dtype in balance.TYPES:
        with suppress(StudyError):  # a kernel that nobody measured here has no turning point
            here[dtype] = limits_of.limits(tables, place, dtype)[0]
    return balance.by_type(names, recordings[0].scale, here)


def kernels(recordings: Sequence[Recording], cores: Sequence[Mapping[str, Any]]) -> Table:
    """Every matrix kernel measured on this machine beside the fastest one and the peak of the part's instructions."""
    found, (tables, place) = home(recordings), measured(recordings)
    known = limits_of.every_kernel(tables, place)
    engine = found.facts[found.rows["engine"].iloc[0]]
    clock = peaks.clock(found.rows)
    tops = {
        k.dtype: peaks.peak(cores, found.facts[place.machine], engine, place.n_threads, k.dtype, clock) for k in known
    }
    data = peaks.table(known, tops)
    columns: Columns = {
        "name": ("kernel, many columns", ""),
        "best": ("best (GFLOP/s)", significant(3, 1e-9)),
        "usual": ("median (GFLOP/s)", significant(3, 1e-9)),
        "balance": ("turns at (FLOPs/byte)", significant(3)),
        "of_fastest": ("of the fastest", ".0%"),
        "peak": ("of the part's peak", ""),
        "at_least": ("of its peak at the highest clock sold", ".0%"),
    }
    shown = [f"{row['of_peak']:.0%}" if row["of_peak"] else f"n/a: {row['why']}" for row in data.to_dict("records")]
    return table(data.assign(peak=shown, balance=data["best"] / limits(recordings)[0].read), columns)


def finding(recordings: Sequence[Recording], found: pd.DataFrame) -> Markdown:
    """The study in one paragraph: how far arithmetic's floor lies below the times measured, and whose roof it is."""
    (limit, dtype), (quick, kernel) = limits(recordings), fastest(recordings)
    counted, off, own = every_cell.counts(found), every_cell.off(found), Kernel(dtype, PLAIN)
    worst, chip = found.loc[off.idxmax()], chips(home(recordings))
    faster = f"the fastest kernel measured there, {kernel.name}, needs {quick.matmul / quick.read:.1f}"
    faster = faster if kernel != own else "no faster kernel was measured there"
    used = [recording for recording in recordings if recording.study in set(found["study"])]
    return Markdown(
        next(filter(None, (evidence.disturbed(recording.rows) for recording in recordings)), "")
        + f"**Arithmetic gives a floor, not a forecast. Of {len(found)} passes, {counted['inside']} took as long as "
        f"arithmetic predicts, {counted['above']} took longer, and {counted['below']} were faster.** The median pass "
        f"misses the prediction by a factor of {off.median():.2f}. {counted['near']} passes miss it by no more than a "
        f"factor of {every_cell.NEAR:g}, the worst by {off.max():.2f} ({escaped(str(worst['model']))}, "
        f"{_pass(worst)}).\n\n- {_refined(found)}\n"
        f"- On {chip}, {own.name} needs {limit.matmul / limit.read:.1f} FLOPs per byte before it waits for compute; "
        f"{faster}.\n{_circular(found, home(recordings), dtype)}{_lacking(recordings)}\n"
        f"Condition: {condition(merged(used))}"
    )


def _lacking(recordings: Sequence[Recording]) -> str:
    """How many passes could not be predicted; nothing where all could."""
    n = every_cell.unpredicted([(r.study, r.rows, r.facts) for r in recordings])
    return f"- {n} more passes are left out: nobody measured the ceilings of their machine.\n" if n else ""


def _refined(found: pd.DataFrame) -> str:
    """What each refinement does to the median miss."""
    first, *rest = every_cell.steps(found).to_dict("records")
    said = [f"{row['median']:.2f} ({row['effect']}) with {row['what']}" for row in rest]
    return f"Knowing more moves the median miss from {first['median']:.2f} to {', then to '.join(said)}."


def _circular(found: pd.DataFrame, at: Recording, dtype: str) -> str:
    """What both phases reach of the roof of their own kernel and of the fastest one's, and what that means."""
    named = [processor(at.facts[machine]) for machine in at.rows["machine"].unique()]
    own = found[found["chip"].isin(named) & (found["dtype"] == dtype)]
    own = own.groupby("kind")[["share", "share_fastest"]].median()
    if not set(ONE) <= set(own.index):
        return ""
    (prompt, fast), (step, _) = own.loc[ONE[0]], own.loc[ONE[1]]
    of_fastest = f"and {fast:.0%} of the fastest kernel's rate" if fast < prompt else "the fastest one measured there"
    return (
        f"- There the median prompt in {dtype} reaches {prompt:.0%} of its own kernel's rate, {of_fastest}. The first "
        f"share is close to circular: prefill spends its time in that kernel. The median decode step of one sequence "
        f"reaches {step:.0%} of what the read bandwidth allows.\n"
    )


ONE = ("prefill, one prompt", "decode, one sequence")


def guess(recordings: Sequence[Recording], guessed: float) -> Markdown:
    """The reader's guess of the tokens a pass needs before it waits for compute, beside what arithmetic says."""
    limit, dtype = limits(recordings)
    name, model = next(iter(models(recordings).items()))
    needed = intensity.turning(model, limit.matmul / limit.read)[0]
    return Markdown(
        f"Your guess was **{guessed:g}** tokens. From the tensor table of {escaped(name)}, the read ceiling and "
        f"{Kernel(dtype, PLAIN).name}: **{needed:g}**."
    )


def studies(recordings: Sequence[Recording], found: pd.DataFrame) -> Table:
    """Which studies the cells come from, and which processes enter no number."""
    entries = []
    for recording in recordings:
        own = found[found["study"] == recording.study]
        entry = {"study": recording.study, "machine": chips(recording), "rows": len(recording.rows)}
        entry |= {"passes": len(own), "types": len(set(own["dtype"])), "builds": ", ".join(sorted(set(own["build"])))}
        left = every_cell.left_out([(recording.study, recording.rows, recording.facts)])
        entry |= {"computed wrong (processes)": left["wrong"], "crashed": left["crashed"]}
        entries.append(entry)
    return Table(pd.DataFrame(entries).astype(str))


def ceilings(recordings: Sequence[Recording]) -> Table:
    """Both ceilings of this machine at each thread count, best and usual."""
    return evidence.ceilings(home(recordings))


def machines(recordings: Sequence[Recording], parts: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """This machine, with the models' kernel and with its fastest, and other parts by balance point."""
    (limit, dtype), (quick, kernel) = limits(recordings), fastest(recordings)
    here = {f"{dtype} kernel": limit} | ({f"{kernel.dtype} kernel": quick} if kernel.dtype != dtype else {})
    return intensity.machines(parts, here, chips(home(recordings)))


def two_passes(recordings: Sequence[Recording], found: pd.DataFrame) -> pd.DataFrame:
    """One prompt and one decode step of the first model in this notebook's home study: its longest and shallowest."""
    own = found[
        (found["study"] == home(recordings).study) & (found["n_seq"] == 1) & (found["dtype"] == limits(recordings)[1])
    ]
    own = own[(own["model"] == own["model"].min()) & (own["n_threads"] == own["n_threads"].max())]
    chosen = own.sort_values(["tokens", "depth"], ascending=[False, True]).groupby("phase", sort=False).head(1)
    words = {"prefill": "a prompt of {} tokens", "decode": "a decode step"}
    return chosen.assign(what=[words[row["phase"]].format(row["tokens"]) for row in chosen.to_dict("records")])


def steps(found: pd.DataFrame) -> Table:
    """How many passes lie in the predicted band and near it, refinement by refinement, over the same passes."""
    data = every_cell.steps(found)
    ends = [f"{row['above']} / {row['below']}" for row in data.to_dict("records")]
    moved = [f"{row['nearer']} / {row['further']}" if row["effect"] else "" for row in data.to_dict("records")]
    columns: Columns = {
        "what": ("predicted from", ""),
        "inside": (f"of {len(found)} inside the band", ""),
        "near": (f"within {every_cell.NEAR:g} times", ""),
        "ends": ("slower / faster", ""),
        "median": ("median miss", ".2f"),
        "worst": ("worst miss", ".2f"),
        "moved": ("passes brought nearer / moved away", ""),
        "effect": ("median miss is", ""),
    }
    return table(data.assign(ends=ends, moved=moved), columns)


def summary(found: pd.DataFrame, by: Sequence[str] = ("kind",)) -> Table:
    """Predicted against measured by kind of pass; the last row is all of them."""
    everything = found.assign(**dict.fromkeys(by, "all"))
    data = pd.concat([every_cell.summary(found, list(by)), every_cell.summary(everything, list(by))], ignore_index=True)
    columns: Columns = {
        **{name: (name, "") for name in by},
        "cells": ("passes", ""),
        "inside": ("inside the band", ""),
        "near": (f"within {every_cell.NEAR:g} times", ""),
        "median": ("median miss", ".2f"),
        "worst": ("worst miss", ".2f"),
        "share": ("of its own kernel's roof", ".0%"),
        "share_fastest": ("of the fastest kernel's roof", ".0%"),
    }
    return table(data, columns)


def worst(found: pd.DataFrame) -> Table:
    """The passes furthest from their bands."""
    return _cells(found.assign(off=every_cell.off(found)).sort_values("off", ascending=False).head(WORST))


def all_cells(found: pd.DataFrame) -> Markdown:
    """The summary by study and every pass, folded."""
    shown = _cells(found.sort_values(["study", "model", "kind", "n_prompt", "n_seq"]))
    return folded(
        f"All {len(found)} passes, and the table above study by study", summary(found, ["study", "kind"]), shown
    )


def _cells(data: pd.DataFrame) -> Table:
    rows = data.to_dict("records")
    columns: Columns = {
        "where": ("study, build", ""),
        "file": ("model, type", ""),
        "pass": ("pass", ""),
        "band": ("predicted (ms)", ""),
        "measured": ("measured (ms)", significant(3, 1e3)),
        "miss": ("miss", ".2f"),
        "miss_kernel": ("miss with all that is known", ".2f"),
        "share": ("of its kernel's roof", ".0%"),
    }
    said = {
        "where": [f"{r['study']}, {r['build']}, {r['n_threads']} threads" for r in rows],
        "file": [f"{r['model']}, {r['dtype']}" for r in rows],
        "pass": [_pass(r) for r in rows],
        "band": [f"{significant(2)(r['low'] * 1e3)} to {significant(2)(r['high'] * 1e3)}, {r['bound']}" for r in rows],
    }
    return table(data.assign(**said), columns)


def takeaway(recordings: Sequence[Recording], found: pd.DataFrame) -> Markdown:
    """What to keep, each with its number: the turning point, kernel by kernel, and the floor."""
    (limit, dtype), (quick, kernel) = limits(recordings), fastest(recordings)
    lines = []
    for name, model in models(recordings).items():
        turns = [intensity.turning(model, at.matmul / at.read) for at in (limit, quick)]
        lines.append(
            f"- **{escaped(name)}** on {chips(home(recordings))}: by arithmetic a pass waits for compute from a prompt "
            f"of {count(turns[0][0])} tokens or a batch of {count(turns[0][1])} sequences on, with "
            f"{Kernel(dtype, PLAIN).name}. A kernel as fast as {kernel.name} would need {count(turns[1][0])} tokens or "
            f"{count(turns[1][1])} sequences."
        )
    last = every_cell.steps(found).to_dict("records")
    known = min(last, key=lambda row: row["median"])
    lines.append(
        f"- The prediction is the least time that a pass can take, not the time it takes. It is best with "
        f"{known['what']}: {known['inside']} of {len(found)} passes lie inside the band and {known['near']} within "
        f"{every_cell.NEAR:g} times its edge. The other {len(found) - known['near']} are further off, and nothing here "
        "explains them."
    )
    return Markdown("\n".join(lines))


def _pass(row: Mapping[str, Any]) -> str:
    """A pass in words."""
    several = "s" if row["n_seq"] > 1 else ""
    if row["phase"] == "decode":
        return f"decode of {row['n_seq']} sequence{several} at depth {row['depth']:.0f}"
    at = f" at depth {row['depth']:.0f}" if row["depth"] else ""
    at += f", keys in {row['type_k']}" if row["type_k"] != "f16" else ""
    return f"prefill of {row['n_seq']} prompt{several} of {row['tokens']} tokens{at}"
