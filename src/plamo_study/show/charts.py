"""Eight kinds of chart, for every page: tidy frames in, altair charts out, which a cell can change or layer further.

    lines(rate, x="n_seq", color="model", title="Eight users: 56 tokens/s. Nine: 46.", y_title="tokens per second")

A frame has `value`, plus `low` and `high` for intervals, as `estimate` and `compare` return it. One
colour belongs to one model on the whole site. Every chart states its content in its description, the alt text.
"""

from itertools import cycle
from textwrap import wrap
from typing import Any

import altair as alt
import pandas as pd

from llama_meter.stats import Estimate
from plamo_study.show.labels import label
from plamo_study.show.theme import CATEGORIES, INK, MUTED, SHAPES

Chart = alt.Chart | alt.LayerChart | alt.FacetChart | alt.HConcatChart | alt.VConcatChart
BLUE, VERMILION, GREEN, PINK, OCHRE, SKY, GREY = CATEGORIES
COLORS = {  # of models and of series that several pages share, by name without star
    "plamo-2-1b": BLUE,
    "plamo-2-1b with window": SKY,
    "plamo-3-nict-2b": VERMILION,
    "plamo-3-matched": GREY,
    "prefill": OCHRE,
    "decode": GREEN,
    "fetching the weights once": SKY,
    "multiplying": PINK,
}
MARKS: dict[str, str] = {}  # shapes of series that several charts of a page share, by name
LONG_NAME = 24  # characters
NARROW = 38  # characters of a title that a phone shows in one line
MANY = 9  # points from which a description names only the ends


def lines(
    data: pd.DataFrame,
    x: str,
    title: str,
    y: str = "value",
    color: str = "model",
    x_title: str = "",
    y_title: str = "",
    log: str = "",
    values: list[float] | None = None,
    subtitle: str = "",
    zero: bool = True,
) -> alt.LayerChart:
    """A line with points and whiskers for each `color`; `log`: "x", "y" or "xy"; `values`: ticks of x."""
    data = _whole(data, y)
    ticks = values or sorted(set(data[x]))
    shown_x = alt.X(f"{x}:Q", title=x_title or label(x), scale=_scale("x" in log, zero=False), axis=_axis(ticks))
    shown_y = alt.Y(f"{y}:Q", title=y_title or label(y), scale=_scale("y" in log, zero=zero))
    base = alt.Chart(data).encode(x=shown_x, color=_color(data, color))
    layers = [
        base.mark_rule(strokeWidth=2).encode(y=alt.Y("low:Q", title=y_title or label(y)), y2="high:Q"),
        base.mark_line().encode(y=shown_y),
        base.mark_point().encode(y=shown_y, shape=_shape(data, color), tooltip=_tips(data, x, y, color)),
    ]
    return _titled(alt.layer(*layers), title, subtitle, _read(data, x, y, color))


def points(data: pd.DataFrame, x: str, y: str = "value", color: str = "model") -> alt.Chart:
    """Points without whiskers, to place under a chart with `over`."""
    base = alt.Chart(_whole(data, y)).mark_point(opacity=0.6, size=40)
    first = next(map(str, data[color]), "")
    return base.encode(x=f"{x}:Q", y=f"{y}:Q", color=alt.value(_colour_of(first) or GREY))


def over(*below: Any) -> alt.LayerChart:
    """Charts layered on top of one another; title and description are those of the last."""
    last = below[-1]
    layers = [chart.copy() for chart in below]
    for chart in layers:
        chart.title, chart.description = alt.Undefined, alt.Undefined
    whole: Any = alt.layer(*layers).resolve_scale(color="independent", shape="independent")
    return whole.properties(title=last.title, description=last.description)


