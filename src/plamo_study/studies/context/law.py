"""What context costs: the samples of its rows with the depth each was taken at.

Times are seconds per token. Estimates are over processes, comparisons are paired by block.
"""

from collections.abc import Iterator
from typing import Any

import pandas as pd

from llama_meter.cells import LADDER
from plamo_study.read.frame import WITH_WINDOW, usable
from plamo_study.stats.estimates import NS, compare, events

PHASES = ("prefill", "decode")
OF_CELL = ("model", "ladder", "flash_attn", "type_k", "type_v", "use_mmap", "n_ubatch", "block", "machine")


def samples(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per usable process, phase and depth, which `estimate` and `compare` take.

    The cell's fields, block and machine; `phase`, "prefill" or "decode"; `depth`; `value`, seconds per token (median
    over repetitions). `ladder`: "" for one of depths whose memory is filled, "walk" where every token was computed,
    "few" for the first and the last depth.
    """
    usable_rows = usable(rows)
    usable_rows = usable_rows[(usable_rows["workload"] == "depth") & (usable_rows["text"] == "")]
    return events(usable_rows, OF_CELL, _by_depth, "phase", "depth", "value")


def _by_depth(row: Any) -> Iterator[dict[str, Any]]:
    """Phase, depth and seconds per token of one process."""
    parts, steps = row.samples_ns
    first = [depth - n % row.n_gen - 1 for n, depth in enumerate(row.series["step_depth"])]  # one step warms up
    for phase, depths, taken, size in (
        ("prefill", row.series["part_depth"], parts, row.n_ubatch),
        ("decode", first, steps, 1),
    ):
        grouped = pd.Series(taken, dtype=float).groupby(pd.Series(depths, dtype=int).to_numpy()).median()
        for depth, ns in grouped.items():
            yield {"phase": phase, "depth": int(depth), "value": ns / NS / size}


def curves(timed: pd.DataFrame, phase: str) -> dict[str, pd.DataFrame]:
    """Seconds per token of the ladders by model: a row per depth, a column per block; windowed models last."""
    ladders = timed[(timed["phase"] == phase) & (timed["ladder"] == LADDER)]
    groups = dict(iter(ladders.groupby("model")))
    names = sorted(groups, key=lambda name: (name.replace(WITH_WINDOW, ""), WITH_WINDOW in name))
    return {name: groups[name].pivot_table(index="depth", columns="block", values="value") for name in names}


def part(timed: pd.DataFrame) -> int:
    """Tokens of the parts of a prompt that the ladders time; 0 where there are none."""
    ladders = timed[timed["ladder"] == LADDER]
    return int(ladders["n_ubatch"].iloc[0]) if len(ladders) else 0


def explained(timed: pd.DataFrame) -> pd.DataFrame:
    """The hybrid with its published window over the same without, per model, phase and depth, as `compare` gives it.

    `estimate`: ratio of times, paired by block; `first` and `second`: seconds per token with the window and without.
    """
    ladders = timed[timed["ladder"] == LADDER]
    plain = ladders["model"].str.replace(WITH_WINDOW, "", regex=False)
    ladders = ladders.assign(model=plain, window=ladders["model"].str.contains(WITH_WINDOW).astype(bool))
    return compare(ladders, of="window", to="not window", by="model phase depth")
