"""Notebook 05's sentences and tables on depth: the words around numbers that come from rows."""

from typing import Any

import pandas as pd
from IPython.display import Markdown

from plamo_study.analysis import growth
from plamo_study.analysis.stats import Estimate
from plamo_study.measure import plan
from plamo_study.measure.recording import Recording
from plamo_study.present import evidence
from plamo_study.present.evidence import condition, escaped
from plamo_study.present.sentences import quotient
from plamo_study.present.tables import Columns, Table, noise, significant, table
from plamo_study.studies.context import analysis, prediction as arithmetic
from plamo_study.studies.context.claims import ALIKE, of_depth

ANSWER = 256  # output tokens of the request that the first paragraph speaks of
READ = {"prefill": "read", "decode": "written"}
VERBS = {"prefill": "reads", "decode": "writes"}
LAST_NEAR = ("alone", plan.DEPTH)  # the kind and depth of notebook 03's first cell
CELLS = {"ladder": "this notebook's first rung", "alone": "a context for these steps alone"}


def finding(recording: Recording, beside: Recording) -> Markdown:
    """The study in one paragraph, what surprises first: who falls behind at length, why, and what a window changes.

    `beside`: where an engine with the published window ran in the same blocks as one without.
    """
    found = of_first_pair(analysis.overtaking(recording.rows))
    sentences = [_faster(row) for row in found.to_dict("records")]
    if not found["hybrid"].str.contains(analysis.WITH_WINDOW).any():
        sentences += windowed(beside)
    sentences.append(_kept(recording, str(found["hybrid"].iloc[0])))
    said = evidence.disturbed(recording.rows) + headline(recording, found)
    listed = "\n".join(f"- {sentence}" for sentence in sentences)
    return Markdown(f"{said}\n\n{listed}\n\nCondition: {condition(recording)}")


def windowed(beside: Recording) -> list[str]:
    """What the window changes at the deepest where both engines ran in the same blocks: the same file, timed twice."""
    changed = analysis.explained(beside.rows)
    sentences = []
    for phase, group in changed.groupby("phase", sort=False):
        last = group.iloc[-1]
        verdict = {
            "holds": "That is shorter",
            "does not hold": "That is longer",
            "inconclusive": "No difference is shown",
        }
        pair = (last["windowed"].scaled(1e3), last["plain"].scaled(1e3))
        times, both = quotient(last["ratio"], *pair, "ms")
        sentences.append(
            f"With the window, a token {READ[str(phase)]} at {last['depth']:,} tokens takes {times} as long as without "
            f"it {both}. {verdict[last['ratio'].below(1.0)]}, judged from {last['ratio'].n} pairs of processes."
        )
    if not sentences:
        return []
    where = f"in the same blocks on {evidence.chips(beside)}, with prompts in parts of {_part(beside)} tokens"
    return [*sentences, f"These two builds, with the window and without, ran {where}. {_foretold(beside)}"]


def _part(recording: Recording) -> int:
    rows = recording.rows
    return int(rows[rows["workload"] == "depth"]["n_ubatch"].max())


def of_first_pair(found: pd.DataFrame) -> pd.DataFrame:
    """The comparisons with the first attention model: that of equal bytes, where it is there."""
    return found[found["other"] == found["other"].iloc[0]]


def headline(recording: Recording, found: pd.DataFrame) -> str:
    """Whether the window that llama.cpp leaves out is why the hybrid falls behind; `found` is of one pair."""
    behind = found["outcome"].str.contains("overtaken|slower")
    windowed = found["hybrid"].str.contains(analysis.WITH_WINDOW)
    hybrid, other = (escaped(str(found[name].iloc[0])) for name in ("hybrid", "other"))
    lost, still = (list(found[behind & kind]["phase"]) for kind in (~windowed, windowed))
    if not windowed.any():
        return (
            f"**llama.cpp leaves out the attention window that {hybrid} is published with, and in long contexts "
            f"{hybrid} {'falls behind' if lost else 'is not shown to fall behind'} {other}**."
        )
    n = int(recording.facts[str(found[windowed]["hybrid"].iloc[0])]["shape"]["window"])
    left_out = f"llama.cpp leaves out the window of {n:,} tokens that its publisher gives its attention layers"
    if lost and not still:
        return f"**In long contexts {hybrid} falls behind {other}, and the engine is why**: {left_out}."
    if lost and len(still) < len(lost):
        return (
            f"**In long contexts {hybrid} falls behind {other}, in part because of the engine**: {left_out}. With the "
            f"window it falls behind only where it {VERBS[still[0]]}."
        )
    if lost:
        return (
            f"**In long contexts {hybrid} falls behind {other}, with its window and without**: {left_out}, and that "
            "alone does not explain it."
        )
    return f"**{hybrid} is nowhere shown to fall behind {other}**, though {left_out}."


