"""Study 03: what evaluating several sequences together buys, per build of the engine, model and number of sequences.

Every function takes the frame of the study's rows. The step time of a process is the median of its steps; estimates
are over processes, comparisons paired by block.
"""

from typing import Any

import numpy as np
import pandas as pd
from scipy import optimize
from scipy import stats as tests

from plamo_study.analysis import stats
from plamo_study.analysis.kernels import weight_passes
from plamo_study.analysis.phase_asymmetry import NS, median_sample, paired_ratio
from plamo_study.analysis.usable import usable

STOCK = "stock"
FALSE_DISCOVERIES = 0.05  # Benjamini-Hochberg level for jumps
LEAST_JUMP = 0.1  # what a line that fits badly can feign is not called a jump


def curves(rows: pd.DataFrame) -> dict[tuple[str, str], pd.DataFrame]:
    """Step seconds by (build, model): a frame with a row per number of sequences and a column per block."""
    found = usable(rows)
    found = found[(found["workload"] == "decode") & (found["policy"] == "shared")]
    found = found.assign(seconds=found["samples_ns"].map(median_sample) / NS)
    return {
        (str(build), str(model)): group.pivot_table(index="n_seq", columns="block", values="seconds")
        for (build, model), group in found.groupby(["build", "model"])
    }


def scaling(rows: pd.DataFrame) -> pd.DataFrame:
    """Per build, model and n_seq: `step` (s), `rate` of all and `each` sequence (t/s), `factor` over one, `noise`, `n`.

    `memory` is the largest resident size of the processes in bytes, the mapped weights included.
    """
    memory = usable(rows)
    memory = memory[memory["policy"] == "shared"].groupby(["build", "model", "n_seq"])["peak_rss_bytes"].max()
    entries = []
    for (build, model), curve in curves(rows).items():
        for n_seq, seconds in curve.iterrows():
            n, known = int(str(n_seq)), seconds.dropna()
            step = stats.median(known.tolist())
            rate = step.per(n)
            entry = {"build": build, "model": model, "n_seq": n, "step": step, "rate": rate, "each": rate.scaled(1 / n)}
            factor = paired_ratio(curve.loc[1] * n, seconds)
            noise, peak = stats.variation(known.tolist()), memory[build, model, n]
            entries.append(entry | {"factor": factor, "memory": peak, "noise": noise, "n": step.n})
    return pd.DataFrame(entries)


def prefill(rows: pd.DataFrame) -> pd.DataFrame:
    """Per build, model, policy and n_seq: `rate` (t/s over all sequences) of short prompts, and whether it was `right`.

    Wrong computations are kept here, marked, because other harnesses publish their speed.
    """
    found = rows[(rows["workload"] == "prefill") & (rows["status"] == "ok") & ~rows["anchor"]]
    entries = []
    for (build, model, policy, n_seq), group in found.groupby(["build", "model", "policy", "n_seq"]):
        seconds = (group["samples_ns"].map(median_sample) / NS).tolist()
        rate = stats.rate(n_seq * int(group["n_prompt"].iloc[0]), seconds)
        entry = {"build": build, "model": model, "policy": policy, "n_seq": n_seq, "rate": rate}
        entries.append(entry | {"right": bool((group["verdict"] == "valid").all()), "n": len(group)})
    return pd.DataFrame(entries)


def fits(rows: pd.DataFrame, tile: int | None = None) -> pd.DataFrame:
    """Step time = `fixed` + n_seq * `each` (s), fitted block by block, residuals weighted by 1 / time.

    With the `tile` of a known kernel, step time = passes(n_seq) * `fixed` + n_seq * `each` instead, from two sequences
    on: one sequence is another kernel's.

    `amortised`: the share of a lone sequence's step that a batch shares. `half`: fixed / each, the number of
    sequences at which the shared part is half of the step. `worst` at `worst_at`: largest deviation of a median from
    the fit.
    """
    entries = []
    for (build, model), curve in curves(rows).items():
        whole = curve.dropna(axis="columns")
        whole = whole[whole.index > 1] if tile else whole
        n_seq = whole.index.to_numpy()
        passes = np.array([weight_passes(int(n), tile) if tile else 1 for n in n_seq])
        lines = [line(n_seq, whole[block].to_numpy(), passes) for block in whole]
        middle = whole.median(axis="columns")
        fixed, each = line(n_seq, middle.to_numpy(), passes)
        off = middle / (fixed * passes + each * n_seq) - 1
        entries.append(
            {
                "build": build,
                "model": model,
                "fixed": stats.median([a for a, _ in lines]),
                "each": stats.median([b for _, b in lines]),
                "amortised": stats.median([a / (a + b) for a, b in lines]),
                "half": stats.median([a / b for a, b in lines]),
                "worst": float(off.loc[off.abs().idxmax()]),
                "worst_at": int(str(off.abs().idxmax())),
            }
        )
    return pd.DataFrame(entries)


def line(n_seq: np.ndarray, seconds: np.ndarray, passes: np.ndarray | float = 1.0) -> tuple[float, float]:
    """Non-negative least squares of seconds = fixed * passes + each * n_seq, every point weighted by 1 / its value."""
    design = np.column_stack([np.broadcast_to(passes, n_seq.shape), n_seq.astype(float)]) / seconds[:, None]
    (fixed, each), _ = optimize.nnls(design, np.ones_like(seconds))
    return float(fixed), float(each)


