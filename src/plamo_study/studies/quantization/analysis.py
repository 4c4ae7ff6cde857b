"""Study 04, speed: what a type of weights changes in size, in each phase's time and in memory.

Every function takes the frame of the study's rows, and where sizes are asked for the facts of its journal. Ratios are
over the reference type, paired by block. What quality costs is another study's.
"""

import pandas as pd

from plamo_study.analysis import stats
from plamo_study.analysis.files import Facts, Files, files
from plamo_study.analysis.memo import once_a_frame
from plamo_study.analysis.roofline import Model
from plamo_study.analysis.timing import NS, median_sample, paired_ratio
from plamo_study.analysis.usable import main_rows, usable
from plamo_study.studies.quantization import pareto

REFERENCE = "F16"
PHASES = ("prefill", "decode", "batch")  # of one prompt, of one sequence, of several together
Series = dict[tuple[str, str, str], pd.Series]


def sizes(known: Files) -> pd.DataFrame:
    """Per file: model, dtype, `bytes` of the file, `bits` per weight (of all tensors), `smaller` than the reference."""
    entries = []
    for (model, dtype), fact in known.items():
        reference = known.get((model, REFERENCE))
        smaller = reference["file_bytes"] / fact["file_bytes"] if reference else float("nan")
        bits = 8 * tensor_bytes(fact) / sum(t["n_elements"] for t in fact["tensors"].values())
        entries.append({"model": model, "dtype": dtype, "bytes": fact["file_bytes"], "bits": bits, "smaller": smaller})
    return pd.DataFrame(entries)


def tensor_bytes(fact: Model) -> int:
    """Bytes of all tensors of a file."""
    return sum(t["n_bytes"] for t in fact["tensors"].values())


@once_a_frame
def seconds(rows: pd.DataFrame) -> Series:
    """Seconds by block, by (phase, model, dtype): of a whole prompt, or of a decode step (median of its steps)."""
    found = main_rows(rows)
    found = found[found["workload"] == "decode"]
    alone, together = found[found["n_seq"] == 1], found[found["n_seq"] > 1]
    series: Series = {}
    for (model, dtype), group in alone.groupby(["model", "dtype"]):
        by_block = group.set_index("block")
        series["prefill", model, dtype] = by_block["prefill_ns"].map(lambda times: pd.Series(times).median()) / NS
        series["decode", model, dtype] = by_block["samples_ns"].map(median_sample) / NS
    for (model, dtype), group in together.groupby(["model", "dtype"]):
        series["batch", model, dtype] = group.set_index("block")["samples_ns"].map(median_sample) / NS
    return series


@once_a_frame
def speeds(rows: pd.DataFrame) -> pd.DataFrame:
    """Per model, dtype and phase: `rate` (t/s, over all sequences), `ratio` over the reference, `noise`, `n`."""
    known, tokens, entries = seconds(rows), _tokens(rows), []
    for (phase, model, dtype), spent in known.items():
        step = stats.median(spent.tolist())
        n = tokens[phase]
        rate = step.per(n)
        entry = {"model": model, "dtype": dtype, "phase": phase, "rate": rate, "ratio": None}
        if (phase, model, REFERENCE) in known:
            entry["ratio"] = paired_ratio(known[phase, model, REFERENCE], spent)
        entries.append(entry | {"noise": stats.variation(spent.tolist()), "n": step.n})
    return pd.DataFrame(entries, columns=["model", "dtype", "phase", "rate", "ratio", "noise", "n"])


def ratio(rows: pd.DataFrame, phase: str, model: str, dtype: str, over: str) -> stats.Estimate | None:
    """How many times as fast one type is as another in a phase, paired by block; None where one was not measured."""
    known = seconds(rows)
    top, bottom = known.get((phase, model, over)), known.get((phase, model, dtype))
    return None if top is None or bottom is None else paired_ratio(top, bottom)


def asymmetry(rows: pd.DataFrame, model: str) -> pd.DataFrame:
    """How many times as fast a model reads a prompt of `n_prompt` as it writes, by `dtype`, the least first: `ratio`.

    Of a token of the prompt and a step of one answer, paired by block.
    """
    known, n_prompt, entries = seconds(rows), _tokens(rows)["prefill"], []
    for phase, name, dtype in known:
        if (phase, name) == ("decode", model) and ("prefill", model, dtype) in known:
            ratio = paired_ratio(known[phase, model, dtype], known["prefill", model, dtype] / n_prompt)
            entries.append({"dtype": dtype, "n_prompt": n_prompt, "ratio": ratio})
    return pd.DataFrame(entries).sort_values("ratio", key=lambda found: found.map(lambda each: each.value))


