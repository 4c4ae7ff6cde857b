"""Notebook 05's sentences and tables on depth: the words around numbers that come from rows."""

from typing import Any

import pandas as pd
from IPython.display import Markdown

from plamo_study.analysis import context as study
from plamo_study.analysis import context_prediction as arithmetic
from plamo_study.analysis import growth
from plamo_study.analysis.context_claims import of_depth
from plamo_study.analysis.stats import Estimate
from plamo_study.measure.collect import Recording
from plamo_study.present import evidence
from plamo_study.present.evidence import condition, escaped
from plamo_study.present.tables import Columns, Table, noise, significant, table

ANSWER = 256  # output tokens of the request that the first paragraph speaks of


def finding(recording: Recording) -> Markdown:
    """The study in one paragraph: number, unit, interval, condition, verdicts."""
    rates, taken = study.rates(recording.rows), study.takeover(recording.rows, study.knots(recording.facts))
    parts = []
    for model in dict.fromkeys(rates["model"]):
        last = rates[rates["model"] == model].groupby("phase").last()
        depth = last["depth"].max()
        kept = f"{last.loc['prefill', 'share']:.0%} of its prefill rate and {last.loc['decode', 'share']:.0%}"
        at = taken[(taken["model"] == model) & (taken["n_out"] == ANSWER)].iloc[0]
        parts.append(
            f"**{escaped(str(model))} keeps {kept} of its decode rate at {depth:,} tokens**; "
            f"with {ANSWER} output tokens prefill takes over a request at {_tokens(at)} tokens of context"
        )
    sentences = [*parts, *overtaken(recording, of_first=True)]
    said = evidence.disturbed(recording.rows) + ". ".join(sentences)
    return Markdown(said + f". Condition: {condition(recording)}")


def overtaken(recording: Recording, of_first: bool = False) -> list[str]:
    """Who is faster at depth, one sentence a phase and pair; or of the first pair only, of equal bytes if there."""
    sentences = []
    found = study.overtaking(recording.rows, study.knots(recording.facts))
    found = found[found["other"] == found["other"].iloc[0]] if of_first else found
    for row in found.to_dict("records"):
        pair = f"{row['phase'].capitalize()}, {escaped(row['hybrid'])} against {escaped(row['other'])}"
        sentences.append(f"{pair}: the hybrid {said(row)}")
    return sentences


def said(row: dict[str, Any]) -> str:
    """An outcome of `context.overtaking` in words."""
    at = f"{significant(2)(row['depth'])} tokens" if row["depth"].value == row["depth"].value else ""
    deepest, last = f"{row['deepest']:,} tokens", f"{row['last']:.2f} times its speed at the deepest"
    words = {
        "faster throughout": f"is faster at every depth to {deepest} ({last})",
        "faster in the end": f"is faster at {deepest} ({last}) and at no depth shown to be slower",
        "slower throughout": f"is slower at every depth to {deepest} ({last}) and, by the fitted laws, beyond",
        "slower in the end": f"is slower at {deepest} ({last}) and, by the laws, beyond; nowhere is it shown faster",
        "slower, overtaking by its law": f"is slower at {deepest} ({last}); its law overtakes at {at} (extrapolated)",
        "overtakes": f"overtakes at {at} ({last})",
        "overtakes again": f"begins faster, falls behind and overtakes at {at} ({last})",
        "is overtaken": f"is overtaken at {at} ({last})",
        "is overtaken again": f"begins slower, gets ahead and is overtaken at {at} ({last})",
        "inconclusive": f"and the other are not told apart at {deepest} ({last}): inconclusive",
    }
    return words[row["outcome"]]


def _tokens(row: Any) -> str:
    found: Estimate = row["tokens"]
    if found.value != found.value:
        return "no number of"
    return f"{significant(2)(found)}" + (" (extrapolated)" if row["extrapolated"] else "")


def guess(recording: Recording, guessed: float) -> Markdown:
    """The reader's guess beside how much longer a step of the first model takes at the deepest."""
    rates = study.rates(recording.rows)
    share: Estimate = rates[rates["phase"] == "prefill"]["share"].groupby(rates["model"]).last().iloc[0]
    return evidence.guessed(guessed, share.per(1.0))


