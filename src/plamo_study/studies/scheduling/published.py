"""The source's five strategies checked against arithmetic: what an H100 can read, compute and hold.

Only published ceilings are used. A row that passes may still be wrong; one that fails cannot be right as printed.
"""

import tomllib
from collections.abc import Mapping
from typing import Any

import pandas as pd

from plamo_study import paths


def strategies() -> dict[str, Any]:
    """The printed table with its stated conditions."""
    return tomllib.loads((paths.PUBLISHED / "strategies.toml").read_text(encoding="utf-8"))


def part(name: str) -> dict[str, Any]:
    """A part's published bandwidth (B/s), memory (bytes) and peaks (FLOP/s)."""
    entries = tomllib.loads((paths.PUBLISHED / "hardware.toml").read_text(encoding="utf-8"))["part"]
    return next(entry for entry in entries if entry["name"] == name)


def checked(told: Mapping[str, Any], part: Mapping[str, Any]) -> pd.DataFrame:
    """One row per strategy: `floor` (s, the weights read once), `possible` (the printed median ITL is not below it),
    `answer` (tokens of an answer that rate and throughput imply), `at_once` (sequences answered, by Little's law from
    the median ITL), `memory` (bytes of weights and their caches), `parts` (how many parts hold that), `prompt` (the
    longest prompts, tokens, for which the request rate leaves time: λ (prompt + answer) <= peak), and
    `chunk_cuts` (whether a chunk of C is shorter than such a prompt; None: no chunk is named)."""
    table = told["table"]
    weights = table["parameters"] * table["bytes_per_weight"]
    tokens = part["peak"]["F16"] / (2 * table["parameters"])  # a second, at the peak
    floor = weights / part["bandwidth"]
    entries = []
    for row in told["strategy"]:
        answer = row["throughput"] / table["per_second"]
        at_once = row["throughput"] * row["itl_p50"]
        memory = weights + at_once * table["depth"] * table["kv_bytes_per_token"]
        prompt = tokens / table["per_second"] - answer
        size = row["name"].partition("C=")[2].rstrip(")")
        entry = {"name": row["name"], "itl": row["itl_p50"], "floor": floor, "possible": row["itl_p50"] >= floor}
        entry |= {"answer": answer, "at_once": at_once, "memory": memory, "parts": -(-memory // part["memory"])}
        entry |= {"prompt": prompt, "chunk_cuts": int(size) < prompt if size else None}
        entries.append(entry)
    return pd.DataFrame(entries)


def needed(told: Mapping[str, Any], part: Mapping[str, Any], prompt: int) -> float:
    """Parts needed, at their peak, for the table's requests a second with prompts of `prompt` tokens."""
    table = told["table"]
    answer = max(row["throughput"] for row in told["strategy"]) / table["per_second"]
    tokens = part["peak"]["F16"] / (2 * table["parameters"])
    return float(table["per_second"] * (prompt + answer) / tokens)
