"""Notebook 05's figures. A figure takes tidy data, holds none, and reads itself aloud in its description."""

import altair as alt
import pandas as pd

from plamo_study.present.figures import Chart, spread
from plamo_study.present.theme import CATEGORIES

NEAR = 512  # tokens up to which a depth axis is linear; it is logarithmic beyond
BAND = "#a6cbe3"
PHASES = ["prefill", "decode"]
IN_THOUSANDS = "datum.value ? datum.value / 1024 + 'k' : '0'"


def rates(data: pd.DataFrame, title: str) -> Chart:
    """Both rates against depth, one panel a phase, one line a model, whiskers the 95 % interval."""
    tidy = spread(data[["model", "phase", "depth", "rate"]], "rate")
    y = alt.Y("value:Q", title="Tokens per second")
    base = alt.Chart().encode(x=_depth(tidy), color=_colour("model", tidy))
    layers = [
        base.mark_rule(strokeWidth=2).encode(y=alt.Y("low:Q", title="Tokens per second"), y2="high:Q"),
        base.mark_line().encode(y=y),
        base.mark_point().encode(y=y, shape=_shape("model", tidy), tooltip=_tips("model", "depth")),
    ]
    chart = alt.layer(*layers, data=tidy).properties(width=250, height=260)
    facets = chart.facet(column=alt.Column("phase:N", title=None, sort=PHASES))
    words = _ends(tidy, ["phase", "model"], "tokens per second")
    return facets.resolve_scale(y="independent").properties(title=title, description=f"{title}. {words}.")


def bands(data: pd.DataFrame, title: str) -> Chart:
    """Measured time per token inside or outside its predicted band, a row a phase, a column a model."""
    tidy = spread(data[["model", "phase", "depth", "low", "high", "measured"]].rename(
        columns={"low": "at_least", "high": "at_most"}), "measured", 1e3)  # fmt: skip
    tidy[["at_least", "at_most"]] *= 1e3
    x, y = _depth(tidy), alt.Y("at_least:Q", title="ms per token", scale=alt.Scale(zero=False))
    band = alt.Chart().mark_area(color=BAND).encode(x=x, y=y, y2="at_most:Q")
    line = alt.Chart().mark_line(color=CATEGORIES[1]).encode(x=x, y="value:Q")
    dots = alt.Chart().mark_point(color=CATEGORIES[1], shape="diamond").encode(x=x, y="value:Q")
    whiskers = alt.Chart().mark_rule(color=CATEGORIES[1], strokeWidth=2).encode(x=x, y="low:Q", y2="high:Q")
    chart = alt.layer(band, whiskers, line, dots, data=tidy).properties(width=155, height=170)
    facets = chart.facet(row=alt.Row("phase:N", title=None, sort=PHASES), column=alt.Column("model:N", title=None))
    words = f"{title}. The band is the prediction, the line the measurement. {_ends(tidy, ['phase', 'model'], 'ms')}."
    return facets.resolve_scale(y="independent").properties(title=title, description=words)


def kept(data: pd.DataFrame, title: str) -> Chart:
    """Bytes kept for one sequence against its length: recurrent state, keys and values, with the window and whole."""
    names = {"state": "recurrent state", "kv": "keys and values", "kv_whole": "keys and values, no window"}
    long = data.melt(["model", "depth"], list(names), "part", "bytes")
    long = long[(long["bytes"] > 0) & (long["depth"] > 0)].assign(
        part=long["part"].map(names), mib=long["bytes"] / 2**20
    )
    x = alt.X(
        "depth:Q",
        title="Tokens (log)",
        scale=alt.Scale(type="log", nice=False),
        axis=alt.Axis(format=",d", tickCount=4),
    )
    y = alt.Y("mib:Q", title="MiB for one sequence (log)", scale=alt.Scale(type="log"))
    dash = alt.StrokeDash("part:N", title=None, sort=list(names.values()), legend=alt.Legend(orient="bottom"))
    lines = alt.Chart(long).mark_line().encode(x=x, y=y, color=_colour("model", long), strokeDash=dash)
    last = long[long["depth"] == long["depth"].max()]
    words = "; ".join(f"{r.model}, {r.part}: {r.mib:.3g} MiB" for r in last.itertuples())
    described = f"{title}. At {long['depth'].max():,} tokens {words}."
    return alt.layer(lines).properties(title=title, description=described)