def bends(rows: pd.DataFrame) -> pd.DataFrame:
    """Whether two lines that meet fit a curve better than one, by the Bayesian information criterion.

    Per build and model: `at` (median over blocks of the best meeting point), `gain` in the criterion (over 6: strong),
    `steeper` (slope after over slope before). Curves of fewer than eight points are left out.
    """
    entries = []
    for (build, model), curve in curves(rows).items():
        whole = curve.dropna(axis="columns")
        if len(whole) < 8:
            continue
        n_seq, found = whole.index.to_numpy(float), [_bend(whole.index.to_numpy(float), whole[b]) for b in whole]
        gain, *_ = _bend(n_seq, whole.median(axis="columns"))
        places, ratios = stats.median([f[1] for f in found]), stats.median([f[2] for f in found])
        entries.append({"build": build, "model": model, "gain": gain, "at": places, "steeper": ratios})
    return pd.DataFrame(entries)


def _bend(n_seq: np.ndarray, seconds: pd.Series) -> tuple[float, float, float]:
    y, n = seconds.to_numpy(), len(seconds)
    best = (np.inf, 0.0, 1.0)
    for knot in n_seq[2:-2]:
        design = np.column_stack([np.ones(n), n_seq, np.maximum(n_seq - knot, 0)]) / y[:, None]
        solution, *_ = np.linalg.lstsq(design, np.ones(n), rcond=None)
        left = float(((design @ solution - 1) ** 2).sum())
        before, after = solution[1], solution[1] + solution[2]
        best = min(best, (left, float(knot), float(after / before) if before > 0 else np.inf))
    fixed, each = line(n_seq, y)
    single = float((((fixed + each * n_seq) / y - 1) ** 2).sum())
    criterion = n * np.log(single / n) + 2 * np.log(n) - (n * np.log(best[0] / n) + 4 * np.log(n))
    return float(criterion), best[1], best[2]


def jumps(rows: pd.DataFrame) -> pd.DataFrame:
    """From every n_seq to the next: measured growth of the step over the growth of the fitted line.

    Columns build, model, n_seq (before), `jump` (1: as the line says) and `found`: a t-test of the logarithms over
    blocks, corrected over the curve by Benjamini and Hochberg, and a growth off the line's by a tenth at least.
    """
    parts = []
    for (build, model), curve in curves(rows).items():
        whole = curve.dropna(axis="columns")
        pairs = [(n, n + 1) for n in whole.index if n + 1 in whole.index]
        if len(whole.columns) < 2 or len(pairs) < 2:
            continue
        fixed, each = line(whole.index.to_numpy(), whole.median(axis="columns").to_numpy())
        off = np.log(whole.div(fixed + each * whole.index.to_numpy(), axis="index"))
        steps = [(off.loc[after] - off.loc[before]).tolist() for before, after in pairs]
        p = tests.false_discovery_control([tests.ttest_1samp(step, 0.0).pvalue for step in steps])
        jump = [stats.ratio(np.exp(step).tolist(), [1.0] * len(step)) for step in steps]
        entry = {"build": build, "model": model, "n_seq": [n for n, _ in pairs], "jump": jump}
        large = [abs(estimate.value - 1) > LEAST_JUMP for estimate in jump]
        parts.append(pd.DataFrame(entry | {"found": (p < FALSE_DISCOVERIES) & np.array(large)}))
    columns = ["build", "model", "n_seq", "jump", "found"]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)


def compared(rows: pd.DataFrame, pairs: dict[str, tuple[tuple[str, str], tuple[str, str]]]) -> pd.DataFrame:
    """How far one curve's scaling factor is from another's, at every n_seq > 1 both have.

    `pairs`: name -> two (build, model). Columns what, n_seq and `ratio`: first factor over second, paired by block.
    """
    known, entries = curves(rows), []
    for what, (first, second) in pairs.items():
        if first not in known or second not in known:
            continue
        factors = [known[key].rdiv(known[key].loc[1], axis="columns") for key in (first, second)]
        for n_seq in sorted(set(factors[0].index) & set(factors[1].index) - {1}):
            entries.append({"what": what, "n_seq": n_seq, "ratio": paired_ratio(*(f.loc[n_seq] for f in factors))})
    return pd.DataFrame(entries, columns=["what", "n_seq", "ratio"])


def table_cells(rows: pd.DataFrame) -> pd.DataFrame:
    """The source's table: per policy and n_seq the aggregate decode `rate`, `prefill` rate, verdicts and failure text.

    `outcome` is valid, wrong or abort; the rate of a wrong computation is kept and marked, that of an abort is None.
    """
    found, entries = rows[(rows["workload"] == "decode") & ~rows["anchor"]], []
    for (build, model, policy, n_seq), group in found.groupby(["build", "model", "policy", "n_seq"]):
        done = group[group["status"] == "ok"]
        outcome = "valid" if (group["verdict"] == "valid").all() else "wrong" if len(done) == len(group) else "abort"
        entry = {"build": build, "model": model, "policy": policy, "n_seq": n_seq, "outcome": outcome, "n": len(group)}
        entry |= {"n_prompt": group["n_prompt"].iloc[0], "n_gen": group["n_gen"].iloc[0], "rate": None, "prefill": None}
        entry |= {"error": max((c["second_path_error"] for c in done["checks"]), default=None)}
        entries.append(
            entry
            | {"failure": next(iter(sorted(set(group["failure"]))), "")}
            | (_rates(done) if len(done) == len(group) else {})
        )
    return pd.DataFrame(entries)


def _rates(done: pd.DataFrame) -> dict[str, Any]:
    steps = [sum(samples[0]) / NS for samples in done["samples_ns"]]
    filled = [fill[0] / NS for fill in done["prefill_ns"]]
    n_seq, n_steps = int(done["n_seq"].iloc[0]), len(done["samples_ns"].iloc[0][0])
    prompts = n_seq * int(done["n_prompt"].iloc[0])
    return {"rate": stats.rate(n_seq * n_steps, steps), "prefill": stats.rate(prompts, filled)}
