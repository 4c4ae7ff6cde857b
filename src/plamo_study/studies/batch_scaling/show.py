"""Notebook 03's sentences and tables on speed: the words around numbers that come from rows."""

import math
from collections.abc import Hashable, Mapping
from typing import Any

import pandas as pd
from IPython.display import Markdown

from plamo_study.analysis import clustered, stats
from plamo_study.analysis.stats import Estimate
from plamo_study.measure.recording import Recording
from plamo_study.present import evidence, published
from plamo_study.present.evidence import condition, escaped
from plamo_study.present.sentences import among, quotient
from plamo_study.present.tables import Columns, Table, folded, noise, significant, table
from plamo_study.studies.batch_scaling import analysis, claims, prediction as arithmetic

SHOWN = (1, 2, 4, 5, 8, 9, 16, 32)  # where a table of every number of sequences would hide its point
FEW = (1, 4, 16, 32)
UNDECIDED = "not decided"
GUESSED = 16  # the batch the reader guesses about
SECOND = {
    "holds": "Two sequences write fewer tokens a second than one",
    "does not hold": "Two sequences write more tokens a second than one",
    "inconclusive": "Whether two sequences write fewer tokens than one is not decided",
}


def stock(data: pd.DataFrame) -> pd.DataFrame:
    """The rows of the engine as it is released."""
    return data[data["build"] == analysis.STOCK]


def finding(recording: Recording) -> Markdown:
    """What a second sequence and what the largest batch buy, and how much of the hybrid's lag is the engine's."""
    rows = recording.rows
    data = stock(analysis.scaling(rows)).set_index(["model", "n_seq"])
    verdicts = claims.second_sequence(rows).set_index("model")["verdict"]
    parts = [
        f"- **{words}**: {'; '.join(_over_one(data, str(model), 2) for model in verdicts.index[verdicts == verdict])}."
        for verdict, words in SECOND.items()
        if (verdicts == verdict).any()
    ]
    n = int(min(known.index.get_level_values("n_seq").max() for _, known in data.groupby("model")))
    many = [_over_one(data, str(model), n) for model in verdicts.index]
    parts += [f"- **{n} sequences beside one**: {'; '.join(many)}.", *_lag(rows)]
    said = evidence.disturbed(rows) + "\n".join(parts)
    return Markdown(f"{said}\n\nCondition: decode {arithmetic.depth(rows):.0f} tokens deep, {condition(recording)}")


def _over_one(data: pd.DataFrame, model: str, n: int) -> str:
    """How many times as many tokens a second so many sequences write as one, and both rates."""
    many, one = data.loc[(model, n)], data.loc[(model, 1)]
    times, rates = quotient(many["factor"], many["rate"], one["rate"], "t/s")
    return f"{times} as many on {escaped(model)} {rates}"


def _lag(rows: pd.DataFrame) -> list[str]:
    """How fast the largest batch of the hybrid is beside attention of equal bytes, as released and corrected."""
    table = analysis.compared(rows, claims.pairs(rows)).set_index(["what", "n_seq"])
    if not {claims.LAG, claims.CORRECTED_LAG} <= set(table.index.get_level_values(0)):
        return []
    n = int(table.loc[claims.LAG].index.max())
    before, after = (_compared(table.loc[(what, n)]) for what in (claims.LAG, claims.CORRECTED_LAG))
    engine = _signed(rows, claims.PROJECTIONS).set_index("n_seq")["sign"][n] == "faster"
    words = "Part of the hybrid's lag is the engine's" if engine else "The hybrid beside attention"
    return [
        f"- **{words}**: beside attention with as many bytes of weights, {n} sequences of the hybrid run {before}. The "
        f"engine splits the Mamba projections: {n} products with a vector where one with a matrix would do (D4). With "
        f"that corrected they run {after}."
    ]


def _compared(row: Mapping[Hashable, Any] | pd.Series) -> str:
    times, rates = quotient(row["ratio"], row["first"], row["second"], "t/s")
    return f"{times} as fast {rates}"


def guess(recording: Recording, guessed: float) -> Markdown:
    """The reader's guess of what 16 sequences buy, beside what the first model measured."""
    data = stock(analysis.scaling(recording.rows))
    data = data[data["n_seq"] == data["n_seq"][data["n_seq"] <= GUESSED].max()]
    row = data.iloc[0]
    off = max(guessed / row["factor"].value, row["factor"].value / guessed)
    return Markdown(
        f"You guessed that {row['n_seq']} sequences write **{guessed:g}** times as many tokens a second as one. "
        f"{escaped(row['model'])} wrote **{row['factor']:.2f}** times as many: your guess is off by a factor of "
        f"{off:.1f}."
    )