def dots(
    data: pd.DataFrame,
    y: str,
    title: str,
    x: str = "value",
    color: str = "model",
    x_title: str = "",
    log: str = "",
    subtitle: str = "",
    zero: bool = False,
    at: float | None = None,
    apart: bool = False,
) -> alt.LayerChart:
    """A point with its whisker for each category of `y`; `at`: a dashed line, such as 1 for "no difference".

    `apart`: points of one category are offset vertically by `color`.
    """
    data = _whole(data, x)
    shown_x = alt.X(f"{x}:Q", title=x_title or label(x), scale=_scale("x" in log, zero=zero))
    base = alt.Chart(data).encode(y=alt.Y(f"{y}:N", title=None, sort=None), color=_color(data, color))
    base = base.encode(yOffset=f"{color}:N") if apart else base
    layers = [
        base.mark_rule(strokeWidth=2).encode(x=alt.X("low:Q", title=x_title or label(x)), x2="high:Q"),
        base.mark_point().encode(x=shown_x, shape=_shape(data, color), tooltip=_tips(data, y, x, color)),
    ]
    rule = alt.Chart(pd.DataFrame({"at": [at]})).mark_rule(strokeDash=[4, 4], color=MUTED).encode(x="at:Q")
    return _titled(alt.layer(*([rule] if at is not None else []), *layers), title, subtitle, _read(data, y, x, color))


def bars(
    data: pd.DataFrame,
    y: str,
    title: str,
    x: str = "value",
    color: str = "model",
    x_title: str = "",
    subtitle: str = "",
    labels: str = ".3~g",
) -> alt.LayerChart:
    """Horizontal bars with their number at the end, with whiskers where there is an interval."""
    data = _whole(data, x)
    shown_x = alt.X(f"{x}:Q", title=x_title or label(x))
    shown_y = alt.Y(f"{y}:N", title=None, sort=None)
    base = alt.Chart(data)
    number = base.mark_text(align="left", dx=6).encode(x=alt.X("high:Q", title=x_title or label(x)), y=shown_y)
    layers = [
        base.mark_bar(opacity=0.85).encode(x=shown_x, y=shown_y, color=_color(data, color)),
        base.mark_rule(strokeWidth=1.5, color=INK).encode(
            x=alt.X("low:Q", title=x_title or label(x)), x2="high:Q", y=shown_y
        ),
        number.encode(text=alt.Text(f"{x}:Q", format=labels)),
    ]
    return _titled(alt.layer(*layers), title, subtitle, _read(data, y, x, color))


def stacked(
    data: pd.DataFrame,
    y: str,
    title: str,
    colors: dict[str, str],
    x: str = "value",
    color: str = "what",
    x_title: str = "",
    y_title: str = "",
    row: str = "",
    subtitle: str = "",
) -> Chart:
    """Shares of a whole, one bar per `y`, in the order of `colors`; `row`: one panel per value."""
    data = _plain(data)
    data = data.assign(place=data[color].map(list(colors).index))
    chart: Chart = (
        alt.Chart(data)
        .mark_bar()
        .encode(
            x=alt.X(f"{x}:Q", title=x_title or label(x), stack="normalize"),
            y=alt.Y(f"{y}:O", title=y_title or label(y)),
            color=alt.Color(
                f"{color}:N", title=None, scale=alt.Scale(domain=list(colors), range=list(colors.values()))
            ),
            order="place:Q",
            tooltip=[f"{y}:O", f"{color}:N", f"{x}:Q"],
        )
    )
    if row:
        header = alt.Header(labelAngle=0, labelOrient="top", labelAnchor="start")  # long names would overlap
        chart = chart.properties(height=90).facet(row=alt.Row(f"{row}:N", title=None, sort=None, header=header))
        chart = chart.resolve_scale(y="independent")
    of = [row, color] if row else [color]
    said = "; ".join(f"{' '.join(map(str, key))}: {group[x].sum():.3g}" for key, group in data.groupby(of, sort=False))
    return _titled(chart, title, subtitle, said)


