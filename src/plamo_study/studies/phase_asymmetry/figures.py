"""Figures of the study of phase asymmetry."""

import altair as alt
import pandas as pd

from plamo_study.present.figures import Chart, marks, spread
from plamo_study.present.theme import CATEGORIES

DIVERGING = ["#d55e00", "#f3f3f3", "#0072b2"]  # decode, neither, prefill


def time_by_length(data: pd.DataFrame, length: str, seconds: str, axis: str, title: str) -> Chart:
    """Time of a phase against a token count, both logarithmic, one line a model, whiskers the 95 % interval."""
    tidy = spread(data[["model", length, seconds]], seconds)
    colour, shape = marks("model", sorted(set(tidy["model"])))
    log = alt.Scale(type="log", nice=False, padding=14)
    x = alt.X(f"{length}:Q", title=axis, scale=log, axis=alt.Axis(values=sorted(set(tidy[length]))))
    y = alt.Y("value:Q", title="Seconds (log)", scale=log, axis=alt.Axis(tickCount=5))
    base = alt.Chart(tidy).encode(x=x, color=colour)
    lines = base.mark_line().encode(y=y)
    points = base.mark_point().encode(y=y, shape=shape, tooltip=_tips(length))
    whiskers = base.mark_rule(strokeWidth=2).encode(y="low:Q", y2="high:Q")
    ends = []
    for model, group in tidy.sort_values(length).groupby("model"):
        first, last = group.iloc[0], group.iloc[-1]
        ends.append(f"{model}: {first['value']:.3g} s at {first[length]} and {last['value']:.3g} s at {last[length]}")
    return alt.layer(lines, whiskers, points).properties(title=title, description=f"{title}. {'; '.join(ends)}.")


def request_map(data: pd.DataFrame, crossing: pd.DataFrame, title: str) -> Chart:
    """Share of a request spent in prefill over input and output length; on the line both phases take equal time."""
    x = alt.X("n_in:Q", title="Input tokens (log)", scale=alt.Scale(type="log", nice=False))
    y = alt.Y("n_out:Q", title="Output tokens (log)", scale=alt.Scale(type="log", nice=False))
    colour = alt.Color(
        "share:Q",
        title="Share of time in prefill",
        scale=alt.Scale(domain=[0, 0.5, 1], range=DIVERGING),
        legend=alt.Legend(format=".0%"),
    )
    fields = alt.Chart().mark_rect().encode(x=x, x2="n_in_next", y=y, y2="n_out_next", color=colour)
    line = spread(crossing, "tokens").rename(columns={"n_prompt": "n_in", "value": "n_out"})
    line = line[line["n_out"] <= data["n_out_next"].max()]
    data = pd.concat([data.assign(part="map"), line.assign(part="line")], ignore_index=True)
    shown = alt.Chart().transform_filter("datum.part == 'line'")
    crossing_line = shown.mark_line(
        color="#1f2328", strokeWidth=2.5, point={"color": "#1f2328", "filled": True}
    ).encode(x=x, y=y)
    words = [f"{m}: {', '.join(f'{int(r.n_prompt)} in = {r.tokens.value:.0f} out' for r in g.itertuples())}"
             for m, g in crossing.groupby("model")]  # fmt: skip
    description = (
        f"{title}. Blue: prefill takes most of the request; orange: decode does. Equal time at {'; '.join(words)}."
    )
    chart = alt.layer(fields.transform_filter("datum.part == 'map'"), crossing_line, data=data).properties(
        width=300, height=260
    )
    return chart.facet(column=alt.Column("model:N", title=None)).properties(title=title, description=description)


def bands(data: pd.DataFrame, title: str) -> Chart:
    """Predicted band of seconds beside the measured median, one row a quantity, one panel a model."""
    tidy = data[["model", "what", "low", "high", "miss"]].assign(measured_s=[e.value for e in data["measured"]])
    y = alt.Y("what:N", title=None, sort=None)
    x = alt.X("low:Q", title="Seconds (log)", scale=alt.Scale(type="log"))
    bar = alt.Chart().mark_bar(height=10, color="#a6cbe3").encode(y=y, x=x, x2="high:Q")
    edge = alt.Chart().mark_tick(height=16, color=CATEGORIES[0], thickness=2).encode(y=y, x=x)
    dot = alt.Chart().mark_point(color=CATEGORIES[1], shape="diamond", size=90).encode(y=y, x="measured_s:Q")
    misses = "; ".join(
        f"{r.model} {r.what}: {r.miss:.2g} times the band's edge" for r in tidy.itertuples() if r.miss != 1
    )
    description = f"{title}. Bars are predicted bands, diamonds measured medians. {misses or 'All inside their bands'}."
    chart = alt.layer(bar, edge, dot, data=tidy).properties(width=300, height=150)
    return chart.facet(column=alt.Column("model:N", title=None)).properties(title=title, description=description)


def gains(data: pd.DataFrame, title: str) -> Chart:
    """Gain of full threads over fewer, with intervals: ceilings first, then each model's phases."""
    tidy = spread(data, "gain")
    names = {"read": "read bandwidth", "matmul": "matrix throughput"}
    tidy["label"] = [names.get(r.what, f"{r.what}, {r.model}") for r in tidy.itertuples()]
    tidy["kind"] = ["ceiling" if r.what in names else r.what for r in tidy.itertuples()]
    y = alt.Y("label:N", title=None, sort=None)
    x = alt.X("value:Q", title="Speed with all threads / speed with half (1 = no gain)", scale=alt.Scale(zero=False))
    colour, shape = marks("kind", ["ceiling", "prefill", "decode"])
    base = alt.Chart(tidy).encode(y=y, color=colour)
    dots = base.mark_point().encode(x=x, shape=shape, tooltip=["label:N", alt.Tooltip("value:Q", format=".2f")])
    whiskers = base.mark_rule(strokeWidth=2).encode(x="low:Q", x2="high:Q")
    words = "; ".join(f"{r.label} {r.value:.2f}" for r in tidy.itertuples())
    return alt.layer(whiskers, dots).properties(title=title, description=f"{title}: {words}.", height=200)


def _tips(length: str) -> list[alt.Tooltip | str]:
    bounds = [alt.Tooltip(f"{name}:Q", format=".3~s", title=f"{name} (s)") for name in ("value", "low", "high")]
    return ["model:N", f"{length}:Q", *bounds]
