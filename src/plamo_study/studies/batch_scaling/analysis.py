"""Study 03: what evaluating several sequences together buys, per build of the engine, model and number of sequences.

The step time of a process is the median of its steps; estimates are over processes, comparisons paired by block. What
is fitted and compared are the `curves` of the study's rows.
"""

import math
from typing import Any

import numpy as np
import pandas as pd
from scipy import optimize

from plamo_study.analysis import clustered, stats
from plamo_study.analysis.kernels import weight_passes
from plamo_study.analysis.timing import NS, median_sample, paired_ratio
from plamo_study.analysis.usable import usable
from plamo_study.limits import RIGHT

Curve = tuple[str, str]  # (build, model)
Curves = dict[Curve, pd.DataFrame]

STOCK = "stock"
LINE, PASSES = "shared + B x each", "passes(B) x shared + B x each, B > 1"
NEARLY = 0.8  # share of a curve's points that a block needs to be fitted
LEAST_POINTS = 8  # of a curve in which a bend is looked for
FALSE_DISCOVERIES = 0.05  # Benjamini-Hochberg level for jumps
LEAST_JUMP = 0.1  # smaller deviations may come from a poor fit


def curves(rows: pd.DataFrame) -> Curves:
    """Step seconds by (build, model): a frame with a row per number of sequences and a column per block."""
    found = usable(rows)
    found = found[(found["workload"] == "decode") & (found["policy"] == "shared")]
    found = found.assign(seconds=found["samples_ns"].map(median_sample) / NS)
    return {
        (str(build), str(model)): group.pivot_table(index="n_seq", columns="block", values="seconds")
        for (build, model), group in found.groupby(["build", "model"])
    }


def factor(curve: pd.DataFrame, n_seq: int) -> stats.Estimate:
    """How many times as many tokens a second `n_seq` sequences write together as one does."""
    return paired_ratio(curve.loc[1] * n_seq, curve.loc[n_seq])


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
        entries.append(entry | {"right": bool(group["verdict"].isin(RIGHT).all()), "n": len(group)})
    return pd.DataFrame(entries)


def fits(known: Curves, tile: int | None = None) -> pd.DataFrame:
    """Step time = `fixed` + n_seq * `each` (s), fitted block by block, residuals weighted by 1 / time.

    With the `tile` of a known kernel, step time = passes(n_seq) * `fixed` + n_seq * `each` instead, from two sequences
    on: a single sequence uses another kernel.

    `form`: LINE or PASSES. `amortised`: the shared part of the cost of a batch's first sequence. `half`: fixed / each,
    the number of sequences whose own parts together equal the shared part of one pass.
    `worst` at `worst_at`: largest deviation of a median from the fit.
    """
    entries = []
    for (build, model), curve in known.items():
        found = _fitted_part(curve, tile)
        lines = [line(one.index.to_numpy(), one.to_numpy(), passes_of(one.index, tile)) for one in _blocks(found)]
        off = found.median(axis="columns") / predicted(found, tile) - 1
        entries.append(
            {
                "build": build,
                "model": model,
                "form": PASSES if tile else LINE,
                "fixed": stats.median([a for a, _ in lines]),
                "each": stats.median([b for _, b in lines]),
                "amortised": stats.median([a / (a + b) for a, b in lines]),
                "half": stats.median([a / b for a, b in lines]),
                "worst": float(off.loc[off.abs().idxmax()]),
                "worst_at": int(str(off.abs().idxmax())),
            }
        )
    return pd.DataFrame(entries)


def chosen_fits(known: Curves, tile: int | None) -> pd.DataFrame:
    """One fit per curve, which all sentences use: the form with the smaller worst miss."""
    forms = [fits(known), *([fits(known, tile)] if tile else [])]
    both = pd.concat(forms, ignore_index=True)
    best = both["worst"].abs().groupby([both["build"], both["model"]]).idxmin()
    return both.loc[best.sort_values()].reset_index(drop=True)


def _fitted_part(curve: pd.DataFrame, tile: int | None) -> pd.DataFrame:
    """A curve from two sequences on where the kernel is known, else whole."""
    return curve[curve.index > 1] if tile else curve


def _blocks(curve: pd.DataFrame) -> list[pd.Series]:
    """The blocks of a curve that hold nearly all of its points: a lost row costs a point, not a block."""
    blocks = [curve[block].dropna() for block in curve]
    return [known for known in blocks if len(known) >= NEARLY * len(curve)]


def passes_of(n_seq: pd.Index, tile: int | None) -> np.ndarray:
    """Weight reads of a step, by number of sequences; 1 where the tile is not known."""
    return np.array([weight_passes(int(n), tile) if tile else 1 for n in n_seq])


def predicted(curve: pd.DataFrame, tile: int | None) -> np.ndarray:
    """Step seconds that the fit to a curve's medians gives at its numbers of sequences."""
    n_seq, passes = curve.index.to_numpy(), passes_of(curve.index, tile)
    fixed, each = line(n_seq, curve.median(axis="columns").to_numpy(), passes)
    return np.asarray(fixed * passes + each * n_seq)


