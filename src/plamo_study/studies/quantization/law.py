"""Quality rows to a table: what each quantized file loses against its reference, with intervals clustered by chunk.

Perplexity, KL divergence and same top are defined as in llama-perplexity; intervals and tests are ours.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from llama_meter.stats import Estimate
from plamo_study.stats.estimates import adjusted, mapped, p_value, ratio_of_sums

NAN = float("nan")
UNKNOWN = Estimate(NAN, NAN, NAN, 0)
DISTANCES = ("kld", "same_top")
COLUMNS = ["model", "file", "perplexity", *DISTANCES]
PAIRED = ["model", "a", "b", "kld_saved", "share", "p"]


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """One line per model and file, the reference first.

    Columns: model, file; as `Estimate`s perplexity, kld (nats) and same_top (a fraction). Values that are undefined,
    for a file with logits that are not finite or for the reference against itself, are NaN.
    """
    lines = [_line(row, name) for row in _evaluated(rows) for name in (row.dtype, *row.candidates)]
    return pd.DataFrame(lines, columns=COLUMNS)


def pairs(rows: pd.DataFrame, wanted: Iterable[tuple[str, str, str]]) -> pd.DataFrame:
    """Pairs (model, a, b) of candidates, chunk by chunk: is b closer to the reference than a?

    Columns: model, a, b, kld_saved (mean KLD of a less that of b, nats, `Estimate`), share (of a's KLD), p and
    p_adjusted (over the pairs given).
    """
    by_model, lines = {row.model: row for row in _evaluated(rows)}, []
    for model, a, b in wanted:
        tokens, kld_a, kld_b = (_of(by_model[model], name) for name in ("tokens", f"kld/{a}", f"kld/{b}"))
        saved = kld_a - kld_b
        line = {"model": model, "a": a, "b": b, "kld_saved": ratio_of_sums(saved, tokens)}
        lines.append(line | {"share": ratio_of_sums(saved, kld_a), "p": p_value(saved / tokens)})
    paired = pd.DataFrame(lines, columns=PAIRED)
    return paired.assign(p_adjusted=adjusted(paired["p"].tolist()))


def _evaluated(rows: pd.DataFrame) -> list[Any]:
    """The usable quality row of each model."""
    good = rows[(rows["workload"] == "quality") & (rows["status"] == "ok") & (rows["verdict"] != "invalid")]
    return list(good.drop_duplicates("model", keep="last").sort_values("model").itertuples())


def _of(row: Any, name: str) -> np.ndarray:
    """A series, one number per chunk."""
    return np.asarray(row.series[name], float)


def _line(row: Any, name: str) -> dict[str, Any]:
    line, tokens = {"model": row.model, "file": name} | dict.fromkeys(COLUMNS[2:], UNKNOWN), _of(row, "tokens")
    if any(row.series[f"not_finite/{name}"]):
        return line
    line["perplexity"] = mapped(ratio_of_sums(_of(row, f"nll/{name}"), tokens), lambda nats: float(np.exp(nats)))
    if name != row.dtype and not any(row.series[f"not_finite/{row.dtype}"]):
        line |= {what: ratio_of_sums(_of(row, f"{what}/{name}"), tokens) for what in DISTANCES}
    return line
