"""Notebook 03's sentences and tables on speed: the words around numbers that come from rows."""

import math

import pandas as pd
from IPython.display import Markdown

from plamo_study.analysis import batch_prediction as arithmetic
from plamo_study.analysis import batch_scaling as study
from plamo_study.analysis.batch_claims import claims, pairs
from plamo_study.measure.collect import Recording
from plamo_study.present import evidence, published
from plamo_study.present.evidence import condition, escaped
from plamo_study.present.tables import Columns, Table, noise, significant, table

SHOWN = (1, 2, 4, 5, 8, 9, 16, 32)  # where a table of every number of sequences would hide its point


def stock(data: pd.DataFrame) -> pd.DataFrame:
    """The rows of the engine as it is released."""
    return data[data["build"] == study.STOCK]


def finding(recording: Recording) -> Markdown:
    """What batching buys, in one paragraph."""
    data, parts = stock(study.scaling(recording.rows)), []
    for model, group in data.groupby("model"):
        known = group.set_index("n_seq")
        most, best = known.loc[16], known.loc[_best(group)]
        parts.append(
            f"**{escaped(str(model))} writes {most['factor']:.2f} times as many tokens with 16 sequences as with one** "
            f"({significant(3)(most['rate'])} t/s in all; the best number measured is {best.name}, with "
            f"{best['factor']:.2f} times)"
        )
    depth = arithmetic.depth(recording.rows)
    said = evidence.disturbed(recording.rows) + "; ".join(parts)
    return Markdown(said + f". Condition: decode at a depth of {depth:.0f} tokens, {condition(recording)}")


def guess(recording: Recording, guessed: float) -> Markdown:
    """The reader's guess beside the measured factor of the first model."""
    data = stock(study.scaling(recording.rows))
    factor = data[data["n_seq"] == 16]["factor"].iloc[0]
    return evidence.guessed(guessed, factor)


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
    return table(data[data["n_seq"].isin(SHOWN)], columns)


def turning(recording: Recording) -> Table:
    """From how many sequences on decode waits for compute: predicted, measured, missed."""
    columns: Columns = {
        "model": ("model", ""),
        "predicted": ("predicted, best ceilings", _count),
        "usual": ("predicted, usual ceilings", _count),
        "measured": ("measured", ".2f"),
        "miss": ("measured / predicted", ".2f"),
    }
    return table(arithmetic.turning(recording.rows, recording.facts), columns)


def scaling(recording: Recording) -> Table:
    """Decode by number of sequences."""
    return _decode(stock(study.scaling(recording.rows)))


def _decode(data: pd.DataFrame) -> Table:
    columns: Columns = {
        "model": ("model", ""),
        "n_seq": ("sequences", ""),
        "step": ("step (ms)", significant(3, 1e3)),
        "rate": ("all sequences (t/s)", significant(3)),
        "each": ("each (t/s)", significant(3)),
        "factor": ("times one sequence", ".2f"),
        "memory": ("peak memory (MiB)", _mebibytes),
        "noise": ("variation", noise),
        "n": ("processes", ""),
    }
    return table(data, columns)


def summary(recording: Recording) -> Table:
    """Decode by number of sequences, a few of them: for a first look."""
    data = stock(study.scaling(recording.rows))
    return _decode(data[data["n_seq"].isin(SHOWN)])


def builds(recording: Recording) -> Table:
    """PLaMo 2's decode rate by build of the engine."""
    data = study.scaling(recording.rows)
    many = data.groupby("model")["build"].transform("nunique") > 1
    columns: Columns = {
        "build": ("build", ""),
        "n_seq": ("sequences", ""),
        "rate": ("all sequences (t/s)", significant(3)),
        "factor": ("times one sequence", ".2f"),
        "n": ("processes", ""),
    }
    shown = data[many & data["n_seq"].isin(data[data["build"] != study.STOCK]["n_seq"])]
    return table(shown.sort_values(["n_seq", "build"]), columns)


def prefill(recording: Recording) -> Table:
    """Prefill of short prompts, each in its own call and packed, right or wrong."""
    data = study.prefill(recording.rows)
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
    return table(shown.sort_values(["build", "model", "policy", "n_seq"]), columns)


def prefill_series(recording: Recording) -> pd.DataFrame:
    """Every prefill rate of the engine as released, in one `series` per model and policy, marked where it is wrong."""
    data = stock(study.prefill(recording.rows))
    wrong = ~data.groupby(["model", "policy"])["right"].transform("all")
    marks = [", WRONG from 2 on" if is_wrong else "" for is_wrong in wrong]
    return data.assign(series=data["model"] + ", " + data["policy"].str.replace("_", " ") + marks)


def comparison(recording: Recording) -> Table:
    """How much of the difference is architecture, size, and the engine's defects."""
    data = study.compared(recording.rows, pairs(recording.rows))
    columns = {"what": ("scaling factor of", ""), "n_seq": ("sequences", ""), "ratio": ("ratio", ".2f")}
    return table(data[data["n_seq"].isin(SHOWN)], columns)


def against_prediction(recording: Recording) -> Table:
    """Measured step beside the predicted band, without and with the kernel's known passes over the weights."""
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
    return table(data.assign(band=band), columns)


def source_table(recording: Recording) -> Table:
    """The source's batch table filled: packed as the source ran it, and per sequence, which is the work-around."""
    theirs = published.load("m4-pro-b9596")
    theirs = theirs[(theirs["quantity"] == "decode") & (theirs["n_prompt"] == 512) & (theirs["model"] == "plamo-2-1b")]
    said = {
        n: "crash" if unit == "crash" else f"{value:.0f}"
        for n, value, unit in theirs[["n_seq", "value", "unit"]].to_numpy()
    }
    data = study.table_cells(recording.rows)
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


def checked_claims(recording: Recording) -> Table:
    """Every claim of the text with its estimate, its threshold and its verdict."""
    return evidence.claims(claims(recording.rows))


def takeaway(recording: Recording) -> Markdown:
    """One sentence a model with its numbers, what is architecture and what is engine, and the claims that failed."""
    rows, lines = recording.rows, []
    fitted, data = stock(study.fits(rows)).set_index("model"), stock(study.scaling(rows))
    for model, group in data.groupby("model"):
        fit, known = fitted.loc[model], group.set_index("n_seq")
        grown = (known["memory"].iloc[-1] - known["memory"].iloc[0]) / (known.index[-1] - known.index[0])
        best = known.loc[_best(group)]
        lines.append(
            f"- **{escaped(str(model))}**: {fit['amortised']:.0%} of a lone sequence's step is shared by a batch; the "
            f"largest factor measured is {best['factor']:.2f}, with {best.name} sequences of "
            f"{significant(3)(best['each'])} t/s each; a sequence costs {_mebibytes(grown)} MiB of memory."
        )
    checked = claims(rows)
    lines += [
        f"- {r['verdict']}: {r['claim']}{', ' + escaped(r['model']) if r['model'] else ''} ({r['estimate']:.2f})"
        for r in checked[checked["verdict"] != "holds"].to_dict("records")
    ]
    return Markdown("\n".join(lines))


def _best(group: pd.DataFrame) -> int:
    return int(max(zip(group["factor"], group["n_seq"], strict=True), key=lambda pair: pair[0].value)[1])


def _count(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:.1f}"


def _mebibytes(value: float) -> str:
    return f"{value / 2**20:,.0f}"
