"""Six kinds of chart that several pages draw: tidy frames in, altair charts out, which a cell can change or layer.

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
from plamo_study.show.tables import label
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
}
MARKS: dict[str, str] = {}  # shapes of series that several charts of a page share, by name
LONG_NAME = 24  # characters
NARROW = 38  # characters of a title that a phone shows in one line
MOST_TICKS = 20  # more would run into one another
MANY = 9  # points from which a description names only the ends


def lines(
    data: pd.DataFrame,
    x: str,
    title: str,
    color: str = "model",
    x_title: str = "",
    y_title: str = "",
    log: str = "",
    values: list[float] | None = None,
    subtitle: str = "",
    zero: bool = True,
) -> alt.LayerChart:
    """A line with points and whiskers for each `color`; `log`: "x", "y" or "xy"; `values`: ticks of x."""
    data, y_title = _whole(data), y_title or label("value")
    ticks = values or sorted(set(data[x]))
    axis = {"values": ticks} if len(ticks) <= MOST_TICKS else {}
    shown_x = alt.X(f"{x}:Q", title=x_title or label(x), scale=_scale("x" in log, zero=False), axis=axis)
    shown_y = alt.Y("value:Q", title=y_title, scale=_scale("y" in log, zero=zero))
    base = alt.Chart(data).encode(x=shown_x, color=_color(data, color))
    points = base.mark_point().encode(y=shown_y, shape=_shape(data, color), tooltip=_tips(data, x, color))
    whiskers = base.mark_rule(strokeWidth=2).encode(y=alt.Y("low:Q", title=y_title), y2="high:Q")
    layers = [whiskers, base.mark_line().encode(y=shown_y), points]
    return titled(alt.layer(*layers), title, subtitle, _points(data, x, color))


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
    data, x_title = _whole(data), x_title or label("value")
    base = alt.Chart(data).encode(y=alt.Y(f"{y}:N", title=None, sort=None), color=_color(data, color))
    base = base.encode(yOffset=f"{color}:N") if apart else base
    shown_x = alt.X("value:Q", title=x_title, scale=_scale("x" in log, zero=zero))
    points = base.mark_point().encode(x=shown_x, shape=_shape(data, color), tooltip=_tips(data, y, color))
    whiskers = base.mark_rule(strokeWidth=2).encode(x=alt.X("low:Q", title=x_title), x2="high:Q")
    rule = alt.Chart(pd.DataFrame({"at": [at]})).mark_rule(strokeDash=[4, 4], color=MUTED).encode(x="at:Q")
    layers = [*([rule] if at is not None else []), whiskers, points]
    return titled(alt.layer(*layers), title, subtitle, _points(data, y, color))


def bars(
    data: pd.DataFrame,
    y: str,
    title: str,
    color: str = "model",
    x_title: str = "",
    subtitle: str = "",
    labels: str = ".3~g",
) -> alt.LayerChart:
    """Horizontal bars with their number at the end, with whiskers where there is an interval."""
    data, x_title = _whole(data), x_title or label("value")
    base = alt.Chart(data).encode(y=alt.Y(f"{y}:N", title=None, sort=None))
    bar = base.mark_bar(opacity=0.85).encode(x=alt.X("value:Q", title=x_title), color=_color(data, color))
    whiskers = base.mark_rule(strokeWidth=1.5, color=INK).encode(x=alt.X("low:Q", title=x_title), x2="high:Q")
    number = base.mark_text(align="left", dx=6).encode(x=alt.X("high:Q", title=x_title))
    layers = [bar, whiskers, number.encode(text=alt.Text("value:Q", format=labels))]
    return titled(alt.layer(*layers), title, subtitle, _points(data, y, color))


def bands(
    data: pd.DataFrame, y: str, title: str, color: str = "model", x_title: str = "", subtitle: str = ""
) -> alt.LayerChart:
    """The prediction as a bar from `least` to `most`, and the measurement as a point with its whisker."""
    data = _whole(data)
    shown_x = alt.X("least:Q", title=x_title or label("value"), scale=_scale(log=True, zero=False))
    bar = alt.Chart(data).encode(y=alt.Y(f"{y}:N", title=None, sort=None)).mark_bar(color="#c9ced6", height=14)
    points = dots(data, y, title, color=color, x_title=x_title, log="x")
    return titled(bar.encode(x=shown_x, x2="most") + points, title, subtitle, _points(data, y, color))


def stacked(
    data: pd.DataFrame,
    y: str,
    title: str,
    colors: dict[str, str],
    color: str = "what",
    x_title: str = "",
    y_title: str = "",
    row: str = "",
    subtitle: str = "",
) -> Chart:
    """Shares of a whole, one bar per `y`, in the order of `colors`; `row`: one panel per value."""
    data = _plain(data).assign(place=lambda table: table[color].map(list(colors).index))
    bar = alt.Chart(data).mark_bar()
    chart: Chart = bar.encode(
        x=alt.X("value:Q", title=x_title or label("value"), stack="normalize"),
        y=alt.Y(f"{y}:O", title=y_title or label(y)),
        color=_colors(color, colors),
        order="place:Q",
        tooltip=[f"{y}:O", f"{color}:N", "value:Q"],
    )
    if row:
        header = alt.Header(labelAngle=0, labelOrient="top", labelAnchor="start")  # long names would overlap
        chart = chart.properties(height=90).facet(row=alt.Row(f"{row}:N", title=None, sort=None, header=header))
        chart = chart.resolve_scale(y="independent")
    groups = data.groupby([row, color] if row else [color], sort=False)["value"].sum()
    words = "; ".join(f"{' '.join(map(str, key)) if row else key}: {value:.3g}" for key, value in groups.items())
    return titled(chart, title, subtitle, words)


def heat(
    data: pd.DataFrame,
    x: str,
    y: str,
    title: str,
    colors: dict[str, str],
    color: str = "value",
    x_title: str = "",
    y_title: str = "",
    subtitle: str = "",
) -> alt.Chart:
    """A field for each pair of `x` and `y`, filled by `color`, one of the `colors` given by name."""
    fields = alt.Chart(_plain(data)).mark_rect(stroke="white")
    chart = fields.encode(
        x=alt.X(f"{x}:O", title=x_title or label(x)),
        y=alt.Y(f"{y}:O", title=y_title or label(y)),
        color=_colors(color, colors),
        tooltip=[f"{x}:O", f"{y}:O", f"{color}:N"],
    )
    return titled(chart, title, subtitle, ", ".join(f"{n} {name}" for name, n in data[color].value_counts().items()))


def _plain(data: pd.DataFrame) -> pd.DataFrame:
    """Columns of numbers and words: an estimate object is not JSON."""
    held = [name for name in data if data[name].map(lambda value: isinstance(value, Estimate)).any()]
    return data.drop(columns=held)


def _whole(data: pd.DataFrame) -> pd.DataFrame:
    """Data ready to draw: plain columns, with the value itself as bounds where there is no interval."""
    plain = _plain(data)
    for bound in ("low", "high"):
        plain[bound] = plain[bound].fillna(plain["value"]) if bound in plain else plain["value"]
    return plain


def _colors(name: str, colors: dict[str, str]) -> alt.Color:
    scale = alt.Scale(domain=list(colors), range=list(colors.values()))
    return alt.Color(f"{name}:N", title=None, scale=scale)


def _color(data: pd.DataFrame, name: str) -> alt.Color:
    names = list(dict.fromkeys(data[name].astype(str)))
    # by the first of several files
    by_colour = {colour: series for series in reversed(names) if (colour := _colour_of(series))}
    fixed = {series: colour for colour, series in by_colour.items()}
    rest = cycle([colour for colour in CATEGORIES if colour not in by_colour])
    scale = {"domain": names, "range": [fixed.get(series) or next(rest) for series in names]}
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


def _tips(data: pd.DataFrame, name: str, color: str) -> list[Any]:
    numbers = [alt.Tooltip(f"{each}:Q", format=".3~g") for each in ("value", "low", "high")]
    numeric = name in data and pd.api.types.is_numeric_dtype(data[name])  # a frame without rows may lack columns
    return [f"{color}:N", f"{name}:{'Q' if numeric else 'N'}", *numbers]


def titled(chart: Any, title: str, subtitle: str, words: str) -> Any:
    """A chart under a title of lines that fit a phone; its description, the title and `words` of the data."""
    text: Any = {"text": _lines(title, NARROW), "subtitle": _lines(subtitle, NARROW + 8)}
    return chart.properties(title=text, description=f"{title} {words}.")


def _lines(text: str, most: int) -> list[str]:
    """A title in lines of about the same length, none with parts of two sentences."""
    parts = [text] if len(text) <= most else text.split(". ")
    whole = [part + "." if at < len(parts) - 1 else part for at, part in enumerate(parts)]
    return [line for part in whole if part for line in wrap(part, len(part) // -(-len(part) // most) + 5)]


def _points(data: pd.DataFrame, x: str, color: str) -> str:
    """The points in words: all of a short series, else its two ends."""
    words = []
    for name, group in data.groupby(color, sort=False):
        few = group if len(group) <= MANY else group.iloc[[0, -1]]
        points = ", ".join(f"{value:.3g} at {at}" for at, value in zip(few[x], few["value"], strict=True))
        words.append(f"{name}: {points}")
    return "; ".join(words)
