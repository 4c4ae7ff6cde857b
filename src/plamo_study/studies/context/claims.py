"""Study 05's claims, each an estimate against a threshold: holds, does not hold, or inconclusive."""

from typing import Any

import pandas as pd

from plamo_study.analysis.claims import above, below, family, within
from plamo_study.studies.context import analysis, memory

ALIKE = 0.10  # two times are called equal within this margin
LAW_MARGIN = 0.25  # a time summed from the depth curves agrees with a measured one within this margin
HALF = 0.5  # of its speed at the beginning: what a model is asked to keep at the deepest


def of_depth(rows: pd.DataFrame) -> pd.DataFrame:
    """What 05-context claims, a family."""
    entries: list[dict[str, Any]] = []
    for (model, phase), group in analysis.filling(rows).groupby(["model", "phase"], sort=False):
        last = group.iloc[-1]
        claim = f"{phase} at depth {last['depth']:,} takes as long in a filled memory as in a computed one"
        entries.append(within(claim, str(model), last["ratio"], 1 - ALIKE, 1 + ALIKE))
    for (model, phase), group in analysis.rates(rows).groupby(["model", "phase"], sort=False):
        last = group.iloc[-1]
        claim = f"{phase} at {last['depth']:,} tokens keeps half its speed"
        entries.append(above(claim, str(model), last["share"], HALF))
    for row in analysis.overtaking(rows).to_dict("records"):
        claim = f"{row['phase']} at {row['deepest']:,} tokens is faster than {row['other'].rstrip('*')}'s"
        entries.append(above(claim, row["hybrid"], row["last"], 1.0))
    for (model, phase), group in analysis.explained(rows).groupby(["model", "phase"], sort=False):
        last = group.iloc[-1]
        claim = f"{phase} at {last['depth']:,} tokens takes less time with the published window than without it"
        entries.append(below(claim, str(model), last["ratio"], 1.0))
    for row in analysis.beginnings(rows).to_dict("records"):
        claim = f"a decode step at depth {row['depth']} ({row['kind']}) takes as long as {row['other'].rstrip('*')}'s"
        entries.append(within(claim, row["hybrid"], row["ratio"], 1 / (1 + ALIKE), 1 + ALIKE))
    return family(entries)


def of_caches(rows: pd.DataFrame, drifted: pd.DataFrame, looped: pd.DataFrame, depths: pd.DataFrame) -> pd.DataFrame:
    """What 05-memory, 05-drift and 05-naive claim, a family."""
    return family([*_of_memory(rows, drifted), *_of_loop(looped, depths)])


def _of_memory(rows: pd.DataFrame, drifted: pd.DataFrame) -> list[dict[str, Any]]:
    entries = []
    for row in memory.kinds(rows).to_dict("records"):
        where = f" with {row['kind'].split('/')[1]} at {row['depth']:,} tokens" + (", every token kept" * row["whole"])
        for phase in analysis.PHASES if row["kind"].startswith("on") else ():
            claim = f"flash attention{where} makes {phase} faster than F16 without it"
            entries.append(above(claim, row["model"], row[f"{phase}_gain"], 1.0))
    for row in memory.drift(drifted).to_dict("records"):
        claim = f"{row['kind']} changes predictions little (thousandths of a nat per token)"
        checked = below(claim, row["model"], row["kld"].scaled(1e3), memory.LITTLE * 1e3)
        entries.append(checked | {"p": row["p_little"]})
    return entries


def _of_loop(rows: pd.DataFrame, depth_rows: pd.DataFrame) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    for row in memory.loop_totals(rows).to_dict("records"):
        law = memory.loop_prediction(rows, depth_rows, row["n_prompt"], row["n_gen"])
        expected = law[law["model"] == row["model"]]
        if len(expected):
            off = row["naive"].scaled(1 / expected["naive"].iloc[0].value)
            claim = "the loop without a cache takes as long as the depth curves of the same machine add up to"
            entries.append(within(claim, row["model"], off, 1 - LAW_MARGIN, 1 + LAW_MARGIN))
    return entries
