"""Notebook 06's figures. A figure takes tidy data, holds none, and reads itself aloud in its description."""

import altair as alt
import pandas as pd

from plamo_study.present.figures import Chart, spread
from plamo_study.present.theme import CATEGORIES

WAYS = ["whole", "apart", "together"]
LOG = alt.Scale(type="log", nice=False, padding=12)


def gaps(data: pd.DataFrame, title: str) -> Chart:
    """How long those being answered wait for each token, over time; the prompt arrives at 0."""
    x = alt.X("at:Q", title="Seconds since the prompt arrived")
    y = alt.Y("gap:Q", title="Wait for a token (ms, log)", scale=alt.Scale(type="log"))
    colour = alt.Color("how:N", title=None, scale=alt.Scale(range=CATEGORIES), sort=None)
    base = alt.Chart().encode(x=x, y=y, color=colour)
    chart = alt.layer(base.mark_line(strokeWidth=1), base.mark_point(size=30), data=data).properties(
        width=250, height=240
    )
    longest = data.groupby(["model", "how"], sort=False)["gap"].max()
    words = "; ".join(f"{model}, {how}: at most {gap:,.0f} ms" for (model, how), gap in longest.items())
    facets = chart.facet(column=alt.Column("model:N", title=None)).resolve_scale(x="independent")
    return facets.properties(title=title, description=f"{title}. {words}.")


def traded(data: pd.DataFrame, column: str, heading: str, title: str, factor: float = 1.0) -> Chart:
    """A quantity against the size of a chunk, a line a way, a panel a model, whiskers the 95 % interval."""
    tidy = spread(data[["model", "how", "n_chunk", column]], column, factor)
    x = alt.X(
        "n_chunk:Q", title="Tokens of a chunk (log)", scale=LOG, axis=alt.Axis(values=sorted(set(tidy["n_chunk"])))
    )
    y = alt.Y("value:Q", title=heading, scale=alt.Scale(type="log"))
    colour = alt.Color("how:N", title=None, scale=alt.Scale(range=CATEGORIES), sort=None)
    base = alt.Chart().encode(x=x, color=colour)
    layers = [
        base.mark_rule(strokeWidth=2).encode(y=alt.Y("low:Q", title=heading), y2="high:Q"),
        base.mark_line().encode(y=y),
        base.mark_point().encode(y=y),
    ]
    chart = alt.layer(*layers, data=tidy).properties(width=250, height=240)
    ends = tidy.sort_values("n_chunk").groupby(["model", "how"], sort=False)["value"]
    words = "; ".join(f"{model}, {how}: {group.iloc[0]:.3g} to {group.iloc[-1]:.3g}" for (model, how), group in ends)
    facets = chart.facet(column=alt.Column("model:N", title=None))
    return facets.properties(
        title=title, description=f"{title}. {heading} from the smallest chunk to the largest: {words}."
    )


def across(data: pd.DataFrame, title: str) -> Chart:
    """What a chunk takes by how much of the prompt was evaluated before it; a line a size, a panel a model."""
    x = alt.X("at:Q", title="Tokens of the prompt evaluated before")
    y = alt.Y("ms:Q", title="Time of a chunk (ms)")
    base = alt.Chart().encode(
        x=x, y=y, color=alt.Color("how:N", title=None, scale=alt.Scale(range=CATEGORIES), sort=None)
    )
    chart = alt.layer(base.mark_line(), base.mark_point(), data=data).properties(width=250, height=240)
    ends = data.groupby(["model", "how"], sort=False)["ms"]
    words = "; ".join(f"{model}, {how}: {ms.iloc[0]:.3g} to {ms.iloc[-1]:.3g} ms" for (model, how), ms in ends)
    facets = chart.facet(column=alt.Column("model:N", title=None))
    return facets.properties(title=title, description=f"{title}. From the first chunk to the last: {words}.")
