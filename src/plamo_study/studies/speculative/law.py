"""Cost of a round of speculation by its number of accepted tokens, and the resulting speeds.

A round generates the accepted tokens and one more. With k drafted, each right with probability a given that those
before it are, n are accepted with probability a^n (1 - a), all k with a^k. So a process that measured rounds with every
n gives the speed at any a.
"""

from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
from scipy import optimize

from llama_meter import stats
from llama_meter.cells import TERMS
from plamo_study.read.frame import usable
from plamo_study.stats.estimates import NS, events

CELL = ["model", "dtype", "file", "depth", "n_seq", "n_draft", "how", "drafter", "accepts", "text", "draft"]
CELL += ["draft_dtype", "temperature"]
PROCESS = ["build", "block", "machine", "verdict", "key"]
SPEED = ["build", "model", "file", "depth", "n_seq", "n_draft", "how"]
RATES = np.linspace(0, 1, 101)
NATIVE, PART = "tokens removed", "part put back"
WORDS = {"full": "all put back", "part": PART, "joined": "part put back, replay joined"}
METRICS = ["rate", "plain", "accepted", "drafting"]


def processes(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per process, in seconds: CELL, PROCESS; `tokens` generated in `seconds`; `rate`, tokens per second of all
    sequences; `taken`, accepted over drafted; `rounds`, each round; `series` and `checks` as recorded. `how`: the way
    that the engine really used. `plain`: seconds per step of plain decode of all sequences, on the same loaded
    weights."""
    drafting_rows = rows[(rows["workload"] == "speculate") & (rows["status"] == "ok")]
    drafting_rows = drafting_rows[drafting_rows["n_draft"] > 0]
    entries = []
    for row in drafting_rows.itertuples():
        rounds = [ns / NS for prompt in row.samples_ns for ns in prompt]
        tokens, drafted, plain = float(row.checks["tokens"]), sum(row.series["drafted"]), row.series["plain ns"]
        entry = {name: getattr(row, name) for name in (*CELL, *PROCESS) if name not in ("file", "how")}
        entry |= {
            "file": f"{row.model} {row.dtype}",
            "how": _how(row),
            "tokens": tokens,
            "seconds": sum(rounds),
            "rate": tokens / sum(rounds),
        }
        entry |= {"taken": sum(row.series["accepted"]) / drafted if drafted else np.nan, "rounds": rounds}
        entry |= {"plain": median(plain) / NS, "plain_rate": row.n_seq * len(plain) * NS / sum(plain)}
        entries.append(entry | {"series": row.series, "checks": row.checks})
    columns = [*CELL, *PROCESS, "tokens", "seconds", "rate", "taken", "plain", "plain_rate"]
    return pd.DataFrame(entries, columns=[*columns, "rounds", "series", "checks"])


def measures(rows: pd.DataFrame) -> pd.DataFrame:
    """Processes in the form for `estimate` and `compare`, one row per metric: CELL, PROCESS, `usable`, `metric` and
    `value`.

    Metrics: "rate" and "plain", tokens per second of all sequences with drafts and without, in the same process;
    "accepted", share of drafted tokens; "drafting", share of time spent on drafting. Shares are missing where nothing
    was drafted.
    """
    runs = processes(rows)
    runs = runs[[*CELL, *PROCESS]].assign(
        usable=runs["key"].isin(set(usable(rows)["key"])),
        rate=runs["rate"],
        plain=runs["plain_rate"],
        accepted=runs["taken"],
        drafting=[sum(run.series["draft"]) / NS / run.seconds for run in runs.itertuples()],
    )
    return runs.melt([*CELL, *PROCESS, "usable"], METRICS, var_name="metric")


def _how(row: Any) -> str:
    if row.back == "tail":
        return NATIVE if row.checks["removes"] else PART
    return WORDS[row.back]


def probabilities(a: np.ndarray, k: int) -> np.ndarray:
    """Probabilities that 0 to k tokens of a draft are accepted, (k + 1, len(a))."""
    n = np.arange(k + 1)[:, None]
    return np.where(n < k, a**n * (1 - a), a**k)


def tokens(a: np.ndarray, k: int) -> np.ndarray:
    """Mean tokens of a round, (len(a),): the accepted ones and one more."""
    return np.asarray(((np.arange(k + 1) + 1)[:, None] * probabilities(a, k)).sum(axis=0))


def round_seconds(process: Any, a: np.ndarray) -> np.ndarray:
    """Mean seconds of a round at acceptances `a`, (len(a),), from a process with every number of right tokens.

    One sequence: the median round by number of accepted tokens. Several sequences, whose numbers differ in every round:
    the median round if tokens are removed at no cost; else non-negative least squares on the number of sequences taken
    back and on the tokens that these evaluated again.
    """
    k, n_seq = int(process.n_draft), int(process.n_seq)
    accepted = np.array(process.series["accepted"]).reshape(-1, n_seq)
    seconds = np.array(process.rounds)
    likely = probabilities(a, k)
    if n_seq == 1:
        by_number = [np.median(seconds[accepted[:, 0] == n]) for n in range(k + 1)]
        return np.asarray(np.array(by_number) @ likely)
    if process.how == NATIVE:
        return np.full(len(a), np.median(seconds))
    back = accepted < k
    facts = np.column_stack([np.ones(len(seconds)), back.sum(axis=1), ((accepted + 1) * back).sum(axis=1)])
    base, per_setback, again = optimize.nnls(facts, seconds)[0]
    n = np.arange(k)[:, None]
    return np.asarray(base + n_seq * ((per_setback + again * (n + 1)) * likely[:k]).sum(axis=0))


def speed_ups(rows: pd.DataFrame) -> pd.DataFrame:
    """Speed over plain decode of the same process at RATES, by block: SPEED, `blocks` and `ratios`, (len(RATES),
    blocks)."""
    right = processes(usable(rows))
    right = right[(right["text"] == "") & (right["drafter"] == "even")]
    entries = []
    for key, group in right.groupby(SPEED, sort=False):
        entry: dict[str, Any] = dict(zip(SPEED, key, strict=True))
        last = group.drop_duplicates("block", keep="last")
        n_tokens = tokens(RATES, entry["n_draft"])
        columns = [n_tokens * process.plain / round_seconds(process, RATES) for process in last.itertuples()]
        if len(columns) > 1:
            entry |= {"machine": last["machine"].iloc[0], "blocks": last["block"].tolist()}
            entries.append(entry | {"ratios": np.array(columns).T})
    return pd.DataFrame(entries, columns=[*SPEED, "machine", "blocks", "ratios"])


def by_block(ups: pd.DataFrame, rates: tuple[float, ...]) -> pd.DataFrame:
    """`speed_ups` at each acceptance: SPEED, `accepts`, `block`, `machine` and `value`, relative to plain decode."""
    entries = []
    for row in ups.to_dict("records"):
        for rate in rates:
            cell = {name: row[name] for name in SPEED} | {"accepts": rate, "machine": row["machine"]}
            speeds = zip(row["blocks"], row["ratios"][np.abs(RATES - rate).argmin()], strict=True)
            entries += [cell | {"block": block, "value": float(value)} for block, value in speeds]
    return pd.DataFrame(entries, columns=[*SPEED, "accepts", "machine", "block", "value"])


def curves(ups: pd.DataFrame, rates: tuple[float, ...]) -> pd.DataFrame:
    """`by_block` over blocks: SPEED, `accepts` and the estimate `speed`, relative to plain decode."""
    groups = by_block(ups, rates).groupby([*SPEED, "accepts"], sort=False)["value"]
    lines = [[*key, _of_blocks(values.to_numpy())] for key, values in groups]
    return pd.DataFrame(lines, columns=[*SPEED, "accepts", "speed"])


def _of_blocks(ratios: np.ndarray) -> stats.Estimate:
    """Estimate from paired ratios, one per block."""
    return stats.ratio(ratios.tolist(), [1.0] * len(ratios))


def break_even(ups: pd.DataFrame) -> pd.DataFrame:
    """`speed_ups` as one row per cell: SPEED and `from`, the acceptance above which drafting beats plain decode.

    None where it always or never pays, and where the interval leaves it open.
    """
    entries = []
    for row in ups.to_dict("records"):
        crossed, ends = stats.crossing(RATES.tolist(), row["ratios"]), row["ratios"][[0, -1]]
        crossed = replace(crossed, low=max(crossed.low, 0.0), high=min(crossed.high, 1.0))  # a probability
        is_open = np.isnan(crossed.low) or (crossed.low == 0 and crossed.high == 1)
        one_sided = _of_blocks(ends[0]).above(1.0) == "holds" or _of_blocks(ends[1]).below(1.0) == "holds"
        entries.append({name: row[name] for name in SPEED} | {"from": None if is_open or one_sided else crossed})
    return pd.DataFrame(entries, columns=[*SPEED, "from"])


def calls(rows: pd.DataFrame) -> pd.DataFrame:
    """Calls of one sequence timed alone, each after one of its own length: SPEED, `drafter`, `block`, `machine`,
    `n_tokens` and `value`, seconds; a line per process and length."""
    right = processes(usable(rows))
    right = right[right["series"].map(lambda series: bool(series.get("columns")))]
    return events(right, (*SPEED, "drafter", "block", "machine"), _alone, "n_tokens", "value")


def _alone(process: Any) -> Iterator[dict[str, Any]]:
    series = process.series
    for n, ns in pd.Series(series["column ns"]).groupby(series["columns"]).median().items():
        yield {"n_tokens": int(n), "value": ns / NS}


def terms(rows: pd.DataFrame, accepts: float) -> pd.DataFrame:
    """Mean seconds of a round's parts at an acceptance: SPEED, `block`, `machine`, and each of TERMS; a process a line.

    Of the medians by number of accepted tokens, weighted by the probability of each number.
    """
    runs = processes(usable(rows))
    runs = runs[(runs["drafter"] == "even") & (runs["n_seq"] == 1)]
    entries = []
    for run in runs.itertuples():
        accepted, likely = np.array(run.series["accepted"]), probabilities(np.array([accepts]), int(run.n_draft))[:, 0]
        entry = {name: getattr(run, name) for name in (*SPEED, "block", "machine")}
        for term in TERMS:
            ns = np.array(run.series[term])
            entry[term] = float(likely @ [np.median(ns[accepted == n]) for n in range(len(likely))]) / NS
        entries.append(entry)
    return pd.DataFrame(entries, columns=[*SPEED, "block", "machine", *TERMS])