def _faster(row: dict[str, Any]) -> str:
    times, rates = quotient(row["last"], row["own"], row["theirs"], "tokens per second")
    how = "With the window" if analysis.WITH_WINDOW in row["hybrid"] else "As released"
    return (
        f"{how} it {VERBS[row['phase']]} {times} as fast as {escaped(row['other'])} at {row['deepest']:,} tokens "
        f"{rates}. It {said(row)}."
    )


def _foretold(recording: Recording) -> str:
    """What the number of keys that a token looks at predicts of who falls behind, for each hybrid."""
    data = of_first_pair(arithmetic.meeting_points(recording.rows, recording.facts)).drop_duplicates("hybrid")
    said = [
        f"with{'' if analysis.WITH_WINDOW in row['hybrid'] else 'out'} the window "
        f"{_met(row['keys'], row['keys_first'])}"
        for row in data.to_dict("records")
    ]
    return (
        f"A new token of the hybrid looks at fewer keys than one of {escaped(str(data['other'].iloc[0]))}, counted in "
        f"tokens of depth: {'; '.join(said)}."
    )


def contrast(recording: Recording) -> Markdown:
    """The same sentences on another recording: what the keys foretell, who is faster, and under which condition."""
    found = of_first_pair(analysis.overtaking(recording.rows))
    lines = [_foretold(recording), *(_faster(row) for row in found.to_dict("records"))]
    listed = "\n".join(f"- {line}" for line in lines)
    return Markdown(f"{evidence.disturbed(recording.rows)}{listed}\n\nCondition: {condition(recording)}")


def _kept(recording: Recording, model: str) -> str:
    rates, taken = analysis.rates(recording.rows), analysis.takeover(recording.rows, analysis.knots(recording.facts))
    last = rates[rates["model"] == model].groupby("phase").last()
    at = taken[(taken["model"] == model) & (taken["n_out"] == ANSWER)].iloc[0]
    return (
        f"At {last['depth'].max():,} tokens {escaped(model)} reads at {last.loc['prefill', 'share']:.0%} of its speed "
        f"in an empty context, and writes at {last.loc['decode', 'share']:.0%}. When it answers with {ANSWER} tokens, "
        f"reading takes longer than writing from {_tokens(at)} tokens of context on."
    )


def overtaken(recording: Recording) -> list[str]:
    """Who is faster at depth, a sentence for each phase and each hybrid of the first pair."""
    return [
        f"{row['phase'].capitalize()}, {escaped(row['hybrid'])} against {escaped(row['other'])}: the hybrid {said(row)}"
        for row in of_first_pair(analysis.overtaking(recording.rows)).to_dict("records")
    ]


def said(row: dict[str, Any]) -> str:
    """An outcome of `context.overtaking` in words."""
    at, deepest = depth(row["depth"]), f"{row['deepest']:,} tokens"
    words = {
        "faster throughout": "is faster at every depth measured",
        "faster in the end": f"is faster at {deepest} and at no depth shown to be slower",
        "slower throughout": "is slower at every depth measured",
        "slower in the end": f"is slower at {deepest} and at no depth shown to be faster",
        "overtakes": f"is slower at first and overtakes at {at}",
        "overtakes again": f"is faster at first, falls behind, and overtakes at {at}",
        "is overtaken": f"is faster at first and is overtaken at {at}",
        "is overtaken again": f"is slower at first, gets ahead, and is overtaken at {at}",
        "inconclusive": f"is neither shown to be faster nor to be slower at {deepest}: inconclusive",
    }
    return words[row["outcome"]]


def depth(at: Estimate) -> str:
    """A depth with its interval, whose bounds may lie outside what was measured."""
    if at.value != at.value:
        return "no depth"
    middle, bounds = f"{at.value:,.0f} tokens", f"{at:,.0f}".partition(" ")[2]
    return f"{middle} {bounds.replace('-inf', 'the beginning').replace('inf', 'beyond the deepest')}"