def line(n_seq: np.ndarray, seconds: np.ndarray, passes: np.ndarray | float = 1.0) -> tuple[float, float]:
    """Non-negative least squares of seconds = fixed * passes + each * n_seq, every point weighted by 1 / its value."""
    design = np.column_stack([np.broadcast_to(passes, n_seq.shape), n_seq.astype(float)]) / seconds[:, None]
    (fixed, each), _ = optimize.nnls(design, np.ones_like(seconds))
    return float(fixed), float(each)


def bends(known: Curves, tile: int | None = None) -> pd.DataFrame:
    """Whether two lines that meet fit a curve better than the fit of `fits`, by the Bayesian information criterion.

    Per build and model: `at` (median over blocks of the best meeting point), `gain` in the criterion (over 6: strong
    for the bend, under -6 strong against it), `steeper` (slope after over slope before). Curves of fewer than eight
    points are left out.
    """
    entries = []
    for (build, model), curve in known.items():
        whole = _fitted_part(curve, tile)
        if len(whole) < LEAST_POINTS:
            continue
        n_seq, middle = whole.index.to_numpy(float), whole.median(axis="columns").to_numpy()
        found = [_bend(one.index.to_numpy(float), one.to_numpy()) for one in _blocks(whole)]
        left = float(((predicted(whole, tile) / middle - 1) ** 2).sum())
        gain = _criterion(left, len(middle), 2) - _criterion(_bend(n_seq, middle)[0], len(middle), 4)
        places, ratios = stats.median([f[1] for f in found]), stats.median([f[2] for f in found])
        entries.append({"build": build, "model": model, "gain": gain, "at": places, "steeper": ratios})
    return pd.DataFrame(entries, columns=["build", "model", "gain", "at", "steeper"])


def _bend(n_seq: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """The best two lines that meet: squared relative misses left over, where they meet, slope after over before."""
    best = (np.inf, 0.0, 1.0)
    for knot in n_seq[2:-2]:
        design = np.column_stack([np.ones(len(y)), n_seq, np.maximum(n_seq - knot, 0)]) / y[:, None]
        solution, *_ = np.linalg.lstsq(design, np.ones(len(y)), rcond=None)
        left = float(((design @ solution - 1) ** 2).sum())
        before, after = solution[1], solution[1] + solution[2]
        best = min(best, (left, float(knot), float(after / before) if before > 0 else np.inf))
    return best


def _criterion(left: float, n: int, parameters: int) -> float:
    """Schwarz's criterion of a least-squares fit: n ln(misses / n) + parameters ln n; smaller is better."""
    return float(n * np.log(max(left, 1e-12) / n) + parameters * np.log(n))


def jumps(known: Curves, tile: int | None = None) -> pd.DataFrame:
    """From every n_seq to the next: measured growth of the step over the growth of the fit (with `tile`, of passes).

    Columns build, model, n_seq (before), `jump` (1: as the fit says) and `found`: a t-test of the logarithms over
    blocks, corrected over the curve by Benjamini and Hochberg, and a growth off the fit's by a tenth at least.
    """
    parts = []
    for (build, model), curve in known.items():
        whole = _fitted_part(curve, tile)
        pairs = [(n, n + 1) for n in whole.index if n + 1 in whole.index]
        if len(whole.columns) < 2 or len(pairs) < 2:
            continue
        off = whole.div(predicted(whole, tile), axis="index")
        jump = [paired_ratio(off.loc[after], off.loc[before]) for before, after in pairs]
        p = np.array(clustered.adjusted([estimate.p(1.0) for estimate in jump]))
        entry = {"build": build, "model": model, "n_seq": [n for n, _ in pairs], "jump": jump}
        large = [abs(estimate.value - 1) > LEAST_JUMP for estimate in jump]
        parts.append(pd.DataFrame(entry | {"found": (p < FALSE_DISCOVERIES) & np.array(large)}))
    columns = ["build", "model", "n_seq", "jump", "found"]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)


def decomposed(known: Curves, chain: dict[str, Curve]) -> pd.DataFrame:
    """The change from one curve to another as factors that multiply, at every n_seq that all of them have.

    `chain`: the first curve, then every further one under the name of what leads to it. Columns n_seq, `from` and `to`
    (seconds of a step at both ends), one factor per name (how many times as fast the step became), `whole`, and the
    factors' `product`. Only blocks that hold all curves enter, so in each block the factors multiply to the whole.
    """
    entries: list[dict[str, Any]] = []
    if not known.keys() >= set(chain.values()):
        return pd.DataFrame(columns=["n_seq", "from", *list(chain)[1:], "product", "whole", "to"])
    links = {name: known[curve] for name, curve in chain.items()}
    for n_seq in sorted(set.intersection(*(set(curve.index) for curve in links.values()))):
        steps = pd.DataFrame({name: curve.loc[n_seq] for name, curve in links.items()}).dropna()
        times = [steps[name].tolist() for name in links]
        entry = {"n_seq": int(n_seq), "from": stats.median(times[0]), "to": stats.median(times[-1])}
        ways = zip(list(links)[1:], times, times[1:], strict=False)
        factors = {name: stats.ratio(before, after) for name, before, after in ways}
        entry |= factors | {"whole": stats.ratio(times[0], times[-1])}
        entries.append(entry | {"product": math.prod(factor.value for factor in factors.values())})
    return pd.DataFrame(entries)
