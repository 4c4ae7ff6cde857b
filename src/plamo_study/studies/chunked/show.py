"""Notebook 06's sentences and tables: the words around numbers that come from rows, never the other way round."""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd
from IPython.display import Markdown

from plamo_study.analysis import stats, timing
from plamo_study.analysis.stats import Estimate
from plamo_study.analysis.timing import NS
from plamo_study.analysis.usable import of_cell
from plamo_study.measure.recording import Recording, elsewhere, read
from plamo_study.present import evidence, sentences
from plamo_study.present.evidence import condition, escaped
from plamo_study.present.sentences import CLOSE
from plamo_study.present.tables import Columns, Table, scaled, significant, table
from plamo_study.studies.chunked import analysis
from plamo_study.studies.chunked.plan import DECODING, DEEPER, PROMPT, USUAL_CHUNK
from plamo_study.studies.chunked.workload import calls

HOW = {"whole": "all at once", "apart": "chunks between steps", "together": "chunks in steps"}
MS = 1e3
SHOWN_BY_CHUNK = (("during", "ms between tokens", scaled(MS, ".1f")), ("rate", "prompt", significant(3)))
SHARES = (0.5, 0.25, 0.125)  # of the wait with the prompt at once: budgets


def finding(recording: Recording) -> Markdown:
    """The longest wait with the prompt at once and in chunks, what the prompt pays, and the size that chunks need."""
    rows = recording.rows
    found, tile = usual(rows), analysis.across_the_tile(rows)
    lines = []
    for model, group in found.groupby("model"):
        whole, cut = (
            group[group["way"] == "whole"],
            group[(group["way"] == "apart") & (group["n_chunk"] == USUAL_CHUNK)],
        )
        if whole.empty or cut.empty or "largest" not in group:
            continue
        first, best = whole.to_dict("records")[0], cut.to_dict("records")[0]
        shorter, longer = (_ratio(rows, best, first, name) for name in ("largest", "ttft"))
        ratio, both = sentences.quotient(shorter, best["largest"].scaled(MS), first["largest"].scaled(MS), "ms")
        line = (
            f"- **{escaped(str(model))}**: a prompt of {PROMPT} tokens at once makes the {DECODING} others wait for "
            f"it. In chunks of {USUAL_CHUNK} between their steps the longest wait is {ratio} as long {both}; "
            f"the prompt's own first token takes {longer:.2f} times as long{sentences.unless(longer)}."
        )
        lines.append(line + _trap(tile[(tile["model"] == model) & (tile["flash_attn"] == "auto")]))
    text = evidence.disturbed(rows) + "\n".join(lines) + f"\n\n({condition(recording)})"
    return Markdown(text)


def _trap(tile: pd.DataFrame) -> str:
    """What one token less than a tile of flash attention costs."""
    if tile.empty:
        return ""
    ratio: Estimate = tile["ratio"].iloc[0]
    less, full = analysis.TILE - 1, analysis.TILE
    if not (ratio.low > 1 or ratio.high < 1):
        return f" Whether chunks of {less} tokens take longer than chunks of {full} is inconclusive: {ratio:.2f} times."
    return (
        f" With flash attention and nobody else there, a chunk of {less} tokens takes {ratio:.2f} times as long as one "
        f"of {full}, in the median over the prompt."
    )


def usual(rows: pd.DataFrame) -> pd.DataFrame:
    """The usual prompt beside the usual sequences, by `how` it is evaluated."""
    found = analysis.table(rows)
    found = found[(found["n_seq"] == DECODING) & (found["n_arriving"] == PROMPT)]
    found = found[(found["n_prompt"] < DEEPER) & (found["flash_attn"] == "auto")]
    return found.assign(how=_how(found))


def _how(found: pd.DataFrame) -> list[str]:
    parts = zip(found["way"], found["kv_unified"], found["flash_attn"], strict=True)
    return [HOW[way] + (", one buffer" if unified else "") + analysis.without(flash) for way, unified, flash in parts]


def _asked(found: pd.DataFrame) -> list[str]:
    return [f"{n} decode, {p:,} arrive" for n, p in zip(found["n_seq"], found["n_arriving"], strict=True)]


