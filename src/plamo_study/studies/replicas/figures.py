"""Notebook 07's figures. A figure takes tidy data, holds none, and reads itself aloud in its description."""

import altair as alt
import pandas as pd

from plamo_study.present.figures import Chart, spread

WIDE = 18  # of a bar


def throughput(data: pd.DataFrame, title: str) -> Chart:
    """Tokens per second by arrangement, a panel a model, the most sequences per process on the left."""
    tidy = spread(data[["model", "arrangement", "n_processes", "rate"]], "rate")
    order = list(dict.fromkeys(tidy.sort_values("n_processes")["arrangement"]))
    x = alt.X("arrangement:N", title="Processes × sequences of each", sort=order)
    heading = "Tokens per second, all sequences"
    base = alt.Chart().encode(x=x)
    bars = base.mark_bar(size=2 * WIDE).encode(y=alt.Y("value:Q", title=heading))
    whiskers = base.mark_rule(strokeWidth=2).encode(y=alt.Y("low:Q", title=heading), y2="high:Q")
    chart = alt.layer(bars, whiskers, data=tidy).properties(width=250, height=240)
    words = "; ".join(
        f"{model}: " + ", ".join(f"{a} {value:,.0f}" for a, value in zip(g["arrangement"], g["value"], strict=True))
        for model, g in tidy.sort_values("n_processes").groupby("model", sort=True)
    )
    return chart.facet(column=alt.Column("model:N", title=None)).properties(
        title=title, description=f"{title}. {heading}: {words}."
    )
