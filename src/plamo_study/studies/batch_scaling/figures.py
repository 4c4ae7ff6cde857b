"""Figures of the study of batch scaling."""

import altair as alt
import pandas as pd

from plamo_study.present.figures import TICKS, Chart, first_and_last, spread
from plamo_study.present.theme import CATEGORIES


def steps(data: pd.DataFrame, title: str) -> Chart:
    """Measured step times inside or outside their predicted bands, one panel a model."""
    tidy = spread(data[["model", "n_seq", "low_passes", "high_passes", "measured"]], "measured", 1e3)
    tidy = tidy.assign(at_least=tidy["low_passes"] * 1e3, at_most=tidy["high_passes"] * 1e3)
    x = alt.X("n_seq:Q", title="Sequences", scale=alt.Scale(nice=False, padding=10), axis=alt.Axis(values=TICKS))
    band = alt.Chart().mark_area(color="#a6cbe3").encode(x=x, y=alt.Y("at_least:Q", title="Step (ms)"), y2="at_most:Q")
    line = alt.Chart().mark_line(color=CATEGORIES[1]).encode(x=x, y="value:Q")
    dots = alt.Chart().mark_point(color=CATEGORIES[1], shape="diamond").encode(x=x, y="value:Q")
    whiskers = alt.Chart().mark_rule(color=CATEGORIES[1], strokeWidth=2).encode(x=x, y="low:Q", y2="high:Q")
    ends = "; ".join(f"{name}: {first_and_last(group)} ms" for name, group in tidy.groupby("model"))
    description = f"{title}. The band is the prediction, the line the measurement. {ends}."
    chart = alt.layer(band, whiskers, line, dots, data=tidy).properties(width=240, height=220)
    facets = chart.facet(column=alt.Column("model:N", title=None)).resolve_scale(y="independent")
    return facets.properties(title=title, description=description)