def _tokens(row: Any) -> str:
    tokens: Estimate = row["tokens"]
    if tokens.value != tokens.value:
        return "no number of"
    return f"{significant(2)(tokens)}" + (" (extrapolated)" if row["extrapolated"] else "")


def guess(recording: Recording, guessed: float) -> Markdown:
    """The reader's guess beside how much longer the hybrid takes to read a token at the deepest than at the start."""
    data, hybrid = analysis.doubling(recording.rows), analysis.pairs(recording.rows)[0][0]
    last = data[(data["model"] == hybrid) & (data["phase"] == "prefill")]["last"].iloc[0]
    return evidence.guessed(guessed, last)


def rates(recording: Recording) -> Table:
    """Both rates by depth."""
    found = analysis.rates(recording.rows)
    wide = found.set_index(["model", "depth", "phase"]).unstack("phase")
    wide.columns = pd.Index([f"{name}_{phase}" for name, phase in wide.columns])
    for phase in analysis.PHASES:
        at_first = wide[f"rate_{phase}"].groupby(level="model").first()
        wide[f"first_{phase}"] = wide.index.get_level_values("model").map(at_first)
    ratios = analysis.asymmetry(recording.rows).set_index(["model", "depth"])["ratio"]
    columns: Columns = {
        "model": ("model", ""),
        "depth": ("depth (tokens)", ",d"),
        "rate_prefill": ("prefill (t/s)", significant(3)),
        "share_prefill": ("of that at 0", ".0%"),
        "rate_decode": ("decode (t/s)", significant(3)),
        "share_decode": ("of that at 0 ", ".0%"),
        "ratio": ("prefill / decode", ".2f"),
        "noise_decode": ("variation of decode", noise),
    }
    beside = {f"share_{phase}": (f"rate_{phase}", f"first_{phase}") for phase in analysis.PHASES}
    beside["ratio"] = ("rate_prefill", "rate_decode")
    return table(wide.join(ratios).reset_index(), columns, ratios=beside)


def prediction(recording: Recording) -> Table:
    """What arithmetic says of the first and the last depth before anything is timed."""
    data = arithmetic.prediction(recording.rows, recording.facts)
    ends = data.groupby(["model", "phase"]).agg({"depth": ["min", "max"]}).stack(future_stack=True).reset_index()
    data = data.merge(ends[["model", "phase", "depth"]], on=["model", "phase", "depth"])
    columns: Columns = {
        "model": ("model", ""),
        "phase": ("phase", ""),
        "depth": ("depth", ",d"),
        "flops": ("GFLOP per token", significant(3, 1e-9)),
        "bytes": ("MB moved per token", significant(3, 1e-6)),
        "bound": ("nearer ceiling", ""),
        "low": ("at least (ms)", significant(3, 1e3)),
        "high": ("at most (ms)", significant(3, 1e3)),
    }
    return table(data, columns)


def meeting_points(recording: Recording) -> Table:
    """Where the hybrid should be overtaken, by the keys a token looks at and by all its work; and where it was."""
    data = arithmetic.meeting_points(recording.rows, recording.facts)
    measured = analysis.overtaking(recording.rows)
    data = data.merge(measured[["hybrid", "other", "phase", "outcome", "depth", "deepest"]])
    for name in ("keys", "sliding", "whole"):
        data[name] = [_met(row[name], row[f"{name}_first"]) for row in data.to_dict("records")]
    data["measured"] = [said(row) for row in data.to_dict("records")]
    columns: Columns = {
        "hybrid": ("hybrid", ""),
        "other": ("attention", ""),
        "phase": ("phase", ""),
        "keys": ("it looks at fewer keys", ""),
        "sliding": ("it needs less work", ""),
        "whole": ("if attention had no window", ""),
        "measured": ("measured: the hybrid", ""),
    }
    return table(data, columns)