def memory(rows: pd.DataFrame) -> pd.DataFrame:
    """Per model and dtype: `memory`, the largest resident size of a lone sequence's processes, mapped weights too."""
    found = usable(rows)
    found = found[(found["workload"] == "decode") & (found["n_seq"] == 1)]
    return found.groupby(["model", "dtype"])["peak_rss_bytes"].max().rename("memory").reset_index()


def validity(rows: pd.DataFrame) -> pd.DataFrame:
    """Per model and dtype: `verdict` of all its cells, `valid` of `n` rows, `error`: the largest against the oracle."""
    entries = []
    found = rows[(rows["model"] != "") & ~rows["anchor"]]
    for (model, dtype), group in found.groupby(["model", "dtype"]):
        gates = [v for c in group[group["workload"] == "gate"]["checks"] for k, v in c.items() if k.endswith("_error")]
        counts = group["verdict"].value_counts()
        valid, n = int(counts.get("valid", 0)), len(group)
        verdict = "valid" if valid == n else ", ".join(f"{c} {v}" for v, c in counts.items() if v != "valid")
        error = max(gates, default=float("nan"))
        entries.append({"model": model, "dtype": dtype, "verdict": verdict, "valid": valid, "n": n, "error": error})
    return pd.DataFrame(entries)


@once_a_frame
def table(rows: pd.DataFrame, facts: Facts) -> pd.DataFrame:
    """Everything about every file in one line: sizes, a ratio and a rate per phase, memory, validity.

    Columns besides those of `sizes`, `memory` and `validity`: prefill, decode, batch (ratios; None where nothing valid
    was measured) and prefill_rate, decode_rate, batch_rate.
    """
    found = sizes(files(rows, facts))
    for name, wide in (("ratio", "{}"), ("rate", "{}_rate")):
        by_phase = speeds(rows).pivot(index=["model", "dtype"], columns="phase", values=name)
        by_phase = (
            by_phase.reindex(columns=PHASES)
            .rename(columns={phase: wide.format(phase) for phase in PHASES})
            .reset_index()
        )
        found = found.merge(by_phase, on=["model", "dtype"], how="left")
    for part in (memory(rows), validity(rows)):
        found = found.merge(part, on=["model", "dtype"], how="left")
    return found


def with_quality(found: pd.DataFrame, quality: pd.DataFrame) -> pd.DataFrame:
    """`table` beside what analysis/quality.table says of the same model and type, at whatever scale that was measured.

    Adds its columns kld, ppl_ratio and loops, and `front`: whether no other file of the model is as small, decodes as
    fast and is as close to the reference, and better in one of these. A file without quality is not on it.
    """
    known = quality.assign(model=[unstarred(name) for name in quality["model"]])
    known = known.drop_duplicates(["model", "file"]).set_index(["model", "file"])  # of several texts the first
    exact = stats.Estimate(0.0, 0.0, 0.0, 0)
    lines = []
    for line in found.to_dict("records"):
        key = (unstarred(line["model"]), line["dtype"])
        has = key in known.index
        line |= {name: _if_known(known.loc[key, name]) if has else None for name in ("kld", "ppl_ratio", "loops")}
        lines.append(line | ({"kld": exact} if has and line["dtype"] == REFERENCE else {}))
    joined = pd.DataFrame(lines)
    better = {"bits": "less", "decode": "more", "kld": "less"}
    for _, group in joined.groupby("model"):
        joined.loc[group.index, "front"] = pareto.front(group, better)
    return joined


def _if_known(estimate: stats.Estimate) -> stats.Estimate | None:
    return None if estimate.value != estimate.value else estimate


def unstarred(name: str) -> str:
    """A model's name without the star that says its shape is assumed."""
    return name.rstrip("*")


def _tokens(rows: pd.DataFrame) -> dict[str, int]:
    """Tokens that a phase's seconds stand for."""
    found = rows[(rows["workload"] == "decode") & ~rows["anchor"]]
    alone = found[found["n_seq"] == 1]["n_prompt"]
    return {"prefill": int(alone.iloc[0]), "decode": 1, "batch": int(found["n_seq"].max())}