def _ratio(rows: pd.DataFrame, cell: Mapping[str, Any], first: Mapping[str, Any], name: str) -> Estimate:
    of = analysis.usable_processes(rows)
    lines = (of_cell(of, each, analysis.CELL) for each in (cell, first))
    return timing.paired_ratio(*(each.set_index("block")[name] for each in lines))


def by_depth(recording: Recording) -> pd.DataFrame:
    """Chunks of a tile and of one token less, with nobody decoding: `model`, `how`, `at` (tokens before), `ms`."""
    found = analysis.alone(recording.rows)
    found = found[found["n_chunk"].isin((analysis.TILE - 1, analysis.TILE))]
    entries = []
    for (model, n_chunk, flash), group in found.groupby(["model", "n_chunk", "flash_attn"], sort=False):
        how = f"{n_chunk} tokens{analysis.without(flash)}"
        for number, seconds in enumerate(pd.DataFrame(group["calls"].tolist()).median()):
            entries.append({"model": model, "how": how, "at": number * n_chunk, "ms": seconds * MS})
    return pd.DataFrame(entries)


def gaps(recording: Recording, n_chunk: int) -> pd.DataFrame:
    """Waits for each token of those decoding, first block: `model`, `how`, `at` (s from the arrival), `gap` (ms)."""
    rows = recording.rows
    found = rows[(rows["workload"] == "arrival") & (rows["status"] == "ok")]
    found = found[found["block"] == found.groupby(analysis.CELL)["block"].transform("min")]
    found = found[(found["n_seq"] == DECODING) & (found["n_arriving"] == PROMPT) & (found["n_prompt"] < DEEPER)]
    found = (
        found[found["flash_attn"] == "auto"]
        .drop_duplicates(analysis.CELL, keep="last")
        .sort_values("way", ascending=False)
    )
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
    found["asked"] = _asked(found)
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


def agreement(recording: Recording) -> Markdown:
    """How many calls took what their micro-batches take alone, and which is furthest from it."""
    found = _predicted(recording)
    mixed = found[found["way"] == "together"]
    if mixed.empty:
        return Markdown("No call with both kinds of work has its parts beside it.")
    close, sure = sentences.closeness(list(mixed["ratio"]))
    alone = list(found[found["way"] != "together"]["ratio"])
    worst = max(mixed.to_dict("records"), key=lambda row: abs(math.log(row["ratio"].value)))
    ratio = stats.selected(worst["ratio"], len(mixed))
    return Markdown(
        f"**{close} of {len(mixed)} kinds of call with both kinds of work take within {CLOSE} times what their "
        f"micro-batches take alone**, {sure}. Furthest is {escaped(worst['model'])}, {worst['n_seq']} decoding, "
        f"{worst['how']} of {worst['n_chunk']}: {ratio:.2f} times, with an interval that holds for all kinds. Of calls "
        f"with nothing but the prompt, for which others wait, {sentences.closeness(alone)[0]} of {len(alone)} do."
    )


def _predicted(recording: Recording) -> pd.DataFrame:
    found = analysis.predicted(recording.rows)
    found = found[found["n_prompt"] < DEEPER]
    return found.assign(how=_how(found))


def prediction(recording: Recording) -> Table:
    """Every kind of call with a chunk in it against what its micro-batches take alone."""
    found = _predicted(recording)
    columns: Columns = {
        "model": ("model", ""),
        "n_seq": ("decode", ""),
        "how": ("how", ""),
        "n_chunk": ("chunk", ""),
        "formed": ("micro-batches", ""),
        "promised": ("alone (ms)", scaled(MS, ".0f")),
        "call": ("measured (ms)", scaled(MS, ".0f")),
        "ratio": ("measured / alone", ".2f"),
    }
    return table(found.sort_values(list(columns)[:4]), columns, ratios={"ratio": ("call", "promised")})


