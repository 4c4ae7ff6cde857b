"""Notebook 09's sentences and tables: the words around numbers that come from rows, never the other way round."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from IPython.display import Markdown

from plamo_study.analysis import stats
from plamo_study.measure.recording import Recording
from plamo_study.present import evidence, sentences
from plamo_study.present.evidence import condition, escaped
from plamo_study.present.sentences import CLOSE, is_close
from plamo_study.present.tables import Columns, Table, scaled, significant, table
from plamo_study.studies.disaggregation import analysis, sizes
from plamo_study.studies.disaggregation.analysis import MOVING
from plamo_study.studies.disaggregation.plan import LINKS

MS, MB = 1e3, 1e-6
SPOKEN_LINK = 10**9
DRAWN_LINKS = (10**8, 10**9, 10**10)
LENGTHS = (128, 512, 2048, 8192, 16384)
CACHES = {"f16": "F16", "q8_0": "Q8_0"}
LLAMA_70B = {"layers": 80, "kv_heads": 8, "head_dim": 128}  # the public configuration of Llama 3 70B
NAMES = {"ttft": "first token", "itl": "gap between tokens", "largest": "longest gap", "throughput": "throughput"}


def finding(recording: Recording, small: Recording | None = None) -> Markdown:
    """Whether an answer changes when its state moves, from which length moving pays, and what sharing out work does.

    What these rows do not hold is told of `small` models.
    """
    rows = recording.rows
    lines = [_identity(rows), *_crossings(rows), *_services(rows)]
    told = condition(recording)
    if small and small.scale != recording.scale:
        of_small = "" if with_loads(recording, small) is recording else _services(small.rows)
        lines += [f"Small models: {line}" for line in (_identity(small.rows), *of_small)]
        told += f" Small models: {evidence.elsewhere(recording, small)}"
    text = evidence.disturbed(rows) + "\n".join(f"- {line}" for line in lines) + f"\n\n({told})"
    return Markdown(text)


def _identity(rows: pd.DataFrame) -> str:
    found = analysis.identity(rows)
    n, valid, same = (int(found[name].sum()) for name in ("n", "valid", "identical"))
    steps = int(rows[rows["workload"] == "shipment"]["n_gen"].max())
    text = f"**The answer does not move.** In {valid} of {n} processes every shipment "
    text += (
        f"of {found['from'].min():,} to {found['to'].max():,} tokens went on for {steps} tokens as if it had stayed; "
    )
    text += f"in {same} in every bit of every logit"
    others = found[found["identical"] < found["n"]]
    if len(others):
        which = ", ".join(
            f"{escaped(row.model)} with flash attention {row.flash_attn}, {CACHES[row.type_k]} and {row.n_threads} "
            f"threads from {row.differs_from:,} tokens on"
            for row in others.itertuples()
        )
        text += f", the others up to rounding (at most {others['error'].max():.0e} of the logits: {which})"
    return text + "."


def _crossings(rows: pd.DataFrame) -> list[str]:
    found, lines = analysis.crossings(rows), []
    found["says"] = [outcome(row) for row in found.to_dict("records")]
    for model, group in found.groupby("model"):
        alike = group.groupby("says", sort=False)["link"]
        said = "; ".join(f"{_links(list(links))}, {says}" for says, links in alike)
        lines.append(
            f"**{escaped(str(model))}**, where shipping is faster than evaluating the prompt again, by law: {said}."
        )
    return lines


def _links(links: list[int]) -> str:
    """Links in order of their speed, as one says them."""
    if len(links) > 2:
        return f"from {link_name(links[0])} to {link_name(links[-1])}"
    return f"at {' and '.join(map(link_name, links))}"


def outcome(row: Mapping[str, Any]) -> str:
    """From which length shipping wins, in words."""
    if row["outcome"] == "from":
        return f"from {row['first']:.0f} tokens on"
    return {
        "always": f"at every length up to {row['longest']:,}",
        "never": f"at no length up to {row['longest']:,}",
    }.get(str(row["outcome"]), "inconclusive")


def _services(rows: pd.DataFrame) -> list[str]:
    lines, found = [], analysis.compared(rows)
    for model, group in found.groupby("model"):
        row = group.sort_values("per_second").to_dict("records")[-1]
        ratio, both = sentences.quotient(
            row["throughput_ratio"], row["throughput_split"], row["throughput"], "tokens/s"
        )
        gap, gaps = sentences.quotient(
            row["largest_ratio"], row["largest_split"].scaled(MS), row["largest"].scaled(MS), "ms", ".2g"
        )
        lines.append(
            f"**{escaped(str(model))}, threads shared out** to a process that reads and one that writes, "
            f"requests at {row['per_second']:g} a second{_beyond(rows, row)}: {ratio} the throughput {both}"
            f"{sentences.unless(row['throughput_ratio'])}; the first token takes {row['ttft_ratio']:.2f} times as long"
            f"{sentences.unless(row['ttft_ratio'])}; the longest gap between two tokens is {gap} as long {gaps}"
            f"{sentences.unless(row['largest_ratio'])}."
        )
    return lines


def _beyond(rows: pd.DataFrame, row: Mapping[str, Any]) -> str:
    """What is said of a load that neither arrangement can take, by what its parts take alone."""
    known = analysis.capacity(rows)
    known = known[known["model"] == row["model"]]
    least = [float(known[name].iloc[0].value) for name in ("shared", "split")] if len(known) else []
    return ", more than either can take" if least and row["per_second"] > max(least) else ""


def link_name(bps: int) -> str:
    """A link's speed."""
    return f"{bps / 1e9:g} Gbit/s" if bps else "loopback"