def bands(
    data: pd.DataFrame,
    y: str,
    title: str,
    low: str = "least",
    high: str = "most",
    x: str = "value",
    color: str = "model",
    x_title: str = "",
    log: str = "x",
    subtitle: str = "",
) -> alt.LayerChart:
    """The prediction as a bar from `low` to `high`, and the measurement as a point with its whisker."""
    data = _whole(data, x)
    base = alt.Chart(data).encode(y=alt.Y(f"{y}:N", title=None, sort=None))
    scale = _scale("x" in log, zero=False)
    bar = base.mark_bar(color="#c9ced6", height=14).encode(
        x=alt.X(f"{low}:Q", title=x_title or label(x), scale=scale), x2=high
    )
    points = dots(data, y, title, x=x, color=color, x_title=x_title, log=log)
    return _titled(bar + points, title, subtitle, _read(data, y, x, color))


def heat(
    data: pd.DataFrame,
    x: str,
    y: str,
    title: str,
    color: str = "value",
    x_title: str = "",
    y_title: str = "",
    subtitle: str = "",
    colors: dict[str, str] | None = None,
) -> alt.Chart:
    """A field for each pair of `x` and `y`, filled by `color`: a number, or one of the `colors` given by name."""
    data = _plain(data)
    kind = "N" if colors else "Q"
    scale = alt.Scale(domain=list(colors), range=list(colors.values())) if colors else alt.Undefined
    chart = (
        alt.Chart(data)
        .mark_rect(stroke="white")
        .encode(
            x=alt.X(f"{x}:O", title=x_title or label(x)),
            y=alt.Y(f"{y}:O", title=y_title or label(y)),
            color=alt.Color(f"{color}:{kind}", title=None if colors else label(color), scale=scale),
            tooltip=[f"{x}:O", f"{y}:O", f"{color}:{kind}"],
        )
    )
    counted = [f"{n} {name}" for name, n in data[color].value_counts().items()]
    said = ", ".join(counted) if colors else f"{len(data)} fields"
    return _titled(chart, title, subtitle, said)


def spans(
    data: pd.DataFrame,
    y: str,
    title: str,
    begin: str = "begin",
    end: str = "end",
    color: str = "what",
    x_title: str = "",
    subtitle: str = "",
) -> alt.Chart:
    """A timeline: bars from `begin` to `end` in the row of `y`."""
    data = _plain(data)
    chart = (
        alt.Chart(data)
        .mark_bar()
        .encode(
            x=alt.X(f"{begin}:Q", title=x_title or label(begin)),
            x2=end,
            y=alt.Y(f"{y}:N", title=None, sort=None),
            color=_color(data, color),
            tooltip=[f"{y}:N", f"{color}:N", f"{begin}:Q", f"{end}:Q"],
        )
    )
    return _titled(chart, title, subtitle, f"{len(data)} spans on {data[y].nunique()} lines")


def curves(
    data: pd.DataFrame,
    x: str,
    y: str,
    title: str,
    color: str = "model",
    x_title: str = "",
    y_title: str = "",
    log: str = "",
) -> alt.Chart:
    """Lines without points, such as laws or limits, to place under measured points with `over`."""
    data = _plain(data)
    line = alt.Chart(data).mark_line(strokeDash=[5, 4], strokeWidth=1.5, opacity=0.8)
    chart = line.encode(
        x=alt.X(f"{x}:Q", title=x_title or label(x), scale=_scale("x" in log, zero=False)),
        y=alt.Y(f"{y}:Q", title=y_title or label(y), scale=_scale("y" in log, zero=False)),
        color=_color(data, color),
    )
    return _titled(chart, title, "", _read(data, x, y, color))


def levels(data: pd.DataFrame) -> str:
    """What the bars of a chart of estimates are, for its subtitle: few processes carry no interval at 95 %."""
    coverages = sorted(
        {estimate.level for estimate, low in zip(data["estimate"], data["low"], strict=True) if low == low}
    )
    ends = " to ".join(f"{level:.0%}" for level in dict.fromkeys([*coverages[:1], *coverages[-1:]]))
    return f"Bars: intervals at {ends}." if ends else ""


