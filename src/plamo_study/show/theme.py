"""The look and the output format of every chart: `enable()` sets the house theme and renderer of altair.

A chart leaves the kernel as one PNG with its description, so it shows on GitHub, in JupyterLab and on paper.
The Vega-Lite spec is in the output's metadata under `SPEC_KEY`, where `publish` finds it to draw the chart again,
interactively. It is metadata because nbformat demands a *string* for a MIME type that ends in `.json` (altair 6's own
`application/vnd.vegalite.v6.json` holds an object, and so papermill cannot save the notebook), and because nbval
compares data but not metadata: it checks the description and leaves pixels and rounding alone.
"""

import base64
import struct
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import altair as alt
import numpy as np
import vl_convert

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

SIGNATURE = b"\x89PNG\r\n\x1a\n"
RGB, RGBA = 2, 6
ROW_AS_IS, ROW_OF_DIFFERENCES = 0, 1
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
        picture = _compact(vl_convert.vegalite_to_png(spec, vl_version=VEGALITE, ppi=PPI))
    except ValueError:  # an empty picture has no size
        if all(spec.get("datasets", {}).values()):
            raise
        return {"text/markdown": NOTHING, "text/plain": NOTHING}, {}
    width, height = (pixels * CSS_PPI // PPI for pixels in struct.unpack(">II", picture[16:24]))
    data = {"image/png": base64.b64encode(picture).decode(), "text/plain": words}
    return data, {"image/png": {"alt": words, "width": width, "height": height}, SPEC_KEY: spec}


def _compact(png: bytes) -> bytes:
    """The same picture in a third of the bytes without loss, for executed notebooks are tracked.

    vl-convert stores four channels, rows as differences, compressed for speed. Charts are flat and opaque: three
    channels, rows as they are, compressed for size, which Pillow cannot be told to. A PNG of another kind is returned
    as it is. Deterministic for the same zlib. Source: W3C PNG specification, third edition, sections 5, 9 and 11.
    """
    chunks = list(_chunks(png))
    pixels = _pixels(dict(chunks)[b"IHDR"], b"".join(data for kind, data in chunks if kind == b"IDAT"))
    if pixels is None:
        return png
    height, width, _ = pixels.shape
    rows = np.concatenate([np.full((height, 1), ROW_AS_IS, np.uint8), pixels.reshape(height, -1)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, RGB, 0, 0, 0)
    density = [(kind, data) for kind, data in chunks if kind == b"pHYs"]
    parts = [(b"IHDR", header), *density, (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b"")]
    return SIGNATURE + b"".join(_pack(kind, data) for kind, data in parts)


def _chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = len(SIGNATURE)
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at : at + 8])
        yield kind, png[at + 8 : at + 8 + length]
        at += 12 + length


def _pixels(header: bytes, data: bytes) -> "np.ndarray[tuple[int, int, int], np.dtype[np.uint8]] | None":
    """Return red, green and blue as (height, width, 3), or None when the picture is not opaque, flat 8-bit RGBA."""
    width, height, depth, colour, *_ = struct.unpack(">IIBBBBB", header)
    if (depth, colour) != (8, RGBA):
        return None
    rows = np.frombuffer(zlib.decompress(data), np.uint8).reshape(height, 1 + 4 * width)
    pixels = np.cumsum(rows[:, 1:].reshape(height, width, 4), axis=1, dtype=np.uint8)
    if (rows[:, 0] != ROW_OF_DIFFERENCES).any() or (pixels[:, :, 3] != 255).any():
        return None
    return pixels[:, :, :3]


def _pack(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
