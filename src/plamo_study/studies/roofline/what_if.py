"""What twice the compute, twice the bandwidth or half the bytes of the weights would do to each phase.

It only moves the machine's two ceilings or the model's bytes in the roofline: a faster machine may need other kernels.
"""

import math
from collections.abc import Mapping

import altair as alt
import pandas as pd

from plamo_study.analysis import roofline
from plamo_study.analysis.roofline import Ceilings, Model
from plamo_study.errors import StudyError
from plamo_study.studies.roofline.intensity import DEPTH

CHANGES = ("times the compute", "times the bandwidth", "fewer bytes of weights")
PASSES = (("prefill of 512", 512, 0.0, 1), ("decode of 1", 1, DEPTH, 1), ("decode of 8", 1, DEPTH, 8),
          ("decode of 32", 1, DEPTH, 32))  # fmt: skip


def passes(models: Mapping[str, Model], limit: Ceilings) -> pd.DataFrame:
    """Per model and pass the seconds of `compute`, of reading `weights`, and of moving the `rest` (cache, state)."""
    entries = []
    for name, model in models.items():
        for what, tokens, depth, n_seq in PASSES:
            account = roofline.parts(model, tokens, depth, n_seq)
            flops, moved = roofline.work(account)
            read = sum(part.bytes for part in account if part.name in roofline.PRODUCTS)
            seconds = {
                "compute": flops / limit.matmul,
                "weights": read / limit.read,
                "rest": (moved - read) / limit.read,
            }
            entries.append({"model": name, "pass": what, **seconds})
    return pd.DataFrame(entries)


def gains(models: Mapping[str, Model], limit: Ceilings, factor: float = 2.0) -> pd.DataFrame:
    """Speedup of each pass by each change by `factor`: `overlap` and `sum`, the band's two ends.

    Columns model, pass, change, overlap (compute hides memory or the other way round), sum (neither hides the other).
    """
    if not 0 < factor < math.inf:
        raise StudyError(f"factor {factor:g}", "must be finite and above 0", "-p factor 2")
    entries = []
    for row in passes(models, limit).to_dict("records"):
        before = (row["compute"], row["weights"] + row["rest"])
        for change in CHANGES:
            compute = row["compute"] / (factor if change == CHANGES[0] else 1)
            memory = (before[1] if change == CHANGES[0] else before[1] / factor if change == CHANGES[1]
                      else row["weights"] / factor + row["rest"])  # fmt: skip
            gain = {"overlap": max(before) / max(compute, memory), "sum": sum(before) / (compute + memory)}
            entries.append({"model": row["model"], "pass": row["pass"], "change": change, **gain})
    return pd.DataFrame(entries)


def in_chart(chart: alt.Chart) -> alt.Chart:
    """The gains computed in a chart of `passes` and their `change`, so that a slider named `factor` can move them."""
    compute, bandwidth, _ = (f"datum.change == '{change}'" for change in CHANGES)
    return chart.transform_calculate(
        before="datum.weights + datum.rest",
        compute_after=f"{compute} ? datum.compute / factor : datum.compute",
        memory_after=f"{compute} ? datum.weights + datum.rest : {bandwidth} ? (datum.weights + datum.rest) / factor"
        " : datum.weights / factor + datum.rest",
    ).transform_calculate(
        overlap="max(datum.compute, datum.before) / max(datum.compute_after, datum.memory_after)",
        sum="(datum.compute + datum.before) / (datum.compute_after + datum.memory_after)",
    )
