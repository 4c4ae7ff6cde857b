"""The pictures of the argument. A figure takes tidy data, holds none, and reads itself aloud in its description."""

import altair as alt
import pandas as pd

from plamo_study.present.figures import Chart, marks, spread

TOKENS = "Tokens in the call (log)"


def request(data: pd.DataFrame, title: str) -> Chart:
    """One request as its calls, one after the other: `call`, `begin`, `end` (s), `tokens`."""
    names = list(dict.fromkeys(data["call"]))
    bars = (
        alt.Chart(data)
        .mark_bar(stroke="white", strokeWidth=0.4)
        .encode(
            alt.X("begin:Q", title="Seconds since the request came"),
            alt.X2("end:Q"),
            alt.Y("call:N", title=None, sort=names),
            alt.Color("call:N", title=None, sort=names, legend=None),
        )
    )
    said = []
    for name in names:
        group = data[data["call"] == name]
        seconds, tokens = group["end"].iloc[-1] - group["begin"].iloc[0], group["tokens"].sum()
        said.append(
            f"{name}: {len(group)} calls of {group['tokens'].iloc[0]} tokens, {tokens} tokens in {seconds:.2g} s"
        )
    return alt.layer(bars).properties(title=title, description=f"{title}. {'; '.join(said)}.", height=90)


def calls(measured: pd.DataFrame, allowed: pd.DataFrame, title: str) -> Chart:
    """Time of a call against the tokens in it, over the least that fetching and multiplying take."""
    tidy = spread(measured, "seconds", 1e3)
    x = alt.X("tokens:Q", title=TOKENS, scale=alt.Scale(type="log", nice=False, padding=12))
    y = alt.Y("value:Q", title="Milliseconds (log)", scale=alt.Scale(type="log"))
    limits = alt.Chart(allowed.assign(value=allowed["seconds"] * 1e3)).mark_line(strokeDash=[5, 4])
    colour, shape = marks("what", [*dict.fromkeys(allowed["what"]), *dict.fromkeys(measured["what"])])
    points = alt.Chart(tidy).mark_point(size=50).encode(x=x, y=y, color=colour, shape=shape)
    ends = [
        f"{what}: {group['value'].iloc[0]:.3g} ms for {group['tokens'].iloc[0]} to {group['value'].iloc[-1]:.3g} ms "
        f"for {group['tokens'].iloc[-1]} tokens"
        for what, group in tidy.groupby("what", sort=False)
    ]
    description = f"{title}. {'; '.join(ends)}. Dashed: the least that each of two things takes."
    return alt.layer(limits.encode(x=x, y=y, color=colour), points).properties(title=title, description=description)


def bits(data: pd.DataFrame, title: str) -> Chart:
    """How many times as fast each phase is with fewer bytes of weights: `dtype`, `phase`, `ratio`, `smaller`."""
    tidy = spread(data, "ratio")
    tidy["file"] = [f"{row['dtype']}: {row['smaller']:.1f} times smaller" for row in tidy.to_dict("records")]
    order = list(dict.fromkeys(tidy["file"]))
    colour, _ = marks("phase", ["reading", "writing"])
    y = alt.Y("file:N", title=None, sort=order, axis=alt.Axis(labelLimit=220))
    base = alt.Chart(tidy).encode(y=y, yOffset=alt.YOffset("phase:N", sort=["reading", "writing"]), color=colour)
    bars = base.mark_bar().encode(alt.X("value:Q", title="Times as fast as with F16"))
    rules = base.mark_rule(strokeWidth=2, color="#1f2328").encode(
        alt.X("low:Q", title="Times as fast as with F16"), alt.X2("high:Q"), color=alt.value("#1f2328")
    )
    said = "; ".join(f"{row['phase']} with {row['file']}: {row['value']:.2f}" for row in tidy.to_dict("records"))
    return alt.layer(bars, rules).properties(title=title, description=f"{title}. {said}.", height=150)


def kept(data: pd.DataFrame, title: str) -> Chart:
    """What is kept of a conversation against its length, state and cache apart: `model`, `tokens`, `part`, `mb`."""
    colour, shape = marks("part", ["state", "cache"])
    whole = data[data["mb"] > 0]
    lines = (
        alt.Chart(whole)
        .mark_line(point=True)
        .encode(
            alt.X(
                "tokens:Q",
                title="Tokens of the conversation (log)",
                scale=alt.Scale(type="log", nice=False, padding=10),
            ),
            alt.Y("mb:Q", title="MB (log)", scale=alt.Scale(type="log")),
            color=colour,
            shape=shape,
        )
        .properties(width=235, height=200)
    )
    ends = [
        f"{model}, {part}: {group['mb'].iloc[0]:.3g} to {group['mb'].iloc[-1]:.3g} MB"
        for (model, part), group in whole.groupby(["model", "part"])
    ]
    return lines.facet(column=alt.Column("model:N", title=None)).properties(
        title=title, description=f"{title}. {'; '.join(ends)}."
    )
