"""Notebook 10's figures. A figure takes tidy data, holds none, and reads itself aloud in its description."""

from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from plamo_study.present.figures import Chart, spread
from plamo_study.present.theme import CATEGORIES, MUTED

WIDTH, HEIGHT = 250, 210
NAMES = {"ttft_p90": "first token, P90 (ms)", "itl_p99": "gap between tokens, P99 (ms)", "throughput": "tokens/s"}


def over_load(data: pd.DataFrame, title: str) -> Chart:
    """Measured (points, whiskers the interval) and simulated (lines) over load, a panel a model and quantity.

    `data`: model, per_second, rule, what, measured (estimates), simulated; both in the unit that `what` names.
    """
    tidy = spread(data, "measured")
    x = alt.X("per_second:Q", title="Requests per second", scale=alt.Scale(zero=False, padding=10))
    y = alt.Y("simulated:Q", title="line: simulated, points: measured (log)", scale=alt.Scale(type="log"))
    colour = alt.Color("rule:N", title=None, sort=None, scale=alt.Scale(range=CATEGORIES))
    base = alt.Chart().encode(x=x, color=colour)
    layers = [
        base.mark_line(strokeWidth=1.5).encode(y=y),
        base.mark_rule(strokeWidth=2).encode(y=alt.Y("low:Q", title=""), y2="high:Q"),
        base.mark_point(size=45).encode(y=alt.Y("value:Q", title="")),
    ]
    chart = alt.layer(*layers, data=tidy).properties(width=WIDTH, height=HEIGHT)
    facets = chart.facet(row=alt.Row("model:N", title=None), column=alt.Column("what:N", title=None, sort=None))
    last = tidy[tidy["per_second"] == tidy["per_second"].max()]
    words = "; ".join(
        f"{row.model}, {row.rule}, {row.what}: {row.value:.3g} measured, {row.simulated:.3g} simulated"
        for row in last.itertuples()
    )
    said = f"{title}. At {tidy['per_second'].max():g} requests a second: {words}."
    return facets.resolve_scale(y="independent").properties(title=title, description=said)


def ratios(data: pd.DataFrame, limit: float, title: str) -> Chart:
    """Predicted over measured, a point a load and way; the band is what is accepted.

    `data`: model, rule, what, ratio (estimates), way.
    """
    tidy = spread(data, "ratio")
    how: dict[str, Any] = {
        "title": "Predicted / measured (log)",
        "scale": alt.Scale(type="log", nice=False, padding=10),
    }
    box = alt.Chart().mark_rect(color="#a6cbe3", opacity=0.5).encode(x=alt.X("mean(from):Q", **how), x2="mean(to):Q")
    x = alt.X("value:Q", **how)
    y = alt.Y("rule:N", title=None, sort=None)
    colour = alt.Color("way:N", title=None, sort=None, scale=alt.Scale(range=CATEGORIES))
    layers = [
        box,
        alt.Chart().mark_rule(color=MUTED, strokeDash=[4, 4]).encode(x=alt.X("mean(even):Q", **how)),
        alt.Chart().mark_point(size=45, filled=False, strokeWidth=2).encode(x=x, y=y, color=colour),
    ]
    tidy = tidy.assign(**{"from": 1 / (1 + limit), "to": 1 + limit, "even": 1.0})
    chart = alt.layer(*layers, data=tidy).properties(width=WIDTH, height=150)
    facets = chart.facet(row=alt.Row("model:N", title=None), column=alt.Column("what:N", title=None, sort=None))
    ways = tidy.assign(inside=tidy["value"].between(1 / (1 + limit), 1 + limit)).groupby("way", sort=False)
    words = "; ".join(
        f"{way}: {of['inside'].sum()} of {len(of)}, all from {of['value'].min():.2f} to {of['value'].max():.2f}"
        for way, of in ways
    )
    said = f"{title}. Within {limit:.0%}, which is the band: {words}."
    return facets.properties(title=title, description=said)


