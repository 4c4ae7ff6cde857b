"""What load does to answers, and servers minute by minute.

Frames in, estimates out. Soaks, crowds and probed servers stand in tables beside the journals (commit 53f8ee5 measured
them), with what a page shows.
"""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from llama_meter import paths, stats
from plamo_study.read.recording import REFERENCE
from plamo_study.stats import estimates
from plamo_study.stats.estimates import names_of

COUNTS = ["prompts", "prompts_changed", "share", "answers", "changed", "near_ties", "servers", "died"]
ENDED = "the server ended: "  # in the failure of a request whose server crashed
VERDICTS = ("right", "wrong", "cannot tell")  # of a probe
HELD_AT = 2  # minutes before a server is suspended
SOAKED = ["machine", "model", "rate", "held_s", "n_minutes"]  # the load of a soak


def under_load(answers: pd.DataFrame) -> pd.DataFrame:
    """What became of the answers of several users at once, by file, build and server, as `counted` counts them.

    Every page, README and the reports quote this one count. `answers`: a frame of `measurements.answers`.
    """
    return counted(answers[answers["n_clients"] > 1], "model file build server")


def counted(answers: pd.DataFrame, by: str | Sequence[str]) -> pd.DataFrame:
    """Answers by what became of them, one line a group of `by`; the unit is the prompt.

    `prompts`: distinct ones that got an answer, and `prompts_changed`: those of them whose answer changed at least
    once; `share`: the latter's share with its exact interval. `answers`: requests of which a token came, `changed` and
    `near_ties` of them; an answer that broke off is compared as far as it goes. `servers`, and how many `died`.
    """
    names, entries = names_of(by), []
    for key, group in answers.groupby(names, sort=True):
        came = group[group["begun"]]
        entry = dict(zip(names, key, strict=True)) | {"prompts": len(came.groupby(["n_prompt", "prompt"]))}
        entry["prompts_changed"] = len(came[came["answer"] == "changed"].groupby(["n_prompt", "prompt"]))
        entry |= {"share": estimates.rate(entry["prompts_changed"], entry["prompts"]), "answers": len(came)}
        entry |= {"changed": int((came["answer"] == "changed").sum())}
        entry |= {"near_ties": int((came["answer"] == "near-tie").sum()), "servers": group["key"].nunique()}
        entries.append(entry | {"died": group["key"][group["failure"].str.contains(ENDED, regex=False)].nunique()})
    return pd.DataFrame(entries, columns=[*names, *COUNTS])


# ------------------------------------------------------------------ recorded beside the journals


def stored(name: str, place: str, scale: str = "mini") -> pd.DataFrame:
    """A table of the reference; without a line at another place or scale, where nothing of it was recorded."""
    table = pd.read_csv(paths.MEASURED / REFERENCE / name)
    return table[(table["scale"] == scale) & (place == REFERENCE)].drop(columns="scale")


def crowds(place: str, scale: str) -> pd.DataFrame:
    """One row per number of concurrent requests, `waits` of which have no slot: seconds per further token by each
    server's own count (`released`, `patched`), and released over patched (`ratio`), over paired rounds."""
    entries = []
    for key, rounds in stored("09-crowd.csv", place, scale).groupby(["machine", "waits"], sort=False):
        slow, fast = rounds["released"].tolist(), rounds["patched"].tolist()
        entries.append([*key, stats.median(slow), stats.median(fast), stats.ratio(slow, fast)])
    return pd.DataFrame(entries, columns=["machine", "waits", "released", "patched", "ratio"])


def confusion(place: str) -> pd.DataFrame:
    """Probed servers by what is known of them and the verdict, with the share of `errors` (exact interval).

    An error at a right server is a false alarm, at a wrong one a miss. "Cannot tell" is counted, and neither.
    """
    lines: list[dict[str, Any]] = []
    for known, servers in stored("09-probed.csv", place).groupby("known"):
        counts = {verdict: int((servers["verdict"] == verdict).sum()) for verdict in VERDICTS}
        errors = counts["wrong" if known == "right" else "right"]
        lines.append({"known": known, **counts, "errors": estimates.rate(errors, len(servers))})
    return pd.DataFrame(lines, columns=["known", *VERDICTS, "errors"])


def alike(held: pd.DataFrame) -> pd.DataFrame:
    """The minutes of the runs that shared the load and machine of most runs: those compare."""
    runs = held.drop_duplicates(["server", "run"])
    return held[held[SOAKED].apply(tuple, axis=1) == runs.groupby(SOAKED).size().idxmax()] if len(runs) else held
