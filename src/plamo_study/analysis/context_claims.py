"""Study 05's claims, each an estimate against a threshold: holds, does not hold, or inconclusive."""

from typing import Any

import pandas as pd

from plamo_study.analysis import context
from plamo_study.analysis import context_memory as memory
from plamo_study.analysis.claims import above, below, within

ALIKE = 0.10  # two times are called equal within this margin
LAW_MARGIN = 0.25  # a time summed from the depth curves agrees with a measured one within this margin
SMALL_DRIFT = 10  # thousandths of a nat per token: a change of predictions that is called small


def of_depth(rows: pd.DataFrame, models: dict[str, dict[str, Any]]) -> pd.DataFrame:
    """What 05-context claims."""
    entries = []
    for (model, phase), group in context.filling(rows).groupby(["model", "phase"], sort=False):
        last = group.iloc[-1]
        claim = f"{phase} at depth {last['depth']:,} costs in a filled memory what it costs in a computed one"
        entries.append(within(claim, str(model), last["ratio"], 1 - ALIKE, 1 + ALIKE))
    for (model, phase), group in context.rates(rows).groupby(["model", "phase"], sort=False):
        last = group.iloc[-1]
        claim = f"{phase} is slower at {last['depth']:,} tokens than at the beginning (share of the rate)"
        entries.append(below(claim, str(model), last["share"], 1.0))
    for row in context.overtaking(rows, context.knots(models)).to_dict("records"):
        claim = f"{row['phase']} at {row['deepest']:,} tokens is faster than {row['other'].rstrip('*')}'s"
        entries.append(above(claim, row["hybrid"], row["last"], 1.0))
    return pd.DataFrame(entries)


def of_memory(rows: pd.DataFrame, drifted: pd.DataFrame) -> pd.DataFrame:
    """What 05-memory and 05-drift claim."""
    entries = []
    for row in memory.kinds(rows).to_dict("records"):
        where = f" with {row['kind'].split('/')[1]} at {row['depth']:,} tokens" + (", every token kept" * row["whole"])
        for phase in context.PHASES if row["kind"].startswith("on") else ():
            claim = f"flash attention{where} makes {phase} faster than F16 without it"
            entries.append(above(claim, row["model"], row[f"{phase}_gain"], 1.0))
    for row in memory.drift(drifted).to_dict("records"):
        claim = f"{row['kind']} changes predictions little (thousandths of a nat per token)"
        entries.append(below(claim, row["model"], row["kld"].scaled(1e3), SMALL_DRIFT))
    return pd.DataFrame(entries)


def of_loop(rows: pd.DataFrame, depth_rows: pd.DataFrame) -> pd.DataFrame:
    """What 05-naive claims."""
    entries: list[dict[str, Any]] = []
    for row in memory.loop_totals(rows).to_dict("records"):
        ratio = row["naive_tokens"] / row["cached_tokens"]
        claim = f"without the cache {row['n_gen']} tokens after {row['n_prompt']} take over twice as long"
        entries.append(above(f"{claim} ({ratio:.0f} times the tokens)", row["model"], row["times"], 2.0))
        law = memory.loop_prediction(rows, depth_rows, row["n_prompt"], row["n_gen"])
        expected = law[law["model"] == row["model"]]
        if len(expected):
            off = row["naive"].scaled(1 / expected["naive"].iloc[0].value)
            claim = "the loop without a cache takes what the depth curves sum to"
            entries.append(within(claim, row["model"], off, 1 - LAW_MARGIN, 1 + LAW_MARGIN))
    return pd.DataFrame(entries)
