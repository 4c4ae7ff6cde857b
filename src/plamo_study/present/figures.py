"""Every figure of the notebooks. A figure takes tidy data, holds none, and reads itself aloud in its description."""

import altair as alt
import pandas as pd

from plamo_study.analysis.stats import Estimate
from plamo_study.present.theme import CATEGORIES

Chart = alt.LayerChart | alt.FacetChart | alt.HConcatChart
TICKS = [1, 4, 8, 12, 16, 24, 32]  # numbers of sequences
LONG_NAME = 24  # characters from which names of a legend stand one below the other
OUTCOMES = {"right": "#a6cbe3", "wrong": "#e69f00", "abort": "#d55e00"}
DIVERGING = ["#d55e00", "#f3f3f3", "#0072b2"]  # decode, neither, prefill


def spread(data: pd.DataFrame, column: str, factor: float = 1.0) -> pd.DataFrame:
    """An estimate column as three numeric ones: value, low and high (the value itself where there is no interval)."""
    estimates: list[Estimate] = [estimate.scaled(factor) for estimate in data[column]]
    low = [e.value if e.low != e.low else e.low for e in estimates]
    high = [e.value if e.high != e.high else e.high for e in estimates]
    return data.drop(columns=column).assign(value=[e.value for e in estimates], low=low, high=high)


def time_by_length(data: pd.DataFrame, length: str, seconds: str, axis: str, title: str) -> Chart:
    """Time of a phase against a token count, both logarithmic, one line a model, whiskers the 95 % interval."""
    tidy = spread(data[["model", length, seconds]], seconds)
    colour, shape = _marks("model", sorted(set(tidy["model"])))
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
    colour, shape = _marks("kind", ["ceiling", "prefill", "decode"])
    base = alt.Chart(tidy).encode(y=y, color=colour)
    dots = base.mark_point().encode(x=x, shape=shape, tooltip=["label:N", alt.Tooltip("value:Q", format=".2f")])
    whiskers = base.mark_rule(strokeWidth=2).encode(x="low:Q", x2="high:Q")
    words = "; ".join(f"{r.label} {r.value:.2f}" for r in tidy.itertuples())
    return alt.layer(whiskers, dots).properties(title=title, description=f"{title}: {words}.", height=200)


def anchors(data: pd.DataFrame, limit: float, title: str) -> Chart:
    """The anchor cell between blocks, relative to its median; the band is the drift that is accepted."""
    box = alt.Chart(pd.DataFrame({"low": [1 - limit], "high": [1 + limit]}))
    band = box.mark_rect(color="#a6cbe3", opacity=0.5).encode(y="low:Q", y2="high:Q")
    x = alt.X("order:O", title="Before block")
    y = alt.Y("relative:Q", title="Anchor step time / median", scale=alt.Scale(zero=False, nice=False, padding=8))
    series = alt.Chart(data).mark_line(point=True).encode(x=x, y=y)
    widest = (data["relative"] - 1).abs().max()
    description = f"{title}. {len(data)} anchors, the furthest {widest:.0%} from the median; the band is {limit:.0%}."
    return alt.layer(band, series).properties(title=title, description=description, height=160)


def _marks(field: str, names: list[str]) -> tuple[alt.Color, alt.Shape]:
    """Colour and shape of one field; the same domain and no title make them one legend."""
    domain = alt.Scale(domain=names)
    legend = alt.Legend(columns=1 if max(map(len, names), default=0) > LONG_NAME else 0)
    color = alt.Color(f"{field}:N", title=None, scale=domain, legend=legend)
    return color, alt.Shape(f"{field}:N", title=None, scale=domain, legend=legend)


def _tips(length: str) -> list[alt.Tooltip | str]:
    bounds = [alt.Tooltip(f"{name}:Q", format=".3~s", title=f"{name} (s)") for name in ("value", "low", "high")]
    return ["model:N", f"{length}:Q", *bounds]