def _plain(data: pd.DataFrame) -> pd.DataFrame:
    """Columns of numbers and words: an estimate object is not JSON."""
    held = [name for name in data if data[name].map(lambda value: isinstance(value, Estimate)).any()]
    return data.drop(columns=held)


def _whole(data: pd.DataFrame, value: str) -> pd.DataFrame:
    """Data ready to draw: plain columns, with the value itself as bounds where there is no interval."""
    plain = _plain(data)
    for bound in ("low", "high"):
        plain[bound] = plain[bound].fillna(plain[value]) if bound in plain else plain[value]
    return plain


def _color(data: pd.DataFrame, name: str) -> alt.Color:
    names = list(dict.fromkeys(data[name].astype(str)))
    # by the first of several files
    by_colour = {colour: series for series in reversed(names) if (colour := _colour_of(series))}
    own = {series: colour for colour, series in by_colour.items()}
    rest = cycle([colour for colour in CATEGORIES if colour not in by_colour])
    scale = {"domain": names, "range": [own.get(series) or next(rest) for series in names]}
    return alt.Color(f"{name}:N", title=None, scale=scale, legend=_legend(names))


def _shape(data: pd.DataFrame, name: str) -> alt.Shape:
    names = list(dict.fromkeys(data[name].astype(str)))
    rest = cycle([shape for shape in SHAPES if shape not in map(MARKS.get, names)] or SHAPES)
    scale = {"domain": names, "range": [MARKS.get(series) or next(rest) for series in names]}
    return alt.Shape(f"{name}:N", title=None, scale=scale, legend=_legend(names))


def _legend(names: list[str]) -> dict[str, Any]:
    """Long names go in one column: side by side they would double the picture's width."""
    long = max(map(len, names), default=0) > LONG_NAME
    return {"columns": 1, "labelLimit": 500} if long else {"columns": 0}


def _colour_of(name: str) -> str:
    """The colour of a model or a series by its name, or of the model in a file's name, such as "plamo-2-1b* Q8_0"."""
    model, _, dtype = name.partition(" ")
    return COLORS.get(name.rstrip("*")) or ("" if "," in dtype else COLORS.get(model.rstrip("*"), ""))


def _scale(log: bool, zero: bool) -> dict[str, Any]:  # plain, for altair copies a chart in every step
    return {"type": "log", "nice": False, "padding": 12} if log else {"zero": zero, "nice": zero}


def _axis(ticks: list[Any]) -> dict[str, Any]:
    return {"values": ticks} if len(ticks) <= 20 else {}  # more would run into one another


def _tips(data: pd.DataFrame, x: str, y: str, color: str) -> list[Any]:
    numbers = [alt.Tooltip(f"{name}:Q", format=".3~g") for name in (y, "low", "high") if name in data]
    typed = [f"{x}:{'Q' if pd.api.types.is_numeric_dtype(data[x]) else 'N'}"] if x in data and x != y else []
    return [f"{color}:N", *typed, *numbers]


def _titled(chart: Any, title: str, subtitle: str, said: str) -> Any:
    text: Any = {"text": _lines(title, NARROW), "subtitle": _lines(subtitle, NARROW + 8)}
    return chart.properties(title=text, description=f"{title} {said}.")


def _lines(text: str, most: int) -> list[str]:
    """A title in lines of about the same length, none with parts of two sentences."""
    parts = [text] if len(text) <= most else text.split(". ")
    whole = [part + "." if at < len(parts) - 1 else part for at, part in enumerate(parts)]
    return [line for part in whole if part for line in wrap(part, len(part) // -(-len(part) // most) + 5)]


def _read(data: pd.DataFrame, x: str, y: str, color: str) -> str:
    """The points in words: all of a short series, else its two ends."""
    said = []
    for name, group in data.groupby(color, sort=False):
        few = group if len(group) <= MANY else group.iloc[[0, -1]]
        points = ", ".join(f"{value:.3g} at {at}" for at, value in zip(few[x], few[y], strict=True))
        said.append(f"{name}: {points}")
    return "; ".join(said)