def simulated(data: pd.DataFrame, series: str, legend: str | None, title: str, bounds: dict[str, float]) -> Chart:
    """Two quantities over load, a line a series, all simulated; rules where a capacity ends.

    `data`: per_second, `series`, ttft_p90 and itl_p99 (s). `bounds`: requests a second by what ends there.
    """
    names = {name: NAMES[name] for name in ("ttft_p90", "itl_p99")}
    tidy = data.melt(["per_second", series], list(names), "what", "ms")
    tidy = tidy.assign(ms=tidy["ms"] * 1e3, what=tidy["what"].map(names), **{series: tidy[series].astype(str)})
    ends = pd.DataFrame([{"what": what, "at": at, "word": word}
                         for what in names.values() for word, at in bounds.items()])  # fmt: skip
    colour = alt.Color(f"{series}:N", title=legend, sort=None, scale=alt.Scale(range=CATEGORIES))
    x = alt.X("per_second:Q", title="Requests per second", scale=alt.Scale(zero=False, padding=10))
    panels = []
    for what in names.values():
        lines = alt.Chart(tidy[tidy["what"] == what]).mark_line(point={"size": 30}).encode(
            x=x, y=alt.Y("ms:Q", title=what, scale=alt.Scale(type="log")), color=colour
        )  # fmt: skip
        own = ends[ends["what"] == what] if len(ends) else ends
        rules = [alt.Chart(own).mark_rule(color=MUTED, strokeDash=[4, 4]).encode(x="at:Q")] if len(own) else []
        panels.append(alt.layer(*rules, lines).properties(width=WIDTH + 30, height=HEIGHT))
    last = tidy.sort_values("per_second").groupby([series, "what"], sort=False)["ms"]
    words = "; ".join(f"{name}, {what}: {g.iloc[0]:.3g} to {g.iloc[-1]:.3g}" for (name, what), g in last)
    limits = "".join(f" Dashed at {at:.3g} requests a second: {word}." for word, at in bounds.items())
    said = f"{title}. From the lowest load to the highest: {words}.{limits}"
    return alt.hconcat(*panels).properties(title=title, description=said)


def fleet(data: pd.DataFrame, title: str) -> Chart:
    """Machines that a load needs by its size, a panel a kind of traffic, a line a way of sharing out.

    `data`: n_machines, pattern, balance, needed (estimates; over machines that just keep up, which is the dashed line).
    """
    tidy = spread(data[["n_machines", "pattern", "balance", "needed"]], "needed").assign(even=1.0)
    tidy = tidy[np.isfinite(tidy["value"])]
    x = alt.X("n_machines:Q", title="Load, in machines that just keep up (log)", scale=alt.Scale(type="log"))
    y = alt.Y("value:Q", title="Machines for each of them (log)", scale=alt.Scale(type="log"))
    base = alt.Chart().encode(x=x, color=alt.Color("balance:N", title=None, scale=alt.Scale(range=CATEGORIES)))
    layers = [
        alt.Chart().mark_rule(color=MUTED, strokeDash=[4, 4]).encode(y=alt.Y("mean(even):Q", title="")),
        base.mark_line(point=True).encode(y=y),
        base.mark_rule(strokeWidth=2).encode(y=alt.Y("low:Q", title=""), y2="high:Q"),
    ]
    chart = alt.layer(*layers, data=tidy).properties(width=WIDTH, height=HEIGHT)
    groups = tidy.sort_values("n_machines").groupby(["pattern", "balance"], sort=False)["value"]
    words = "; ".join(f"{load}, {how}: {g.iloc[0]:.2f} to {g.iloc[-1]:.2f}" for (load, how), g in groups)
    said = f"{title}. From the smallest fleet to the largest: {words}. Dashed: machines that just keep up."
    panels = chart.facet(column=alt.Column("pattern:N", title=None, sort=["steady", "bursty", "diurnal"]))
    return panels.properties(title=title, description=said)
