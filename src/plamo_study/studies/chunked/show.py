"""Notebook 06's sentences and tables: the words around numbers that come from rows, never the other way round."""

from collections.abc import Mapping
from typing import Any

import pandas as pd
from IPython.display import Markdown

from plamo_study.analysis import timing
from plamo_study.analysis.stats import Estimate
from plamo_study.analysis.timing import NS
from plamo_study.analysis.usable import usable
from plamo_study.measure.recording import Recording
from plamo_study.present import evidence, sentences
from plamo_study.present.evidence import condition, escaped
from plamo_study.present.tables import Columns, Table, scaled, significant, table
from plamo_study.studies.chunked import analysis
from plamo_study.studies.chunked.workload import calls

HOW = {"whole": "all at once", "apart": "chunks between steps", "together": "chunks in steps"}
CLOSE = 1.5  # times off that a prediction may be
MS = 1e3


def finding(recording: Recording) -> Markdown:
    """The longest wait with the prompt at once and in the chunks that shorten it most, and what the prompt pays."""
    rows = recording.rows
    found = usual(rows)
    lines = []
    for model, group in found.groupby("model"):
        whole = group[group["way"] == "whole"]
        cut = group[group["way"] != "whole"].dropna(subset=["largest"])
        if whole.empty or cut.empty:
            continue
        first = whole.to_dict("records")[0]
        best = min(cut.to_dict("records"), key=lambda row: row["largest"].value)
        shorter = _ratio(rows, best, first, "largest")
        longer = _ratio(rows, best, first, "ttft")
        ratio, both = sentences.quotient(shorter, best["largest"].scaled(MS), first["largest"].scaled(MS), "ms")
        lines.append(
            f"- **{escaped(str(model))}**: a prompt of {first['n_arriving']:,} tokens, evaluated at once, makes "
            f"everybody wait {first['largest'].value:.2f} s. {best['how'].capitalize()} of {best['n_chunk']} tokens, "
            f"the longest wait is {ratio} as long {both}; the prompt's first token takes {longer:.2f} times as long."
        )
    text = evidence.disturbed(rows) + "\n".join(lines) + f"\n\n({condition(recording)})"
    return Markdown(text)


def usual(rows: pd.DataFrame) -> pd.DataFrame:
    """The cells that all models share, by `how` the prompt is evaluated."""
    found = analysis.table(rows)
    sizes = found.groupby(["n_seq", "n_arriving"])["way"].count()
    n_seq, n_arriving = sizes.idxmax()
    found = found[(found["n_seq"] == n_seq) & (found["n_arriving"] == n_arriving)]
    return found.assign(how=_how(found))


def _how(found: pd.DataFrame) -> list[str]:
    pairs = zip(found["way"], found["kv_unified"], strict=True)
    return [HOW[way] + (", one buffer" if unified else "") for way, unified in pairs]


def _ratio(rows: pd.DataFrame, cell: Mapping[str, Any], first: Mapping[str, Any], name: str) -> Estimate:
    of = analysis.processes(usable(rows))
    return timing.paired_ratio(*(analysis.of_cell(of, each).set_index("block")[name] for each in (cell, first)))


def gaps(recording: Recording, n_chunk: int) -> pd.DataFrame:
    """Waits for each token of those decoding, first block: `model`, `how`, `at` (s from the arrival), `gap` (ms)."""
    rows = recording.rows
    main = usual(rows)
    found = rows[(rows["workload"] == "arrival") & (rows["status"] == "ok") & (rows["block"] == 0)]
    found = found[(found["n_seq"] == main["n_seq"].iloc[0]) & (found["n_arriving"] == main["n_arriving"].iloc[0])]
    found = found.drop_duplicates(analysis.CELL, keep="last").sort_values("way", ascending=False)
    found = found[((found["n_chunk"] == n_chunk) & ~found["kv_unified"]) | (found["way"] == "whole")]
    entries = []
    for row in found.itertuples():
        cell, now, since = analysis.cell_of(row), 0.0, 0.0
        times = [ns / NS for ns in row.samples_ns[0]]
        arrival = sum(times[: cell.n_gen])
        for call, seconds in zip(calls(cell), times, strict=True):
            now, since = now + seconds, since + seconds
            if 0 in dict(call):
                entries.append({"model": row.model, "how": HOW[row.way], "at": now - arrival, "gap": since * MS})
                since = 0.0
    return pd.DataFrame(entries)


def cells(recording: Recording) -> Table:
    """Every cell: waits of those decoding, the prompt's first token, its rate, and the verdict."""
    found = analysis.table(recording.rows).sort_values(["model", "n_seq", "n_arriving", "n_chunk", "way"])
    found["how"] = _how(found)
    found["asked"] = [f"{n} decode, {p:,} arrive" for n, p in zip(found["n_seq"], found["n_arriving"], strict=True)]
    found["how"] += [f" of {n}" if n else "" for n in found["n_chunk"]]
    columns: Columns = {
        "model": ("model", ""),
        "asked": ("who", ""),
        "how": ("how", ""),
        "before": ("step before (ms)", scaled(MS, ".1f")),
        "largest": ("longest wait (ms)", scaled(MS, ".0f")),
        "ttft": ("first token of the prompt (s)", significant(3)),
        "rate": ("prompt (tokens/s)", significant(3)),
        "verdict": ("verdict", ""),
    }
    return table(found, columns)


def prediction(recording: Recording) -> Table:
    """Each kind of mixed call against the sum of its parts, by the micro-batches that were formed."""
    found = analysis.predicted(recording.rows)
    close = sum(1 / CLOSE <= ratio.value <= CLOSE for ratio in found["ratio"])
    columns: Columns = {
        "model": ("model", ""),
        "n_seq": ("decode", ""),
        "n_chunk": ("chunk", ""),
        "kv_unified": ("one buffer", ""),
        "formed": ("micro-batches", ""),
        "promised": ("parts (ms)", scaled(MS, ".0f")),
        "call": ("measured (ms)", scaled(MS, ".0f")),
        "ratio": ("measured / parts", ".2f"),
    }
    found = found.sort_values(list(columns)[:4])
    return table(found, columns, f"{close} of {len(found)} calls are within {CLOSE} times of their parts.")


def formed(recording: Recording) -> Table:
    """The tokens of each micro-batch the engine formed of the arrival's first call, seen in its graphs."""
    found = analysis.formed(recording.rows)
    found = found[found["way"] == "together"].sort_values(["model", "n_seq", "kv_unified", "n_chunk"])
    columns: Columns = {
        "model": ("model", ""),
        "n_seq": ("decode", ""),
        "n_chunk": ("chunk", ""),
        "kv_unified": ("one buffer", ""),
        "sizes": ("tokens of each micro-batch", ""),
    }
    return table(found, columns)
