"""The look and the output format of every chart: `enable()` sets the house theme and renderer of altair.

A chart leaves the kernel as one PNG with its description, so it shows on GitHub, in JupyterLab and on paper.
The Vega-Lite spec is in the output's metadata under `SPEC_KEY`, where `publish` finds it to draw the chart again,
interactively. It is metadata because nbformat demands a *string* for a MIME type that ends in `.json` (altair 6's own
`application/vnd.vegalite.v6.json` holds an object, and so papermill cannot save the notebook), and because nbval
compares data but not metadata: it checks the description and leaves pixels and rounding alone.
"""

import base64
import warnings
from typing import Any

import altair as alt
import vl_convert

from plamo_study.show import png

SPEC_KEY = "plamo_study_vegalite"
ROWS_KEY = "plamo_study_rows"  # in an output's metadata: whose rows the page shows, for `publish`
PPI = 144
CSS_PPI = 72
VEGALITE = "6.4"
FONT = "Liberation Sans, Arial, Helvetica, sans-serif"
"""The first name ships inside vl-convert, so a PNG does not depend on the fonts of the machine."""

INK, MUTED, GRID, CARD = "#1f2328", "#57606a", "#e3e6ea", "#ffffff"
CATEGORIES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9", "#4d4d4d"]
"""Okabe and Ito's colour-blind safe set (2008), its yellow darkened to be seen on white, black replaced by grey."""
SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right"]
SEQUENTIAL = ["#e8f1f8", "#a6cbe3", "#56a0cc", "#0072b2", "#00406b"]
WORDS = {"labelColor": INK, "labelFontSize": 12, "titleColor": MUTED, "titleFontSize": 12, "titleFontWeight": 400}
TITLE = {"fontSize": 16, "fontWeight": 600, "color": INK, "subtitleFontSize": 13, "subtitleColor": MUTED}
AXIS = {"gridColor": GRID, "domainColor": MUTED, "ticks": False, "labelPadding": 6, "titlePadding": 10}
LEGEND = {"orient": "top", "symbolSize": 90, "symbolStrokeWidth": 1, "symbolOpacity": 1, "labelLimit": 320}

NOTHING = "nothing of this was measured here"

MimeBundle = tuple[dict[str, Any], dict[str, Any]]


def enable() -> None:
    """Use the house theme and renderer for every altair chart shown from now on."""
    warnings.filterwarnings("ignore", ".*infer vegalite type from 'empty'")  # a chart of nothing is shown as words
    alt.theme.register("plamo", enable=True)(theme)
    alt.renderers.register("plamo", mimebundle)
    alt.renderers.enable("plamo")


def theme() -> alt.theme.ThemeConfig:
    """Return the Vega-Lite configuration: dark ink on a white card, legible on a light and on a dark page."""
    config = {
        "background": CARD,
        "padding": 12,
        "font": FONT,
        "view": {"continuousWidth": 560, "continuousHeight": 300, "discreteWidth": 560, "stroke": None},
        "title": {"anchor": "start", "frame": "group", **TITLE, "offset": 12},
        "axis": {**WORDS, **AXIS},
        "axisX": {"grid": False, "ticks": True, "tickColor": GRID, "labelAngle": 0},
        "axisY": {"domain": False},
        "legend": {**WORDS, **LEGEND},
        "header": {"labelFontSize": 13, "labelColor": INK, "titleFontSize": 13, "titleColor": INK},
        "range": {"category": CATEGORIES, "symbol": SHAPES, "heatmap": SEQUENTIAL, "ramp": SEQUENTIAL},
        "line": {"strokeWidth": 2.5},
        "point": {"size": 70, "filled": True, "opacity": 1},
        "bar": {"color": CATEGORIES[0]},
        "rule": {"color": MUTED},
        "text": {"color": INK, "fontSize": 12},
        "errorbar": {"thickness": 1.5, "ticks": True},
    }
    return {"config": config}  # type: ignore[typeddict-item]  # plain data: altair checks it against its schema


def mimebundle(spec: dict[str, Any], **_: Any) -> MimeBundle:
    """Turn a Vega-Lite spec into the data and metadata of one notebook output.

    The picture has 144 pixels per inch, twice the density of a CSS pixel here; `width` and `height` are CSS pixels.
    The same spec and the same vl-convert give the same bytes. Its words are the chart's description.
    """
    words = " ".join(str(spec.get("description") or "A chart").split())
    try:
        picture = png.compact(vl_convert.vegalite_to_png(spec, vl_version=VEGALITE, ppi=PPI))
    except ValueError:  # an empty picture has no size
        if all(spec.get("datasets", {}).values()):
            raise
        return {"text/markdown": NOTHING, "text/plain": NOTHING}, {}
    width, height = (pixels * CSS_PPI // PPI for pixels in png.size(picture))
    data = {"image/png": base64.b64encode(picture).decode(), "text/plain": words}
    return data, {"image/png": {"alt": words, "width": width, "height": height}, SPEC_KEY: spec}