def _met(turns: list[float], first: bool) -> str:
    """Where something holds that turns at these depths and holds, or does not, at first."""
    ends = [0.0, *turns] if first else list(turns)
    if not ends:
        return "at no depth"
    if ends == [0.0]:
        return "at every depth"
    spans = [ends[k : k + 2] for k in range(0, len(ends), 2)]
    closed, still = spans[: len(ends) // 2], spans[len(ends) // 2 :]
    said = [f"from {begin:,.0f} to {to:,.0f}" if begin else f"up to {to:,.0f}" for begin, to in closed]
    return " and ".join([*said, *(f"from {begin:,.0f} on" for (begin,) in still)])


def beginnings(recording: Recording) -> Table:
    """Decode near the beginning by kind of cell: why two notebooks printed two ratios."""
    data = analysis.beginnings(recording.rows)
    columns: Columns = {
        "kind": ("measured in", CELLS.__getitem__),
        "depth": ("depth", ""),
        "hybrid": ("hybrid", ""),
        "own": ("ms per step", significant(3, 1e3)),
        "other": ("attention", ""),
        "theirs": ("ms per step ", significant(3, 1e3)),
        "ratio": ("attention's time / hybrid's", ".2f"),
    }
    return table(data, columns, ratios={"ratio": ("theirs", "own")})


def near(recording: Recording) -> Markdown:
    """Whether kind of cell or machine is why two notebooks printed two ratios for a decode step near the beginning."""
    data = analysis.beginnings(recording.rows)
    first = data[data["hybrid"] == data["hybrid"].iloc[0]]
    rung, cell = (first[(first["kind"] == kind) & (first["depth"] == at)] for kind, at in (("ladder", 0), LAST_NEAR))
    if not len(rung) or not len(cell):
        return Markdown("Only one of the two kinds of cell was measured here.")
    change: Estimate = analysis.kinds_compared(recording.rows)
    held = change.within(1 / (1 + ALIKE), 1 + ALIKE)
    why = {
        "holds": f"They are alike within {ALIKE:.0%}. So the kind of cell does not matter: the machine is what the "
        "notebooks disagreed on",
        "does not hold": "They differ: the kind of cell matters, and a ratio near the beginning must name it",
        "inconclusive": f"Inconclusive: they are neither shown to be alike within {ALIKE:.0%} nor shown to differ",
    }
    return Markdown(
        f"Attention takes {rung['ratio'].iloc[0]:.2f} times the hybrid's time on the first rung and "
        f"{cell['ratio'].iloc[0]:.2f} times in notebook 03's cell. The first divided by the second is {change:.2f}. "
        f"{why[held]}."
    )


def past_window(recording: Recording) -> Table:
    """The oracle's verdict on texts longer than the window, by build; and what a missing window would have shown."""
    rows = recording.rows[recording.rows["workload"] == "gate"]
    entries = [
        {"model": row.model, "tokens": row.n_prompt, "verdict": row.verdict}
        | {name: row.checks.get(name, float("nan")) for name in ("prefill_error", "decode_error", "without_window")}
        for row in rows.itertuples()
    ]
    columns: Columns = {
        "model": ("model", ""),
        "tokens": ("tokens", ",d"),
        "prefill_error": ("error of one call", ".1e"),
        "decode_error": ("error of single steps", ".1e"),
        "verdict": ("verdict", ""),
        "without_window": ("error against an oracle without the window", ".1e"),
    }
    return table(pd.DataFrame(entries), columns)


def explained(recording: Recording) -> Table:
    """What the published window changes in the hybrid's times, by depth."""
    wide = analysis.explained(recording.rows).pivot_table(index=["model", "depth"], columns="phase", values="ratio",
                                                       aggfunc="first").reset_index()  # fmt: skip
    columns: Columns = {
        "model": ("model", ""),
        "depth": ("depth", ",d"),
        "prefill": ("prefill: time with window / without", ".2f"),
        "decode": ("decode: time with window / without", ".2f"),
    }
    return table(wide, columns)


def against_prediction(recording: Recording) -> Table:
    """Measured medians beside the predicted band, every depth."""
    data = arithmetic.against_prediction(recording.rows, recording.facts)
    band = [f"{significant(3, 1e3)(r['low'])} to {significant(3, 1e3)(r['high'])}" for r in data.to_dict("records")]
    columns: Columns = {
        "model": ("model", ""),
        "phase": ("phase", ""),
        "depth": ("depth", ",d"),
        "band": ("predicted (ms per token)", ""),
        "measured": ("measured (ms per token)", significant(3, 1e3)),
        "miss": ("times the band's edge", ".2f"),
    }
    return table(data.assign(band=band), columns)


def attention_rates(recording: Recording) -> Table:
    """At which rate attention runs, from what a token of depth adds."""
    columns: Columns = {
        "model": ("model", ""),
        "phase": ("time per token of", ""),
        "added": ("added per 1,000 tokens of depth (ms)", significant(3, 1e6)),
        "allowed": ("ceilings allow (ms)", significant(3, 1e6)),
        "rate": ("attention's rate (GFLOP/s)", significant(3, 1e-9)),
        "share": ("of the matrix ceiling", ".0%"),
    }
    return table(arithmetic.attention_rates(recording.rows, recording.facts), columns)


def filling(recording: Recording) -> Table:
    """Filled memories against computed ones."""
    columns: Columns = {
        "model": ("model", ""),
        "phase": ("phase", ""),
        "depth": ("depth", ",d"),
        "ratio": ("time in a filled memory / in a computed one", ".3f"),
    }
    return table(analysis.filling(recording.rows), columns)


def laws(recording: Recording) -> Table:
    """The growth laws, their strength and their coefficients."""
    data = analysis.laws(recording.rows, analysis.knots(recording.facts))
    data["formula"] = [_formula(law, c) for law, c in zip(data["law"], data["coefficients"], strict=True)]
    data["alone"] = [f"{r['chosen_by']} of {r['n']}" for r in data.to_dict("records")]
    data["used"] = ["yes" if fits else "no" for fits in data["fits"]]
    columns: Columns = {
        "model": ("model", ""),
        "phase": ("time per token of", ""),
        "law": ("law", ""),
        "strength": ("beats simpler laws by (BIC)", ".1f"),
        "alone": ("processes that choose it alone", ""),
        "formula": ("ms; ms per 1,000 tokens; added per square, or by the bend", ""),
        "worst": ("largest miss of the law", "+.1%"),
        "used": ("fits well enough to be used", ""),
    }
    return table(data, columns)


def doubling(recording: Recording) -> Table:
    """How much longer a token takes at the deepest, and where it takes twice as long as at the beginning."""
    data = analysis.doubling(recording.rows)
    columns: Columns = {
        "model": ("model", ""),
        "phase": ("phase", ""),
        "deepest": ("deepest (tokens)", ",d"),
        "last": ("time of a token there / at 0", ".2f"),
        "depth": ("twice as long at", _doubled),
    }
    return table(data, columns)


def _doubled(at: Estimate) -> str:
    return depth(at) if at.value == at.value else "beyond the deepest measured"


def _formula(law: str, coefficients: tuple[Estimate, ...]) -> str:
    powers = (0, 1, 1 if law == growth.BENT else 2)
    shown = [significant(3, 1e3 * 1e3**power)(c) for power, c in zip(powers, coefficients, strict=False)]
    return "; ".join(shown)


def takeover(recording: Recording) -> Table:
    """The practical maximum of the context, as a function of the answer's length."""
    data = analysis.takeover(recording.rows, analysis.knots(recording.facts))
    data["shown"] = [_tokens(row) for row in data.to_dict("records")]
    wide = data.pivot_table(index="n_out", columns="model", values="shown", aggfunc="first").reset_index()
    return Table(wide.rename(columns={"n_out": "output tokens"}).rename_axis(columns=None))


def compared(recording: Recording) -> Table:
    """The hybrid against attention, by depth."""
    columns: Columns = {
        "phase": ("phase", ""),
        "hybrid": ("hybrid", ""),
        "other": ("attention", ""),
        "depth": ("depth", ",d"),
        "ratio": ("attention's time / hybrid's", ".2f"),
    }
    return table(analysis.compared(recording.rows), columns)


def checked_claims(recording: Recording) -> Table:
    """Every claim on depth with its estimate, its threshold and its verdict."""
    return evidence.claims(of_depth(recording.rows))


def takeaway(recording: Recording) -> Markdown:
    """Who overtakes whom, what a token costs at the deepest, then the claims that did not hold."""
    lines = [f"- {sentence}." for sentence in overtaken(recording)]
    for model, group in analysis.doubling(recording.rows).groupby("model", sort=False):
        times = {row["phase"]: row for row in group.to_dict("records")}
        read, written = (f"{times[phase]['last']:.2f}" for phase in analysis.PHASES)
        lines.append(
            f"- **{escaped(str(model))}**: at {times['decode']['deepest']:,} tokens a token takes {read} times as long "
            f"to read, and {written} times as long to write, as at the beginning."
        )
    checked = of_depth(recording.rows)
    open_claims = checked[checked["verdict"] != "holds"]
    lines += [
        f"- {r['verdict'].capitalize()}: {r['claim']} ({escaped(r['model'])})" for r in open_claims.to_dict("records")
    ]
    return Markdown("\n".join(lines))
