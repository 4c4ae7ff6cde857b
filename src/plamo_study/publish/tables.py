"""A chart's data as tables for a reader: columns by what the axes and legends call them, with their units.

The frames behind charts name columns for the code: `value`, `low`, `fill`. What is only drawn with them stays out.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from plamo_study.show.labels import LABELS, label

SHOWN = (  # channels whose fields a reader sees, those whose titles name a quantity first
    "x", "y", "theta", "color", "fill", "stroke", "shape", "size", "strokeDash", "opacity", "row", "column", "facet",
    "text", "tooltip", "x2", "y2",
)  # fmt: skip
ENDS = {"x2": "x", "y2": "y"}  # the other end of a bar or a whisker is named after its axis
PANELS = ("layer", "hconcat", "vconcat", "concat")
LAST = ("low", "high", "n", "noise")  # columns that say how sure a value is
LOG = re.compile(r"\s*\(log\)|[,;] log(?=\))")  # of a title, how its axis is drawn

Row = dict[str, Any]
Encoding = dict[str, Any]


def tables(spec: Mapping[str, Any]) -> list[list[Row]]:
    """The tables of a Vega-Lite spec as their rows, the longest first; guide lines and their words are none."""
    marks: dict[int, tuple[list[Row], list[Encoding]]] = {}
    for rows, encoding in _drawn(spec, spec.get("datasets", {}), [], {}, {}):
        marks.setdefault(id(rows), (rows, []))[1].append(encoding)
    named = sorted((_named(rows, encodings) for rows, encodings in marks.values()), key=len, reverse=True)
    long = [rows for rows in named if len(rows) > 1 and len(rows[0]) > 1]
    return long or [rows for rows in named if rows and rows[0]]


def _drawn(
    part: Mapping[str, Any], datasets: Mapping[str, list[Row]], rows: Any, outer: Encoding, axes: Mapping[str, str]
) -> Iterator[tuple[list[Row], Encoding]]:
    """Each mark of a spec: the rows that it draws, and its encoding with what its parents say.

    Layers share their axes: a mark without titles of its own has those in `axes`.
    """
    data = part.get("data") or {}
    rows = datasets.get(data.get("name", ""), data.get("values", rows))
    facet = {name: part["facet"][name] for name in ("row", "column") if name in part.get("facet", {})}
    encoding = {**outer, **(part.get("encoding") or {}), **facet}
    inner = [panel for name in PANELS for panel in part.get(name, ())] + ([part["spec"]] if "spec" in part else [])
    if "layer" in part and not axes:
        axes = dict(reversed([pair for layer in (part, *_parts(part)) for pair in _axes(layer.get("encoding") or {})]))
    for panel in inner:
        yield from _drawn(panel, datasets, rows, encoding, axes)
    if not inner and isinstance(rows, list):
        untitled = {name: axes[name] for name in axes if name in encoding and "title" not in encoding[name]}
        yield rows, encoding | {name: {"title": title, **encoding[name]} for name, title in untitled.items()}


def _parts(part: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for layer in part.get("layer", ()):
        yield layer
        yield from _parts(layer)


def _axes(encoding: Encoding) -> list[tuple[str, str]]:
    """The axes that an encoding gives a title."""
    return [(name, title) for name in "xy" for how in _as_list(encoding.get(name)) if (title := _own_title(how))]


def _named(rows: list[Row], encodings: list[Encoding]) -> list[Row]:
    """Rows under their headings: words first, without the columns that no channel shows."""
    rows = [row for row in rows if isinstance(row, dict)]
    titles = {name: _title(name, encodings) for name in dict.fromkeys(name for row in rows for name in row)}
    words = {name for name in titles if any(isinstance(row.get(name), str) for row in rows)}

    def place(name: str) -> tuple[bool, int, bool]:
        return name not in words, LAST.index(name) if name in LAST else -1, _is_end(name, encodings)

    shown = sorted((name for name, title in titles.items() if title), key=place)
    headings: dict[str, str] = {}
    for name in sorted(shown, key=lambda name: name != "value"):  # of an axis that several columns share, the first
        heading = titles[name] if titles[name] not in headings.values() else f"{titles[name]}, {label(name)}"
        headings[name] = heading if heading not in headings.values() else f"{heading} ({name})"
    return [{headings[name]: row[name] for name in shown if name in row} for row in rows]


def _title(field: str, encodings: list[Encoding]) -> str:
    """The heading of a field: its title on an axis or in a legend, else the one of its kind; "" for one not shown."""
    shown = field in LABELS
    for channel in SHOWN:
        for encoding in encodings:
            for how in _as_list(encoding.get(channel)):
                if how.get("field") == field and not ("scale" in how and how["scale"] is None):
                    shown = True
                    of_axis = next((title for name, title in _axes(encoding) if name == ENDS.get(channel)), "")
                    title = _own_title(how) or of_axis
                    if title and (field not in LABELS or channel in ("x", "y", *ENDS)):
                        return LOG.sub("", title).strip()
    return label(field) if shown else ""


def _own_title(how: Mapping[str, Any]) -> str:
    """The title of a channel, as such or of its axis or legend."""
    said = next((at["title"] for at in (how, how.get("axis"), how.get("legend")) if at and at.get("title")), "")
    return " ".join(said) if isinstance(said, list) else str(said)


def _is_end(field: str, encodings: list[Encoding]) -> bool:
    return any(
        how.get("field") == field for encoding in encodings for end in ENDS for how in _as_list(encoding.get(end))
    )


def _as_list(channel: Any) -> list[dict[str, Any]]:
    several = channel if isinstance(channel, list) else [channel]
    return [item for item in several if isinstance(item, dict)]
