"""Recorded runs of llama-server and our loop with the same drafts: tokens generated, drafted and accepted."""

from pathlib import Path
from typing import Any

import msgspec
import pandas as pd

from llama_meter.measure import result_file
from plamo_study.stats import estimates

NAME = "08-beside.json"
OURS, SERVER = "our loop", "llama-server"
PLAIN, NGRAMS = "nobody", "n-grams of the text"
MADE_BY = "plamo-study server build, then python tools/servers.py drafts"


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One process: tokens generated and their seconds, and tokens drafted and accepted, over all prompts.

    The server's count excludes the first token of each answer, at which its timing begins. `plain`: seconds per token
    of plain decode in the same process, 0 if it was not timed.
    """

    who: str
    model: str
    drafter: str
    round: int
    tokens: int
    seconds: float
    drafted: int
    accepted: int
    plain: float = 0.0


class Beside(msgspec.Struct, frozen=True, kw_only=True):
    """Runs of both on one machine, with draft length and number of threads."""

    machine: dict[str, Any]
    n_draft: int
    n_threads: int
    runs: list[Run]


def write(found: Beside, place: str) -> Path:
    """Keep the runs; a new comparison replaces the one before it."""
    return result_file.keep(found, place, NAME)


def recorded(place: str) -> Beside | None:
    """The runs of a place; None where nothing was compared there."""
    return result_file.load(place, NAME, Beside, MADE_BY)


def served(found: Beside) -> pd.DataFrame:
    """llama-server beside our loop: `model`, `drafter`, `ratio` (their tokens a second over ours, paired by round).

    With the prefix `ours_` or `theirs_`: `drafted` and `accepted` tokens, and `speed` over plain decode (None for plain
    decode itself), ours in the same process and theirs in another one.
    """
    runs = pd.DataFrame([msgspec.to_builtins(run) for run in found.runs])
    runs["rate"] = runs["tokens"] / runs["seconds"]
    entries = []
    for (model, drafter), group in runs.groupby(["model", "drafter"], sort=False):
        entry: dict[str, Any] = {"model": model, "drafter": drafter}
        rates = {}
        for name, who in (("ours", OURS), ("theirs", SERVER)):
            own = group[group["who"] == who].set_index("round")
            plain = runs[(runs["model"] == model) & (runs["drafter"] == PLAIN) & (runs["who"] == who)]
            rates[name] = own["rate"]
            steps = 1 / own["plain"] if own["plain"].all() else plain.set_index("round")["rate"]
            entry |= {
                f"{name}_drafted": int(own["drafted"].median()),
                f"{name}_accepted": int(own["accepted"].median()),
            }
            entry[f"{name}_speed"] = estimates.paired_ratio(own["rate"], steps) if drafter != PLAIN else None
        entries.append(entry | {"ratio": estimates.paired_ratio(rates["theirs"], rates["ours"])})
    return pd.DataFrame(entries)
