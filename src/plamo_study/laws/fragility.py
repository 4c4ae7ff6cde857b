"""Which tensors suffer from quantization, which more than their size and role explain, and what protecting them buys.

Three questions are kept apart.

1. *Does it harm?* Damage (mean KL divergence) with this point alone quantized, against that of the same reference
   computed in other pieces, paired by chunk. Coarse quantization of anything does harm, even in a random model.
2. *Is it fragile?* Damage per byte cannot say. In models of random weights it differs twentyfold and more between
   classes, because a head, a gate and a projection differ in size and role, and chunks are so alike that every such
   difference is significant. Nor can an outlier test among classes: there are five to nine of them, and which one is
   the outlier is fixed by the architecture. So each point has its own control: the same tensors with errors of the
   same type that know nothing of the weights (engine/kernels.py). The control meets the same inputs, in the same
   layers, in as many weights; it differs only in whether the errors fit the weights. Damage over control is what
   structure costs: outliers that set the scale of their block, and errors that point where the model is sensitive.
   The *excess* is that quotient over the median quotient of the other points of its family (classes, or layers),
   because weights of another shape than the normal one shift all quotients alike.
   Null: the rounding error at hand is one more draw of the control, so the excess is 1. Its logarithm is held against
   the spread of the control's draws by a two-sided prediction t test (s · √(1 + 1/n), n draws), in which few weights
   mean a wide spread, whatever the number of chunks. A second test asks for more: an excess beyond `MARGIN` either
   way, which keeping a point in a larger type would need to be worth it. Both are corrected by Benjamini-Hochberg over
   all points and files given. What could have been found is printed beside it (`detectable`).
3. *What is protection worth?* Damage avoided when a point alone keeps the reference's type, per byte it costs, and
   the frontier of protecting class after class in that order. The order is chosen on the chunks it is measured on.

This module reads rows (llama_meter/workloads/fragility.py), no files and no engine.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import special

from llama_meter.limits import DRAWS
from llama_meter.stats import Estimate, t_quantile
from plamo_study.stats import clustered

LEVEL = 0.05  # false-discovery rate
MARGIN = 1.25  # excess beyond which a point is worth keeping; less is shown, but of no use
EQUIVALENT = 2.0  # an excess whose interval is within this factor of 1, and holds 1, counts as none
MEGABYTE = 1e6
FRAGILE, STURDY = f"fragile, beyond {MARGIN} times", "sturdy"
MORE, EXPLAINED, OPEN = "fragile, margin open", "as size and role explain", "inconclusive"
UNKNOWN = Estimate(np.nan, np.nan, np.nan, 0)
DAMAGE = ["model", "candidate", "family", "point", "n_weights", "extra_bytes", "dropped", "share", "avoided",
          "per_megabyte", "price", "p_harm", "p_avoided"]  # fmt: skip
STEPS = ["model", "candidate", "step", "point", "bytes", "bits_per_weight", "damage"]
JUDGED = ["model", "candidate", "family", "point", "dropped", "control", "above", "n_chunks", "quotient", "excess",
          "p", "p_margin", "error", "n"]  # fmt: skip


@dataclass(frozen=True)
class Scanned:
    """One scan: model, the reference's and the candidate's type, series by name."""

    model: str
    reference: str
    candidate: str
    series: dict[str, list[float]]

    @property
    def points(self) -> list[str]:
        """Points whose every number is finite, classes first."""
        names = [name.removeprefix("size ") for name in self.series if name.startswith("size ")]
        return [n for n in names if all(f"{scan} {n}" in self.series for scan in ("drop", "control", "protect"))]

    def of(self, name: str) -> np.ndarray:
        """A series as an array."""
        return np.asarray(self.series[name], float)

    def mean(self, name: str) -> Estimate:
        """Mean of a series over chunks, nats."""
        return mean(self.of(name))

    def avoided(self, point: str, among: int) -> Estimate:
        """Nats saved when a point alone is not quantized; the interval allows for selection from `among` points."""
        return mean(self.of("all") - self.of(f"protect {point}"), among)

    def size(self, point: str) -> tuple[float, float, float]:
        """Weights, bytes in the reference, bytes in the candidate."""
        weights, reference, candidate = self.series[f"size {point}"]
        return weights, reference, candidate


def family(point: str) -> str:
    """The family of a point: "layer" or "class"."""
    return "layer" if point.startswith("layer ") else "class"


def mean(values: np.ndarray, among: int = 1) -> Estimate:
    """Mean over chunks with its interval."""
    return clustered.ratio_of_sums(values, np.ones(len(values)), among)


# ---------------------------------------------------------------- damage and what protection is worth


def damage(scans: Iterable[Scanned]) -> pd.DataFrame:
    """One line per scan and point, in the file's order.

    Columns: model, candidate, family, point, n_weights, extra_bytes (reference less candidate), dropped (nats lost
    when it alone is quantized), share (of the candidate's damage), avoided (nats saved when it alone is not),
    per_megabyte (nats avoided per 1e6 bytes), price (extra bits per weight of the whole file per nat avoided), as
    `Estimate`s; p_harm and p_avoided, Benjamini-Hochberg-adjusted, two-sided: against the floor, against zero.
    """
    lines = [_damage(scan, point) for scan in scans for point in scan.points]
    table = pd.DataFrame(lines, columns=DAMAGE)
    for name in ("p_harm", "p_avoided"):
        table[name] = clustered.adjusted(table[name].tolist())
    return table


def _damage(scan: Scanned, point: str) -> dict[str, Any]:
    weights, reference, candidate = scan.size(point)
    extra, everything = reference - candidate, scan.of("all")
    dropped, saved = scan.of(f"drop {point}"), everything - scan.of(f"protect {point}")
    avoided = mean(saved)
    return {
        "model": scan.model,
        "candidate": scan.candidate,
        "family": family(point),
        "point": point,
        "n_weights": int(weights),
        "extra_bytes": int(extra),
        "dropped": mean(dropped),
        "share": clustered.ratio_of_sums(dropped, everything),
        "avoided": avoided,
        "per_megabyte": avoided.scaled(MEGABYTE / extra),
        "price": _inverse(avoided, 8 * extra / scan.size("all")[0]),
        "p_harm": clustered.p_value(dropped - scan.of("floor")),
        "p_avoided": clustered.p_value(saved),
    }


def _inverse(estimate: Estimate, factor: float) -> Estimate:
    """`factor` over an estimate; infinite where it can be zero or less."""
    low, value, high = (factor / x if x > 0 else np.inf for x in (estimate.high, estimate.value, estimate.low))
    return Estimate(value, low, high, estimate.n)


def frontier(scans: Iterable[Scanned]) -> pd.DataFrame:
    """Classes protected one by one, most damage avoided per byte first: one line per scan and step (0: candidate).

    Columns: model, candidate, step, point (the class added), bytes (of all tensors), bits_per_weight, damage (nats).
    """
    lines = []
    for scan in scans:
        weights, _, size = scan.size("all")
        steps = sorted((n.split(" ", 2) for n in scan.series if n.startswith("frontier ")), key=lambda s: int(s[1]))
        for words in [["", "0", ""], *steps]:
            _, reference, candidate = scan.size(words[2]) if words[2] else (0.0, 0.0, 0.0)
            size += reference - candidate
            line = {"model": scan.model, "candidate": scan.candidate, "step": int(words[1]), "point": words[2]}
            now = scan.mean(" ".join(words) if words[2] else "all")
            lines.append(line | {"bytes": int(size), "bits_per_weight": 8 * size / weights, "damage": now})
    return pd.DataFrame(lines, columns=STEPS)


# ---------------------------------------------------------------- fragility


def fragility(scans: Iterable[Scanned]) -> pd.DataFrame:
    """One line per scan and point: does it suffer more than its size and role explain?

    Columns: model, candidate, family, point, dropped and control (nats), above and n_chunks (in how many of the chunks
    damage exceeds its control), quotient (of the two), excess (quotient over the median of the others of its family,
    with a 95 % prediction interval), p (two-sided, that the excess is 1) and p_adjusted, p_margin (that it is within
    `MARGIN`) and p_margin_adjusted, tests (how many were corrected together), detectable (smallest excess told from 1
    with a power of 80 % in the face of all these tests), verdict: fragile beyond the margin, fragile with the margin
    open, sturdy, as size and role explain, or inconclusive. A family of one point has no others: NaN.
    """
    lines = [line for scan in scans for line in _of_scan(scan)]
    table = pd.DataFrame(lines, columns=JUDGED)
    for name in ("p", "p_margin"):
        table[f"{name}_adjusted"] = clustered.adjusted(table[name].tolist())
    table["tests"] = int(table["p"].notna().sum())
    table["detectable"] = [
        _detectable(error, n, len(table)) for error, n in zip(table["error"], table["n"], strict=True)
    ]
    verdicts = zip(table["excess"], table["p_adjusted"], table["p_margin_adjusted"], strict=True)
    table["verdict"] = [_verdict(excess, p, p_margin) for excess, p, p_margin in verdicts]
    return table.drop(columns=["error", "n"])


def _of_scan(scan: Scanned) -> list[dict[str, Any]]:
    logs = {point: _log_quotients(scan, point) for point in scan.points}
    return [_fragility(scan, point, logs) for point in logs]


def _fragility(scan: Scanned, point: str, quotients: dict[str, np.ndarray]) -> dict[str, Any]:
    logs = quotients[point]
    others = [q for p, q in quotients.items() if family(p) == family(point) and p != point]
    excess, p, p_margin, error = UNKNOWN, np.nan, np.nan, np.nan
    if others and len(logs) > 1:
        excess, p, p_margin, error = _held(logs - np.median(others, axis=0))
    dropped, control = scan.of(f"drop {point}"), scan.of(f"control {point}")
    return {
        "model": scan.model,
        "candidate": scan.candidate,
        "family": family(point),
        "point": point,
        "dropped": mean(dropped),
        "control": mean(control),
        "above": int((dropped > control).sum()),
        "n_chunks": len(dropped),
        "quotient": float(np.exp(logs.mean())),
        "excess": excess,
        "p": p,
        "p_margin": p_margin,
        "error": error,
        "n": len(logs),
    }


def _log_quotients(scan: Scanned, point: str) -> np.ndarray:
    """ln(damage / control) per draw: the mean over the chunks evaluated with it."""
    with np.errstate(divide="ignore"):
        logs = np.log(scan.of(f"drop {point}")) - np.log(scan.of(f"control {point}"))
    draws = min(DRAWS, len(logs))
    return np.array([logs[draw::draws].mean() for draw in range(draws)])


def _held(logs: np.ndarray) -> tuple[Estimate, float, float, float]:
    """Excess with its prediction interval, p that it is 1, p that it is within the margin, its error as one more draw.

    The error is the standard error of the logarithm.
    """
    n, middle = len(logs), float(logs.mean())
    error = float(logs.std(ddof=1)) * (1 + 1 / n) ** 0.5
    reach = t_quantile(n - 1) * error
    p, p_margin = (
        min(1.0, 2 * float(special.stdtr(n - 1, (np.log(margin) - abs(middle)) / error))) if error else 0.0
        for margin in (1.0, MARGIN)
    )
    value, low, high = (float(np.exp(x)) for x in (middle, middle - reach, middle + reach))
    return Estimate(value, low, high, n), p, p_margin, error


def _detectable(error: float, n: int, tests: int) -> float:
    """The excess found in four of five cases if it were the only one among all tests."""
    if np.isnan(error):
        return np.nan
    quantiles = special.stdtrit(n - 1, [1 - LEVEL / (2 * tests), clustered.POWER])
    return float(np.exp(quantiles.sum() * error))


def _verdict(excess: Estimate, p: float, p_margin: float) -> str:
    if p < LEVEL:
        more = FRAGILE if p_margin < LEVEL else MORE
        return more if excess.value > 1 else STURDY
    within = excess.within(1 / EQUIVALENT, EQUIVALENT) == "holds"
    return EXPLAINED if within and excess.low <= 1 <= excess.high else OPEN
