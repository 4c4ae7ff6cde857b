"""What a prompt's arrival costs those who are being answered, and the prompt itself: frames in, estimates out."""

from collections.abc import Mapping
from statistics import median
from typing import Any

import pandas as pd

from plamo_study.analysis import stats, timing
from plamo_study.analysis.timing import NS
from plamo_study.analysis.usable import usable
from plamo_study.measure.cells import Arrival, Calls
from plamo_study.studies.chunked.workload import calls

TIMES = ["before", "during", "largest", "ttft", "call"]
CELL = ["model", "n_seq", "n_arriving", "way", "n_chunk", "kv_unified"]


def cell_of(row: Any) -> Arrival:
    """The cell of a line of a frame, as far as its calls depend on it."""
    return Arrival(
        depth=int(row.n_prompt), n_gen=int(row.n_gen), n_seq=int(row.n_seq), n_arriving=int(row.n_arriving),
        n_chunk=int(row.n_chunk), way=row.way,
    )  # fmt: skip


def processes(rows: pd.DataFrame) -> pd.DataFrame:
    """A line a process, in seconds: CELL, `block`, `verdict`, `before` (median step), `during` and `largest` (median
    and largest gap between two tokens of those decoding while the prompt is evaluated), `ttft` and `call` (median call
    with a full chunk in it); `rate`, prompt tokens per second from its arrival to its first token."""
    found = rows[(rows["workload"] == "arrival") & (rows["status"] == "ok")]
    entries = []
    for row in found.itertuples():
        cell = cell_of(row)
        asked, times = calls(cell), [ns / NS for ns in row.samples_ns[0]]
        gaps, ttft, full = _during(cell, asked, times)
        entry = {name: getattr(row, name) for name in (*CELL, "block", "verdict")}
        entry |= {"before": median(times[: cell.n_gen]), "during": median(gaps), "largest": max(gaps)}
        entries.append(entry | {"ttft": ttft, "call": median(full), "rate": cell.n_arriving / ttft})
    return pd.DataFrame(entries, columns=[*CELL, "block", "verdict", *TIMES, "rate"])


def _during(cell: Arrival, asked: Calls, times: list[float]) -> tuple[list[float], float, list[float]]:
    """Gaps between tokens of those decoding, from the prompt's arrival on; its time to the first token; full calls."""
    gaps, waited, ttft, left, full = [], 0.0, 0.0, cell.n_arriving, []
    most = max(n for call in asked for seq, n in call if seq == cell.n_seq)
    for call, seconds in list(zip(asked, times, strict=True))[cell.n_gen :]:
        piece = dict(call).get(cell.n_seq, 0)
        waited += seconds
        if left > 0:
            ttft += seconds
            full += [seconds] if piece == most else []
            left -= piece
        if 0 in dict(call):
            gaps.append(waited)
            waited = 0.0
            if left <= 0:
                break
    return gaps, ttft, full


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """A line a cell: TIMES and `rate` as estimates over processes; `verdict` is valid, or how many were not."""
    entries = []
    right = processes(usable(rows))
    for key, group in processes(rows).groupby(CELL, sort=False):
        entry: dict[str, Any] = dict(zip(CELL, key, strict=True))
        wrong = int((group["verdict"] != "valid").sum())
        entry["verdict"] = "valid" if not wrong else f"{wrong} of {len(group)} {group['verdict'].iloc[-1]}"
        used = of_cell(right, entry)
        if len(used):
            entry |= {
                name: stats.median(used[name].tolist()) for name in ("before", "during", "largest", "ttft", "call")
            }
            entry["rate"] = stats.rate(float(entry["n_arriving"]), used["ttft"].tolist())
        entries.append(entry)
    return pd.DataFrame(entries)


def of_cell(found: pd.DataFrame, cell: Mapping[str, Any]) -> pd.DataFrame:
    """The lines of one cell, by CELL."""
    return found[(found[CELL] == pd.Series({name: cell[name] for name in CELL})).all(axis=1)]


def formed(rows: pd.DataFrame) -> pd.DataFrame:
    """The micro-batches the engine formed of the arrival's first call: CELL and `sizes`, tokens of each."""
    entries = []
    for row in rows[(rows["workload"] == "arrival") & (rows["status"] == "ok")].itertuples():
        of_call, sizes = row.series["of call"], row.series["micro-batch"]
        first = [int(size) for size, call in zip(sizes, of_call, strict=True) if call == row.n_gen]
        entries.append({name: getattr(row, name) for name in CELL} | {"sizes": " + ".join(map(str, first))})
    return pd.DataFrame(entries, columns=[*CELL, "sizes"]).drop_duplicates()


def predicted(rows: pd.DataFrame) -> pd.DataFrame:
    """Calls with a chunk and all decoding sequences in them, against the sum of their parts measured alone.

    `twice`: a step of all sequences and the chunk, each a micro-batch of its own. `once`: one micro-batch, as long as a
    prompt of as many tokens. `call`: measured. `ratio`: measured over what the micro-batches that were formed promise,
    paired by block; `formed`: how many.
    """
    used, made = usable(rows), formed(rows).set_index(CELL)["sizes"]
    steps = {k: _by_block(g) for k, g in used[used["workload"] == "decode"].groupby(["model", "n_seq"])}
    prompts = {k: _by_block(g) for k, g in used[used["workload"] == "prefill"].groupby(["model", "n_prompt"])}
    entries = []
    for key, group in processes(used[used["workload"] == "arrival"]).groupby(CELL, sort=False):
        entry: dict[str, Any] = dict(zip(CELL, key, strict=True))
        step, chunk = steps.get((entry["model"], entry["n_seq"] + 1)), prompts.get((entry["model"], entry["n_chunk"]))
        if entry["way"] != "together" or step is None or chunk is None:
            continue
        count = len(made[key].split(" + "))
        promised = chunk * (entry["n_chunk"] - 1) / entry["n_chunk"] + step
        promised = promised if count > 1 else chunk * (entry["n_chunk"] + entry["n_seq"]) / entry["n_chunk"]
        promised, call = promised.dropna(), group.groupby("block")["call"].median()
        entry |= {"formed": count, "promised": stats.median(promised.tolist()), "call": stats.median(call.tolist())}
        entries.append(entry | {"ratio": timing.paired_ratio(call, promised)})
    return pd.DataFrame(entries, columns=[*CELL, "formed", "promised", "call", "ratio"])


def _by_block(group: pd.DataFrame) -> pd.Series:
    """Seconds of a step or a prompt, by block."""
    return timing.seconds_by_block(group.drop_duplicates("block", keep="last"), timing.median_sample)
