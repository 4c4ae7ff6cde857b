"""Notebook 01's sentences and tables: the words around numbers that come from rows, never the other way round."""

import pandas as pd
from IPython.display import Markdown

from plamo_study.analysis import own_ceilings
from plamo_study.analysis.stats import Estimate
from plamo_study.analysis.usable import model_names
from plamo_study.measure.recording import Recording
from plamo_study.present import evidence, published, sentences
from plamo_study.present.evidence import CEILINGS, condition, escaped
from plamo_study.present.tables import Columns, Table, noise, significant, table
from plamo_study.studies.phase_asymmetry import analysis, prediction as arithmetic
from plamo_study.studies.phase_asymmetry.claims import claims


def finding(recording: Recording) -> Markdown:
    """The study in one paragraph: number, unit, interval, condition, verdicts."""
    rows = recording.rows
    ratios = analysis.asymmetry(rows).set_index("model")["ratio"]
    fast, slow = analysis.prefill(rows), analysis.decode(rows, (512,))
    parts = []
    for model, ratio in ratios.items():
        prefill = fast[(fast["model"] == model) & (fast["n_prompt"] == 512)]["rate"].iloc[0]
        decode = slow[slow["model"] == model]["rate"].iloc[0]
        times, rates = sentences.quotient(ratio, prefill, decode, "tokens per second", ".1f")
        parts.append(f"**{escaped(str(model))} reads {times} as fast as it writes** {rates}")
    return Markdown(
        evidence.disturbed(rows)
        + "; ".join(parts)
        + f".\n\nCondition: prompts of 512 tokens, 512 output tokens, one sequence, {condition(recording)}"
    )


def takeaway(recording: Recording) -> Markdown:
    """One sentence a model with its numbers and their condition, then the claims that did not hold."""
    rows = recording.rows
    table = arithmetic.against_prediction(rows, recording.facts).set_index(["model", "what"])
    gains, cross = analysis.thread_gains(rows), analysis.crossover(rows).set_index(["model", "n_prompt"])["tokens"]
    lines = []
    for model in model_names(rows):
        fast, slow = table.loc[(model, "prefill 512")], table.loc[(model, "decode step")]
        more = {phase: _gain(gains, phase, model) for phase in ("prefill", "decode")}
        upper, lower = (CEILINGS[own_ceilings.CEILING[phase["bound"]]] for phase in (fast, slow))
        lines.append(
            f"- **{escaped(model)}**: prefill reaches {fast['of_usual']:.0%} of the {upper} measured beside it"
            f"{more['prefill']}; a decode step reaches {slow['of_usual']:.0%} of the {lower}{more['decode']}. "
            f"With 512 input tokens, a request of more than {cross[model, 512]:.0f} output tokens is decode-bound."
        )
    checked = claims(rows, recording.facts)
    open_claims = checked[checked["verdict"] != "holds"]
    lines += [f"- {r['verdict']}: {r['claim']} ({escaped(r['model'])})" for r in open_claims.to_dict("records")]
    return Markdown("\n".join(lines))


def _gain(gains: dict[tuple[str, str], pd.Series], phase: str, model: str) -> str:
    """What twice the threads give, where that was measured."""
    times = gains.get((phase, model))
    return "" if times is None else f", and twice the threads make it {analysis.gain_estimate(times):.2f} times as fast"


def guess(recording: Recording, guessed: float) -> Markdown:
    """The reader's guess beside the measured ratio of the first model."""
    ratio: Estimate = analysis.asymmetry(recording.rows)["ratio"].iloc[0]
    return evidence.guessed(guessed, ratio)


def prediction(recording: Recording) -> Table:
    """What arithmetic says before anything is timed."""
    columns: Columns = {
        "model": ("model", ""),
        "what": ("what", ""),
        "flops": ("GFLOP", significant(3, 1e-9)),
        "bytes": ("GB moved", significant(3, 1e-9)),
        "bound": ("nearer ceiling", ""),
        "low": ("at least (s)", significant(3)),
        "high": ("at most (s)", significant(3)),
    }
    return table(arithmetic.prediction(recording.rows, recording.facts), columns)


