"""The picture of all levers. A figure takes tidy data, holds none, and reads itself aloud in its description."""

import altair as alt
import pandas as pd

from plamo_study.present.figures import Chart, marks, on_a_line, spread


def gains(data: pd.DataFrame, title: str) -> Chart:
    """Every gain with its interval, by lever and model, on a scale of factors; 1 is no change."""
    tidy = spread(data[["name", "model", "gain"]], "gain")
    models = list(dict.fromkeys(tidy["model"]))
    order = list(dict.fromkeys(tidy["name"]))
    colour, shape = marks("model", models)
    axis = "Times as good as without it (log); 1: no change"
    x = alt.Scale(type="log", nice=False, padding=10)
    y = alt.Y("name:N", title=None, sort=order, axis=alt.Axis(labelLimit=240))
    base = alt.Chart(tidy).encode(y=y, yOffset=alt.YOffset("model:N", sort=models), color=colour)
    layers = [
        alt.Chart(pd.DataFrame({"x": [1.0]})).mark_rule(strokeDash=[4, 4]).encode(x=alt.X("x:Q", title=axis)),
        base.mark_rule(strokeWidth=2).encode(alt.X("low:Q", title=axis, scale=x), alt.X2("high:Q")),
        base.mark_point(size=50, filled=True).encode(alt.X("value:Q", title=axis, scale=x), shape=shape),
    ]
    said = "; ".join(f"{row['name']}, {row['model']}: {row['value']:.3g}" for row in tidy.to_dict("records"))
    return alt.layer(*layers).properties(title=title, description=f"{title}. {said}.", height=26 * len(order))


def stacked(data: pd.DataFrame, title: str) -> Chart:
    """Each gain alone against the same gain beside another lever."""
    tidy = pd.DataFrame(
        {
            "lever": data["name"],
            "x": [each.value for each in data["alone"]],
            "y": [each.value for each in data["measured"]],
            "tip": data["model"] + " " + data["kind"].astype(str) + ", " + data["beside"],
        }
    )
    axes = ("Times as good, alone (log)", "Times as good, beside another lever (log)")
    said = f"{int(data['close'].sum())} of {len(data)} points lie within 1.5 times of the line on which both are equal."
    return on_a_line(tidy, axes, "lever", title, said)
