"""Quality rows to a table: what each quantized file loses against its reference, with intervals clustered by chunk.

Perplexity, KL divergence, same top and RMS Δp are defined as in llama-perplexity; bits per byte, loops, intervals and
tests are ours. This module draws nothing and reads no file.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from llama_meter.stats import Estimate
from plamo_study.stats import estimates
from plamo_study.stats.estimates import mapped, ratio_of_sums
from plamo_study.studies.quantization.divergence import GRID

NAN = float("nan")
UNKNOWN = Estimate(NAN, NAN, NAN, 0)
FAR = 0.99  # the quantile of the tokens' KL divergence that is told
DISTANCES = ("kld", "same_top", "rms_dp", "kld_99")
COLUMNS = [
    "model",
    "text",
    "file",
    "file_bytes",
    "valid",
    "not_finite",
    "perplexity",
    "bits_per_byte",
    *DISTANCES,
    "loops",
]
PAIRED = ["model", "a", "b", "kld_saved", "share", "p"]


@dataclass(frozen=True)
class Evaluated:
    """One model's files on one text: series by name, reference, bytes per file."""

    model: str
    text: str
    reference: str
    series: dict[str, list[float]]
    file_bytes: dict[str, float]

    def of(self, what: str, name: str) -> np.ndarray:
        """A file's series, one number per chunk."""
        return np.asarray(self.series[f"{what}/{name}"], float)

    def finite(self, name: str) -> bool:
        """Whether every scored token of a file had finite logits."""
        return not self.of("not_finite", name).any()

    @property
    def tokens(self) -> np.ndarray:
        """Tokens scored per chunk."""
        return np.asarray(self.series["tokens"], float)


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per model, text and file, the reference first.

    Columns: model, text, file, file_bytes, valid (all logits finite), not_finite (tokens); as `Estimate`s perplexity,
    bits_per_byte, kld, kld_99 (nats), same_top, rms_dp (fractions), loops (share of greedy continuations). Values that
    are undefined, for an invalid file or for the reference against itself, are NaN. No lines if no row is usable.
    """
    lines = [_line(evaluation, name) for evaluation in evaluated(rows) for name in evaluation.file_bytes]
    return pd.DataFrame(lines, columns=COLUMNS)


def evaluated(rows: pd.DataFrame) -> list[Evaluated]:
    """Usable quality rows by model and text; rows of one model with different candidates are merged."""
    good = rows[(rows["workload"] == "quality") & (rows["status"] == "ok") & (rows["verdict"] != "invalid")]
    evaluations = []
    for (model, text), group in good.groupby(["model", "text"], sort=True):
        series: dict[str, list[float]] = {}
        sizes: dict[str, float] = {}
        for row in group.itertuples():
            series |= row.series
            sizes |= dict(zip((row.dtype, *row.candidates), row.series["file_bytes"], strict=True))
        evaluations.append(Evaluated(model, text, str(group["dtype"].iloc[0]), series, sizes))
    return evaluations


def pairs(rows: pd.DataFrame, wanted: Iterable[tuple[str, str, str]]) -> pd.DataFrame:
    """Pairs (model, a, b) of candidates, chunk by chunk: is b closer to the reference than a?

    Columns: model, a, b, kld_saved (mean KLD of a less that of b, nats, `Estimate`), share (of a's KLD), p and
    p_adjusted (over the pairs given).
    """
    by_model = {evaluation.model: evaluation for evaluation in evaluated(rows)}
    lines = [_pair(by_model[model], a, b) for model, a, b in wanted]
    paired = pd.DataFrame(lines, columns=PAIRED)
    return paired.assign(p_adjusted=estimates.adjusted(paired["p"].tolist()))


def _line(evaluation: Evaluated, name: str) -> dict[str, Any]:
    valid = evaluation.finite(name)
    line: dict[str, Any] = {"model": evaluation.model, "text": evaluation.text, "file": name}
    line |= {"file_bytes": evaluation.file_bytes[name], "valid": valid}
    line["not_finite"] = int(evaluation.of("not_finite", name).sum())
    nll = evaluation.of("nll", name)
    line["perplexity"] = mapped(ratio_of_sums(nll, evaluation.tokens), _exp) if valid else UNKNOWN
    in_bits = nll / np.log(2)
    line["bits_per_byte"] = ratio_of_sums(in_bits, evaluation.series["bytes"]) if valid else UNKNOWN
    return line | _against_reference(evaluation, name, valid) | {"loops": _loops(evaluation, name, valid)}


def _against_reference(evaluation: Evaluated, name: str, valid: bool) -> dict[str, Any]:
    if name == evaluation.reference or not valid or not evaluation.finite(evaluation.reference):
        return dict.fromkeys(DISTANCES, UNKNOWN)
    tokens = evaluation.tokens
    below, at = evaluation.of(f"below/{name}", str(FAR)), evaluation.series[f"quantiles/{name}"]
    return {
        "kld": ratio_of_sums(evaluation.of("kld", name), tokens),
        "kld_99": estimates.quantile(FAR, below, tokens, GRID, at),
        "same_top": ratio_of_sums(evaluation.of("same_top", name), tokens),
        "rms_dp": mapped(ratio_of_sums(evaluation.of("dp2", name), tokens), lambda square: float(np.sqrt(square))),
    }


def _loops(evaluation: Evaluated, name: str, valid: bool) -> Estimate:
    if f"loop/{name}" not in evaluation.series or not valid:
        return UNKNOWN
    looped = evaluation.of("loop", name) > 0
    return estimates.rate(int(looped.sum()), len(looped))


def _pair(evaluation: Evaluated, a: str, b: str) -> dict[str, Any]:
    saved = evaluation.of("kld", a) - evaluation.of("kld", b)
    per_token = saved / evaluation.tokens
    return {
        "model": evaluation.model,
        "a": a,
        "b": b,
        "kld_saved": ratio_of_sums(saved, evaluation.tokens),
        "share": ratio_of_sums(saved, evaluation.of("kld", a)),
        "p": estimates.p_value(per_token),
    }


def _exp(value: float) -> float:
    return float(np.exp(value))


USUAL = "as usual"
VARIED = {
    "n_ctx": "{:,} tokens read",
    "n_gen": "{:,} tokens written",
    "dtype": "reference in {}",
    "text": "{}",
    "type_k": "keys and values in {}",
}
SUMS = ["kld", "nll", "near", "far", "same_first"]
HANDED = ["model", "case", "n_ctx", "n_gen", "exact", "read", "write", "text", "tokens", "whole", *SUMS]


def handed(rows: pd.DataFrame) -> pd.DataFrame:
    """One line a text for each pair of files of which one read and one wrote: sums over its written tokens, in nats.

    `case`: what a row does otherwise than the first one, one thing at a time, else USUAL. Columns: HANDED.
    """
    lines = []
    for _, row in rows.iterrows():
        first = rows.iloc[0]
        case = ", ".join(how.format(row[what]) for what, how in VARIED.items() if row[what] != first[what]) or USUAL
        of = {"model": row.model, "case": case, "n_ctx": row.n_ctx, "n_gen": row.n_gen, "exact": row["dtype"]}
        for pair in [key[4:] for key in row.series if key.startswith("kld/")]:
            sums = {name: row.series.get(f"{name}/{pair}", NAN) for name in SUMS}
            own = {"tokens": row.series["tokens"], "whole": row.series["nll/undivided"], **sums}
            read, write = pair.split(">")
            lines.append(pd.DataFrame({**of, "read": read, "write": write, "text": range(len(own["tokens"])), **own}))
    table = pd.concat(lines, ignore_index=True) if lines else pd.DataFrame(columns=HANDED)
    return table.drop_duplicates(["model", "case", "read", "write", "text"])