def prediction(recording: Recording) -> Table:
    """Bytes, FLOPs and the band of a step, at some numbers of sequences."""
    data = arithmetic.prediction(recording.rows, recording.facts)
    columns: Columns = {
        "model": ("model", ""),
        "n_seq": ("sequences", ""),
        "bytes": ("GB moved", significant(3, 1e-9)),
        "flops": ("GFLOP", significant(3, 1e-9)),
        "bound": ("nearer ceiling", ""),
        "low": ("at least (ms)", significant(3, 1e3)),
        "high": ("at most (ms)", significant(3, 1e3)),
    }
    return table(data[data["n_seq"].isin(FEW)], columns)


def turning(recording: Recording) -> Table:
    """From how many sequences on decode waits for compute: predicted, measured, missed."""
    data = arithmetic.turning(recording.rows, recording.facts)
    columns: Columns = {
        "model": ("model", ""),
        "predicted": ("predicted, best ceilings", _count),
        "usual": ("predicted, usual ceilings", _count),
        "measured": ("measured, by the chosen fit", ".2f"),
        "miss": ("measured / predicted", ".2f"),
        "off": ("the fit's worst miss", ""),
    }
    return table(data.assign(off=worst_miss(data)), columns)


def worst_miss(fits: pd.DataFrame) -> list[str]:
    """By how much a fit misses at most, and where."""
    return [f"{row.worst:+.0%} at {row.worst_at}" for row in fits.itertuples()]


OVER_ONE = {"factor": ("rate", "one")}
DECODE: Columns = {
    "model": ("model", ""),
    "n_seq": ("sequences", ""),
    "step": ("step (ms)", significant(3, 1e3)),
    "rate": ("all sequences (t/s)", significant(3)),
    "each": ("each (t/s)", significant(3)),
    "factor": ("times one sequence", ".2f"),
}


def summary(recording: Recording) -> Table:
    """Decode by number of sequences, a few of them: for a first look."""
    data = stock(analysis.scaling(recording.rows))
    return table(data[data["n_seq"].isin(SHOWN)], {**DECODE, "n": ("processes", "")}, ratios=OVER_ONE)


def scaling(recording: Recording) -> Markdown:
    """Decode at every number of sequences, folded."""
    data = stock(analysis.scaling(recording.rows))
    more: Columns = {"memory": ("peak memory (MiB)", _mebibytes), "noise": ("variation", noise)}
    shown = table(data, {**DECODE, **more}, ratios=OVER_ONE)
    return folded(f"Every number of sequences ({len(data)} rows)", shown)


def worth(recording: Recording) -> Table:
    """What correcting the split projections is worth at every number of sequences, with its sign."""
    return _corrected(recording, claims.PROJECTIONS)


def no_worth(recording: Recording) -> Markdown:
    """What the other two corrections change in decode speed, folded: nothing is expected."""
    return folded(f"{claims.OTHERS.capitalize()} corrected: what decode pays", _corrected(recording, claims.OTHERS))


def _corrected(recording: Recording, defect: str) -> Table:
    columns: Columns = {
        "n_seq": ("sequences", ""),
        "first": ("corrected (t/s)", significant(3)),
        "second": ("not (t/s)", significant(3)),
        "ratio": ("times as fast", ".2f"),
        "won": ("blocks in which faster", ""),
        "p": ("p, corrected for the family", ".2g"),
        "sign": ("so it is", ""),
    }
    data = _signed(recording.rows, defect)
    won = [f"{row.won} of {row.ratio.n}" for row in data.itertuples()]
    return table(data.assign(won=won), columns, ratios={"ratio": ("first", "second")})


def _signed(rows: pd.DataFrame, defect: str) -> pd.DataFrame:
    """A correction against none at every n_seq: `p` that nothing changes, corrected over the n_seq, and `sign`."""
    data = analysis.compared(rows, claims.pairs(rows))
    data = data[data["what"] == claims.corrected(defect)]
    p = clustered.adjusted([ratio.p(1.0) for ratio in data["ratio"]])
    return data.assign(p=p, sign=[_sign(ratio, value) for ratio, value in zip(data["ratio"], p, strict=True)])


def _sign(ratio: Estimate, p: float) -> str:
    """Which way a ratio lies from 1: only where its interval and the corrected p agree."""
    if p <= analysis.FALSE_DISCOVERIES and not ratio.low <= 1 <= ratio.high:
        return "faster" if ratio.value > 1 else "slower"
    return UNDECIDED