def tile(recording: Recording) -> Table:
    """Chunks around the size of flash attention's tiles, with it and without."""
    less, full = analysis.TILE - 1, analysis.TILE
    found = analysis.across_the_tile(recording.rows)
    found["flash_attn"] = found["flash_attn"].map({"auto": "on", "off": "off"})
    columns: Columns = {
        "model": ("model", ""),
        "flash_attn": ("flash attention", ""),
        "short": (f"{less} tokens (ms)", scaled(MS, ".1f")),
        "full": (f"{full} tokens (ms)", scaled(MS, ".1f")),
        "ratio": (f"{less} / {full}", ".2f"),
    }
    return table(found, columns, ratios={"ratio": ("short", "full")})


def partial_tiles(recording: Recording) -> Table | Markdown:
    """Small chunks beside a build whose flash attention uses tiles that are not full; as recorded."""
    found = read("06-tiles", "recorded", recording.scale)
    if found is None:
        how = f"`plamo-study measure 06-tiles --scale {recording.scale} --beside partial-tiles`"
        return Markdown(f"Nothing is recorded of that build at this scale: {how}.")
    return by_size(found)


def by_size(recording: Recording) -> Table:
    """A chunk's time by its tokens: the engine as released, without flash attention, and every build beside it."""
    data = analysis.by_size(recording.rows)
    wide = data.pivot(index=["model", "n_chunk"], columns="how", values=["call", "ratio"])
    shown = wide.index.to_frame(index=False)
    shown["call"] = wide["call", analysis.STOCK].to_numpy()
    columns: Columns = {"model": ("model", ""), "n_chunk": ("chunk", ""), "call": ("stock (ms)", scaled(MS, ".1f"))}
    beside = {}
    for how in data["how"].unique():
        if how != analysis.STOCK:
            beside[f"{how} ratio"] = ("call", how)
            shown[how], shown[f"{how} ratio"] = wide["call", how].to_numpy(), wide["ratio", how].to_numpy()
            columns = {**columns, how: (f"{how} (ms)", scaled(MS, ".1f"))}
            columns = {**columns, f"{how} ratio": (f"{how}, times as fast", ".2f")}
    return table(shown, columns, f"Recorded on {evidence.chips(recording)}.", beside)


def neighbours(recording: Recording) -> Table:
    """Mixed calls beside short and long neighbours, with one buffer for all and with one each."""
    found = analysis.neighbours(recording.rows)
    columns: Columns = {
        "model": ("model", ""),
        "kv_unified": ("one buffer", ""),
        "n_chunk": ("chunk", ""),
        "short": ("neighbours' tokens", ""),
        "call_short": ("call (ms)", scaled(MS, ".1f")),
        "long": ("longer neighbours' tokens", ""),
        "call_long": ("call beside them (ms)", scaled(MS, ".1f")),
        "ratio": ("longer / shorter", ".2f"),
    }
    return table(found, columns, ratios={"ratio": ("call_long", "call_short")})


def budget(recording: Recording) -> Table:
    """For a longest wait that is asked for, the largest chunk that is predicted to keep it, and what it gave."""
    found = analysis.within_budget(recording.rows, SHARES)
    found["asked"] = _asked(found)
    columns: Columns = {
        "model": ("model", ""),
        "asked": ("who", ""),
        "budget": ("budget (ms)", scaled(MS, ".0f")),
        "n_chunk": ("largest chunk that fits", ""),
        "promised": ("predicted (ms)", scaled(MS, ".0f")),
        "largest": ("longest wait (ms)", scaled(MS, ".0f")),
        "kept": ("kept", ""),
        "ttft": ("first token of the prompt (s)", significant(3)),
    }
    return table(found, columns)


