"""Notebook 08's figures. A figure takes tidy data, holds none, and reads itself aloud in its description."""

import altair as alt
import pandas as pd

from plamo_study.present.figures import Chart, spread, whiskered
from plamo_study.present.theme import CATEGORIES

LINE = 1.0  # as fast as plain decode


def speeds(data: pd.DataFrame, title: str) -> Chart:
    """Speed over plain decode against acceptance, a line a way back, a panel a model; above the line drafting pays."""
    tidy = spread(data[["model", "who", "accepts", "speed"]], "speed")
    x = alt.X("accepts:Q", title="Acceptance of a drafted token", axis=alt.Axis(format="%"))
    y = alt.Y("value:Q", title="Times as fast as plain decode")
    base = alt.Chart().encode(
        x=x, color=alt.Color("who:N", title=None, scale=alt.Scale(range=CATEGORIES), sort=None, legend=_below())
    )
    layers = [
        alt.Chart().mark_rule(strokeDash=[4, 4]).encode(y=alt.datum(LINE)),
        base.mark_area(opacity=0.2).encode(y=alt.Y("low:Q", title="Times as fast as plain decode"), y2="high:Q"),
        base.mark_line().encode(y=y),
    ]
    chart = alt.layer(*layers, data=tidy).properties(width=250, height=240)
    ends = tidy.sort_values("accepts").groupby(["model", "who"], sort=False)["value"]
    words = "; ".join(f"{model}, {who}: {group.iloc[0]:.2f} to {group.iloc[-1]:.2f}" for (model, who), group in ends)
    facets = chart.facet(column=alt.Column("model:N", title=None))
    return facets.properties(title=title, description=f"{title}. From acceptance 0 to 1: {words}.")


def split(data: pd.DataFrame, title: str) -> Chart:
    """What a round is made of: a bar a way back, its terms stacked, plain decode of as many tokens beside it."""
    x = alt.X("ms:Q", title="Milliseconds of a round")
    y = alt.Y("who:N", title=None, sort=None)
    colour = alt.Color("term:N", title=None, scale=alt.Scale(range=CATEGORIES), sort=None)
    bars = alt.Chart().mark_bar().encode(x=x, y=y, color=colour, order="order:Q")
    chart = alt.layer(bars, data=data).properties(width=560, height=alt.Step(26))
    whole = data.groupby(["model", "who"], sort=False)["ms"].sum()
    words = "; ".join(f"{model}, {who}: {ms:.3g} ms" for (model, who), ms in whole.items())
    facets = chart.facet(row=alt.Row("model:N", title=None)).resolve_scale(x="independent", y="independent")
    return facets.properties(title=title, description=f"{title}. {words}.")


def columns(data: pd.DataFrame, title: str) -> Chart:
    """What a call of several tokens costs over a call of one, a line a model."""
    tidy = spread(data[["model", "n_tokens", "ratio"]], "ratio")
    x = alt.X("n_tokens:Q", title="Tokens in the call", axis=alt.Axis(values=sorted(set(tidy["n_tokens"]))))
    base = alt.Chart(tidy).encode(x=x, color=alt.Color("model:N", title=None, scale=alt.Scale(range=CATEGORIES)))
    last = tidy.sort_values("n_tokens").groupby("model").last()
    words = "; ".join(
        f"{model}: {row['value']:.2f} for {row['n_tokens']} tokens" for model, row in last.to_dict("index").items()
    )
    return alt.layer(*whiskered(base, "Time, a call of one token = 1")).properties(
        title=title, description=f"{title}. {words}.", width=420, height=240
    )


def _below() -> alt.Legend:
    return alt.Legend(orient="bottom", columns=1)
