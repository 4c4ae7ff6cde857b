"""Notebook 08's sentences and tables: the words around numbers that come from rows, never the other way round."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from IPython.display import Markdown

from plamo_study.analysis import stats
from plamo_study.analysis.usable import of_cell, verdict_of
from plamo_study.measure.recording import Recording, read
from plamo_study.present import evidence, sentences
from plamo_study.present.evidence import condition, escaped
from plamo_study.present.tables import Columns, Table, scaled, significant, table
from plamo_study.studies.batch_scaling import analysis as batch_scaling
from plamo_study.studies.speculative import analysis, served
from plamo_study.studies.speculative.plan import BOTH_MOVE, PROSE, RATES, TERMS, TEXT, USUAL

MS = 1e3
NO_HEADS = (
    "No such head is published for any PLaMo: so says the source of the M4 Pro's figures, and a search of 2026-11-22 "
    "found none either."
)
SHOWN = tuple(np.round(np.linspace(0, 1, 21), 2).tolist())  # acceptances of a curve
MEASURED_AT = 0.7  # the acceptance that sentences speak of
BUILD = "rollback"
STEPS = "03-batch-scaling"
HOW_TO = "plamo-study engine build rollback, then plamo-study measure 08-speculative --scale {} --beside rollback"
PUBLISHED = (  # of the 8b model: whose draft, times plain decode, what a drafted token costs of a target's step
    ("plamo-2-1b drafts", 0.29, 1.18, 1.291 / 9.118),
    ("n-grams draft", 0.81, 1.21, 0.0),
)


def finding(recording: Recording) -> Markdown:
    """From which acceptance drafting pays, by model, as released and on the build that keeps states."""
    rows = recording.rows
    found, first = analysis.break_even(rows), analysis.soonest(rows)
    lines = [f"{_released(row)} {_sooner(row, first)}" for row in _usual(found).to_dict("records")]
    lines += [f"{_corrected(row)} {_sooner(row, first)}" for row in _usual(found, BUILD).to_dict("records")]
    lines += [line for model, calls in _calls(rows).groupby("model", sort=False) for line in _steepest(model, calls)]
    lines += [_gain(row) for row in _of(analysis.beside(rows), accepts=MEASURED_AT).to_dict("records")]
    said = evidence.disturbed(rows) + "\n".join(f"- {line}" for line in lines)
    return Markdown(f"{said}\n\n{lossless(recording).data}\n\n({condition(recording)})")


def _usual(found: pd.DataFrame, build: str = "stock") -> pd.DataFrame:
    """One sequence, the usual draft, the cheapest way that a build has."""
    return _single(found[found["n_draft"] == USUAL], build)


def _single(found: pd.DataFrame, build: str) -> pd.DataFrame:
    cheap = found[(found["build"] == build) & (found["n_seq"] == 1)]
    cheap = cheap[cheap["how"].isin((analysis.NATIVE, analysis.PART))]
    return cheap[cheap["n_prompt"] == cheap["n_prompt"].min()]


def _of(found: pd.DataFrame, **fields: Any) -> pd.DataFrame:
    usual = {"n_seq": 1, "n_draft": USUAL} | fields
    found = of_cell(found, usual, list(usual))
    return found[found["n_prompt"] == found["n_prompt"].min()]


def _released(row: dict[str, Any]) -> str:
    return f"**{escaped(row['model'])}**, as released ({row['how']}): {_pays(row)}"


def _corrected(row: dict[str, Any]) -> str:
    return f"**{escaped(row['model'])}**, on a build that keeps the states of its last tokens: {_pays(row)}"


def _pays(row: dict[str, Any]) -> str:
    """From which acceptance a draft that costs nothing itself is faster than plain decode."""
    what, crossed = f"a draft of {row['n_draft']} tokens", row["from"]
    if row["pays"] == "never":
        return f"{what} never pays, even where every token of it is right."
    if row["pays"] == "always":
        return f"{what} pays even where none of it is right."
    if row["pays"] == "inconclusive":
        return f"whether {what} pays is inconclusive."
    return f"{what} pays from an acceptance of {crossed:.2f}."


def _sooner(row: dict[str, Any], soonest: pd.DataFrame) -> str:
    """The length of draft that pays from the lowest acceptance, where another one does."""
    first = next(iter(of_cell(soonest, row, analysis.OF_LENGTHS).to_dict("records")), row)
    if first["n_draft"] == row["n_draft"]:
        return "No other length that was measured pays sooner."
    said = f"{first['n_draft']} pays soonest, from {first['from']:.2f}, which reads low"
    return f"{said} ({sentences.among(first['from'], 'lengths')})."


def _steepest(model: str, calls: pd.DataFrame) -> Iterator[str]:
    """Where one token more makes a call of several dearest, if that is shown."""
    several = calls[(calls["n_tokens"] > 2) & calls["longer"].notna()].set_index("n_tokens")["longer"]
    n = max(several.index, key=lambda each: float(several[each].value), default=0)
    longer = stats.selected(several[n], len(several)) if n else None
    if longer is None or longer.above(1.0) != "holds":
        return
    yield (
        f"From {n - 1} to {n} tokens a call of {escaped(model)} grows most: it takes {longer:.2f} times as long "
        f"({sentences.among(longer, 'such steps')}). A draft of {n - 2} tokens needs the shorter call, a draft of "
        f"{n - 1} the longer one."
    )


def _gain(row: dict[str, Any]) -> str:
    ratio, both = sentences.quotient(row["ratio"], row["rate"], row["stock"], "tokens/s")
    return (
        f"At an acceptance of {row['accepts']:g} the build that keeps states gives {escaped(row['model'])} {ratio} as "
        f"many tokens a second as the released one {both}, in drafts of {row['n_draft']}."
    )


def lossless(recording: Recording) -> Markdown:
    """Whether every token was the target's own."""
    found = list(analysis.differences(recording.rows))
    every = analysis.processes(recording.rows)
    tokens = int(every[every["temperature"] == 0]["tokens"].sum())
    said = f"Of {tokens:,} tokens that were given out greedily, {len(found)} were not what plain decode chose"
    if not found:
        return Markdown(f"{said}: every such answer is the target's own, token by token.")
    ties = sum(gap <= BOTH_MOVE * rounding for gap, rounding in found)
    near = f"{ties} of these are near-ties: calls of that size alone move logits as far as the two tokens lie apart."
    return Markdown(f"{said}, in {len(set(found))} different places; {near}")