def against_prediction(recording: Recording) -> Table:
    """Measured medians beside the predicted band, and how much of the nearer ceiling was reached."""
    data = arithmetic.against_prediction(recording.rows, recording.facts)
    band = [f"{significant(2)(r['low'])} to {significant(2)(r['high'])}" for r in data.to_dict("records")]
    columns: Columns = {
        "model": ("model", ""),
        "what": ("what", ""),
        "band": ("predicted (s)", ""),
        "measured": ("measured (s)", significant(3)),
        "miss": ("times the band's edge", ".2f"),
        "bound": ("nearer ceiling", ""),
        "of_best": ("of its best sample", ".0%"),
        "of_usual": ("of it in the same blocks", ".0%"),
    }
    return table(data.assign(band=band), columns)


def prefill(recording: Recording) -> Table:
    """Prefill by prompt length."""
    columns: Columns = {
        "model": ("model", ""),
        "n_prompt": ("prompt tokens", ""),
        "rate": ("prefill rate (t/s)", significant(3)),
        "ttft": ("TTFT, median (ms)", significant(3, 1e3)),
        "ttft_p95": ("TTFT, p95 (ms)", significant(3, 1e3)),
        "noise": ("variation", noise),
        "n": ("processes", ""),
    }
    return table(analysis.prefill(recording.rows), columns)


def decode(recording: Recording) -> Table:
    """Decode by output length."""
    columns: Columns = {
        "model": ("model", ""),
        "generated": ("output tokens", ""),
        "seconds": ("time (s)", significant(3)),
        "rate": ("decode rate (t/s)", significant(3)),
        "itl": ("ITL, median (ms)", significant(3, 1e3)),
        "itl_p95": ("ITL, p95 (ms)", significant(3, 1e3)),
        "noise": ("variation", noise),
        "n": ("processes", ""),
    }
    return table(analysis.decode(recording.rows).sort_values(["model", "generated"]), columns)


def asymmetry(recording: Recording) -> Table:
    """The ratio of the two phases' rates."""
    return table(
        analysis.asymmetry(recording.rows), {"model": ("model", ""), "ratio": ("prefill rate / decode rate", ".2f")}
    )


def crossover(recording: Recording) -> Table:
    """Where a request turns from prefill-bound to decode-bound."""
    columns: Columns = {
        "model": ("model", ""),
        "n_prompt": ("prompt tokens", ""),
        "tokens": ("output tokens of equal time", ".0f"),
    }
    return table(analysis.crossover(recording.rows), columns)


def gains(recording: Recording) -> Table:
    """What full threads gain over half of them."""
    data = analysis.threads_experiment(recording.rows)
    data = data.assign(what=[CEILINGS.get(what, what) for what in data["what"]])
    return table(data, {"what": ("what", ""), "model": ("model", ""), "gain": ("gain", ".2f")})


def checked_claims(recording: Recording) -> Table:
    """Every claim of the text with its estimate, its threshold and its verdict."""
    return evidence.claims(claims(recording.rows, recording.facts))


def offload(recording: Recording) -> Table | Markdown:
    """CPU against GPU where layers can be offloaded, and a plain sentence where they cannot."""
    data = analysis.offload(recording.rows)
    if data.empty:
        return Markdown("No layers were offloaded on this machine: every number here is the CPU's.")
    return table(data, {"model": ("model", ""), "phase": ("phase", ""), "gain": ("GPU over CPU", ".2f")})


def beside_published(recording: Recording) -> Table:
    """The M4 Pro's figures beside ours: other machine, build and weights, so only the pattern compares."""
    theirs = published.load("m4-pro-b9596")
    theirs = theirs[(theirs["n_seq"] == 1) & theirs["value"].notna()]
    fast = {
        (r["model"].rstrip("*"), r["n_prompt"]): r["rate"] for r in analysis.prefill(recording.rows).to_dict("records")
    }
    slow = {
        (r["model"].rstrip("*"), r["generated"]): r["rate"] for r in analysis.decode(recording.rows).to_dict("records")
    }
    ours = [
        (fast.get((r.model, r.n_prompt)) if r.quantity == "prefill" else slow.get((r.model, r.n_gen)))
        for r in theirs.itertuples()
    ]
    what = [
        f"prefill of {r.n_prompt}" if r.quantity == "prefill" else f"decode of {r.n_gen} after {r.n_prompt}"
        for r in theirs.itertuples()
    ]
    columns: Columns = {
        "model": ("model", ""),
        "what": ("what", ""),
        "value": ("M4 Pro, published (t/s)", ",.0f"),
        "ours": ("here (t/s)", significant(3)),
    }
    return table(theirs.assign(what=what, ours=ours), columns)