def decomposition(recording: Recording) -> Table:
    """From the large attention model to the hybrid as released, in four factors that multiply in every block."""
    data = analysis.decomposed(recording.rows, claims.chain(recording.rows))
    columns: Columns = {
        "n_seq": ("sequences", ""),
        "from": ("large attention (ms)", significant(3, 1e3)),
        claims.SIZE: (claims.SIZE, ".3f"),
        claims.ARCHITECTURE: (f"x {claims.ARCHITECTURE}", ".3f"),
        claims.PROJECTIONS: (f"x {claims.PROJECTIONS}", ".3f"),
        claims.OTHERS: (f"x {claims.OTHERS}", ".3f"),
        "product": ("= by these", ".3f"),
        "whole": ("times as fast", ".3f"),
        "to": ("hybrid as released (ms)", significant(3, 1e3)),
    }
    return table(data, columns, ratios={"whole": ("from", "to")})


def builds(recording: Recording) -> Table:
    """PLaMo 2's decode rate by build of the engine."""
    data = analysis.scaling(recording.rows)
    many = data.groupby("model")["build"].transform("nunique") > 1
    columns: Columns = {
        "build": ("build", ""),
        "n_seq": ("sequences", ""),
        "rate": ("all sequences (t/s)", significant(3)),
        "factor": ("times one sequence", ".2f"),
        "n": ("processes", ""),
    }
    shown = data[many & data["n_seq"].isin(data[data["build"] != analysis.STOCK]["n_seq"])]
    return table(shown.sort_values(["n_seq", "build"]), columns, ratios=OVER_ONE)


def prefill(recording: Recording) -> Markdown:
    """Prefill of short prompts, each in its own call and packed, right or wrong; folded."""
    data = analysis.prefill(recording.rows)
    data = data.assign(right=["right" if right else "WRONG" for right in data["right"]])
    columns: Columns = {
        "build": ("build", ""),
        "model": ("model", ""),
        "policy": ("policy", ""),
        "n_seq": ("sequences", ""),
        "rate": ("prefill rate (t/s)", significant(3)),
        "right": ("computed", ""),
        "n": ("processes", ""),
    }
    shown = data[data["n_seq"].isin(SHOWN)]
    rows = table(shown.sort_values(["build", "model", "policy", "n_seq"]), columns)
    return folded("Prefill rates of short prompts by build, model and policy", rows)


def prefill_series(recording: Recording) -> pd.DataFrame:
    """Every prefill rate of the engine as released, in one `series` per model and policy, marked where it is wrong."""
    data = stock(analysis.prefill(recording.rows))
    wrong = ~data.groupby(["model", "policy"])["right"].transform("all")
    marks = [", WRONG from 2 on" if is_wrong else "" for is_wrong in wrong]
    return data.assign(series=data["model"] + ", " + data["policy"].str.replace("_", " ") + marks)


def against_prediction(recording: Recording) -> Markdown:
    """Measured step beside the predicted band, without and with the kernel's known passes over the weights; folded."""
    data = arithmetic.against_prediction(recording.rows, recording.facts)
    band = [f"{significant(3, 1e3)(r.low)} to {significant(3, 1e3)(r.high)}" for r in data.itertuples()]
    columns: Columns = {
        "model": ("model", ""),
        "n_seq": ("sequences", ""),
        "band": ("predicted (ms)", ""),
        "measured": ("measured (ms)", significant(3, 1e3)),
        "miss": ("times the band's edge", ".2f"),
        "passes": ("known passes", ""),
        "miss_passes": ("times the edge with them", ".2f"),
    }
    return folded(f"Predicted and measured steps ({len(data)} rows)", table(data.assign(band=band), columns))


def source_table(recording: Recording) -> Table:
    """The source's batch table filled: packed as the source ran it, and per sequence, which is the work-around."""
    theirs = published.load("m4-pro-b9596")
    theirs = theirs[(theirs["quantity"] == "decode") & (theirs["n_prompt"] == 512) & (theirs["model"] == "plamo-2-1b")]
    said = {
        n: "crash" if unit == "crash" else f"{value:.0f}"
        for n, value, unit in theirs[["n_seq", "value", "unit"]].to_numpy()
    }
    data = analysis.table_cells(recording.rows)
    rate = [significant(3)(e) if e is not None else "none" for e in data["rate"]]
    source = [said.get(n, "n/a") for n in data["n_seq"]]
    error = [f"{e:.1g}" if e is not None and not math.isnan(e) else "n/a" for e in data["error"]]
    columns: Columns = {
        "n_seq": ("sequences", ""),
        "source": ("M4 Pro, published (t/s)", ""),
        "policy": ("prefill here", ""),
        "outcome": ("outcome here", ""),
        "rate": ("all sequences (t/s)", ""),
        "prefill": ("prefill rate (t/s)", significant(3)),
        "error": ("largest error", ""),
        "n": ("processes", ""),
    }
    shown = data.assign(rate=rate, source=source, error=error).sort_values(["n_seq", "policy"], ascending=[True, False])
    return table(shown, columns)