def act(recording: Recording) -> Markdown:
    """For which acceptance, draft and model drafting pays on this machine, in one sentence."""
    found = analysis.best(recording.rows, RATES)
    builds = [build for build in ("stock", BUILD) if build in set(found["build"])]
    return Markdown("**What to do:** " + " ".join(_best(found, build) for build in builds))


def _best(found: pd.DataFrame, build: str) -> str:
    found = found[(found["build"] == build) & (found["n_seq"] == 1)]
    found = found[found["how"].isin((analysis.NATIVE, analysis.PART))]
    found = found[found["n_prompt"] == found["n_prompt"].min()]
    said = []
    for model, group in found.groupby("model", sort=False):
        shown = [f"{_draft(row)} at {row['accepts']:g}" for row in group.sort_values("accepts").to_dict("records")]
        said.append(f"{escaped(str(model))}: {', '.join(shown)}")
    where = "As released" if build == "stock" else f"On the build `{build}`"
    return f"{where}, by the acceptance your drafter reaches, {'; '.join(said)}."


def _draft(row: dict[str, Any]) -> str:
    if not row["n_draft"]:
        return "do not draft"
    sure = row["speed"].above(1.0) == "holds"
    return f"draft {row['n_draft']}{'' if sure else ' (not shown to pay)'}"


def curves(recording: Recording, n_draft: int) -> pd.DataFrame:
    """Speed over plain decode against acceptance, by way back: `model`, `who`, `accepts`, `speed`."""
    found = _of(analysis.curves(recording.rows, SHOWN), n_draft=n_draft)
    found["who"] = [_way(row) for row in found.to_dict("records")]
    return found[["model", "who", "accepts", "speed"]]