def drawn(recording: Recording) -> tuple[pd.DataFrame, pd.DataFrame]:
    """What the first figure draws: bytes by formula and as shipped (MB), and shipping over evaluating again."""
    found = analysis.weights(recording.rows, recording.facts)
    found = found[found["type_k"] == analysis.USUAL["type_k"]]
    fine = []
    for model in found["model"].unique():
        known = found[found["model"] == model].set_index("n_prompt")["n_bytes"]
        shape = recording.facts[model]["shape"]
        for n in sorted({*LENGTHS, 256, 1024, 4096, *known.index}):
            size = sizes.size(shape, n).total * MB
            fine.append({"model": model, "n_prompt": n, "predicted": size, "n_bytes": known.get(n, np.nan) * MB})
    shares = analysis.shares(recording.rows, DRAWN_LINKS)
    return pd.DataFrame(fine), shares.assign(how=[link_name(link) for link in shares["link"]])


def bytes_predicted(recording: Recording) -> Table:
    """What each state consists of by formula, before anything is shipped."""
    entries = []
    for model in evidence.model_names(recording.rows):
        for n in LENGTHS:
            size = sizes.size(recording.facts[model]["shape"], n)
            entries.append({"model": model, "n": n, "full": size.full, "sliding": size.sliding,
                            "recurrent": size.recurrent, "total": size.total})  # fmt: skip
    columns: Columns = {
        "model": ("model", ""),
        "n": ("tokens", ","),
        "full": ("keys and values (MB)", scaled(MB, ".2f")),
        "sliding": ("those of sliding layers (MB)", scaled(MB, ".2f")),
        "recurrent": ("recurrent (MB)", scaled(MB, ".2f")),
        "total": ("state (MB)", scaled(MB, ".2f")),
    }
    return table(pd.DataFrame(entries), columns)


def crossings(recording: Recording) -> Table:
    """From which length shipping wins, by model and link."""
    found = analysis.crossings(recording.rows)
    wide = [
        {"model": model} | {link_name(row.link): outcome(row._asdict()) for row in group.itertuples()}
        for model, group in found.groupby("model")
    ]
    columns: Columns = {"model": ("model", "")} | {link_name(link): (link_name(link), "") for link in LINKS}
    return table(pd.DataFrame(wide), columns, "By law: the bytes over the link, and what both sides did, measured.")


def identity(recording: Recording) -> Table:
    """Shipments that went on as if they had stayed, by model, attention and cache."""
    found = analysis.identity(recording.rows)
    found["cache"] = found["type_k"].map(CACHES)
    found["lengths"] = [f"{low:,} to {high:,}" for low, high in zip(found["from"], found["to"], strict=True)]
    found["same"] = [f"{same} of {n}" for same, n in zip(found["identical"], found["n"], strict=True)]
    found["verdict"] = [f"{valid} of {n} valid" for valid, n in zip(found["valid"], found["n"], strict=True)]
    columns: Columns = {
        "model": ("model", ""),
        "flash_attn": ("flash attention", ""),
        "cache": ("keys and values", ""),
        "n_threads": ("threads", ""),
        "lengths": ("tokens", ""),
        "same": ("same in every bit", ""),
        "error": ("largest error", ".0e"),
        "verdict": ("verdict", ""),
    }
    return table(found, columns)