def curves(
    data: pd.DataFrame, column: str, series: str, axis: str, title: str, reference: float | None = None
) -> Chart:
    """An estimate against the number of sequences, one line a series, whiskers the 95 % interval."""
    tidy = spread(data[["n_seq", series, column]], column)
    names = list(dict.fromkeys(tidy[series]))
    colour, shape = _marks(series, names)
    x = alt.X("n_seq:Q", title="Sequences", scale=alt.Scale(nice=False, padding=10), axis=alt.Axis(values=TICKS))
    y = alt.Y("value:Q", title=axis, scale=alt.Scale(zero=reference is None))
    base = alt.Chart(tidy).encode(x=x, color=colour)
    layers = [
        base.mark_rule(strokeWidth=2).encode(y=alt.Y("low:Q", title=axis), y2="high:Q"),
        base.mark_line().encode(y=y),
        base.mark_point().encode(y=y, shape=shape, tooltip=["n_seq:Q", alt.Tooltip("value:Q", format=".3~g")]),
    ]
    if reference is not None:
        rule = alt.Chart(pd.DataFrame({"y": [reference]})).mark_rule(strokeDash=[4, 4]).encode(y="y:Q")
        layers.insert(0, rule)
    ends = "; ".join(f"{name}: {_ends(tidy[tidy[series] == name])}" for name in names)
    return alt.layer(*layers).properties(title=title, description=f"{title}. {ends}.")


def steps(data: pd.DataFrame, title: str) -> Chart:
    """Measured step times inside or outside their predicted bands, one panel a model."""
    tidy = spread(data[["model", "n_seq", "low_passes", "high_passes", "measured"]], "measured", 1e3)
    tidy = tidy.assign(at_least=tidy["low_passes"] * 1e3, at_most=tidy["high_passes"] * 1e3)
    x = alt.X("n_seq:Q", title="Sequences", scale=alt.Scale(nice=False, padding=10), axis=alt.Axis(values=TICKS))
    band = alt.Chart().mark_area(color="#a6cbe3").encode(x=x, y=alt.Y("at_least:Q", title="Step (ms)"), y2="at_most:Q")
    line = alt.Chart().mark_line(color=CATEGORIES[1]).encode(x=x, y="value:Q")
    dots = alt.Chart().mark_point(color=CATEGORIES[1], shape="diamond").encode(x=x, y="value:Q")
    whiskers = alt.Chart().mark_rule(color=CATEGORIES[1], strokeWidth=2).encode(x=x, y="low:Q", y2="high:Q")
    ends = "; ".join(f"{name}: {_ends(group)} ms" for name, group in tidy.groupby("model"))
    description = f"{title}. The band is the prediction, the line the measurement. {ends}."
    chart = alt.layer(band, whiskers, line, dots, data=tidy).properties(width=240, height=220)
    facets = chart.facet(column=alt.Column("model:N", title=None)).resolve_scale(y="independent")
    return facets.properties(title=title, description=description)


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
    colour, shape = _marks("label", list(dict.fromkeys(tidy["label"])))
    dots = (
        alt.Chart(tidy)
        .mark_point(size=90)
        .encode(y=alt.Y("test:N", title=None, sort=None), x=x, color=colour, shape=shape)
    )
    rule = alt.Chart(pd.DataFrame({"x": sorted(set(data["limit"]))})).mark_rule(strokeDash=[4, 4]).encode(x="x:Q")
    words = "; ".join(f"{r.test}, {r.label}: {r.error:.1e}" for r in tidy.itertuples())
    return alt.layer(rule, dots).properties(title=title, description=f"{title}. {words}.", height=140)


def _ends(group: pd.DataFrame) -> str:
    first, last = group.iloc[0], group.iloc[-1]
    return f"{first['value']:.3g} at {first['n_seq']} and {last['value']:.3g} at {last['n_seq']} sequences"