def _way(row: dict[str, Any]) -> str:
    return str(row["how"]) + ("" if row["build"] == "stock" else f", build {row['build']}")


def columns(recording: Recording) -> pd.DataFrame:
    """What a call of several tokens costs over a call of one: `model`, `n_tokens`, `ratio`."""
    return _calls(recording.rows)[["model", "n_tokens", "ratio"]]


def _calls(rows: pd.DataFrame) -> pd.DataFrame:
    found = analysis.columns(rows)
    return found[(found["build"] == "stock") & (found["n_prompt"] == found["n_prompt"].min())]


def foretold(recording: Recording) -> Table | Markdown:
    """Calls of several tokens beside steps of as many sequences, which notebook 03 timed: both have as many columns."""
    earlier = read(STEPS, "recorded", recording.scale)
    if earlier is None:
        return Markdown(f"No step of several sequences is recorded at this scale: `plamo-study run {STEPS}`.")
    steps = batch_scaling.scaling(earlier.rows)
    steps = steps[(steps["build"] == batch_scaling.STOCK) & (steps["n_seq"] > 1)]
    found = _calls(recording.rows).merge(steps[["model", "n_seq", "factor"]].rename(columns={"n_seq": "n_tokens"}))
    found["step"] = [row.factor.per(row.n_tokens) for row in found.itertuples()]
    found["over"] = [row.ratio.value / row.step.value for row in found.itertuples()]
    columns: Columns = {
        "model": ("model", ""),
        "n_tokens": ("tokens or sequences", ""),
        "step": ("a step of so many sequences, over one (03)", ".2f"),
        "ratio": ("a call of so many tokens, over one", ".2f"),
        "over": ("call / step", ".2f"),
    }
    note = f"Steps are of {evidence.chips(earlier)}, calls of {evidence.chips(recording)}."
    return table(found, columns, note)


def split(recording: Recording, accepts: float) -> pd.DataFrame:
    """What a round of the usual draft is made of at an acceptance: `model`, `who`, `term`, `ms`, `order`."""
    found = _of(analysis.terms(recording.rows, accepts))
    entries = []
    for row in found.to_dict("records"):
        who = _way(row)
        for order, term in enumerate(TERMS):
            if row[term] is not None:
                entry = {"model": row["model"], "who": who, "term": term, "ms": row[term].value * MS, "order": order}
                entries.append(entry)
    return pd.DataFrame(entries, columns=["model", "who", "term", "ms", "order"])


def tax(recording: Recording, accepts: float) -> Table:
    """The terms of a round at an acceptance, and the share of it that taking back costs."""
    found = analysis.terms(recording.rows, accepts)
    found = found[found["n_prompt"] == found["n_prompt"].min()]
    columns: Columns = {
        "model": ("model", ""),
        "how": ("way back", ""),
        "n_draft": ("drafted", ""),
        "save": ("save (ms)", scaled(MS, ".2f")),
        "verify": ("verify (ms)", scaled(MS, ".2f")),
        "restore": ("restore (ms)", scaled(MS, ".2f")),
        "replay": ("replay (ms)", scaled(MS, ".2f")),
        "tax": ("save, restore, replay / round", ".0%"),
    }
    return table(found.sort_values(["model", "how", "n_draft"]), columns, f"At an acceptance of {accepts:g}.")


def agreement(recording: Recording) -> Markdown:
    """How many rounds took what their terms take alone, and which kind is furthest from it."""
    found = analysis.rounds(recording.rows)
    if found.empty:
        return Markdown("No round has its terms beside it.")
    share, kinds = found["close"].mean(), analysis.law(recording.rows).to_dict("records")
    worst = max(kinds, key=lambda row: abs(np.log(row["ratio"].value)))
    ratio = stats.selected(worst["ratio"], len(kinds))
    return Markdown(
        f"**{share:.0%} of {len(found):,} rounds lie within {analysis.LAW:.0%} of the sum of their terms.** Furthest "
        f"of {len(kinds)} kinds is {escaped(worst['model'])}, {worst['n_draft']} drafted, {worst['how']}: a round "
        f"takes {ratio:.2f} times the sum, with an interval that holds for all kinds."
    )