def phases(recording: Recording) -> pd.DataFrame:
    """Median milliseconds of each phase of a shipment as fast as it goes: `model`, `n_prompt`, `phase`, `ms`."""
    found = analysis.by_length(recording.rows)
    return (
        found.melt(["model", "n_prompt"], list(MOVING), "phase", "ms")
        .groupby(["model", "n_prompt", "phase"], sort=False, as_index=False)["ms"]
        .median()
        .assign(ms=lambda tidy: tidy["ms"] * MS)
    )


def _how(found: pd.DataFrame) -> list[str]:
    parts = zip(found["type_k"], found["flash_attn"], found["n_threads"], found["link_bps"], strict=True)
    fewer = {n: f", threads {n}" for n in set(found["n_threads"]) - {found["n_threads"].max()}}
    return [f"{CACHES[cache]}, flash {flash}{fewer.get(n, '')}, {link_name(bps)}" for cache, flash, n, bps in parts]


def cells(recording: Recording) -> Table:
    """Every shipment: where its time goes, the link's real speed, and the verdict."""
    found = analysis.table(recording.rows).sort_values(["model", "n_prompt", "link_bps", "type_k", "flash_attn"])
    found["how"] = _how(found)
    columns: Columns = {
        "model": ("model", ""),
        "n_prompt": ("tokens", ","),
        "how": ("cache and link", ""),
        "n_bytes": ("bytes", ","),
        "prefill": ("prefill (ms)", significant(3, MS)),
        "moving": ("save to load (ms)", significant(3, MS)),
        "verdict": ("verdict", ""),
        "rate": ("sent at (Gbit/s)", significant(3, 1e-9)),
        "save": ("save (ms)", significant(3, MS)),
        "check": ("check (ms)", significant(3, MS)),
        "send": ("send (ms)", significant(3, MS)),
        "load": ("load (ms)", significant(3, MS)),
        "step": ("first step (ms)", significant(3, MS)),
    }
    return table(found, columns)


def prediction(recording: Recording) -> Table:
    """Predictions by kind: how many are close to what was measured, and the furthest."""
    found, entries = analysis.predicted(recording.rows, recording.facts), []
    for what, group in found.groupby("what", sort=False):
        ratios = sorted(group["ratio"], key=lambda ratio: abs(np.log(ratio.value)))
        values = [ratio.value for ratio in ratios]
        entry = {"what": what, "close": f"{sum(map(is_close, values))} of {len(values)}"}
        entry |= {"median": float(np.median(values)), "furthest": stats.selected(ratios[-1], len(ratios))}
        entries.append(entry)
    timed = found[~found["what"].isin(("bytes", "send"))]
    close, sure = sentences.closeness(list(timed["ratio"]))
    columns: Columns = {
        "what": ("what", ""),
        "close": (f"within {CLOSE} times", ""),
        "median": ("measured / predicted, median", ".2f"),
        "furthest": ("furthest", ".2f"),
    }
    note = f"{close} of {len(timed)} predicted times are within {CLOSE} times of what was measured, {sure}."
    note += " The furthest of several is the one that noise helped most; its interval holds for all of its kind."
    note += " Not counted: bytes, which a formula gives, and sending, which only says that the limiter keeps its speed."
    return table(pd.DataFrame(entries), columns, note)


def every_prediction(recording: Recording) -> Table:
    """Each prediction beside what was measured."""
    found = analysis.predicted(recording.rows, recording.facts)
    found["how"] = _how(found)
    factors = [1.0 if what == "bytes" else MS for what in found["what"]]
    for name in ("promised", "measured"):
        found[name] = found[name] * factors
    found["what"] = [what if what == "bytes" else f"{what} (ms)" for what in found["what"]]
    columns: Columns = {
        "model": ("model", ""),
        "n_prompt": ("tokens", ","),
        "how": ("cache and link", ""),
        "what": ("what", ""),
        "promised": ("predicted", significant(3)),
        "measured": ("measured", significant(3)),
        "ratio": ("measured / predicted", ".2f"),
    }
    return table(found, columns, ratios={"ratio": ("measured", "promised")})