def checked_claims(recording: Recording) -> Markdown:
    """How many claims hold, and every one with its estimate, its threshold and its verdict, folded."""
    families = claims.families(recording.rows, published_factors())
    verdicts = pd.concat(families)["verdict"]
    counts = evidence.counted(verdicts)
    summary = f"{len(verdicts)} claims in {len(families)} families, each corrected for its size: {counts}"
    return folded(summary, *map(evidence.claims, families))


def published_factors() -> claims.Said:
    """What the source's batches of two and its largest batch wrote, over one sequence, by model."""
    theirs = published.load("m4-pro-b9596")
    theirs = theirs[(theirs["quantity"] == "decode") & (theirs["n_prompt"] == 512) & theirs["value"].notna()]
    said: claims.Said = {}
    for model, group in theirs.groupby("model"):
        rates = group.set_index("n_seq")["value"]
        said[str(model)] = {n: float(rates[n] / rates[1]) for n in sorted({2, int(rates.index.max())})}
    return said


def takeaway(recording: Recording) -> Markdown:
    """What a batch costs and buys by model, what the engine's defect costs, and the claims that did not hold."""
    rows, facts = recording.rows, recording.facts
    fitted = stock(analysis.chosen_fits(rows, arithmetic.tile_of(rows, facts))).set_index("model")
    data, memory = stock(analysis.scaling(rows)).set_index(["model", "n_seq"]), arithmetic.memory(rows, facts)
    lines = []
    for kept in memory.to_dict("records"):
        model = str(kept["model"])
        lines.append(f"- **{escaped(model)}**: {_cost(fitted.loc[model])} {_best(data, model)} {_kept(kept)}")
    lines += _worths(rows)
    checked = claims.claims(rows, published_factors())
    lines += [
        f"- {r['verdict'].capitalize()}: {r['claim']}, {escaped(r['model'])} ({r['estimate']:.2f})"
        for r in checked[(checked["verdict"] != "holds") & (checked["model"] != "")].to_dict("records")
    ]
    return Markdown("\n".join(lines))


def _cost(fit: pd.Series) -> str:
    """What a step consists of, by the chosen fit, with the fit's miss."""
    once = "one pass over the weights" if fit["form"] == analysis.PASSES else "a step"
    return (
        f"{once} takes {significant(3, 1e3)(fit['fixed'])} ms, and every sequence adds "
        f"{significant(3, 1e3)(fit['each'])} ms. So {fit['amortised']:.0%} of the first sequence's time is shared with "
        f"those that join it (worst miss of this fit: {worst_miss(fit.to_frame().T)[0]} sequences)."
    )


def _best(data: pd.DataFrame, model: str) -> str:
    sizes = data.loc[model].index
    n = int(max(sizes, key=lambda n: float(data.loc[(model, n), "rate"].value)))
    many, one = data.loc[(model, n)], data.loc[(model, 1)]
    factor = stats.selected(many["factor"], len(sizes) - 1)
    times, rates = quotient(factor, many["rate"], one["rate"], "t/s")
    return (
        f"Its best batch, {n} sequences ({among(factor, 'sizes')}), writes {times} as many tokens a second as one "
        f"{rates}."
    )


def _kept(kept: dict[str, Any]) -> str:
    """What one more sequence takes in memory, of what, and in which context."""
    state = f"{_mebibytes(kept['state'])} of recurrent state, " if kept["state"] else ""
    return (
        f"One more sequence takes {_mebibytes(kept['grown'])} MiB in a context of {kept['tokens']} tokens: {state}"
        f"{_mebibytes(kept['cache'])} of keys and values, {_mebibytes(kept['rest'])} of logits and buffers."
    )


def _worths(rows: pd.DataFrame) -> list[str]:
    """What correcting the split projections is worth: where it is decided, with its sign."""
    data = _signed(rows, claims.PROJECTIONS)
    if data.empty:
        return []
    decided, rest = data[data["sign"] != UNDECIDED], data[data["sign"] == UNDECIDED]
    said = [f"{row['n_seq']} sequences run {_compared(row)}" for row in decided.to_dict("records")]
    said += [f"for {', '.join(map(str, rest['n_seq']))} it is {UNDECIDED}"] if len(rest) else []
    return [f"- **Split projections (D4) corrected**: {'; '.join(said)}."]


def _count(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:.1f}"


def _mebibytes(value: float) -> str:
    return f"{value / 2**20:,.0f}" if value >= 100 * 2**20 else f"{value / 2**20:.1f}"