def redrawn(recording: Recording) -> Table:
    """What a call costs after one of another length, for which the engine builds its graph anew."""
    columns: Columns = {
        "model": ("model", ""),
        "n_tokens": ("tokens", ""),
        "kept": ("after a call as long (ms)", scaled(MS, ".2f")),
        "fresh": ("after another (ms)", scaled(MS, ".2f")),
        "ratio": ("another / as long", ".2f"),
    }
    return table(analysis.redrawn(recording.rows), columns, ratios={"ratio": ("fresh", "kept")})


def law(recording: Recording) -> Table:
    """Rounds against the sum of their terms, by kind."""
    columns: Columns = {
        "model": ("model", ""),
        "how": ("way back", ""),
        "n_draft": ("drafted", ""),
        "n_prompt": ("depth", ""),
        "rounds": ("rounds", ""),
        "share": (f"within {analysis.LAW:.0%}", ".0%"),
        "ratio": ("round / sum", ".2f"),
    }
    return table(analysis.law(recording.rows).sort_values(list(columns)[:4]), columns)


def break_even(recording: Recording) -> Table:
    """From which acceptance drafting pays, by model, build, way back, draft, depth and sequences."""
    found = analysis.break_even(recording.rows)
    found["from"] = [
        row["from"] if row["pays"] == "from" else row["pays"] for row in found[["from", "pays"]].to_dict("records")
    ]
    columns: Columns = {
        "model": ("model", ""),
        "build": ("build", ""),
        "how": ("way back", ""),
        "n_seq": ("sequences", ""),
        "n_prompt": ("depth", ""),
        "n_draft": ("drafted", ""),
        "from": ("pays from an acceptance of", lambda value: value if isinstance(value, str) else f"{value:.2f}"),
    }
    return table(found.sort_values(list(columns)[:6]), columns)


def forced(recording: Recording) -> Table:
    """Speeds measured at one acceptance, beside what rounds with every number of accepted tokens gave for it."""
    found = analysis.forced(recording.rows).sort_values(["model", "n_seq", "n_draft", "how", "accepts"])
    columns: Columns = {
        "model": ("model", ""),
        "how": ("way back", ""),
        "n_draft": ("drafted", ""),
        "accepts": ("acceptance", ""),
        "speed": ("times plain decode", ".2f"),
        "computed": ("computed", ".2f"),
        "ratio": ("measured / computed", ".2f"),
        "verdict": ("verdict", ""),
        "rate": ("tokens/s", significant(3)),
    }
    return table(found, columns, ratios={"ratio": ("speed", "computed")})


def beside(recording: Recording) -> Table | Markdown:
    """Tokens per second of the released engine and of the build that keeps states, at the same acceptances."""
    found = analysis.beside(recording.rows)
    if found.empty:
        return _unknown(recording)
    columns: Columns = {
        "model": ("model", ""),
        "n_prompt": ("depth", ""),
        "n_draft": ("drafted", ""),
        "accepts": ("acceptance", ""),
        "stock": ("as released (tokens/s)", significant(3)),
        "rate": ("keeping states (tokens/s)", significant(3)),
        "ratio": ("times as many", ".2f"),
    }
    note = f"Measured on {evidence.chips(recording)}."
    shown = found.sort_values(["model", "n_prompt", "n_draft", "accepts"])
    return table(shown, columns, note, {"ratio": ("rate", "stock")})


def _unknown(recording: Recording) -> Markdown:
    return Markdown(f"That build was not measured here: `{HOW_TO.format(recording.scale)}`.")


def gained(recording: Recording, accepts: float) -> Table | Markdown:
    """Times plain decode before and after, by length of the draft, depth and sequences, at an acceptance."""
    found = analysis.gained(recording.rows, accepts)
    if found.empty:
        return _unknown(recording)
    columns: Columns = {
        "model": ("model", ""),
        "n_seq": ("sequences", ""),
        "n_prompt": ("depth", ""),
        "n_draft": ("drafted", ""),
        "stock": ("as released, times plain", ".2f"),
        "speed": ("keeping states, times plain", ".2f"),
        "ratio": ("after / before", ".2f"),
    }
    note = (
        f"At an acceptance of {accepts:g}. Of several sequences the released engine verifies each in a call of its "
        f"own, because it mixes up their tokens in one; the other build corrects that too."
    )
    return table(found.sort_values(list(columns)[:4]), columns, note, {"ratio": ("speed", "stock")})


