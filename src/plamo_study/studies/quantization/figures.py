"""The figures of size, speed and quality by type of weights. A figure takes tidy data and reads itself aloud."""

import altair as alt
import pandas as pd

from plamo_study.present.figures import Chart, spread
from plamo_study.present.theme import CATEGORIES, INK, MUTED

FRONT, BEATEN = "on the front", "beaten"
LEAST = 1e-6  # nats: less is what two paths of one file differ by
LABEL = 0.045  # of the axis: what a label takes
PHASES = {"prefill": "prefill", "decode": "decode, one", "batch": "decode, batch"}


def pareto(data: pd.DataFrame, title: str) -> Chart:
    """Decode speed against what is lost, each dot labelled with its type, the front in colour; a panel a model.

    The axis is logarithmic and has no zero: what loses less than `LEAST` stands at its left edge.
    """
    tidy = _both(data)
    edges = {name: tidy[name].clip(lower=LEAST) for name in ("lost", "lost_low", "lost_high")}
    tidy = tidy.assign(**edges, label_at=_apart(tidy))
    axis = alt.Axis(tickCount=4, format="~e")
    scale = alt.Scale(type="log", nice=False, padding=18)
    x = alt.X("lost:Q", title="KL divergence from F16 (nats, log)", scale=scale, axis=axis)
    y = alt.Y("value:Q", title="Decode over F16", scale=alt.Scale(zero=False, padding=14))
    colour = alt.Color("kind:N", title=None, scale=alt.Scale(domain=[FRONT, BEATEN], range=[CATEGORIES[0], MUTED]))
    base = alt.Chart().encode(color=colour)
    layers = [
        base.mark_rule(strokeWidth=1.5).encode(x=x, y="low:Q", y2="high:Q"),
        base.mark_rule(strokeWidth=1.5).encode(x="lost_low:Q", x2="lost_high:Q", y=y),
        base.mark_point(size=60).encode(x=x, y=y, tooltip=["dtype:N", "value:Q", "lost:Q", "bits:Q"]),
        alt.Chart().mark_text(align="left", dx=8, fontSize=10, color=INK).encode(x=x, y="label_at:Q", text="dtype:N"),
    ]
    words = "; ".join(f"{model}: {_read_aloud(group)}" for model, group in tidy.groupby("model"))
    description = f"{title}. Up is faster, left is closer to F16. On the front: {words}."
    chart = alt.layer(*layers, data=tidy).properties(width=330, height=300)
    return chart.facet(column=alt.Column("model:N", title=None)).properties(title=title, description=description)


def promised(data: pd.DataFrame, title: str) -> Chart:
    """Per type: what bytes promise (bar), what the kernels' rates say (tick) and what was measured (diamond)."""
    tidy = spread(data[["model", "dtype", "phase", "predicted", "measured"]], "measured")
    tidy["kernels"] = [None if e is None else e.value for e in data["kernels"]]
    tidy = tidy.assign(words=[PHASES[phase] for phase in tidy["phase"]])
    y = alt.Y("dtype:N", title=None, sort=list(dict.fromkeys(tidy["dtype"])))
    x = alt.X("predicted:Q", title="Speed over F16")
    layers = [
        alt.Chart().mark_bar(color="#a6cbe3", height=9).encode(y=y, x=x),
        alt.Chart().mark_tick(color=CATEGORIES[0], thickness=2, height=14).encode(y=y, x="kernels:Q"),
        alt.Chart().mark_rule(color=CATEGORIES[1], strokeWidth=2).encode(y=y, x="low:Q", x2="high:Q"),
        alt.Chart().mark_point(color=CATEGORIES[1], shape="diamond", size=70).encode(y=y, x="value:Q"),
    ]
    words = "; ".join(
        f"{r.model} {r.phase} {r.dtype}: promised {r.predicted:.2f}, measured {r.value:.2f}" for r in tidy.itertuples()
    )
    description = f"{title}. Bars are what bytes promise, ticks what kernels say, diamonds measurements. {words}."
    chart = alt.layer(*layers, data=tidy).properties(width=300, height=200)
    rows = alt.Row("words:N", title=None, sort=list(PHASES.values()))
    chart = chart.facet(column=alt.Column("model:N", title=None), row=rows)
    return chart.properties(title=title, description=description)


def _both(data: pd.DataFrame) -> pd.DataFrame:
    """Lines that have a speed and a loss, both spread into values and bounds."""
    whole = data[data["decode"].notna() & data["kld"].notna()]
    tidy = spread(whole[["model", "dtype", "bits", "front", "kld"]], "kld")
    tidy = tidy.rename(columns={"value": "lost", "low": "lost_low", "high": "lost_high"})
    speed = spread(whole[["decode"]], "decode")
    return tidy.assign(**speed, kind=[FRONT if on else BEATEN for on in tidy["front"]]).drop(columns="front")


def _apart(tidy: pd.DataFrame) -> pd.Series:
    """Where each label stands, so that none lies on another of its panel: its dot's height, or a little above."""
    gap = LABEL * (tidy["high"].max() - tidy["low"].min())
    places = pd.Series(0.0, index=tidy.index)
    for _, group in tidy.groupby("model"):
        last = float("-inf")
        for index, value in group["value"].sort_values().items():
            last = max(float(value), last + gap)
            places[index] = last
    return places


def _read_aloud(group: pd.DataFrame) -> str:
    on = group[group["kind"] == FRONT].sort_values("value")
    return ", ".join(f"{r.dtype} {r.value:.2f} times at {r.lost:.1e}" for r in on.itertuples()) or "none"