def with_loads(recording: Recording, small: Recording) -> Recording:
    """The rows in which both arrangements were measured under load: those of small models where these lack one."""
    return small if analysis.compared(recording.rows).empty else recording


def under_load(recording: Recording, loads: Recording) -> Markdown:
    """Whose rows the figures of loads are."""
    return Markdown(f"Measured under load: {evidence.elsewhere(recording, loads)}")


def waits(recording: Recording) -> pd.DataFrame:
    """Waits by load for the figure: `model`, `per_second`, `what`, `how`, `time` (ms)."""
    entries = []
    for row in analysis.compared(recording.rows).to_dict("records"):
        for name in ("ttft", "itl", "largest"):
            for how, end in (("one engine", ""), ("split", "_split")):
                entry = {"model": row["model"], "per_second": row["per_second"], "what": NAMES[name], "how": how}
                entries.append(entry | {"time": row[name + end].scaled(MS)})
    return pd.DataFrame(entries, columns=["model", "per_second", "what", "how", "time"])


def services(recording: Recording) -> Table:
    """One engine against two that share its threads, by load: split over shared, paired by block."""
    found = analysis.compared(recording.rows)
    columns: Columns = {
        "model": ("model", ""),
        "per_second": ("requests/s", "g"),
        "throughput": ("one engine (tokens/s)", significant(3)),
        "throughput_split": ("split (tokens/s)", significant(3)),
        "throughput_ratio": ("split / one: throughput", ".2f"),
        "ttft_ratio": ("first token", ".2f"),
        "itl_ratio": ("gap between tokens", ".2f"),
        "largest_ratio": ("longest gap", ".2g"),
    }
    asked = recording.rows[recording.rows["workload"] == "service"]
    if asked.empty:
        return table(found, columns)
    cell = asked.iloc[0]
    note = (
        f"A load is {cell['n_requests']} requests of {cell['n_prompt']} tokens, answers of {cell['n_gen']}, "
        f"{cell['n_seq']} answered at once. The times of arrival were drawn once, so intervals tell how processes vary "
        "and not how arrivals do. Where both keep up, throughput is the load's own. The split engine's first token is "
        "counted when the one that writes has it: shipping and waiting for a place are in it."
    )
    return table(found, columns, note, {"throughput_ratio": ("throughput_split", "throughput")})


def capacity(recording: Recording) -> Table:
    """Requests per second that each arrangement takes at most, by law."""
    columns: Columns = {
        "model": ("model", ""),
        "shared": ("one engine (requests/s)", significant(3)),
        "split": ("split on this machine", significant(3)),
        "split_ratio": ("split / one", ".2f"),
        "two": ("split over two machines", significant(3)),
        "two_ratio": ("split over two / one engine", ".2f"),
        "each_ratio": ("split over two / an engine on each", ".2f"),
    }
    found = analysis.capacity(recording.rows)
    ratios = [*found["split_ratio"], *found["two_ratio"]]
    open_ = sum(ratio.above(1.0) == "inconclusive" for ratio in ratios)
    note = (
        f"By law, without what shipping takes. Of {len(ratios)} ratios to one engine the interval of {open_} holds 1."
    )
    found = found.assign(each_ratio=[ratio.scaled(0.5) for ratio in found["two_ratio"]])
    return table(found, columns, note, {f"{name}_ratio": (name, "shared") for name in ("split", "two")})


def printed() -> Table:
    """The sources' 26 ms for the state of 4,096 tokens of a 70B at 400 Gbit/s, recomputed from its shape."""
    entries = [
        {"shape": name, "seconds": analysis.transfer(**LLAMA_70B | {"kv_heads": n}, n_tokens=4096, bps=400e9)}
        for name, n in (("8 key-value heads, as published", 8), ("64 heads, without groups", 64))
    ]
    columns: Columns = {
        "shape": ("70B, 80 layers of 128 a head", ""),
        "seconds": ("4,096 tokens at 400 Gbit/s (ms)", scaled(MS, ".1f")),
    }
    return table(
        pd.DataFrame(entries), columns, "The source prints 26 ms. On the wire; saving and loading come on top."
    )
