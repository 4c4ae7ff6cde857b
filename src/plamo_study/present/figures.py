"""Every figure of the notebooks. A figure takes tidy data, holds none, and reads itself aloud in its description."""

from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from plamo_study.analysis.stats import Estimate
from plamo_study.present.sentences import CLOSE, is_close

Chart = alt.LayerChart | alt.FacetChart | alt.HConcatChart | alt.VConcatChart
LONG_NAME = 24  # characters from which names of a legend stand one below the other


def spread(data: pd.DataFrame, column: str, factor: float = 1.0) -> pd.DataFrame:
    """An estimate column as three numeric ones: value, low and high (the value itself where there is no interval)."""
    estimates: list[Estimate] = [estimate.scaled(factor) for estimate in data[column]]
    low = [e.value if e.low != e.low else e.low for e in estimates]
    high = [e.value if e.high != e.high else e.high for e in estimates]
    return data.drop(columns=column).assign(value=[e.value for e in estimates], low=low, high=high)


def anchors(data: pd.DataFrame, limit: float, title: str) -> Chart:
    """The anchor cell between blocks, relative to its median; the band is the drift that is accepted."""
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


def whiskered(base: alt.Chart, axis: str, scale: alt.Scale | None = None, **points: Any) -> list[alt.Chart]:
    """A line through points with their intervals, of data that `spread` made; `points`: how a point looks."""
    y = alt.Y("value:Q", title=axis, scale=scale) if scale else alt.Y("value:Q", title=axis)
    return [
        base.mark_rule(strokeWidth=2).encode(y=alt.Y("low:Q", title=axis), y2="high:Q"),
        base.mark_line().encode(y=y),
        base.mark_point().encode(y=y, **points),
    ]


def on_a_line(data: pd.DataFrame, axes: tuple[str, str], which: str, title: str) -> Chart:
    """Points `x` against `y`, both on scales of factors, by `which`, around the line on which both are equal.

    `tip`: what a point is.
    """
    known = data[["x", "y"]].to_numpy() if len(data) else np.ones(1)
    low, high = float(known.min()), float(known.max())
    scale = alt.Scale(type="log", domain=[low / 1.1, high * 1.1], nice=False)
    ticks = [value * 10.0**power for power in range(-6, 7) for value in (1, 2, 3, 5, 7)]
    axis = alt.Axis(values=[tick for tick in ticks if low / 1.1 <= tick <= high * 1.1])
    x = alt.X("x:Q", title=axes[0], scale=scale, axis=axis)
    y = alt.Y("y:Q", title=axes[1], scale=scale, axis=axis)
    line = alt.Chart(pd.DataFrame({"x": [low, high], "y": [low, high]})).mark_line(strokeDash=[4, 4], color="#6b7280")
    colour, shape = marks(which, list(dict.fromkeys(data[which])))
    points = alt.Chart(data).mark_point(size=50).encode(x=x, y=y, color=colour, shape=shape, tooltip=["tip:N"])
    near = sum(map(is_close, data["y"] / data["x"]))
    said = f"{near} of {len(data)} points lie within {CLOSE} times of the line on which both are equal."
    return alt.layer(line.encode(x=x, y=y), points).properties(title=title, description=f"{title}. {said}", height=300)
