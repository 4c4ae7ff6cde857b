"""Notebook 09's figures. A figure takes tidy data, holds none, and reads itself aloud in its description."""

import altair as alt
import pandas as pd

from plamo_study.present.figures import Chart, spread
from plamo_study.present.theme import CATEGORIES, MUTED

TOKENS = alt.Scale(type="log", base=2, nice=False, padding=12)
WIDTH, HEIGHT = 300, 260


def bytes_and_crossover(weights: pd.DataFrame, shares: pd.DataFrame, title: str) -> Chart:
    """Left: what a state weighs by the prompt's length. Right: shipping over evaluating again; under 1 shipping wins.

    `weights`: model, n_prompt, predicted (line) and n_bytes (points), MB. `shares`: model, how, n_prompt, ratio.
    """
    chart = alt.hconcat(_bytes(weights), _shares(shares))
    return chart.properties(title=title, description=_said(title, weights, shares))


def _bytes(weights: pd.DataFrame) -> Chart:
    x = alt.X("n_prompt:Q", title="Tokens of the prompt (log)", scale=TOKENS)
    colour = alt.Color("model:N", title=None, scale=alt.Scale(range=CATEGORIES))
    base = alt.Chart(weights).encode(x=x, color=colour)
    y = alt.Scale(type="log")
    lines = base.mark_line().encode(y=alt.Y("predicted:Q", title="State to ship (MB, log)", scale=y))
    points = base.transform_filter("isValid(datum.n_bytes)").mark_point().encode(y=alt.Y("n_bytes:Q", scale=y))
    return alt.layer(lines, points).properties(width=WIDTH, height=HEIGHT)


def _shares(shares: pd.DataFrame) -> Chart:
    tidy = spread(shares[["model", "how", "n_prompt", "ratio"]], "ratio")
    x = alt.X("n_prompt:Q", title="Tokens of the prompt (log)", scale=TOKENS)
    domain = [tidy["value"].min() / 2, max(2.0, tidy["value"].max() * 2)]  # of the values: two processes span more
    y = alt.Y("value:Q", title="Ship / evaluate again (log)", scale=alt.Scale(type="log", domain=domain))
    base = alt.Chart(tidy).encode(
        x=x,
        color=alt.Color("model:N", title=None, scale=alt.Scale(range=CATEGORIES)),
        strokeDash=alt.StrokeDash("how:N", title=None, sort=None),
    )
    even = alt.Chart(pd.DataFrame({"y": [1.0]})).mark_rule(color=MUTED).encode(y="y:Q")
    end = alt.Chart(pd.DataFrame({"x": [tidy["n_prompt"].max()], "y": [1.0]}))
    at = {
        "x": alt.X("x:Q", scale=TOKENS, title="Tokens of the prompt (log)"),
        "y": alt.Y("y:Q", title="Ship / evaluate again (log)"),
    }
    words = [end.mark_text(align="right", color=MUTED, dy=dy).encode(**at, text=alt.value(says))
             for says, dy in (("above: evaluate again", -9), ("below: ship", 11))]  # fmt: skip
    whiskers = base.mark_rule(strokeWidth=1.5, clip=True).encode(
        y=alt.Y("low:Q"), y2="high:Q", strokeDash=alt.value([1, 0])
    )
    layers = [even, *words, whiskers, base.mark_line().encode(y=y)]
    return alt.layer(*layers).properties(width=WIDTH, height=HEIGHT)


def _said(title: str, weights: pd.DataFrame, shares: pd.DataFrame) -> str:
    """What both panels show, in words."""
    ends = weights.sort_values("n_prompt").groupby("model")
    sizes = "; ".join(
        f"{model} {group['predicted'].iloc[0]:.3g} to {group['predicted'].iloc[-1]:.3g} MB" for model, group in ends
    )
    found = shares.sort_values("n_prompt").groupby(["model", "how"], sort=False)["ratio"]
    ratios = "; ".join(f"{m} at {how}: {g.iloc[0].value:.2g} to {g.iloc[-1].value:.2g}" for (m, how), g in found)
    return f"{title}. Bytes from the shortest prompt to the longest: {sizes}. Shipping over evaluating again: {ratios}."


def phases(data: pd.DataFrame, title: str) -> Chart:
    """Where the time of a shipment goes, by length: save, check, send and load stacked, a panel a model.

    `data`: model, n_prompt, phase, ms.
    """
    colour = alt.Color("phase:N", title=None, sort=None, scale=alt.Scale(range=CATEGORIES))
    bars = (
        alt.Chart()
        .mark_bar()
        .encode(
            x=alt.X("n_prompt:O", title="Tokens of the prompt"), y=alt.Y("ms:Q", title="Milliseconds"), color=colour
        )
    )
    longest = data[data["n_prompt"] == data["n_prompt"].max()]
    words = "; ".join(f"{row.model} {row.phase} {row.ms:.2g} ms" for row in longest.itertuples())
    chart = alt.layer(bars, data=data).properties(width=250, height=220).facet(column=alt.Column("model:N", title=None))
    return chart.properties(title=title, description=f"{title}. At {longest['n_prompt'].max():,} tokens: {words}.")


def waits(data: pd.DataFrame, title: str) -> Chart:
    """Times of the shared engine and of the split one by load, a panel a quantity and model; whiskers the interval.

    `data`: model, per_second, what, how, time (estimates, ms).
    """
    tidy = spread(data, "time")
    x = alt.X("per_second:Q", title="Requests per second", scale=alt.Scale(type="log", padding=12, nice=False),
              axis=alt.Axis(values=sorted(set(tidy["per_second"]))))  # fmt: skip
    colour = alt.Color("how:N", title=None, sort=None, scale=alt.Scale(range=CATEGORIES))
    base = alt.Chart().encode(x=x, color=colour)
    y = alt.Y("value:Q", title="ms (log)", scale=alt.Scale(type="log"))
    layers = [base.mark_rule().encode(y=alt.Y("low:Q", title="ms (log)"), y2="high:Q"), base.mark_line().encode(y=y),
              base.mark_point().encode(y=y)]  # fmt: skip
    chart = alt.layer(*layers, data=tidy).properties(width=190, height=170)
    groups = tidy.sort_values("per_second").groupby(["model", "what", "how"], sort=False)["value"]
    words = "; ".join(f"{' '.join(key)} {g.iloc[0]:.3g} to {g.iloc[-1]:.3g} ms" for key, g in groups)
    facets = chart.facet(row=alt.Row("model:N", title=None), column=alt.Column("what:N", title=None, sort=None))
    return facets.resolve_scale(y="independent").properties(
        title=title, description=f"{title}. From the lowest load to the highest: {words}."
    )