def on_text(recording: Recording) -> Table | Markdown:
    """Real drafters on real text: what they get right, and what it gives."""
    found = analysis.on_text(recording.rows)
    if found.empty:
        return Markdown("Nothing was drafted from a text at this scale: random weights continue none.")
    found["who"] = [_drafter(row) for row in found.to_dict("records")]
    found["target"] = found["model"] + " " + found["dtype"]
    kinds = found["text"].map({TEXT: "code", PROSE: "prose"})
    found["at"] = kinds.fillna(found["text"]) + found["temperature"].map(", {:g}".format)
    columns: Columns = {
        "target": ("target", ""),
        "who": ("drafter", ""),
        "at": ("text, temperature", ""),
        "n_draft": ("at most", ""),
        "drafts": ("rounds with a draft", ".0%"),
        "taken": ("accepted of drafted", ".0%"),
        "given": ("tokens a round", ".2f"),
        "speed": ("times plain decode", ".2f"),
        "places": ("right by place, if all before are", _places),
    }
    return table(found.sort_values(list(columns)[:4]), columns)


def servers(recording: Recording) -> Table | Markdown:
    """llama-server with the same drafts on the same prompts, beside our loop."""
    found = evidence.standing(recording, served.recorded)
    if not found:
        return Markdown(f"No server was asked here: `{served.MADE_BY}`.")
    lines = analysis.served(found)
    for name in ("ours", "theirs"):
        both = zip(lines[f"{name}_accepted"], lines[f"{name}_drafted"], strict=True)
        lines[name] = [f"{accepted} of {drafted}" if drafted else "" for accepted, drafted in both]
    speed = lambda value: significant(3)(value) if value else ""  # noqa: E731 # plain decode has none
    columns: Columns = {
        "model": ("model", ""),
        "drafter": ("who drafts", ""),
        "ours": ("accepted, our loop", ""),
        "theirs": ("accepted, llama-server", ""),
        "ours_speed": ("times plain, our loop", speed),
        "theirs_speed": ("times plain, llama-server", speed),
        "ratio": ("tokens/s, llama-server / our loop", ".2f"),
    }
    rounds = len({run.round for run in found.runs})
    note = f"At most {found.n_draft} tokens a draft, greedy, {rounds} rounds in turn, threads: {found.n_threads}."
    return table(lines, columns, note)


def _drafter(row: dict[str, Any]) -> str:
    return f"{row['draft']} {row['draft_dtype']}" if row["draft"] else "n-grams of the text"


def _places(shares: list[float]) -> str:
    return " ".join("–" if share != share else f"{share:.0%}" for share in shares)


def adapted(recording: Recording) -> Table:
    """A draft whose length adapts, beside the best fixed length in hindsight."""
    columns: Columns = {
        "model": ("model", ""),
        "accepts": ("acceptance", ""),
        "drawn": ("as drawn", ".2f"),
        "adapts": ("adapts, times plain", ".2f"),
        "n_draft": ("best fixed length", ""),
        "fixed": ("with it, times plain", ".2f"),
        "ratio": ("adapts / best fixed", ".2f"),
    }
    found = analysis.adapted(recording.rows).sort_values(["model", "accepts"])
    note = "Adapts: two tokens more after a draft that was right, one less after one that was not."
    if len(found):
        best = sentences.among(found["fixed"].iloc[0], "lengths")
        note += f" The best fixed length is {best}."
    return table(found, columns, note, {"ratio": ("adapts", "fixed")})


