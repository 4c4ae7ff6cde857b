"""Figures of the batching law."""

import altair as alt
import pandas as pd

from plamo_study.present.figures import Chart, marks

OUTCOMES = {"right": "#a6cbe3", "wrong": "#e69f00", "abort": "#d55e00"}


def packed_map(data: pd.DataFrame, title: str) -> Chart:
    """What packed prompts come to, by their number and n_batch; a cross where the law says otherwise."""
    x, y = alt.X("n_seq:O", title="Prompts packed"), alt.Y("n_batch:O", title="n_batch (tokens)")
    scale = alt.Scale(domain=list(OUTCOMES), range=list(OUTCOMES.values()))
    fields = (
        alt.Chart().mark_rect(stroke="white").encode(x=x, y=y, color=alt.Color("observed:N", title=None, scale=scale))
    )
    words = alt.Chart().mark_text(fontSize=9).encode(x=x, y=y, text="mark:N")
    tidy = data.assign(mark=["" if r.predicted == r.observed else "x" for r in data.itertuples()])
    tidy = tidy.sort_values("build", key=lambda builds: builds != "stock", kind="stable")  # the released engine first
    counts = "; ".join(f"{b}: {', '.join(f'{n} {o}' for o, n in g['observed'].value_counts().items())}"
                       for b, g in data.groupby("build"))  # fmt: skip
    off = (tidy["mark"] == "x").sum()
    description = f"{title}. {counts}. The law says otherwise in {off} fields."
    chart = alt.layer(fields, words, data=tidy).properties(width=240, height=110)
    return chart.facet(column=alt.Column("build:N", title=None, sort=None)).properties(
        title=title, description=description
    )


def three_tests(data: pd.DataFrame, title: str) -> Chart:
    """Relative error of the three tests on a logarithmic axis; right of its model's line a test fails."""
    tidy = data.assign(label=data["model"] + ", " + data["build"], shown=data["error"].clip(lower=1e-8))
    x = alt.X("shown:Q", title="Largest relative error (log; 1e-8 and less at the left)", scale=alt.Scale(type="log"))
    colour, shape = marks("label", list(dict.fromkeys(tidy["label"])))
    dots = (
        alt.Chart(tidy)
        .mark_point(size=90)
        .encode(y=alt.Y("test:N", title=None, sort=None), x=x, color=colour, shape=shape)
    )
    rule = alt.Chart(pd.DataFrame({"x": sorted(set(data["limit"]))})).mark_rule(strokeDash=[4, 4]).encode(x="x:Q")
    words = "; ".join(f"{r.test}, {r.label}: {r.error:.1e}" for r in tidy.itertuples())
    return alt.layer(rule, dots).properties(title=title, description=f"{title}. {words}.", height=140)