def compared(data: pd.DataFrame, title: str) -> Chart:
    """The first attention model's time over the hybrid's, a panel a phase; above the line the hybrid is the faster."""
    tidy = spread(data[data["other"] == data["other"].iloc[0]], "ratio").drop(columns="ratio", errors="ignore")
    y = alt.Y("value:Q", title="Attention's time / hybrid's", scale=alt.Scale(zero=False))
    base = alt.Chart().encode(x=_depth(tidy), color=_colour("hybrid", tidy))
    layers = [
        alt.Chart().mark_rule(strokeDash=[4, 4]).encode(y=alt.datum(1.0)),
        base.mark_rule(strokeWidth=2).encode(y=alt.Y("low:Q", title="Attention's time / hybrid's"), y2="high:Q"),
        base.mark_line().encode(y=y),
        base.mark_point().encode(y=y, shape=_shape("hybrid", tidy), tooltip=_tips("hybrid", "depth")),
    ]
    chart = alt.layer(*layers, data=tidy).properties(width=250, height=260)
    facets = chart.facet(column=alt.Column("phase:N", title=None, sort=PHASES))
    words = f"{title}. Above the dashed line the hybrid is the faster one. {_ends(tidy, ['phase', 'hybrid'], 'times')}."
    return facets.properties(title=title, description=words)


def keys(data: pd.DataFrame, title: str) -> Chart:
    """Keys that a new token looks at, all layers together, against depth."""
    log = alt.Scale(type="log", nice=False)
    x = alt.X("depth:Q", title="Depth (tokens, log)", scale=log, axis=alt.Axis(format=",d", tickCount=4))
    y = alt.Y("keys:Q", title="Keys looked at (log)", scale=alt.Scale(type="log"), axis=alt.Axis(format="~s"))
    lines = alt.Chart(data).mark_line(point=True).encode(x=x, y=y, color=_colour("model", data))
    words = _ends(data.rename(columns={"keys": "value"}), ["model"], "keys")
    return alt.layer(lines).properties(title=title, description=f"{title}. {words}.")


def takeover(data: pd.DataFrame, title: str) -> Chart:
    """Context from which prefill takes most of a request, by the answer's length; triangles are extrapolated."""
    known = data[[row["tokens"].value == row["tokens"].value for row in data.to_dict("records")]]
    tidy = spread(known, "tokens").assign(rests=["extrapolated" if e else "measured" for e in known["extrapolated"]])
    log = alt.Scale(type="log", nice=False, padding=12)
    x = alt.X("n_out:Q", title="Output tokens (log)", scale=log, axis=alt.Axis(values=sorted(set(tidy["n_out"]))))
    y = alt.Y("value:Q", title="Context (tokens, log)", scale=log, axis=alt.Axis(format=",d"))
    base = alt.Chart(tidy).encode(x=x, color=_colour("model", tidy))
    shapes = alt.Scale(domain=["measured", "extrapolated"], range=["circle", "triangle-up"])
    shape = alt.Shape("rests:N", title=None, scale=shapes, legend=alt.Legend(orient="bottom"))
    layers = [
        base.mark_rule(strokeWidth=2).encode(y=alt.Y("low:Q", title="Context (tokens, log)"), y2="high:Q"),
        base.mark_line().encode(y=y),
        base.mark_point().encode(y=y, shape=shape, tooltip=_tips("model", "n_out")),
    ]
    words = "; ".join(f"{m}: {', '.join(f'{r.value:,.0f} for {r.n_out} ({r.rests})' for r in g.itertuples())}"
                      for m, g in tidy.groupby("model"))  # fmt: skip
    return alt.layer(*layers).properties(title=title, description=f"{title}. {words}.")