def binding(recording: Recording) -> Table | Markdown:
    """What `Llama.generate` of llama-cpp-python does with a draft model, by model."""
    rows = recording.rows
    found = rows[(rows["workload"] == "speculate") & (rows["back"] == "binding")].drop_duplicates(["model", "build"])
    if found.empty:
        return Markdown("`Llama.generate` was not tried at this scale.")
    entries = []
    for row in found.itertuples():
        said = f"{row.checks['same_tokens']:.0f} of {row.checks['tokens']:.0f} tokens" if row.status == "ok" else "none"
        entry = {"model": row.model, "tokens as without a draft": said, "verdict": row.verdict}
        entries.append(entry | {"ended with": row.failure or "all tokens"})
    return Table(pd.DataFrame(entries))


def published(recording: Recording) -> Table:
    """Published speed-ups of a larger model on our curve: the acceptance they imply where its rounds cost what ours do.

    A drafter's own cost is added: k steps of a model that has so much of the target's weights.
    """
    found = _usual(analysis.speed_ups(recording.rows))
    found = found[found["how"] == analysis.PART]
    entries = []
    for who, low, high, cost in PUBLISHED:
        for row in found.to_dict("records"):
            ratios = analysis.drafted_at(row, cost)
            fastest = float(np.median(ratios, axis=1).max())
            entry = {"published for plamo-2-8b": who, "times plain decode": f"{low} to {high}"}
            entry |= {"on the curve of": f"{row['model']}, {row['n_draft']} drafted"}
            said = [analysis.implied(ratios, speed) for speed in (low, high)]
            entry["implied acceptance"] = " to ".join(_implied(each) for each in said)
            entries.append(entry | {"the curve ends at": f"{fastest:.2f}"})
    return Table(pd.DataFrame(entries))


def _implied(acceptance: float) -> str:
    return "off the curve" if acceptance != acceptance else f"{acceptance:.2f}"


def heads(recording: Recording) -> Table:
    """What a head that drafts (MTP, EAGLE) would have to reach, were there one for PLaMo."""
    found = _single(analysis.speed_ups(recording.rows), "stock")
    entries = []
    for model, rows in found.groupby("model", sort=False):
        for layers in (1, 2):
            cost = layers / _layers(recording, model)
            entry = {"target": model, "head": f"{layers} layer{'s' if layers > 1 else ''}"}
            entry |= {"a drafted token costs, of a step": f"{cost:.0%}"}
            needs = {row["n_draft"]: _needs(row, cost) for row in rows.to_dict("records")}
            first = min(needs, key=lambda length: needs[length])
            wanted = "no acceptance" if np.isinf(needs[first]) else f"{needs[first]:.2f}, {first} drafted"
            entries.append(entry | {"acceptance it needs": wanted})
    lengths = found["n_draft"].nunique()
    return Table(pd.DataFrame(entries), f"{NO_HEADS} Each acceptance is the lowest of {lengths} lengths and reads low.")


def _needs(row: dict[str, Any], cost: float) -> float:
    """The acceptance from which drafted tokens of this cost pay: 0 where they always do, infinite where never."""
    ratios = analysis.drafted_at(row, cost)
    if np.median(ratios, axis=1).max() < 1:
        return float("inf")
    need = analysis.implied(ratios, 1.0)
    return 0.0 if np.isnan(need) else need


def _layers(recording: Recording, model: str) -> int:
    return int(recording.facts[model]["shape"]["layers"])


def cells(recording: Recording) -> Table:
    """Every cell: what was drafted, how it was taken back, how fast, and the verdict."""
    found = analysis.processes(recording.rows)
    entries = []
    for key, group in found.groupby(["build", *analysis.CELL], sort=False):
        entry: dict[str, Any] = dict(zip(["build", *analysis.CELL], key, strict=True))
        entry |= {"verdict": verdict_of(group["verdict"]), "rate": stats.median(group["rate"].tolist())}
        entry["who"] = entry["label"] or (f"{entry['accepts']:g} right" if entry["n_draft"] else "")
        entries.append(entry)
    columns: Columns = {
        "model": ("model", ""),
        "n_prompt": ("depth", ""),
        "n_seq": ("sequences", ""),
        "n_draft": ("drafted", ""),
        "who": ("drafter", ""),
        "how": ("way back", ""),
        "rate": ("tokens/s", significant(3)),
        "verdict": ("verdict", ""),
    }
    return table(pd.DataFrame(entries).sort_values(list(columns)[:6]), columns)