def by_chunk(recording: Recording) -> Table:
    """The sources' table: time between tokens and the prompt's rate by chunk, of the prompt cut in most ways.

    Of recorded rows those of the machine on which it was cut in most ways; the note says where it is another one.
    """
    others = elsewhere(recording) if recording.source == "recorded" else []
    tables = [_most_cut(each.rows) for each in (recording, *others)]
    found = max(tables, key=lambda each: each["n_chunk"].nunique())
    n_seq, n_arriving = found.iloc[0][["n_seq", "n_arriving"]]
    nothing = found.drop_duplicates(["model", "way"]).assign(n_chunk=0, during=lambda data: data["nobody"], rate=None)
    wide = pd.concat([nothing, found]).pivot(index=["model", "n_chunk"], columns="way", values=["during", "rate"])
    shown = wide.index.to_frame(index=False)
    columns: Columns = {"model": ("model", ""), "n_chunk": ("chunk", "")}
    for way in found["way"].unique():
        for name, title, how in SHOWN_BY_CHUNK:
            shown[f"{way} {name}"] = wide[name, way].to_numpy()
            columns = {**columns, f"{way} {name}": (f"{HOW[way]}: {title}", how)}
    caption = f"{n_seq} sequences decoding, a prompt of {n_arriving:,} tokens, its rate in tokens/s; 0: decode only."
    caption += "" if found is tables[0] else " Measured on another machine than the rest of this page."
    return table(shown, columns, caption)


def _most_cut(rows: pd.DataFrame) -> pd.DataFrame:
    """Of the prompt that was cut into most sizes of chunk, with a buffer a sequence and flash attention; `nobody`: a
    step before anybody arrives, over all sizes."""
    found = analysis.table(rows)
    found = found[(found["way"] != "whole") & ~found["kv_unified"] & (found["flash_attn"] == "auto")]
    found = found[found["n_prompt"] < DEEPER]
    sizes = found.groupby(["n_seq", "n_arriving"], sort=False)["n_chunk"].nunique()
    n_seq, n_arriving = max(sizes.index, key=lambda key: (sizes[key], key[1]))
    found = found[(found["n_seq"] == n_seq) & (found["n_arriving"] == n_arriving)]
    own = analysis.usable_processes(rows).merge(found[analysis.CELL])
    before = {
        key: stats.median(group.groupby("block")["before"].median().tolist())
        for key, group in own.groupby(["model", "way"])
    }
    return found.assign(nobody=[before[key] for key in zip(found["model"], found["way"], strict=True)])


def with_sizes(recording: Recording, small: Recording) -> Recording:
    """The rows in which chunks of several sizes were measured: those of small models where these have but one."""
    return recording if usual(recording.rows)["n_chunk"].nunique() > 2 else small


def whose(recording: Recording, shown: Recording) -> Markdown:
    """What is said before figures of other rows than those of the page."""
    if shown is recording:
        return Markdown("All of what follows is of the same rows.")
    return Markdown(
        f"These rows cut a prompt of {PROMPT} tokens into chunks of {USUAL_CHUNK} only; every size takes two hours a "
        f"block at full size. **What follows is of small models**, as recorded. "
        f"({evidence.elsewhere(recording, shown)})"
    )


def gain(recording: Recording) -> Table:
    """What cutting gains or costs in all: the same work, the prompt at once and then the steps, over the cut prompt."""
    found = analysis.equal_work(recording.rows)
    found = found[(found["n_seq"] == DECODING) & (found["n_prompt"] < DEEPER) & (found["flash_attn"] == "auto")]
    found["how"] = _how(found)
    faster = int(sum(gain.low > 1 for gain in found["gain"]))
    slower = int(sum(gain.high < 1 for gain in found["gain"]))
    columns: Columns = {
        "model": ("model", ""),
        "n_arriving": ("prompt", ""),
        "how": ("how", ""),
        "n_chunk": ("chunk", ""),
        "gain": ("work per time, at once = 1", ".2f"),
    }
    found = found.sort_values(list(columns)[:4])
    caption = f"Of {len(found)} ways {faster} gain, {slower} lose; for the others the interval holds 1."
    return table(found, columns, caption)


def formed(recording: Recording) -> Table:
    """The tokens of each micro-batch the engine formed of the arrival's first call, seen in its graphs."""
    found = analysis.formed(recording.rows)
    found = found.sort_values(["model", "n_seq", "kv_unified", "n_chunk"])
    found = found.drop_duplicates(["model", "n_seq", "kv_unified", "n_chunk", "sizes"])
    columns: Columns = {
        "model": ("model", ""),
        "n_seq": ("decode", ""),
        "n_chunk": ("chunk", ""),
        "kv_unified": ("one buffer", ""),
        "sizes": ("tokens of each micro-batch", ""),
    }
    return table(found, columns)
