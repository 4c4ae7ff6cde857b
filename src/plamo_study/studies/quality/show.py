"""Notebook 04 on quality: what each type loses against F16, in sentences and tables written from rows."""

import pandas as pd
from IPython.display import Markdown

from plamo_study.analysis.stats import Estimate
from plamo_study.measure.recording import Recording
from plamo_study.present.evidence import escaped
from plamo_study.present.tables import Columns, Format, Table, folded, significant, table
from plamo_study.studies.quality import analysis

MILLI = 1e3  # KL divergence is shown in thousandths of a nat
PAIRS = (("Q4_0", "Q4_K_M"), ("Q5_0", "Q5_K_M"), ("Q4_0", "Q4_0-ssm_out-F16"), ("Q8_0", "Q8_0-ssm_out-BF16"))
FILE: dict[str, tuple[str, Format]] = {"model": ("model", ""), "file": ("type", "")}


def finding(recording: Recording) -> Markdown:
    """Per model the smallest loss, the largest, and the types whose loss in perplexity is seen, with the condition."""
    data = analysis.table(recording.rows)
    parts = []
    for model, group in data.groupby("model"):
        told = [line for line in group.to_dict("records") if not pd.isna(line["kld"].value)]
        if not told:
            continue
        told.sort(key=lambda line: float(line["kld"].value))
        seen = [line["file"] for line in told if line["p_adjusted"] < analysis.LEVEL and line["ppl_ratio"].value > 1]
        rounded = [line for line in told if line["file"] not in ("F32", "BF16")] or told
        least, most = rounded[0], told[-1]
        parts.append(
            f"- **{escaped(str(model))} loses {_milli(least)} thousandths of a nat in {least['file']} and "
            f"{_milli(most)} in {most['file']}** (KL divergence from F16). Its perplexity is worse beyond doubt in "
            f"{', '.join(seen) or 'no type'}."
        )
    lines = "\n".join(parts)
    return Markdown(f"{lines}\n\nCondition: {condition(recording)}")


def condition(recording: Recording) -> str:
    """Text, chunks and scale behind a loss, as one clause."""
    row = recording.rows[recording.rows["workload"] == "quality"].iloc[0]
    return (
        f"scale {recording.scale}, {row['n_chunks']} chunks of {row['n_prompt']} tokens of {row['text']}; the second "
        "half of each chunk is scored; over chunks, 95 % intervals where the brackets name no other level."
    )


def losses(recording: Recording) -> Table:
    """Every file against its reference: what is lost, and whether perplexity shows it."""
    columns: Columns = FILE | {
        "ppl_ratio": ("perplexity over F16", ".4f"),
        "p_adjusted": ("adjusted p", ".2g"),
        "kld": ("KLD (0.001 nats)", significant(2, MILLI)),
        "kld_99": ("KLD, 99 %", significant(2, MILLI)),
        "same_top": ("same top-1", ".2%"),
        "loops": ("loops", ".0%"),
    }
    return table(_lines(recording), columns)


def details(recording: Recording) -> Markdown:
    """What a referee asks next, folded: absolute values, other percentiles, the smallest change that could be seen."""
    columns: Columns = FILE | {
        "perplexity": ("perplexity", significant(4)),
        "bits_per_byte": ("bits per byte", ".4f"),
        "detectable": ("detectable change of perplexity", ".2%"),
        "words": ("finite", ""),
    }
    more: Columns = FILE | {
        "kld_50": ("KLD, median", significant(2, MILLI)),
        "kld_90": ("90 %", significant(2, MILLI)),
        "kld_99.9": ("99.9 %", significant(2, MILLI)),
        "rms_dp": ("RMS Δp", ".2%"),
    }
    data = _lines(recording)
    return folded("Perplexity, bits per byte, percentiles and RMS Δp", table(data, columns), table(data, more))


def _lines(recording: Recording) -> pd.DataFrame:
    data = analysis.table(recording.rows)
    data["words"] = ["yes" if r["valid"] else f"{r['not_finite']} tokens not" for r in data.to_dict("records")]
    return _without_unknowns(data)


def pairs(recording: Recording) -> Table:
    """Types of about the same size, chunk by chunk: which is closer to F16."""
    known = analysis.table(recording.rows)
    files = {model: set(group["file"]) for model, group in known.groupby("model")}
    wanted = [(str(m), a, b) for m, names in files.items() for a, b in PAIRS if {a, b} <= names]
    columns: Columns = {
        "model": ("model", ""),
        "a": ("instead of", ""),
        "b": ("use", ""),
        "kld_saved": ("KLD saved (0.001 nats)", significant(2, MILLI)),
        "share": ("share of its KLD", ".0%"),
        "p_adjusted": ("adjusted p", ".2g"),
        "words": ("closer to F16", ""),
    }
    data = analysis.pairs(recording.rows, wanted)
    return table(data.assign(words=["yes" if closer else "not shown" for closer in data["closer"]]), columns)


def _milli(line: dict[str, Estimate]) -> str:
    return significant(2, MILLI)(line["kld"])


def _without_unknowns(data: pd.DataFrame) -> pd.DataFrame:
    """Estimates that are not there as None, which tables show as n/a."""
    return data.map(lambda value: None if isinstance(value, Estimate) and pd.isna(value.value) else value)
