"""Every figure of the notebooks. A figure takes tidy data, holds none, and states its content in its description."""

import altair as alt
import pandas as pd

from plamo_study.analysis.stats import Estimate

Chart = alt.LayerChart | alt.FacetChart | alt.HConcatChart | alt.VConcatChart
LONG_NAME = 24  # characters from which a legend lists its names in one column


def spread(data: pd.DataFrame, column: str, factor: float = 1.0) -> pd.DataFrame:
    """An estimate column as three numeric ones: value, low and high (the value itself where there is no interval)."""
    estimates: list[Estimate] = [estimate.scaled(factor) for estimate in data[column]]
    low = [e.value if e.low != e.low else e.low for e in estimates]
    high = [e.value if e.high != e.high else e.high for e in estimates]
    return data.drop(columns=column).assign(value=[e.value for e in estimates], low=low, high=high)


def anchors(data: pd.DataFrame, limit: float, title: str) -> Chart:
    """The anchor cell between blocks, relative to its median; the band is the accepted drift."""
    box = alt.Chart(pd.DataFrame({"low": [1 - limit], "high": [1 + limit]}))
    band = box.mark_rect(color="#a6cbe3", opacity=0.5).encode(y="low:Q", y2="high:Q")
    x = alt.X("order:O", title="Before block")
    y = alt.Y("relative:Q", title="Anchor step time / median", scale=alt.Scale(zero=False, nice=False, padding=8))
    series = alt.Chart(data).mark_line(point=True).encode(x=x, y=y)
    away = (data["relative"] - 1).abs()
    description = (
        f"{title}. {(away <= limit).sum()} of {len(data)} anchors lie within {limit:.0%} of their median, which is the "
        f"band; the furthest is {away.max():.1%} away."
    )
    return alt.layer(band, series).properties(title=title, description=description, height=160)


def marks(field: str, names: list[str]) -> tuple[alt.Color, alt.Shape]:
    """Colour and shape of one field; the same domain and no title make them one legend."""
    domain = alt.Scale(domain=names)
    long = max(map(len, names), default=0) > LONG_NAME
    legend = alt.Legend(columns=1, labelLimit=500) if long else alt.Legend(columns=0)
    color = alt.Color(f"{field}:N", title=None, scale=domain, legend=legend)
    return color, alt.Shape(f"{field}:N", title=None, scale=domain, legend=legend)