def rates(recording: Recording) -> Table:
    """Both rates by depth."""
    found = study.rates(recording.rows)
    wide = found.set_index(["model", "depth", "phase"]).unstack("phase")
    wide.columns = pd.Index([f"{name}_{phase}" for name, phase in wide.columns])
    ratios = study.asymmetry(recording.rows).set_index(["model", "depth"])["ratio"]
    columns: Columns = {
        "model": ("model", ""),
        "depth": ("depth (tokens)", ",d"),
        "rate_prefill": ("prefill (t/s)", significant(3)),
        "share_prefill": ("of that at 0", ".0%"),
        "rate_decode": ("decode (t/s)", significant(3)),
        "share_decode": ("of that at 0 ", ".0%"),
        "ratio": ("prefill / decode", ".2f"),
        "noise_decode": ("variation of decode", noise),
        "n_decode": ("processes", ""),
    }
    return table(wide.join(ratios).reset_index(), columns)


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
    """Where arithmetic lets the hybrid overtake, with the sliding window and without."""
    data = arithmetic.meeting_points(recording.rows, recording.facts)
    for name in ("sliding", "whole"):
        data[name] = [_met(row[name], row[f"{name}_first"]) for row in data.to_dict("records")]
    columns: Columns = {
        "phase": ("phase", ""),
        "hybrid": ("hybrid", ""),
        "other": ("attention", ""),
        "sliding": ("the hybrid needs less (tokens), sliding window", ""),
        "whole": ("if every layer saw everything", ""),
    }
    return table(data, columns)


def _met(depth: float, first: bool) -> str:
    if depth != depth:
        return "at every depth" if first else "at no depth"
    return f"up to {depth:,.0f}" if first else f"from {depth:,.0f} on"


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
    return table(study.filling(recording.rows), columns)


def laws(recording: Recording) -> Table:
    """The growth laws, their strength and their coefficients."""
    data = study.laws(recording.rows, study.knots(recording.facts))
    data["formula"] = [_formula(law, c) for law, c in zip(data["law"], data["coefficients"], strict=True)]
    data["alone"] = [f"{r['chosen_by']} of {r['n']}" for r in data.to_dict("records")]
    columns: Columns = {
        "model": ("model", ""),
        "phase": ("time per token of", ""),
        "law": ("law", ""),
        "strength": ("beats simpler laws by (BIC)", ".1f"),
        "alone": ("processes that choose it alone", ""),
        "formula": ("ms; ms per 1,000 tokens; added per square, or by the bend", ""),
        "doubling": ("twice the time at", doubled),
        "worst": ("largest miss of the law", "+.1%"),
    }
    return table(data, columns)


def doubled(depth: Estimate) -> str:
    """A depth that a law may not reach."""
    return "no depth" if depth.value != depth.value else f"a depth of {significant(2)(depth)} tokens"


def _formula(law: str, coefficients: tuple[Estimate, ...]) -> str:
    powers = (0, 1, 1 if law == growth.BENT else 2)
    shown = [significant(3, 1e3 * 1e3**power)(c) for power, c in zip(powers, coefficients, strict=False)]
    return "; ".join(shown)


def takeover(recording: Recording) -> Table:
    """The practical maximum of the context, as a function of the answer's length."""
    data = study.takeover(recording.rows, study.knots(recording.facts))
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
    return table(study.compared(recording.rows), columns)


def checked_claims(recording: Recording) -> Table:
    """Every claim on depth with its estimate, its threshold and its verdict."""
    return evidence.claims(of_depth(recording.rows, recording.facts))


def takeaway(recording: Recording) -> Markdown:
    """One sentence a model with its laws, who overtakes whom, then the claims that did not hold."""
    found = study.laws(recording.rows, study.knots(recording.facts)).set_index(["model", "phase"])
    lines = []
    for model in dict.fromkeys(found.index.get_level_values("model")):
        told = [_law(str(phase), found.loc[(model, phase)]) for phase in study.PHASES if (model, phase) in found.index]
        lines.append(f"- **{escaped(str(model))}**: {'; '.join(told)}.")
    lines += [f"- {sentence}." for sentence in overtaken(recording)]
    checked = of_depth(recording.rows, recording.facts)
    open_claims = checked[checked["verdict"] != "holds"]
    lines += [f"- {r['verdict']}: {r['claim']} ({escaped(r['model'])})" for r in open_claims.to_dict("records")]
    return Markdown("\n".join(lines))


def _law(phase: str, law: pd.Series) -> str:
    agreed, twice = f"{law['chosen_by']} of {law['n']} processes alone say so", doubled(law["doubling"])
    return f"the time of a token of {phase} is {law['law']} in depth ({agreed}), doubled at {twice}"