def drift(data: pd.DataFrame, title: str) -> Chart:
    """KL divergence from the plain kind on a logarithmic axis, with intervals over chunks."""
    tidy = spread(data[["model", "kind", "kld"]], "kld")
    y = alt.Y("kind:N", title="flash / K / V", sort=list(dict.fromkeys(data["kind"])))
    x = alt.X("value:Q", title="KL divergence (nats per token, log)", scale=alt.Scale(type="log"))
    base = alt.Chart(tidy).encode(y=y, color=_colour("model", tidy))
    dots = base.mark_point(size=90).encode(x=x, shape=_shape("model", tidy), tooltip=_tips("model", "kind"))
    whiskers = base.mark_rule(strokeWidth=2).encode(x="low:Q", x2="high:Q")
    words = "; ".join(f"{r.model}, {r.kind}: {r.value:.2g}" for r in tidy.itertuples())
    return alt.layer(whiskers, dots).properties(title=title, description=f"{title}. {words}.", height=180)


def loop(data: pd.DataFrame, title: str) -> Chart:
    """Time of each output token with and without the cache, on a logarithmic axis."""
    parts = [spread(data[["model", "output", way]], way).assign(way=word)
             for way, word in (("naive", "without the cache"), ("cached", "with it"))]  # fmt: skip
    tidy = pd.concat(parts, ignore_index=True)
    tidy["what"] = tidy["model"] + ", " + tidy["way"]
    y = alt.Y("value:Q", title="Seconds (log)", scale=alt.Scale(type="log"))
    x = alt.X("output:Q", title="Output token", scale=alt.Scale(nice=False))
    lines = alt.Chart(tidy).mark_line(point=True).encode(x=x, y=y, color=_colour("what", tidy))
    ends = tidy.rename(columns={"output": "depth"})
    return alt.layer(lines).properties(title=title, description=f"{title}. {_ends(ends, ['what'], 's', 'token')}.")


def _depth(tidy: pd.DataFrame) -> alt.X:
    scale = alt.Scale(type="symlog", constant=NEAR, nice=False, padding=10)
    marks = [depth for depth in sorted(set(tidy["depth"])) if depth == 0 or depth >= 2 * NEAR]
    return alt.X("depth:Q", title="Depth (tokens)", scale=scale, axis=alt.Axis(values=marks, labelExpr=IN_THOUSANDS))


def _colour(field: str, tidy: pd.DataFrame) -> alt.Color:
    names = list(dict.fromkeys(tidy[field]))
    legend = alt.Legend(columns=1 if max(map(len, names), default=0) > 24 else 0)
    return alt.Color(f"{field}:N", title=None, scale=alt.Scale(domain=names), legend=legend)


def _shape(field: str, tidy: pd.DataFrame) -> alt.Shape:
    names = list(dict.fromkeys(tidy[field]))
    return alt.Shape(f"{field}:N", title=None, scale=alt.Scale(domain=names))


def _tips(*fields: str) -> list[alt.Tooltip | str]:
    return [*fields, *(alt.Tooltip(f"{name}:Q", format=".3~g") for name in ("value", "low", "high"))]


def _ends(tidy: pd.DataFrame, by: list[str], unit: str, at: str = "depth") -> str:
    words = []
    for name, group in tidy.sort_values("depth", kind="stable").groupby(by, sort=False):
        first, last = group.iloc[0], group.iloc[-1]
        label = ", ".join(map(str, name if isinstance(name, tuple) else (name,)))
        words.append(
            f"{label}: {first['value']:.3g} {unit} at {at} {first['depth']} and {last['value']:.3g} at {last['depth']}"
        )
    return "; ".join(words)
